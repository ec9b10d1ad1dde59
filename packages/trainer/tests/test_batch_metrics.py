"""Numbers of a finished step, also of a step in which nothing counts."""

import math

import pytest
import torch

from kapell.trainer.algorithms import metric_values
from kapell.trainer.metrics import column_metrics


def columns(mask):
    mask_BT = torch.tensor(mask)
    ones_BT = torch.ones(mask_BT.shape)
    return {
        "response_mask": mask_BT,
        "prompt_mask": torch.ones(len(mask_BT), 2, dtype=torch.long),
        "token_level_scores": ones_BT,
        "token_level_rewards": ones_BT,
        "advantages": ones_BT,
        "returns": ones_BT,
        "values": ones_BT,
        "rollout_log_probs": -ones_BT,
        "old_log_probs": -1.5 * ones_BT,
        "entropys": ones_BT,
    }


def test_scores_lengths_and_gaps_count_response_tokens_only():
    values = metric_values(column_metrics(columns([[1, 1, 0], [1, 0, 0]])))
    assert values["critic/score/mean"] == 1.5
    assert values["response_length/mean"] == 1.5
    assert values["response_length/clip_ratio"] == 0.0
    assert values["perf/total_num_tokens"] == 7
    assert values["training/rollout_log_probs_diff_max"] == 0.5


@pytest.mark.parametrize("mask", [[[0, 0], [0, 0]], [[1, 1], [0, 0]]])
def test_rows_without_tokens_raise_nothing_and_no_number_is_infinite(mask):
    for name, value in metric_values(column_metrics(columns(mask))).items():
        assert math.isfinite(value), name


def test_no_rows_at_all_give_numbers_without_an_error():
    empty = {name: column[:0] for name, column in columns([[1, 1]]).items()}
    values = metric_values(column_metrics(empty))
    assert all(math.isfinite(value) for value in values.values())
    assert values["perf/total_num_tokens"] == 0
