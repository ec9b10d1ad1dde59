"""A second device for tests on machines that have none: its tensors hold values and do not mix with those of the CPU.

Within `second_device` torch's device ``meta`` has values. A tensor there wraps one on the CPU, which the same kernels
compute, so results are equal bit for bit; an operation on tensors of both devices raises, as between CPU and CUDA.
"""

from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

DEVICE = torch.device("meta")
_aten = torch.ops.aten
_BETWEEN_DEVICES = {_aten.copy_.default, _aten._to_copy.default}
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}


class There(torch.Tensor):
    """A tensor on the second device."""

    @staticmethod
    def __new__(cls, values):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
        )
        made.values_ = values
        return made

    def __repr__(self):
        return f"There({self.values_})"

    @property
    def is_meta(self):
        return False

    def data_ptr(self):
        return self.values_.data_ptr()

    def tolist(self):
        return self.values_.tolist()

    def __tensor_flatten__(self):
        return ["values_"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return There(inner["values_"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _run(func, args, kwargs):
    """The operation on the CPU, with its result where it belongs."""
    flat, spec = tree_flatten((args, kwargs))
    there = [value for value in flat if isinstance(value, There)]
    if there and func not in _BETWEEN_DEVICES:
        _check_devices(func, args, kwargs)
    inner = [value.values_ if isinstance(value, There) else value for value in flat]
    inner_args, inner_kwargs = tree_unflatten(inner, spec)
    target = kwargs.get("device")
    if target is not None:
        inner_kwargs["device"] = torch.device("cpu")
    result = func(*inner_args, **inner_kwargs)
    if func is _aten.copy_.default:
        return args[0]
    moves = bool(there) if target is None else torch.device(target).type == DEVICE.type
    known = {id(old): value for old, value in zip(inner, flat, strict=True)}  # those that were changed in place

    def placed(value):
        if not isinstance(value, torch.Tensor) or id(value) in known:
            return known.get(id(value), value)
        return There(value) if moves else value

    return tree_map(placed, result)


def _check_devices(func, args, kwargs):
    if func in _INDEXED and isinstance(args[0], There):
        args = (args[0], *args[2:])  # what indexes a tensor of another device may be on the CPU
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
    if any(tensor.dim() and not isinstance(tensor, There) for tensor in tensors):
        raise RuntimeError(f"{func} got tensors of two devices")


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Python(TorchFunctionMode):
    """What reaches no dispatcher: the values of Python lists."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None and torch.device(device).type == DEVICE.type:
            return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        return func(*args, **kwargs)


@contextmanager
def second_device():
    """Within the block ``meta`` is a device with values."""
    with _Dispatch(), _Python():
        yield DEVICE
