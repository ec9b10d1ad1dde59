import math

import pytest
import torch

from kapell.trainer.algorithms import masked_mean, masked_sum, masked_var, masked_whiten

JUNK = [math.nan, math.inf, -math.inf, 1e9]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture
def values():
    return tensor([[1, 2, 3], [4, 5, 100]])


@pytest.fixture
def mask():
    return torch.tensor([[1, 1, 1], [1, 1, 0]])


def test_mean_and_variance_match_the_worked_numbers(values, mask):
    assert masked_mean(values, mask) == 3
    assert masked_var(values, mask) == 2.5


def test_whitening_matches_the_worked_numbers(values, mask):
    white = masked_whiten(values, mask)
    expected = tensor([[-1.264911, -0.632456, 0], [0.632456, 1.264911, 0]])
    torch.testing.assert_close(white, expected, atol=1e-6, rtol=0)
    unshifted = masked_whiten(values, mask, shift_mean=False)
    torch.testing.assert_close(unshifted, tensor([[1.735089, 2.367544, 3], [3.632456, 4.264911, 0]]), atol=1e-6, rtol=0)


def test_gradient_of_the_mean_is_one_over_the_count(values, mask):
    values.requires_grad_()
    masked_mean(values, mask).backward()
    assert values.grad.tolist() == [[0.2, 0.2, 0.2], [0.2, 0.2, 0]]


def test_variance_of_fewer_than_two_slots_is_an_error(values):
    for mask in ([[0, 1, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]):
        with pytest.raises(ValueError, match="at least 2 valid slots"):
            masked_var(values, torch.tensor(mask))


def test_whitening_one_slot_leaves_it_and_none_gives_zeros():
    values = tensor([0, 3, 7])
    assert masked_whiten(values, torch.tensor([0, 1, 0])).tolist() == [0, 3, 0]
    assert masked_whiten(values, torch.tensor([0, 0, 0])).tolist() == [0, 0, 0]


def test_whitening_equal_values_gives_zeros():
    assert masked_whiten(tensor([0.1, 0.1, 5]), torch.tensor([1, 1, 0])).tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.uint8, torch.bfloat16])
def test_any_mask_dtype_means_the_same(dtype):
    mask = torch.tensor([1, 0, 1]).to(dtype)
    assert masked_mean(tensor([1, 2, 3]), mask) == 2
    assert masked_sum(tensor([1, 2, 3]), mask) == 4
    assert masked_whiten(tensor([1, 2, 3]), mask)[1] == 0


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("function", [masked_mean, masked_sum, masked_var, masked_whiten])
def test_junk_in_masked_slots_reaches_neither_value_nor_gradient(function, junk, mask):
    results = []
    for filler in (0.0, junk):
        values = tensor([[1, 2, 3], [4, 5, filler]]).requires_grad_()
        result = function(values, mask)
        result.square().sum().backward()
        results.append((result.detach(), values.grad))
    torch.testing.assert_close(results[0], results[1], atol=0, rtol=0)
    assert results[1][1][1, 2] == 0


def test_half_precision_is_summed_in_single_precision():
    values = torch.full((4096,), 0.1, dtype=torch.bfloat16)
    total = masked_sum(values, torch.ones(4096))
    assert total.dtype == torch.float32
    assert total == pytest.approx(4096 * float(values[0]), rel=1e-5)


def test_mean_over_rows_of_an_empty_row_is_zero():
    assert masked_mean(tensor([[1, 2], [3, 4]]), torch.tensor([[1, 1], [0, 0]]), dim=-1).tolist() == [1.5, 0]
