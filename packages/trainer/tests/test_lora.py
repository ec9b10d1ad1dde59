"""Adapters are trained, the model below them is not; the reference is the model without them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from kapell.trainer.build import prepare, train
from kapell.trainer.cli import main
from kapell.trainer.config_load import ConfigError, load_config
from kapell.trainer.export import export_model
from kapell.trainer.lora import ADAPTER, Adapter, build_with_adapter, without_adapter
from kapell.trainer.models import build_policy, new_model_config
from kapell.trainer.run_folder import RunFiles
from kapell.trainer.stages import Stages
from kapell.trainer.state_files import CheckpointError
from kapell.trainer.workers import ActorRolloutRefWorker, CriticWorker

peft = pytest.importorskip("peft")

MODEL = "actor_rollout_ref.model"
SMALL = [
    "backend=local",
    "trainer.n_gpus_per_node=2",
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
    "trainer.save_freq=2",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.optim.lr=0.05",
    "actor_rollout_ref.rollout.n=4",
    f"{MODEL}.hidden_size=16",
    "actor_rollout_ref.actor.use_kl_loss=true",
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Trains; the workers of each class, the batches that reached the policy's update, metrics and the run's folder."""

    def run_with(*overrides, folder="run"):
        workers, batches, update = {ActorRolloutRefWorker: [], CriticWorker: []}, [], Stages.update_actor

        def recording(self, batch, step):
            batches.append(batch)
            return update(self, batch, step)

        with monkeypatch.context() as patch:
            patch.setattr(Stages, "update_actor", recording)
            for cls, found in workers.items():
                patch.setattr(cls, "__init__", _watched(cls.__init__, found))
            target = tmp_path / folder
            target.mkdir(exist_ok=True)
            config = load_config(overrides=[*SMALL, *overrides]).config
            train(prepare(config, target), target, hooks=[RunFiles(target)])
        metrics = [json.loads(line) for line in (target / "metrics.jsonl").read_text().splitlines()]
        return workers, batches, metrics, target

    return run_with


def _watched(build, found):
    def init(self, *args, **kwargs):
        build(self, *args, **kwargs)
        found.append(self)

    return init


def logits_of(model, batch):
    with torch.no_grad():
        return model(batch.column("input_ids"), attention_mask=batch.column("attention_mask")).logits


def test_the_adapter_alone_is_trained_and_the_reference_is_the_model_without_it(run):
    workers, batches, metrics, _ = run(f"{MODEL}.lora_rank=2")
    for worker in workers[ActorRolloutRefWorker]:
        model, start = worker.engine.model, worker._build_model()
        assert worker._reference is model
        for name, value in start.state_dict().items():
            changed = not torch.equal(model.state_dict()[name], value)
            assert changed == ("lora_B" in name or "lora_A" in name), name
        with without_adapter(model):
            assert torch.equal(logits_of(model, batches[1]), logits_of(start, batches[1]))
        assert not torch.allclose(logits_of(model, batches[1]), logits_of(start, batches[1]), atol=1e-3)
    assert torch.allclose(batches[0].column("ref_log_prob"), batches[0].column("old_log_probs"), atol=1e-6)
    assert (batches[1].column("ref_log_prob") - batches[1].column("old_log_probs")).abs().max() > 1e-3
    assert metrics[1]["actor/kl_loss"] > 0


def test_the_sum_and_the_adapter_are_saved_and_a_checkpoint_is_exported_as_the_sum(run, tmp_path):
    workers, batches, _, folder = run(f"{MODEL}.lora_rank=2")
    trained = workers[ActorRolloutRefWorker][0].engine.model
    expected = logits_of(trained, batches[0])
    merged = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    assert torch.allclose(logits_of(merged, batches[0]), expected, atol=1e-5)
    base = workers[ActorRolloutRefWorker][0]._build_model().unload()
    read = peft.PeftModel.from_pretrained(base, folder / "model" / ADAPTER)
    assert torch.allclose(logits_of(read, batches[0]), expected, atol=1e-6)
    export_model(folder, tmp_path / "exported")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    assert torch.allclose(logits_of(exported, batches[0]), expected, atol=1e-5)


def test_a_checkpoint_holds_what_is_trained_and_finds_the_base_model_again(run, tmp_path):
    _, _, _, first = run(folder="first")
    base = first / "model"
    options = [f"{MODEL}.path={base}", f"{MODEL}.lora_rank=2", "algorithm.adv_estimator=gae"]
    options += ["critic.model.lora_rank=2", f"critic.model.path={base}"]
    workers, batches, _, folder = run(*options)
    checkpoint = folder / "global_step_2"
    for role, of_head in (("actor", 0), ("critic", 2)):
        names = list(load_file(checkpoint / role / "model.safetensors"))
        assert sum("modules_to_save" in name for name in names) == of_head
        assert all("lora_" in name or "modules_to_save" in name for name in names)
    trained = workers[CriticWorker][0].engine.model
    export_model(folder, tmp_path / "critic", role="critic")
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic", dtype=torch.float32)
    assert torch.allclose(logits_of(critic, batches[0]), logits_of(trained, batches[0]), atol=1e-5)

    moved = first.rename(tmp_path / "moved") / "model"
    with pytest.raises(CheckpointError, match=f"its base model is not here .*{base}.* with --base"):
        export_model(folder, tmp_path / "exported")
    main(["export", str(folder), str(tmp_path / "exported"), "--base", str(moved)])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    policy = workers[ActorRolloutRefWorker][0].engine.model
    assert torch.allclose(logits_of(exported, batches[0]), logits_of(policy, batches[0]), atol=1e-5)

    weights = load_file(moved / "model.safetensors")
    weights["transformer.h.0.attn.c_proj.bias"] += 1e-3
    save_file(weights, moved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="its adapter was trained on another base model than the one that is"):
        export_model(folder, tmp_path / "again", base=moved)
    moved.parent.rename(first)
    with pytest.raises(CheckpointError, match="its adapter was trained on another base model than the one that is"):
        run(*options, "trainer.total_training_steps=3")


