"""The reward model's role: the score of the last token, whatever the padding, the portions and the workers."""

import json
import math
from functools import partial

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from kapell.protocol import DataProto
from kapell.trainer.algorithms import position_ids
from kapell.trainer.build import prepare, train
from kapell.trainer.config import RewardConfig, RewardModelConfig
from kapell.trainer.config_load import load_config
from kapell.trainer.data import pad_left
from kapell.trainer.models import build_policy, new_model_config
from kapell.trainer.reward import RewardError
from kapell.trainer.reward_functions import RewardRows, RowScore
from kapell.trainer.reward_model import (
    ModelReward,
    RewardModel,
    RewardModelWorker,
    build_reward_model,
    check_reward_model,
)
from kapell.trainer.reward_terms import build_reward
from kapell.trainer.run_folder import RunFiles
from kapell.trainer.tokenizer import build_character_tokenizer
from kapell.workergroup import ClassWithInitArgs, WorkerFailedError, load_backend

TEXTS = ["12", "345", "6", "7890", "11"]
ANSWERS = ["21", "5", "66", "0987", "1"]


def save_model(tokenizer, folder, *, labels=1, model_type="gpt2"):
    config = new_model_config(tokenizer, model_type=model_type, hidden_size=16, num_attention_heads=2, max_length=600)
    config.num_labels = labels
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        model.score.weight.mul_(50)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=["gpt2", "qwen3"])
def saved(request, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward_model")
    return folder, save_model(tokenizer, folder, model_type=request.param)


def batch_of(tokenizer, *, extra_left=0):
    prompts, prompt_mask = pad_left([tokenizer(text)["input_ids"] for text in TEXTS], tokenizer.pad_token_id)
    if extra_left:
        wider = torch.zeros((len(TEXTS), extra_left), dtype=torch.long)
        prompts, prompt_mask = torch.cat([wider, prompts], 1), torch.cat([wider, prompt_mask], 1)
    answers = [[*tokenizer.convert_tokens_to_ids(list(text)), tokenizer.eos_token_id] for text in ANSWERS]
    width = max(map(len, answers))
    responses = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in answers])
    mask = torch.cat([prompt_mask, (responses != tokenizer.pad_token_id).long()], 1)
    return DataProto.from_dict(
        tensors={
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": mask,
            "position_ids": position_ids(mask),
        },
        non_tensors={"raw_prompt": TEXTS},
    )


def by_hand(model, tokenizer):
    """One row at a time, without padding."""
    scores = []
    for text, answer in zip(TEXTS, ANSWERS, strict=True):
        ids = [*tokenizer(text)["input_ids"], *tokenizer.convert_tokens_to_ids(list(answer)), tokenizer.eos_token_id]
        with torch.no_grad():
            scores.append(model(torch.tensor([ids])).logits[0, 0].item())
    return scores


def scored(folder, tokenizer, batch, *, workers=1, **options):
    build = partial(build_reward_model, folder, pad_token_id=tokenizer.pad_token_id)
    with load_backend("local")() as backend:
        group = backend.worker_group(
            backend.resource_pool([workers]), ClassWithInitArgs(RewardModelWorker, build, **options), role="rm"
        )
        return RewardModel(group)(batch, ANSWERS)


@pytest.mark.parametrize("extra_left", [0, 3])
def test_the_score_is_that_of_the_last_token_whatever_the_padding(saved, tokenizer, extra_left):
    folder, model = saved
    scores = scored(folder, tokenizer, batch_of(tokenizer, extra_left=extra_left))
    assert scores == pytest.approx(by_hand(model, tokenizer), abs=1e-4)
    assert max(scores) - min(scores) > 0.05


@pytest.mark.parametrize("workers", [1, 2, 4, 7])
@pytest.mark.parametrize("micro", [None, 1, 2])
def test_neither_workers_nor_portions_change_a_score(saved, tokenizer, workers, micro):
    folder, model = saved
    scores = scored(folder, tokenizer, batch_of(tokenizer), workers=workers, micro_batch_size=micro)
    assert scores == pytest.approx(by_hand(model, tokenizer), abs=1e-4)


def test_no_rows_are_no_scores(saved, tokenizer):
    assert scored(saved[0], tokenizer, batch_of(tokenizer).select_idxs([]), workers=2) == []


