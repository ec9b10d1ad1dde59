"""The wire format: values that pickle to out-of-band buffers and arrive private and writable.

`pack(value)` gives a stand-in for a value (a tensor, a numpy array, a TensorDict, or lists, tuples and dicts with such
inside). Pickled with protocol 5, the numbers travel as `pickle.PickleBuffer`s without being copied; a view sends only
what it shows, and memory that appears twice is sent once. Unpickling gives the *original value*, not the stand-in:

>>> import pickle, torch
>>> buffers = []
>>> data = pickle.dumps(pack({"x": torch.zeros(1000)}), protocol=5, buffer_callback=buffers.append)
>>> len(data) < 500, pickle.loads(data, buffers=buffers)["x"].shape
(True, torch.Size([1000]))

What arrives is copied once into memory of its own, so writing to it changes nobody's data. With
``pack(value, read_only=True)`` it is not copied: it arrives as views that refuse to be written
(`kapell.protocol.read_only`).

A `DataProto` packs itself when it is pickled. For Ray: ``ref = ray.put(pack(value))``, ``value = ray.get(ref)``.
"""

from __future__ import annotations

from typing import Any

from kapell.protocol.packing import Packing, Standin

__all__ = ["pack", "unpack"]


def pack(value: Any, *, read_only: bool = False) -> Any:
    """Replace the tensors, arrays and TensorDicts in a value by stand-ins that pickle without copying.

    Looks into lists, tuples, dicts and object arrays, at every depth. The stand-ins refer to the memory itself: pickle
    them before it changes.
    """
    return Packing(read_only=read_only).standin(value)


def unpack(value: Any) -> Any:
    """Give the value of a stand-in that has not been pickled; anything else is given as it is."""
    return value.value() if isinstance(value, Standin) else value
