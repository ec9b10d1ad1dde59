"""Models that do not fit a run are refused when it is prepared, before any worker starts."""

import json
import os
import re
from functools import partial

import pytest
import torch
from transformers import BloomConfig, GPT2Config, GPT2ForSequenceClassification, LlamaConfig

from kapell.protocol import DataProto
from kapell.trainer.build import prepare, train
from kapell.trainer.config_load import load_config
from kapell.trainer.models import build_policy, new_model_config, num_positions
from kapell.trainer.reward_model import RewardModelWorker, build_reward_model
from kapell.trainer.tokenizer import build_character_tokenizer
from kapell.trainer.trainer import Trainer
from kapell.workergroup import ClassWithInitArgs, WorkerFailedError, load_backend

MODEL = "actor_rollout_ref.model"
LONGEST = 5 + 6  # tokens of a row: four digits and <answer>, and the response
GAE = "algorithm.adv_estimator=gae"


@pytest.fixture
def prepared(tmp_path, one_small_step):
    row = {"data_source": "reverse_digits", "prompt": "1234", "reward_model": {"ground_truth": "4321"}}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    data = f"data.train_files={tmp_path / 'rows.jsonl'}"
    return lambda *overrides: prepare(load_config(overrides=[*one_small_step, data, *overrides]).config, tmp_path)


def positions(number, key=MODEL):
    return f"{key}.override_config.max_position_embeddings={number}"