def test_a_model_with_its_own_tokenizer_reads_text_by_its_chat_template(tmp_path, tokenizer):
    own = build_character_tokenizer("0123456789 abcdefghijklmnopqrstuvwxyz:|")
    own.chat_template = "{% for message in messages %}{{ message.role }}:{{ message.content }}|{% endfor %}"
    model = save_model(own, tmp_path)
    with load_backend("local")() as backend:
        worker = ClassWithInitArgs(RewardModelWorker, partial(build_reward_model, tmp_path), own, micro_batch_size=2)
        group = backend.worker_group(backend.resource_pool([2]), worker, role="rm")
        scores = RewardModel(group, by_text=True)(batch_of(tokenizer), ANSWERS)
    for text, answer, score in zip(TEXTS, ANSWERS, scores, strict=True):
        ids = own(f"user:{text}|assistant:{answer}|", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            assert score == pytest.approx(model(torch.tensor([ids])).logits[0, 0].item(), abs=1e-4)


def test_a_worker_without_tokenizer_says_so(saved, tokenizer):
    with load_backend("local")() as backend:
        worker = ClassWithInitArgs(RewardModelWorker, partial(build_reward_model, saved[0]))
        model = RewardModel(backend.worker_group(backend.resource_pool([1]), worker, role="rm"), by_text=True)
        with pytest.raises(WorkerFailedError) as caught:
            model(batch_of(tokenizer), ANSWERS)
    assert "no tokenizer" in str(caught.value.exceptions)


def test_folders_that_hold_no_reward_model_are_refused(tmp_path, tokenizer):
    with pytest.raises(FileNotFoundError):
        check_reward_model(tmp_path / "nowhere")
    save_model(tokenizer, tmp_path / "two", labels=2)
    with pytest.raises(ValueError, match="has 2 labels; a reward model has one"):
        check_reward_model(tmp_path / "two")
    config = new_model_config(tokenizer, hidden_size=16, num_attention_heads=2, max_length=24)
    config.num_labels = 1
    build_policy(config).save_pretrained(tmp_path / "policy")
    with pytest.raises(ValueError, match=r"no reward model: it lacks the weights score\.weight"):
        build_reward_model(tmp_path / "policy")
    save_model(tokenizer, tmp_path / "small")
    with pytest.raises(ValueError, match="use_own_tokenizer=true"):
        check_reward_model(tmp_path / "small", vocab_size=1000)


def rows_with(scores):
    count = 2
    return RewardRows(
        data_sources=["d"] * count,
        solutions=["s"] * count,
        ground_truths=["t"] * count,
        extra_infos=[{}] * count,
        model_scores=scores,
    )


def test_scores_that_are_not_finite_are_errors_of_their_rows():
    good, bad = ModelReward()(rows_with([0.0, math.nan]))
    assert good == RowScore(0.0)
    assert isinstance(bad, RewardError)
    assert "returned nan for row 1" in str(bad)
    with pytest.raises(ValueError, match=r"reward\.reward_model\.enable=true"):
        list(ModelReward()(rows_with(None)))


def test_the_model_scores_alone_or_beside_other_rewards(tmp_path):
    model = RewardModelConfig(enable=True, path="x", weight=0.5)
    (alone,) = build_reward(RewardConfig(reward_model=model), ["unknown source"]).terms
    assert (alone.name, alone.weight) == ("reward_model", 0.5)
    terms = {"digits": {"type": "function"}}
    both = build_reward(RewardConfig(reward_model=model, terms=terms), ["reverse_digits"]).terms
    assert [term.name for term in both] == ["digits", "reward_model"]
    with pytest.raises(ValueError, match="needs path"):
        RewardModelConfig(enable=True)


@pytest.mark.parametrize("own_pool", [False, True])
@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_a_run_learns_from_a_reward_model_and_a_function(tmp_path, tokenizer, own_pool, estimator):
    save_model(tokenizer, tmp_path / "rm")
    overrides = [
        "backend=local",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        "data.train_batch_size=4",
        "data.val_batch_size=100",
        "data.max_response_length=3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.model.hidden_size=16",
        "actor_rollout_ref.rollout.n=2",
        f"algorithm.adv_estimator={estimator}",
        "reward.terms.digits.type=function",
        "reward.reward_model.enable=true",
        f"reward.reward_model.path={tmp_path / 'rm'}",
        "reward.reward_model.weight=0.25",
        "reward.reward_model.micro_batch_size_per_gpu=3",
        f"reward.reward_model.enable_resource_pool={own_pool}",
    ]
    folder = tmp_path / "run"
    train(prepare(load_config(overrides=overrides).config, folder), folder, hooks=[RunFiles(folder)])
    *_, last = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    expected = last["reward/digits"] + 0.25 * last["reward/reward_model"]
    assert last["critic/score/mean"] == pytest.approx(expected, abs=1e-5)
    assert last["reward/reward_model"] != 0.0
    assert last["actor/grad_norm"] > 0.0
