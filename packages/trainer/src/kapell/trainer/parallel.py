"""How the ranks of a group hold one model together: each a copy, or each a part (FSDP2)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from .collective import Collective

__all__ = ["Parallelism", "Replicated", "Sharded"]


class Parallelism(ABC):
    """What an engine asks of the ranks together. Every rank must ask for the same things in the same order."""

    @abstractmethod
    def place(self, model: nn.Module) -> None:
        """Lay out a model whose weights are equal on all ranks."""

    def passes(self, number: int) -> int:
        """How many passes this rank makes, where it needs ``number`` itself."""
        return number

    @abstractmethod
    def start_average(self, parameters: Sequence[nn.Parameter]) -> Callable[[], Tensor]:
        """Start to average gradients; the function returned waits for it and gives the norm of them all."""

    @contextmanager
    def whole(self, model: nn.Module) -> Generator[None]:
        """Within the block each rank runs the model by itself, without gradients."""
        yield

    def gathered_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights by name, whole; tied ones, which are one object, are one tensor."""
        return {name: weight.detach() for name, weight in weights.items()}

    def gathered(self, state: Any) -> Any:
        """A state with whole tensors."""
        return state

    def scattered(self, state: Any, like: Any) -> Any:
        """A state with whole tensors, laid out as ``like`` is."""
        del like
        return state


class Replicated(Parallelism):
    """Each rank has all weights; gradients are averaged in one piece."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective

    def place(self, model: nn.Module) -> None:
        """Each rank keeps all weights."""

    def start_average(self, parameters: Sequence[nn.Parameter]) -> Callable[[], Tensor]:
        """Start to average; a parameter without a gradient takes part with zeros."""
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        collect = self._collective.start_average(torch.cat([part.reshape(-1) for part in parts]))

        def finish() -> Tensor:
            flat = collect()
            for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                parameter.grad = part.view_as(parameter)
            return flat.norm()

        return finish


class Sharded(Parallelism):
    """Each rank has a part of each weight, gradient and moment, by torch's ``fully_shard``, layer by layer.

    Over `torch.distributed`'s default group, which must be initialised. Ranks meet in each pass through a layer.
    """

    def place(self, model: nn.Module) -> None:
        """Shard each layer, then what is around them."""
        mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
        for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        for module in _sharded_modules(model):
            module.set_force_sum_reduction_for_comms(True)  # torch 2.8 over gloo takes an average for a sum

    def passes(self, number: int) -> int:
        """The most that any rank needs."""
        most = torch.tensor(number)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def start_average(self, parameters: Sequence[nn.Parameter]) -> Callable[[], Tensor]:
        """The backward passes have averaged already."""
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        return lambda: norm.full_tensor() if isinstance(norm, DTensor) else norm

    @contextmanager
    def whole(self, model: nn.Module) -> Generator[None]:
        """Bring all weights to each rank and keep them for the block."""
        modules = _sharded_modules(model)
        for module in modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in modules:
                module.reshard()
                module.set_reshard_after_forward(True, recurse=False)

    def gathered_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same on each rank."""
        whole: dict[int, Tensor] = {}
        for weight in weights.values():
            if id(weight) not in whole:
                whole[id(weight)] = self.gathered(weight.detach())
        return {name: whole[id(weight)] for name, weight in weights.items()}

    def gathered(self, state: Any) -> Any:
        """A state with whole tensors on each rank."""
        if isinstance(state, Mapping):
            return {key: self.gathered(value) for key, value in state.items()}
        return state.full_tensor() if isinstance(state, DTensor) else state

    def scattered(self, state: Any, like: Any) -> Any:
        """This rank's part of a state that is the same on all."""
        if isinstance(state, Mapping):
            return {key: self.scattered(value, like[key]) for key, value in state.items()}
        if not isinstance(like, DTensor) or not isinstance(state, Tensor) or state.shape != like.shape:
            return state
        return distribute_tensor(state, like.device_mesh, like.placements, src_data_rank=None)


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
