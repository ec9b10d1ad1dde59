"""Masks and positions of padded sequences."""
# B rows, T response tokens, P padded prompt length, L = P + T

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["mask_from_lengths", "mask_up_to_eos", "on_last_token", "position_ids", "response_lengths"]


def mask_from_lengths(lengths_B: Tensor, width: int) -> Tensor:
    """1 for the first `length` tokens of each row, (B,) -> (B, width) int64; the mask to use where lengths are known.

    >>> mask_from_lengths(torch.tensor([3, 0]), 4)
    tensor([[1, 1, 1, 0],
            [0, 0, 0, 0]])
    """
    return (torch.arange(width, device=lengths_B.device) < lengths_B[:, None]).long()


def mask_up_to_eos(responses_BT: Tensor, eos_token_id: int | Iterable[int]) -> Tensor:
    """1 up to and including the first end-of-sequence token, all ones where there is none, (B, T) int64.

    Only for responses whose lengths nobody kept: a row that was cut off without an end token counts its padding too.

    >>> mask_up_to_eos(torch.tensor([[5, 2, 2, 2], [5, 6, 7, 8]]), eos_token_id=2)
    tensor([[1, 1, 0, 0],
            [1, 1, 1, 1]])
    """
    ids = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    is_eos_BT = torch.isin(responses_BT, torch.tensor(ids, device=responses_BT.device, dtype=responses_BT.dtype)).long()
    ended_before_BT = is_eos_BT.cumsum(-1) - is_eos_BT
    return (ended_before_BT == 0).long()


def response_lengths(mask_BT: Tensor) -> Tensor:
    """The tokens of each row up to its mask's last 1, those between that it leaves out included, (B,); 0 without any.

    >>> response_lengths(torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]]))
    tensor([3, 0])
    """
    return (mask_BT.flip(-1).cumsum(-1) > 0).sum(-1)


def on_last_token(values_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Each row's value on its mask's last 1 and 0 elsewhere, (B, T). Raises `ValueError` for a row without any.

    >>> on_last_token(torch.tensor([0.5]), torch.tensor([[1, 1, 0]]))
    tensor([[0.0000, 0.5000, 0.0000]])
    """
    lengths_B = response_lengths(mask_BT)
    if (lengths_B == 0).any():
        row = int((lengths_B == 0).nonzero()[0])
        raise ValueError(f"row {row} has an empty response, so its score has no token to lie on")
    values_BT = torch.zeros(mask_BT.shape, dtype=values_B.dtype, device=values_B.device)
    values_BT[torch.arange(len(values_B)), lengths_B - 1] = values_B
    return values_BT


def position_ids(attention_mask_BL: Tensor) -> Tensor:
    """Position of each token counted from the first real one, (B, L) int64; padding on the left gets 0.

    >>> position_ids(torch.tensor([[0, 0, 1, 1, 1]]))
    tensor([[0, 0, 0, 1, 2]])
    """
    return ((attention_mask_BL != 0).long().cumsum(-1) - 1).clamp(min=0)
