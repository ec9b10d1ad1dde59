"""Where packed memory arrives: copied once into memory of its own, or shown as it lies in views that refuse writing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kapell.protocol.columns.memory import HUGE_BYTES
from kapell.protocol.read_only import ReadOnlyTensor, writable_view

__all__ = ["Arrivals"]

_ALIGNMENT = 64  # bytes, as torch aligns its own


class Arrivals:
    """The buffers of one packed value at their destination."""

    def __init__(self, read_only: bool, *buffers: Any) -> None:
        *pieces, first_probe, second_probe = buffers
        # Only what the unpickler itself has just read from the stream is ours already. A bytearray that somebody
        # handed over may be read again; one piece of another type says that some were handed over.
        self._ours = first_probe is second_probe and {*map(type, buffers)} == {bytearray}
        self._read_only = read_only
        self._pieces = pieces
        self._copies: dict[int, np.ndarray] = {}
        self._block = np.empty(0, dtype=np.uint8)  # what is left of the memory for small pieces

    @staticmethod
    def device_here(name: str) -> torch.device:
        """Give the named device, or the nearest thing that this machine has."""
        device = torch.device(name)
        if device.type != "cuda":
            return device
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return device if (device.index or 0) < torch.cuda.device_count() else torch.device("cuda")

    def tensor(
        self,
        number: int | None,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        device: str | None,
        *,
        wants_grad: bool,
        private: bool = False,
    ) -> torch.Tensor:
        """Give piece ``number`` as a tensor."""
        if number is None:
            tensor = torch.empty(shape, dtype=dtype)
        elif self._read_only and not private and device is None:
            return ReadOnlyTensor.of(torch.from_numpy(writable_view(self._pieces[number])).view(dtype).view(shape))
        else:
            tensor = torch.from_numpy(self._private(number)).view(dtype).view(shape)
        if device is not None:
            tensor = tensor.to(self.device_here(device))
        return tensor.requires_grad_() if wants_grad else tensor

    def dense(self, number: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Give piece ``number`` as a tensor of a dtype that numpy has too, by numpy's name."""
        if self._read_only:
            view = torch.from_numpy(writable_view(self._pieces[number]).view(dtype).reshape(shape))
            return ReadOnlyTensor.of(view)
        return torch.from_numpy(self._private(number).view(dtype).reshape(shape))

    def array(self, number: int | None, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """Give piece ``number`` as a numpy array."""
        if number is None:
            return np.empty(shape, dtype=dtype)
        if not self._read_only:
            return self._private(number).view(dtype).reshape(shape)
        view = np.frombuffer(self._pieces[number], dtype=np.uint8).view(dtype).reshape(shape)
        view.flags.writeable = False
        return view

    def _private(self, number: int) -> np.ndarray:
        copy = self._copies.get(number)
        if copy is None:
            source = np.frombuffer(self._pieces[number], dtype=np.uint8)
            copy = self._copies[number] = source if self._ours else self._copy(source)
        return copy

    def _copy(self, source: np.ndarray) -> np.ndarray:
        if source.nbytes >= HUGE_BYTES:
            return source.copy()
        # Small pieces share one piece of memory, so that they get huge pages too.
        if source.nbytes > self._block.nbytes:
            sizes = [memoryview(piece).nbytes for piece in self._pieces]
            self._block = np.empty(sum(_aligned(size) for size in sizes if size < HUGE_BYTES), dtype=np.uint8)
        copy, self._block = self._block[: source.nbytes], self._block[_aligned(source.nbytes) :]
        copy[:] = source
        return copy


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
