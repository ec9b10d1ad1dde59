"""Statistics over the valid slots of a tensor.

Selection is by `where`, never by multiplication, so whatever lies in a masked slot (NaN, infinity) reaches neither the
value nor the gradient. Masks may be bool, integer or float: nonzero means valid.
"""
# B rows, T tokens

import torch
from torch import Tensor

__all__ = ["as_mask", "keep", "masked_mean", "masked_sum", "masked_var", "masked_whiten", "widen"]

_VARIANCE_FLOOR = 1e-8  # as in the reference implementations; keeps a constant input at zero


def as_mask(mask: Tensor) -> Tensor:
    """A mask of any dtype as bool: nonzero is valid."""
    return mask if mask.dtype == torch.bool else mask != 0


def widen(values: Tensor) -> Tensor:
    """At least float32: half precision and integers are widened, float32 and float64 stay."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def keep(mask: Tensor, values: Tensor) -> Tensor:
    """`values`, at least float32, with exact zeros in masked slots.

    >>> keep(torch.tensor([1, 0]), torch.tensor([2.0, float("nan")]))
    tensor([2., 0.])
    """
    values = widen(values)
    return torch.where(as_mask(mask), values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum over valid slots; 0 where none is."""
    kept = keep(mask, values)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over valid slots, sum(x m)/sum m; 0 where none is.

    >>> masked_mean(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, 0, 1]))
    tensor(2.)
    """
    valid = as_mask(mask).expand_as(values)
    count = valid.sum() if dim is None else valid.sum(dim)
    return masked_sum(values, valid, dim) / count.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Sample variance over valid slots, sum((x-mean)^2 m)/(sum m - 1).

    Fewer than two valid slots have no variance: ValueError.
    """
    valid = as_mask(mask).expand_as(values)
    count = int(valid.sum())
    if count < 2:
        raise ValueError(f"the sample variance needs at least 2 valid slots, the mask leaves {count}")
    return _var(values, valid, count)


def masked_whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """(x-mean)/sqrt(var+1e-8) over valid slots, zeros in masked ones; the mean is added back unless `shift_mean`.

    One valid slot stays as it is and an empty mask gives zeros: neither has a variance, and neither may end a run.
    """
    valid = as_mask(mask).expand_as(values)
    count = int(valid.sum())
    if count < 2:
        return keep(valid, values)
    mean = masked_mean(values, valid)
    white = (keep(valid, values) - mean) * torch.rsqrt(_var(values, valid, count) + _VARIANCE_FLOOR)
    return keep(valid, white if shift_mean else white + mean)


def _var(values: Tensor, valid: Tensor, count: int) -> Tensor:
    centered = keep(valid, keep(valid, values) - masked_mean(values, valid))
    return centered.square().sum() / (count - 1)
