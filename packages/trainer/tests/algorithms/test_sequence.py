"""Masks, positions, length penalties and seeds."""

import pytest
import torch

from kapell.trainer.algorithms import (
    mask_from_lengths,
    mask_up_to_eos,
    missing_eos_penalty,
    position_ids,
    replica_seed,
    soft_overlong_penalty,
)


@pytest.mark.parametrize(
    ("length", "mask"), [(3, [1, 1, 1, 0]), (2, [1, 1, 0, 0]), (0, [0, 0, 0, 0]), (4, [1, 1, 1, 1])]
)
def test_mask_from_lengths(length, mask):
    assert mask_from_lengths(torch.tensor([length]), 4).tolist() == [mask]


@pytest.mark.parametrize(
    ("tokens", "mask"),
    [
        ([5, 2, 0, 0], [1, 1, 0, 0]),
        ([5, 2, 2, 2], [1, 1, 0, 0]),
        ([2, 9, 9, 9], [1, 0, 0, 0]),
        ([5, 6, 7, 8], [1, 1, 1, 1]),
        ([5, 3, 2, 0], [1, 1, 0, 0]),
    ],
)
def test_mask_includes_the_first_end_token_and_nothing_after(tokens, mask):
    assert mask_up_to_eos(torch.tensor([tokens]), [2, 3]).tolist() == [mask]


@pytest.mark.parametrize(
    ("mask", "positions"),
    [([0, 0, 1, 1, 1], [0, 0, 0, 1, 2]), ([1, 1, 1], [0, 1, 2]), ([0, 0], [0, 0]), ([0, 1, 1, 0], [0, 0, 1, 1])],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_positions_count_from_the_first_real_token(mask, positions, dtype):
    assert position_ids(torch.tensor([mask]).to(dtype)).tolist() == [positions]


def test_more_left_padding_does_not_move_real_tokens():
    mask = torch.tensor([[0, 1, 1, 1]])
    wider = torch.tensor([[0, 0, 0, 1, 1, 1]])
    assert position_ids(wider)[0, 3:].tolist() == position_ids(mask)[0, 1:].tolist()


def test_a_response_goes_on_counting():
    assert position_ids(torch.tensor([[0, 0, 1, 1, 1, 1, 1]]))[0, -2:].tolist() == [3, 4]


def test_soft_overlong_penalty_matches_the_worked_numbers():
    lengths = torch.tensor([14, 15, 16, 18, 20, 25])
    penalty = soft_overlong_penalty(lengths, max_length=20, buffer=5)
    torch.testing.assert_close(penalty, torch.tensor([0, 0, -0.2, -0.6, -1, -1]))
    torch.testing.assert_close(soft_overlong_penalty(lengths, max_length=20, buffer=5, factor=0.5), penalty / 2)


def test_soft_overlong_penalty_without_a_buffer_is_a_step():
    assert soft_overlong_penalty(torch.tensor([20, 21]), max_length=20, buffer=0).tolist() == [0, -1]
    with pytest.raises(ValueError, match="between 0 and max_length=20, got 21"):
        soft_overlong_penalty(torch.tensor([1]), max_length=20, buffer=21)


def test_answers_without_an_end_token_are_penalised():
    assert missing_eos_penalty(torch.tensor([1, 0]), penalty=0.5).tolist() == [0, -0.5]


def test_replicas_have_seeds_of_their_own_that_repeat():
    seeds = [replica_seed(0, dp_rank=rank) for rank in range(64)]
    assert len(set(seeds)) == 64
    assert seeds == [replica_seed(0, dp_rank=rank) for rank in range(64)]
    assert replica_seed(0, dp_rank=1) != replica_seed(1, dp_rank=0)
    assert replica_seed(0, dp_rank=0) != replica_seed(0, dp_rank=0, stream="data")
    assert replica_seed(None, dp_rank=3) is None
    assert all(0 <= seed < 2**63 for seed in seeds)
