"""What scoring adds to a batch: scores on last tokens, each reward's own, extras per row and as metrics."""

import numpy as np
import pytest
import torch

from kapell.protocol import DataProto
from kapell.trainer.metrics import metrics_of
from kapell.trainer.reward_functions import FunctionReward
from kapell.trainer.reward_sum import RewardSum, RewardTerm
from kapell.trainer.scoring import Scorer
from kapell.trainer.tokenizer import EOS_TOKEN, build_character_tokenizer

TOKENIZER = build_character_tokenizer("0123456789")


def batch_of(*responses, truths):
    ids = [TOKENIZER.convert_tokens_to_ids([*text, EOS_TOKEN]) for text in responses]
    width = max(map(len, ids))
    return DataProto.from_dict(
        tensors={
            "responses": torch.tensor([row + [0] * (width - len(row)) for row in ids]),
            "response_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids]),
        },
        non_tensors={
            "data_source": np.array(["digits"] * len(ids), dtype=object),
            "ground_truth": np.array(truths, dtype=object),
            "extra_info": np.array([{}] * len(ids), dtype=object),
        },
    )


def score(batch, *terms, fallback=None):
    parts = [RewardTerm(name, FunctionReward(function=function), weight) for name, function, weight in terms]
    return Scorer(reward=RewardSum(parts, fallback), tokenizer=TOKENIZER)(batch)


def length(source, solution, truth, extra):
    return {"score": len(solution), "parity": len(solution) % 2, "note": solution}


def right(source, solution, truth, extra):
    if not solution:
        raise ValueError("empty")
    return {"score": solution == truth, "exact_match": solution[0] == truth[0]}


def test_scores_lie_on_the_last_token_and_exact_match_is_by_text():
    result = score(batch_of("12", "345", truths=["12", "0"]), ("length", length, 1.0))
    assert result.column("rm_scores").tolist() == [[0.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 3.0]]
    assert result.column("exact_match").tolist() == [1.0, 0.0]
    assert result.column("reward_components").tolist() == [[2.0], [3.0]]
    assert result.non_tensor_batch["reward_extra"].tolist() == [
        {"parity": 0, "note": "12"},
        {"parity": 1, "note": "345"},
    ]
    metrics = {name: metric.value for name, metric in metrics_of(result).items()}
    assert metrics == {"reward/errors": 0.0, "reward/parity": 0.5, "reward/exact_match": 0.5}


@pytest.mark.parametrize("kind", [bool, float, np.bool_])
def test_the_acc_that_verls_rewards_return_is_the_exact_match(kind):
    def within_one(source, solution, truth, extra):
        return {"score": 0.0, "acc": kind(abs(int(solution) - int(truth)) <= 1), "pred": solution}

    result = score(batch_of("12", "345", truths=["13", "0"]), ("close", within_one, 1.0))
    assert result.column("exact_match").tolist() == [1.0, 0.0]
    metrics = {name: metric.value for name, metric in metrics_of(result).items()}
    assert metrics["reward/acc"] == metrics["reward/exact_match"] == 0.5


def test_several_rewards_are_told_apart():
    result = score(batch_of("12", "345", truths=["12", "3"]), ("right", right, 1.0), ("length", length, 0.1))
    assert result.column("rm_scores").sum(-1).tolist() == pytest.approx([1.2, 0.3])
    assert result.column("reward_components").tolist() == [[1.0, 2.0], [0.0, 3.0]]
    assert result.column("exact_match").tolist() == [1.0, 1.0]
    assert result.non_tensor_batch["reward_extra"][1] == {
        "right": 0.0,
        "length": 3.0,
        "right/exact_match": True,
        "length/parity": 1,
        "length/note": "345",
    }
    metrics = {name: metric.value for name, metric in metrics_of(result).items()}
    assert metrics["reward/right"] == 0.5
    assert metrics["reward/length"] == 2.5
    assert metrics["reward/length/parity"] == 0.5
    assert metrics["reward/exact_match"] == 1.0


def test_rows_that_fail_are_counted_in_metrics():
    result = score(batch_of("1", "", truths=["1", "1"]), ("right", right, 1.0), ("length", length, 1.0), fallback=0.0)
    metrics = {name: metric.value for name, metric in metrics_of(result).items()}
    assert (metrics["reward/errors"], metrics["reward/right/errors"], metrics["reward/length/errors"]) == (1, 1, 0)
    assert result.column("exact_match").tolist() == [1.0, 0.0]


def test_tokens_that_the_mask_leaves_out_on_the_way_are_part_of_the_text_and_the_score_lies_after_them():
    batch = batch_of("12993", "45", truths=["12993", "0"])
    batch.batch["response_mask"] = torch.tensor([[1, 1, 0, 0, 1, 1], [0, 1, 1, 0, 0, 0]])
    result = score(batch, ("length", length, 1.0))
    assert result.non_tensor_batch["solution_str"].tolist() == ["12993", "45"]
    assert result.column("rm_scores").tolist() == [[0.0] * 5 + [5.0], [0.0, 0.0, 2.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("width", [0, 3])
def test_a_row_without_any_token_is_refused(width):
    batch = batch_of("12", "34", truths=["12", "34"])
    mask = batch.batch["response_mask"][:, :width] * torch.tensor([[1], [0]])
    batch.batch["response_mask"], batch.batch["responses"] = mask, batch.batch["responses"][:, :width]
    with pytest.raises(ValueError, match=rf"row {1 if width else 0} has an empty response"):
        score(batch, ("length", length, 1.0))


def test_what_a_reward_returns_under_the_name_of_a_count_is_kept_beside_the_count():
    def strict(source, solution, truth, extra):
        if not solution:
            raise ValueError("empty")
        return {"score": 1.0, "errors": 7}

    def metrics(*terms):
        result = score(batch_of("1", "", truths=["1", "1"]), *terms, fallback=0.0)
        return {name: metric.value for name, metric in metrics_of(result).items()}

    found = metrics(("strict", strict, 1.0))
    assert found == {"reward/errors": 1, "reward/errors_returned": 7, "reward/exact_match": 0.5}
    found = metrics(("errors", strict, 1.0), ("exact_match", strict, 1.0))
    assert (found["reward/errors"], found["reward/errors_returned"]) == (2, 0.5)
    assert (found["reward/errors/errors"], found["reward/errors/errors_returned"]) == (1, 7)
    assert (found["reward/exact_match"], found["reward/exact_match_returned"]) == (0.5, 0.5)
