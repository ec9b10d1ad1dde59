"""A model with its optimizer: passes over micro-batches, and an update averaged over the ranks of a group."""

# N rows of this rank, B of a micro-batch, T response tokens

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .algorithms import LossResult, Metric, merge_metrics
from .collective import Collective, SingleCollective
from .config import OptimConfig
from .devices import moved
from .forward import Columns
from .lora import split_weights, weights_checksum
from .micro_batches import MicroBatches, joined, portions
from .models import allow_recomputation, training_mode
from .optimizers import build_optimizer, build_schedule
from .parallel import Replicated, Sharded

__all__ = ["TrainEngine"]

_CPU = torch.device("cpu")


class TrainEngine:
    """One rank's part in the training of a model.

    `forward_backward` adds up gradients over micro-batches and starts their average over the ranks; `step` waits for it
    and moves the weights. All ranks start equal and get the same averages, so they stay equal.

    ``strategy`` is ``ddp``, a copy of the model on each rank, or ``fsdp2``, a part on each, over torch's default
    process group. Weights, gradients, moments and losses are float32; with ``dtype=torch.bfloat16`` the matrix products
    of all passes are computed in that (autocast). ``gradient_checkpointing`` computes each layer again in the backward
    pass, which saves the memory of its activations. The model lives on ``device``; columns go there micro-batch by
    micro-batch, and results come back to where the columns are.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        optim: OptimConfig,
        *,
        grad_clip: float = 1.0,
        total_steps: int | None = None,
        collective: Collective | None = None,
        strategy: Literal["ddp", "fsdp2"] = "ddp",
        dtype: torch.dtype = torch.float32,
        gradient_checkpointing: bool = False,
        device: torch.device = _CPU,
    ) -> None:
        self.device = device
        self._parallel = Sharded() if strategy == "fsdp2" else Replicated(collective or SingleCollective())
        if gradient_checkpointing:
            allow_recomputation(model)
        self.model = self.place(model)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._grad_clip = grad_clip
        self._dtype = dtype
        self._pending: Callable[[], Tensor] | None = None
        self._frozen_checksum: int | None = None
        self.optimizer = build_optimizer(self._parameters, optim)
        self.scheduler = build_schedule(self.optimizer, optim, total_steps=total_steps)

    def forward_backward(
        self, columns: Columns, loss: Callable[[Columns], LossResult], *, micro_batches: MicroBatches | None = None
    ) -> dict[str, Metric]:
        """Gradients of a mini-batch: this rank's rows through ``loss`` in micro-batches, then averaged over the ranks.

        The loss divides by the counts of the whole mini-batch over all ranks, so that neither micro-batches nor ranks
        change its gradient. A rank without rows takes part with zeros.
        """
        if self._pending is not None:
            raise RuntimeError("a mini-batch waits for its optimizer step; call step() before the next one")
        self.optimizer.zero_grad(set_to_none=True)
        metrics = []
        with training_mode(self.model):
            for micro in self._portions(columns, self._rows(columns, micro_batches)):
                with self.autocast():
                    value, numbers = loss(micro)
                value.backward()
                metrics.append(numbers)
        self._pending = self._parallel.start_average(self._parameters)
        return merge_metrics(metrics)

    def step(self) -> dict[str, float]:
        """Move the weights by the averaged gradient. Returns ``grad_norm`` (before clipping) and ``lr``."""
        if self._pending is None:
            raise RuntimeError("there is no gradient to step with; call forward_backward() first")
        norm, self._pending = self._pending(), None
        if not torch.isfinite(norm):
            raise FloatingPointError(f"the gradient's norm is {norm.item()}; no step was made")
        scale = (self._grad_clip / (norm + 1e-6)).clamp(max=1.0)
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad * scale  # not in place: ranks of one process share the average
        lr = float(self.scheduler.get_last_lr()[0])
        self.optimizer.step()
        self.scheduler.step()
        return {"grad_norm": norm.item(), "lr": lr}

    @torch.no_grad()
    def evaluate(
        self,
        columns: Columns,
        forward: Callable[[PreTrainedModel, Columns], Mapping[str, Tensor]],
        *,
        names: tuple[str, ...],
        micro_batches: MicroBatches | None = None,
        model: PreTrainedModel | None = None,
    ) -> dict[str, Tensor]:
        """What ``forward`` gives for each response token, as ``(N, T)`` float32 columns with zeros in masked slots.

        ``model`` is another one in this engine's precision and layout, see `place`.
        """
        rows = self._rows(columns, micro_batches)
        with self.autocast():
            parts = [forward(model or self.model, micro) for micro in self._portions(columns, rows)]
        return joined(parts, rows, columns["response_mask"], names)

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of the model's passes."""
        return nullcontext() if self._dtype is torch.float32 else torch.autocast(self.device.type, self._dtype)

    @contextmanager
    def sampling(self) -> Generator[None]:
        """Within the block the rank runs the model by itself, as often as it likes. Every rank must enter it."""
        with self._parallel.whole(self.model), self.autocast():
            yield

    def place(self, model: PreTrainedModel) -> PreTrainedModel:
        """Lay out another model as this engine's own is, so that `evaluate` takes it."""
        model.to(self.device)
        self._parallel.place(model)
        return model

    def model_state(self) -> dict[str, Tensor]:
        """All weights by name, whole, whatever the strategy. Every rank must call it."""
        return self._parallel.gathered_weights(self.model.state_dict(keep_vars=True))

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take over what `model_state` of an equal model returned. Every rank must call it."""
        self.model.load_state_dict(self._parallel.scattered(dict(weights), self.model.state_dict()))

    def frozen_checksum(self) -> int | None:
        """A checksum of the weights that are not trained; None where all are. Every rank must call it."""
        if self._frozen_checksum is None:
            frozen = split_weights(self.model).frozen
            whole = ((name, self._parallel.gathered(weight.detach())) for name, weight in frozen.items())
            self._frozen_checksum = weights_checksum(whole)
        return self._frozen_checksum

    def _portions(self, columns: Columns, rows: list[list[int]]) -> Iterator[Columns]:
        return (moved(micro, self.device) for micro in portions(columns, rows))

    def _rows(self, columns: Columns, micro_batches: MicroBatches | None) -> list[list[int]]:
        sizes = micro_batches or MicroBatches()
        lengths = columns["attention_mask"].sum(-1).tolist()
        return sizes.rows(lengths, self._parallel.passes(sizes.num_for(lengths)))

    def state_dict(self) -> dict[str, Any]:
        """Weights that are trained, optimizer and schedule: whole, whatever the strategy. Every rank must call it."""
        return {
            "model": self._parallel.gathered_weights(split_weights(self.model).saved),
            "optimizer": self._parallel.gathered(self.optimizer.state_dict()),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, under this engine's own learning rate and other options.

        Raises ``KeyError`` or ``RuntimeError`` for a state that is not that of this model.
        """
        if missing := split_weights(self.model).saved.keys() - state["model"].keys():
            raise KeyError(f"it lacks {len(missing)} tensors, such as {min(missing)}")
        self.model.load_state_dict(self._parallel.scattered(state["model"], self.model.state_dict()), strict=False)
        options = self.optimizer.state_dict()["param_groups"]
        moments = {
            number: {name: self._parallel.scattered(value, self._parameters[number]) for name, value in values.items()}
            for number, values in state["optimizer"]["state"].items()
        }
        self.optimizer.load_state_dict({"state": moments, "param_groups": options})
        place = {name: state["scheduler"][name] for name in ("last_epoch", "_step_count")}
        self.scheduler.load_state_dict({**self.scheduler.state_dict(), **place})
        epoch, factors = self.scheduler.last_epoch, self.scheduler.lr_lambdas
        rates = [base * factor(epoch) for base, factor in zip(self.scheduler.base_lrs, factors, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.scheduler.load_state_dict({**self.scheduler.state_dict(), "_last_lr": rates})
