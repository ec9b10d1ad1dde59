"""bfloat16 and activations that are computed again: what is computed how, and that the numbers stay."""

import pytest
import torch

from kapell.trainer.algorithms import BatchTotals, LossResult, position_ids
from kapell.trainer.build import prepare
from kapell.trainer.config import OptimConfig
from kapell.trainer.config_load import ConfigError, load_config
from kapell.trainer.engine import TrainEngine
from kapell.trainer.forward import policy_forward
from kapell.trainer.models import build_policy, new_model_config
from kapell.trainer.objectives import PolicyObjective
from kapell.trainer.roles import worker_groups
from kapell.trainer.rollout_engine import RolloutRequest, SamplerEngine
from kapell.trainer.sampler import Sampling
from kapell.trainer.workers import ActorRolloutRefWorker, CriticWorker
from kapell.workergroup import ClassWithInitArgs, load_backend

OBJECTIVE = PolicyObjective(options={"clip_ratio": 0.2}, entropy_coeff=0.01)


def columns_of(rows=6, prompt=3, length=5):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 13, (rows, prompt + length), generator=generator)
    ones = torch.ones_like(ids)
    return {
        "input_ids": ids,
        "attention_mask": ones,
        "position_ids": position_ids(ones),
        "responses": ids[:, prompt:],
        "response_mask": ones[:, prompt:],
        "old_log_probs": torch.full((rows, length), -2.5),
        "advantages": torch.randn((rows, length), generator=generator),
    }


def engine_of(tokenizer, model_type="qwen3", **options):
    config = new_model_config(tokenizer, model_type=model_type, hidden_size=32, max_length=24)
    return TrainEngine(build_policy(config, seed=3), OptimConfig(lr=1e-2), **options)


def gradient_of(engine, columns):
    totals = BatchTotals.of(columns["response_mask"])
    metrics = engine.forward_backward(columns, lambda rows: OBJECTIVE(engine.model, rows, totals))
    return torch.cat([p.grad.reshape(-1) for p in engine.model.parameters()]), metrics["actor/pg_loss"].value


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "qwen3"])
def test_activations_computed_again_give_the_same_gradient(tokenizer, model_type):
    columns = columns_of()
    plain, loss = gradient_of(engine_of(tokenizer, model_type), columns)
    again, same_loss = gradient_of(engine_of(tokenizer, model_type, gradient_checkpointing=True), columns)
    assert torch.allclose(plain, again, atol=1e-7)
    assert loss == same_loss


@pytest.mark.parametrize(("gradient_checkpointing", "passes"), [(False, 1), (True, 2)])
def test_a_layer_runs_twice_when_its_activations_are_computed_again(tokenizer, gradient_checkpointing, passes):
    engine = engine_of(tokenizer, gradient_checkpointing=gradient_checkpointing)
    calls = []
    engine.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    gradient_of(engine, columns_of())
    assert len(calls) == passes


def test_fewer_bytes_wait_for_the_backward_pass_when_activations_are_computed_again(tokenizer):
    kept = []
    for gradient_checkpointing in (False, True):
        sizes = []
        engine = engine_of(tokenizer, gradient_checkpointing=gradient_checkpointing)
        pack = torch.autograd.graph.saved_tensors_hooks(lambda x, s=sizes: s.append(x.nbytes) or x, lambda x: x)
        with pack:
            gradient_of(engine, columns_of())
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 2


def test_sampling_keeps_its_cache_after_such_an_update(tokenizer):
    engine = engine_of(tokenizer, gradient_checkpointing=True)
    gradient_of(engine, columns_of())
    engine.step()
    widths = []
    engine.model.register_forward_pre_hook(lambda _m, args: widths.append(args[0].shape[1]) if args else None)
    rollout_of(engine)
    assert widths[1:] == [1] * 5


def rollout_of(engine):
    prompts = torch.tensor([[3, 4, 2]] * 8)
    request = RolloutRequest(
        prompts=prompts,
        prompt_mask=torch.ones_like(prompts),
        sample_ids=range(8),
        sampling=Sampling(),
        max_new_tokens=6,
        seed=1,
        step=1,
    )
    with engine.sampling():
        rollout = SamplerEngine(engine.model, [], 0).generate(request)
    attention = torch.ones((8, 9), dtype=torch.long)
    return {
        "input_ids": torch.cat([prompts, rollout.responses], dim=1),
        "attention_mask": attention,
        "position_ids": position_ids(attention),
        "responses": rollout.responses,
        "response_mask": rollout.response_mask,
        "rollout_log_probs": rollout.rollout_log_probs,
    }