def test_a_critic_with_an_adapter_trains_it_and_its_head(run):
    options = ["algorithm.adv_estimator=gae", "critic.model.lora_rank=2"]
    workers, *_ = run(*options)
    model, start = workers[CriticWorker][0].engine.model, workers[CriticWorker][0]._build_model()
    changed = {name for name, value in start.state_dict().items() if not torch.equal(model.state_dict()[name], value)}
    assert any("lora_B" in name for name in changed)
    assert any("modules_to_save" in name for name in changed)
    assert all("lora_" in name or "modules_to_save" in name for name in changed)


def test_activations_computed_again_work_with_an_adapter(run):
    _, _, plain, _ = run(f"{MODEL}.lora_rank=2", folder="plain")
    _, _, again, _ = run(f"{MODEL}.lora_rank=2", f"{MODEL}.enable_gradient_checkpointing=true", folder="again")
    assert plain[0]["actor/grad_norm"] > 0
    assert again[1]["actor/grad_norm"] == pytest.approx(plain[1]["actor/grad_norm"], abs=1e-5)


def test_rank_scale_and_modules_are_as_asked(tokenizer):
    def build():
        return build_policy(new_model_config(tokenizer, model_type="llama", hidden_size=16, max_length=8), seed=1)

    def adapted(**options):
        return build_with_adapter(build, Adapter(**options), seed=1)

    def trained(model):
        return {name: p for name, p in model.named_parameters() if p.requires_grad}

    few, many = trained(adapted(rank=2)), trained(adapted(rank=4))
    assert sum(p.numel() for p in many.values()) == 2 * sum(p.numel() for p in few.values())
    assert {name.split(".")[-4] for name in trained(adapted(rank=2, target_modules=["q_proj"]))} == {"q_proj"}
    assert torch.equal(*(trained(adapted(rank=2))[next(iter(few))] for _ in range(2)))
    weak, strong = adapted(rank=2, alpha=2), adapted(rank=2, alpha=8)
    changes = []
    for model in (weak, strong):
        with torch.no_grad():
            for name, parameter in trained(model).items():
                if "lora_B" in name:
                    parameter.fill_(0.1)
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        changes.append(layer.get_delta_weight("default"))
    assert torch.allclose(4 * changes[0], changes[1])


def test_wrong_values_are_refused():
    with pytest.raises(ConfigError, match="lora_rank must not be negative"):
        load_config(overrides=[f"{MODEL}.lora_rank=-1"])
    with pytest.raises(ConfigError, match="target_modules must be a text or a list of texts"):
        load_config(overrides=[f"{MODEL}.target_modules=3"])


def test_without_peft_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"kapell-trainer\[lora\]"):
        Adapter(rank=1)


def test_another_model_is_the_reference_where_it_is_named(run, tmp_path):
    _, _, _, first = run(folder="first")
    path = f"actor_rollout_ref.ref.model.path={first / 'model'}"
    for name, overrides in (("plain", [path]), ("adapter", [path, f"{MODEL}.lora_rank=2"])):
        workers, (batch, _), *_ = run(*overrides, folder=name)
        model = AutoModelForCausalLM.from_pretrained(first / "model", dtype=torch.float32)
        position_ids = batch.column("position_ids")
        with torch.no_grad():
            output = model(
                batch.column("input_ids"), attention_mask=batch.column("attention_mask"), position_ids=position_ids
            )
        length = batch.column("responses").shape[1]
        wanted = output.logits[:, -length - 1 : -1].log_softmax(-1).gather(-1, batch.column("responses")[..., None])
        assert torch.allclose(batch.column("ref_log_prob"), wanted[..., 0] * batch.column("response_mask"), atol=1e-5)
        assert (batch.column("ref_log_prob") - batch.column("old_log_probs")).abs().max() > 1e-3
        assert workers[ActorRolloutRefWorker][0]._reference is not workers[ActorRolloutRefWorker][0].engine.model


def test_a_reference_that_is_no_model_is_refused_beforehand(tmp_path):
    keys = ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.ref.model.path=nowhere"]
    with pytest.raises(FileNotFoundError, match="no model folder nowhere"):
        prepare(load_config(overrides=keys).config, tmp_path)
