"""`ValueStack`: one Python value a row inside a TensorDict, kept as one numpy array until somebody needs the pieces.

tensordict keeps such values as a list of one-value TensorDicts, which costs microseconds a row to build. Here that
list is made when one of tensordict's own operations asks for it; the row operations of this package never do.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack
from tensordict.utils import LinkedList

from kapell.protocol.columns.objects import column_of_objects

__all__ = ["ValueStack", "array_of"]


class ValueStack(NonTensorStack):
    """A NonTensorStack that is built in constant time."""

    @classmethod
    def of(cls, cells: np.ndarray | Iterable[Any], device: torch.device | None = None) -> ValueStack:
        """Stack the rows of an array, or the values of a list."""
        column = cells if isinstance(cells, np.ndarray) else column_of_objects(cells)
        stack = cls.__new__(cls)
        # The attributes of a stack of one piece, whatever this version of tensordict has, but for the pieces.
        stack.__dict__.update(NonTensorStack(NonTensorData(None)).__dict__)
        stack.__dict__.pop("tensordicts", None)
        stack.__dict__.update(_column=column, _pieces=None, _device_of_pieces=device)
        stack.__dict__["_batch_size"] = torch.Size([len(column)])
        return stack

    @property
    def tensordicts(self) -> list[Any]:
        """The pieces, one a row. From here on they are what counts."""
        pieces = self.__dict__.get("_pieces")
        if pieces is None:
            device = self.__dict__["_device_of_pieces"]
            pieces = [NonTensorData(cell, device=device) for cell in self.__dict__.pop("_column")]
            self.__dict__["_pieces"] = pieces
        return pieces

    @tensordicts.setter
    def tensordicts(self, pieces: Iterable[Any]) -> None:
        self.__dict__["_pieces"] = list(pieces)
        self.__dict__.pop("_column", None)

    def tolist(self, *, as_linked_list: bool = False, **options: Any) -> list[Any]:
        """Give the values; ``as_linked_list`` as in tensordict."""
        if self.__dict__.get("_column") is None:
            return super().tolist(as_linked_list=as_linked_list, **options)
        values = list(self.__dict__["_column"])
        return LinkedList(values, td=self) if as_linked_list else values

    @property
    def device(self) -> torch.device | None:  # ty: ignore[incompatible-property-override]
        """The device that tensordict notes at the pieces."""
        return self.__dict__["_device_of_pieces"] if self.__dict__.get("_column") is not None else super().device

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Note another device; the values stay where they are."""
        column = self.__dict__.get("_column")
        target = args[0] if args else kwargs.get("device")
        if column is None or not isinstance(target, str | torch.device):
            return super().to(*args, **kwargs)
        return ValueStack.of(column, device=torch.device(target))

    def _clone(self, recurse: bool = True) -> Any:
        column = self.__dict__.get("_column")
        return super()._clone(recurse) if column is None else ValueStack.of(column.copy(), device=self.device)

    def _has_names(self) -> bool:
        return False if self.__dict__.get("_column") is not None else super()._has_names()

    def __len__(self) -> int:
        return self.batch_size[0]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _restored, (self.tolist(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> ValueStack:
        return ValueStack.of(copy.deepcopy(array_of(self), memo))


def array_of(stack: NonTensorStack) -> np.ndarray:
    """Give the values of a stack as an array with the dtype they came with; objects stay one a row.

    Once tensordict has taken a numeric column to pieces, the pieces are numpy scalars of one dtype, which says it.
    """
    column = stack.__dict__.get("_column")
    if column is not None:
        return cast(np.ndarray, column)
    cells = [piece.data for piece in stack.tensordicts]
    dtypes = {getattr(cell, "dtype", None) if isinstance(cell, np.generic | np.ndarray) else None for cell in cells}
    shapes = {cell.shape for cell in cells if isinstance(cell, np.generic)}
    if len(dtypes) == 1 and None not in dtypes and shapes == {()}:
        return np.array(cells)
    return column_of_objects(cells)


def _restored(cells: list[Any]) -> ValueStack:
    return ValueStack.of(cells)