def dtypes_of_products(engine, run):
    """The element types in which the layers' products come out."""
    found = set()
    linear = [module for module in engine.model.modules() if isinstance(module, torch.nn.Linear)]
    hooks = [module.register_forward_hook(lambda _m, _i, output: found.add(output.dtype)) for module in linear]
    run()
    for hook in hooks:
        hook.remove()
    return found


def log_probs_of(engine, columns):
    return engine.evaluate(
        columns,
        lambda model, micro: policy_forward(model, micro, temperature=1.0)._asdict(),
        names=("log_probs",),
    )["log_probs"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_pass_computes_its_products_in_the_chosen_type(tokenizer, dtype):
    engine = engine_of(tokenizer, dtype=dtype)
    runs = (
        lambda: gradient_of(engine, columns_of()),
        lambda: rollout_of(engine),
        lambda: log_probs_of(engine, COLUMNS),
    )
    for run in runs:
        assert dtypes_of_products(engine, run) == {dtype}


COLUMNS = columns_of()


def test_weights_gradients_moments_and_losses_stay_float32_in_bfloat16(tokenizer):
    engine = engine_of(tokenizer, dtype=torch.bfloat16)
    gradient, _ = gradient_of(engine, COLUMNS)
    engine.step()
    assert gradient.dtype == torch.float32
    assert {p.dtype for p in engine.model.parameters()} == {torch.float32}
    moments = [state["exp_avg"].dtype for state in engine.optimizer.state.values()]
    assert set(moments) == {torch.float32}
    assert log_probs_of(engine, COLUMNS).dtype == torch.float32


def test_bfloat16_is_close_to_float32_and_not_the_same(tokenizer):
    exact, rounded = (engine_of(tokenizer, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    difference = (log_probs_of(exact, COLUMNS) - log_probs_of(rounded, COLUMNS)).abs().max()
    assert 0 < difference < 0.05
    first, second = (gradient_of(engine, COLUMNS)[0] for engine in (exact, rounded))
    assert torch.nn.functional.cosine_similarity(first, second, dim=0) > 0.99


def test_log_probs_of_bfloat16_sampling_agree_with_recomputed_ones_to_its_precision(tokenizer):
    engine = engine_of(tokenizer, dtype=torch.bfloat16)
    columns = rollout_of(engine)
    assert (log_probs_of(engine, columns) - columns["rollout_log_probs"]).abs().max() < 0.05


@pytest.mark.parametrize(
    ("key", "role"),
    [("actor_rollout_ref.model", "actor"), ("critic.model", "critic")],
)
def test_the_keys_of_a_role_change_its_engine_and_no_other(tmp_path, monkeypatch, one_small_step, key, role):
    engines = {}
    for cls in (ActorRolloutRefWorker, CriticWorker):

        def build(self, *args, original=cls.__init__, **options):
            original(self, *args, **options)
            engines[self.role] = self.engine

        monkeypatch.setattr(cls, "__init__", build)
    overrides = ["algorithm.adv_estimator=gae", f"{key}.dtype=bfloat16", f"{key}.enable_gradient_checkpointing=true"]
    prepared = prepare(load_config(overrides=[*one_small_step, *overrides]).config, tmp_path)
    with worker_groups(prepared):
        for name, engine in engines.items():
            columns = columns_of()
            calls, dtypes = [], set()
            layer = engine.model.transformer.h[0].mlp.c_fc
            layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
            layer.register_forward_hook(lambda _m, _i, output, dtypes=dtypes: dtypes.add(output.dtype))

            def loss(micro, model=engine.model):
                return LossResult(model(micro["input_ids"])[0].float().square().mean(), {})

            engine.forward_backward(columns, loss)
            assert len(calls) == (2 if name == role else 1)
            assert dtypes == {torch.bfloat16 if name == role else torch.float32}


def test_parts_in_one_process_are_refused_with_the_way_out(tmp_path, one_small_step):
    small = [*one_small_step, "algorithm.adv_estimator=gae"]
    with pytest.raises(ConfigError, match=r"actor\.strategy=fsdp2 needs a process for each worker"):
        load_config(overrides=[*small, "actor_rollout_ref.actor.strategy=fsdp2"])
    prepared = prepare(load_config(overrides=small).config, tmp_path)
    worker = ClassWithInitArgs(
        ActorRolloutRefWorker,
        prepared.build_policy,
        OptimConfig(),
        eos_token_ids=[prepared.tokenizer.eos_token_id],
        pad_token_id=prepared.tokenizer.pad_token_id,
        strategy="fsdp2",
    )
    with load_backend("local")() as backend, pytest.raises(Exception, match="use strategy=ddp, or backend=ray"):
        backend.worker_group(backend.resource_pool([1]), worker, role="policy")
