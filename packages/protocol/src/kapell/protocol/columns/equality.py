"""Equality of values for merging: NaN equals NaN, shapes and dtypes count, cycles end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase

from kapell.protocol.columns.jagged import is_jagged, parts_of

__all__ = ["close", "same"]

# Ranks measure the same thing a little differently: numbers this near are one value.
_RELATIVE_TOLERANCE = 1e-4


def same(left: Any, right: Any) -> bool:
    """Say whether two values are the same: type, shape, dtype and every element, with NaN equal to NaN.

    >>> same(np.array([1.0, np.nan]), np.array([1.0, np.nan]))
    True
    >>> same(float("nan"), "nan")
    False
    """
    return _Comparison(exact=True).equal(left, right)


def close(left: Any, right: Any) -> bool:
    """Like `same`, but floating-point numbers may differ by 0.01 %, wherever they are in the value."""
    return _Comparison(exact=False).equal(left, right)


class _Comparison:
    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._open: set[tuple[int, int]] = set()  # pairs under comparison: meeting one again closes a cycle

    def equal(self, left: Any, right: Any) -> bool:
        if left is right:
            return True
        rule = self._rule_for(left, right)
        if rule is None:
            return False
        pair = (id(left), id(right))
        if pair in self._open:
            return True
        self._open.add(pair)
        try:
            return rule(left, right)
        finally:
            self._open.discard(pair)

    def _rule_for(self, left: Any, right: Any) -> Callable[[Any, Any], bool] | None:
        """Choose by the left value; None when the right one is of another sort."""
        for kind, rule in (
            (torch.Tensor, self._tensors),
            (np.ndarray, self._arrays),
            ((NonTensorData, NonTensorStack), self._non_tensors),
            (TensorDictBase, self._tables),
            (Mapping, self._mappings),
            ((list, tuple), self._sequences),
            ((float, np.floating), self._floats),
        ):
            if isinstance(left, kind) or isinstance(right, kind):
                return rule if isinstance(left, kind) and isinstance(right, kind) else self._mixed_numbers(left, right)
        return _plain

    def _mixed_numbers(self, left: Any, right: Any) -> Callable[[Any, Any], bool] | None:
        numbers = (int, float, np.number)
        return self._floats if isinstance(left, numbers) and isinstance(right, numbers) else None

    def _floats(self, left: float, right: float) -> bool:
        if left == right or (math.isnan(left) and math.isnan(right)):
            return True
        return not self._exact and math.isclose(left, right, rel_tol=_RELATIVE_TOLERANCE)

    def _tensors(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        if left.is_nested or right.is_nested:
            return left.is_nested and right.is_nested and self._nested(left, right)
        if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device:
            return False
        if not (left.is_floating_point() or left.is_complex()):
            return bool((left == right).all())
        if left.element_size() == 1:
            left, right = left.float(), right.float()  # torch compares no FP8
        agree = (left == right) | (left.isnan() & right.isnan())
        if not self._exact:
            agree |= torch.isclose(left, right, rtol=_RELATIVE_TOLERANCE, atol=0.0)
        return bool(agree.all())

    def _nested(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        if not (is_jagged(left) and is_jagged(right)):
            return left.layout == right.layout and self._sequences(list(left.unbind()), list(right.unbind()))
        values, offsets, ragged = parts_of(left)
        other_values, other_offsets, other_ragged = parts_of(right)
        return ragged == other_ragged and self._tensors(offsets, other_offsets) and self._tensors(values, other_values)

    def _arrays(self, left: np.ndarray, right: np.ndarray) -> bool:
        if left.shape != right.shape or not _one_dtype(left.dtype, right.dtype):
            return False
        if left.dtype.hasobject:
            return all(self.equal(a, b) for a, b in zip(left.flat, right.flat, strict=True))
        agree = left == right
        if left.dtype.kind in "fcmM":
            agree = agree | (_not_a_number(left) & _not_a_number(right))
        if not self._exact and left.dtype.kind in "fc":
            agree = agree | np.isclose(left, right, rtol=_RELATIVE_TOLERANCE, atol=0.0)
        return bool(np.all(agree))

    def _mappings(self, left: Mapping[Any, Any], right: Mapping[Any, Any]) -> bool:
        return left.keys() == right.keys() and all(self.equal(value, right[key]) for key, value in left.items())

    def _sequences(self, left: list[Any], right: list[Any]) -> bool:
        if isinstance(left, tuple) != isinstance(right, tuple) or len(left) != len(right):
            return False
        return all(self.equal(a, b) for a, b in zip(left, right, strict=True))

    def _non_tensors(self, left: Any, right: Any) -> bool:
        return left.batch_size == right.batch_size and self.equal(left.tolist(), right.tolist())

    def _tables(self, left: Any, right: Any) -> bool:
        if left.batch_size != right.batch_size or set(left.keys()) != set(right.keys()):
            return False
        return all(self.equal(left.get(name), right.get(name)) for name in left.keys())  # noqa: SIM118


def _one_dtype(left: np.dtype, right: np.dtype) -> bool:
    return left == right or (left.kind == right.kind and left.kind in "US")  # text of any length


def _not_a_number(array: np.ndarray) -> np.ndarray:
    return np.isnat(array) if array.dtype.kind in "mM" else np.isnan(array)


def _plain(left: Any, right: Any) -> bool:
    if isinstance(left, bool) is not isinstance(right, bool):
        return False
    try:
        return bool(left == right)
    except (TypeError, ValueError):  # an object whose == is no yes or no
        return False
