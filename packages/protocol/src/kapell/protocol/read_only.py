"""Read-only tensors: views of memory that others read too. Reading works as ever; writing in place raises.

torch has no read-only tensors, and a plain one on shared memory would write through to every reader.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["ReadOnlyError", "ReadOnlyTensor", "writable_view"]


class ReadOnlyError(RuntimeError):
    """A write to memory that others read."""

    def __init__(self, operation: str) -> None:
        super().__init__(
            f"{operation} would write to a batch that arrived read-only, in memory that others read; "
            "write to a copy: tensor.clone()"
        )
        self._operation = operation

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._operation,), self.__dict__


class ReadOnlyTensor(torch.Tensor):
    """A tensor that refuses in-place writes, as do its views; any other result is an ordinary tensor.

    ``.clone()`` gives an ordinary, writable copy.
    """

    _plain: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ReadOnlyTensor:
        """Show a tensor read-only."""
        shown = torch.Tensor._make_wrapper_subclass(
            cls, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        shown._plain = tensor.detach()
        return shown

    def plain(self) -> torch.Tensor:
        """Give the ordinary tensor on the same memory. Whoever writes to it writes to everybody's."""
        return self._plain

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Give a read-only array on the same memory."""
        array = self._plain.numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Give nested lists."""
        return self._plain.tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.numpy()
        return array.astype(dtype or array.dtype) if copy or (dtype is not None and dtype != array.dtype) else array

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._plain.clone()

    def __reduce_ex__(self, proto: Any) -> tuple[Any, ...]:
        from kapell.protocol.packing import Packing

        return Packing(read_only=False).standin(self._plain).__reduce_ex__(proto)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ReadOnlyTensor({self._plain!r})"

    @classmethod
    def __torch_dispatch__(  # ty: ignore[incompatible-method-override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        _refuse_writes(func, args, kwargs)
        shared = {_memory(leaf._plain) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)}

        def opened(leaf: Any) -> Any:
            return leaf._plain if isinstance(leaf, cls) else leaf

        def closed(leaf: Any) -> Any:
            is_view = isinstance(leaf, torch.Tensor) and not isinstance(leaf, cls) and _memory(leaf) in shared
            return cls.of(leaf) if is_view else leaf

        return tree_map(closed, func(*tree_map(opened, args), **tree_map(opened, kwargs)))


def writable_view(buffer: Any) -> np.ndarray:
    """Show a buffer as bytes that claim to be writable: torch warns about those that don't."""
    view = np.frombuffer(buffer, dtype=np.uint8)
    return view if view.flags.writeable else np.asarray(_Claim(view))


class _Claim:
    def __init__(self, view: np.ndarray) -> None:
        self._view = view  # numpy keeps this object, and with it the buffer, alive
        address = view.__array_interface__["data"][0]
        self.__array_interface__ = {"version": 3, "shape": view.shape, "typestr": "|u1", "data": (address, False)}


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        if any(isinstance(leaf, ReadOnlyTensor) for leaf in tree_leaves(value)):
            raise ReadOnlyError(str(func.overloadpacket.__name__))