def saved(folder, num_positions):
    tokenizer = build_character_tokenizer("0123456789")
    build_policy(new_model_config(tokenizer, hidden_size=16, max_length=num_positions)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def saved_reward_model(folder, num_positions):
    tokenizer = build_character_tokenizer("0123456789")
    sizes = GPT2Config(n_embd=8, n_layer=1, n_head=1, n_positions=num_positions, vocab_size=len(tokenizer))
    sizes.pad_token_id, sizes.num_labels = tokenizer.pad_token_id, 1
    sizes.bos_token_id = sizes.eos_token_id = None
    GPT2ForSequenceClassification(sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_folders_are_found_from_wherever_a_worker_runs(prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("policy", "critic", "reference"):
        saved(tmp_path / name, LONGEST)
    made = prepared(
        f"{MODEL}.path=policy",
        "critic.model.path=critic",
        "actor_rollout_ref.ref.model.path=reference",
        GAE,
        "algorithm.use_kl_in_reward=true",
    )
    monkeypatch.chdir("/")
    for build in (made.build_policy, made.build_critic, made.build_reference):
        assert build().config.n_positions == LONGEST


def test_the_last_model_is_saved_where_the_controller_runs(prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = prepared()
    monkeypatch.setattr(Trainer, "fit", lambda self: os.chdir("/"))  # as if the workers had been started there
    (tmp_path / "run").mkdir()
    train(made, "run")
    assert (tmp_path / "run" / "model" / "config.json").is_file()


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "opt"])
def test_a_policy_with_a_position_less_than_the_longest_row_is_refused_with_numbers_and_keys(prepared, model_type):
    message = (
        f"actor_rollout_ref.model: the model has {LONGEST - 1} positions (max_position_embeddings), below the "
        f"{LONGEST} tokens of a row: the longest prompt has 5, and data.max_response_length is 6; lower that, shorten "
        "prompts by data.max_prompt_length"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        prepared(f"{MODEL}.model_type={model_type}", positions(LONGEST - 1))


def test_a_model_with_just_enough_positions_trains(prepared, tmp_path):
    exact = prepared(positions(LONGEST), "actor_rollout_ref.actor.optim.lr=1e-6", GAE)
    assert train(exact, tmp_path).steps == 1


def test_the_positions_of_every_role_that_exists_are_looked_at(prepared, tmp_path):
    small = saved(tmp_path / "small", LONGEST - 1)
    assert prepared(f"critic.model.path={small}")  # there is no critic
    with pytest.raises(ValueError, match=r"critic\.model: the model has 10 positions"):
        prepared(f"critic.model.path={small}", GAE)
    with pytest.raises(ValueError, match=r"actor_rollout_ref\.model: the model has 10 positions"):
        prepared(f"{MODEL}.path={small}")
    reference = f"actor_rollout_ref.ref.model.path={small}"
    assert prepared(reference)
    with pytest.raises(ValueError, match=r"actor_rollout_ref\.ref\.model: the model has 10 positions"):
        prepared(reference, "actor_rollout_ref.actor.use_kl_loss=true")
    scorer = ["reward.reward_model.enable=true", f"reward.reward_model.path={saved_reward_model(tmp_path / 'rm', 10)}"]
    with pytest.raises(ValueError, match=r"reward\.reward_model\.path=.*rm: the model has 10 positions"):
        prepared(*scorer)
    assert prepared(*scorer, "reward.reward_model.use_own_tokenizer=true")


def test_prompts_that_are_only_validated_count_as_well(prepared, tmp_path):
    for name, prompt in (("train", "12"), ("val", "123456")):
        row = {"data_source": "reverse_digits", "prompt": prompt, "reward_model": {"ground_truth": "1"}}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    files = [f"data.train_files={tmp_path / 'train.jsonl'}", f"data.val_files={tmp_path / 'val.jsonl'}"]
    files += ["data.max_prompt_length=7", "data.train_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1"]
    assert prepared(*files, positions(13))
    with pytest.raises(ValueError, match="below the 13 tokens of a row: the longest prompt has 7, and"):
        prepared(*files, positions(12))


def test_stretched_rotary_positions_count_and_other_models_have_no_limit():
    assert num_positions(BloomConfig()) is None
    assert num_positions(GPT2Config(n_positions=12)) == 12
    stretched = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
    assert num_positions(LlamaConfig(max_position_embeddings=32, rope_parameters=stretched)) == 128
    assert num_positions(LlamaConfig(max_position_embeddings=256, rope_parameters=stretched)) == 256


def test_a_reward_model_with_its_own_tokenizer_says_how_long_a_text_is_that_it_cannot_hold(tmp_path):
    build = partial(build_reward_model, saved_reward_model(tmp_path, 8))
    with load_backend("local")() as backend:
        worker = ClassWithInitArgs(RewardModelWorker, build, build_character_tokenizer("0123456789"))
        group = backend.worker_group(backend.resource_pool([1]), worker, role="reward_model")
        texts = {"raw_prompt": ["12", "1"], "solution_str": ["123456", "1"]}
        assert len(group.compute_rm_score_of_text(DataProto.from_dict(non_tensors=texts))) == 2
        texts["solution_str"][0] += "7"
        with pytest.raises(WorkerFailedError) as caught:
            group.compute_rm_score_of_text(DataProto.from_dict(non_tensors=texts))
    assert "has 9 tokens by the reward model's own tokenizer, and the model 8 positions" in str(caught.value.exceptions)


def test_an_architecture_that_cannot_be_the_role_is_refused(prepared):
    with pytest.raises(ValueError, match=r"critic\.model: no model can be made of this configuration: .*OPTConfig"):
        prepared(f"{MODEL}.model_type=opt", GAE)
    with pytest.raises(ValueError, match=r"actor_rollout_ref\.model: no model can be made .*T5Config"):
        prepared(f"{MODEL}.model_type=t5", f"{MODEL}.hidden_size=32")


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("[q_prj]", "target_modules: the model has no module 'q_prj'; did you mean 'q_proj'"),
        ("[q_proj,zzz]", "target_modules: the model has no module 'zzz'; it has: down_proj, embed_tokens, gate_proj"),
        ("q_proj", "a text is a regular expression of a module's whole name; the model has: down_proj"),
        ("'.*q_prj'", "target_modules=.*q_prj: "),
        ("'q_('", "target_modules=q_(: missing ), unterminated subpattern"),
        ("[]", "target_modules=[]: "),
        ("[norm]", "target_modules=['norm']: "),
    ],
)
@pytest.mark.parametrize("role", ["critic", "actor_rollout_ref"])
def test_modules_that_cannot_have_an_adapter_are_refused_with_those_that_there_are(prepared, role, targets, message):
    pytest.importorskip("peft")
    lora = [f"{role}.model.lora_rank=2", f"{role}.model.target_modules={targets}"]
    with pytest.raises(ValueError, match=re.escape(f"{role}.model: ")) as caught:
        prepared(f"{MODEL}.model_type=llama", GAE, *lora)
    assert message in str(caught.value)
    assert "has: down_proj, embed_tokens, gate_proj, k_proj" in str(caught.value)


def test_modules_that_there_are_pass_by_name_path_or_expression_and_leave_random_numbers_as_they_were(prepared):
    pytest.importorskip("peft")
    for targets in ("[q_proj,v_proj]", "[layers.1.self_attn.q_proj]", "'.*layers\\.0.*proj'", "all-linear"):
        state = torch.get_rng_state()
        lora = [f"{MODEL}.lora_rank=2", f"{MODEL}.target_modules={targets}"]
        model = prepared(f"{MODEL}.model_type=llama", *lora).build_policy()
        assert torch.equal(torch.get_rng_state(), state)
        assert any("lora_A" in name for name, _ in model.named_parameters())
        assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("num_gpus", "own_model", "told"), [(2, True, ["2 GPUs"]), (2, False, []), (0, True, [])], ids=str
)
def test_gpus_that_a_model_of_ones_own_leaves_idle_are_told(
    prepared, tmp_path, monkeypatch, caplog, num_gpus, own_model, told
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    prepared(*([f"{MODEL}.path={saved(tmp_path / 'policy', LONGEST)}"] if own_model else []))
    messages = [record.getMessage() for record in caplog.records if "idle" in record.getMessage()]
    assert [part in message for part, message in zip(told, messages, strict=True)] == [True] * len(told)
