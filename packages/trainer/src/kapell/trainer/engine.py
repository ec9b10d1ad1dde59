"""A model with its optimizer: forward passes over response tokens, and an update averaged over the ranks of a group."""

# B rows, T response tokens, L = prompt and response tokens, V vocabulary

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from .algorithms import (
    LossResult,
    Metric,
    entropy_from_logits,
    log_probs_from_logits,
    merge_metrics,
    sum_pi_squared_from_logits,
)
from .collective import Collective, SingleCollective
from .config import OptimConfig

__all__ = [
    "MODEL_COLUMNS",
    "Columns",
    "PolicyOutput",
    "TrainEngine",
    "learning_rate_factor",
    "micro_batches",
    "policy_forward",
    "value_forward",
]

Columns = Mapping[str, Tensor]
"""Columns of a batch by name, all with the same number of rows."""

MODEL_COLUMNS = ("input_ids", "attention_mask", "position_ids", "responses")
"""What a forward pass reads: three of shape ``(B, L)``, and the responses ``(B, T)`` at their end."""


class PolicyOutput(NamedTuple):
    """What a forward pass says of each response token, ``(B, T)`` each."""

    log_probs: Tensor
    """Log-probability of the token."""
    entropy: Tensor | None
    """Entropy of the distribution that it was drawn from."""
    sum_pi_squared: Tensor | None
    """Sum of that distribution's squared probabilities."""


def policy_forward(
    model: PreTrainedModel,
    columns: Columns,
    *,
    temperature: float,
    with_entropy: bool = False,
    with_sum_pi_squared: bool = False,
) -> PolicyOutput:
    """Log-probabilities of the response tokens and, if asked for, what else their distributions say."""
    responses_BT = columns["responses"]
    num_tokens = responses_BT.shape[1]
    output = model(
        columns["input_ids"],
        attention_mask=columns["attention_mask"],
        position_ids=columns["position_ids"],
        logits_to_keep=num_tokens + 1,
        use_cache=False,
    )
    logits_BTV = output.logits[:, :-1]  # the logits at a token predict the next one
    return PolicyOutput(
        log_probs=log_probs_from_logits(logits_BTV, responses_BT, temperature=temperature),
        entropy=entropy_from_logits(logits_BTV, temperature=temperature) if with_entropy else None,
        sum_pi_squared=sum_pi_squared_from_logits(logits_BTV, temperature=temperature) if with_sum_pi_squared else None,
    )


def value_forward(model: PreTrainedModel, columns: Columns) -> Tensor:
    """The value before each response token, ``(B, T)``."""
    num_tokens = columns["responses"].shape[1]
    output = model(
        columns["input_ids"],
        attention_mask=columns["attention_mask"],
        position_ids=columns["position_ids"],
        use_cache=False,
    )
    return output.logits[:, -num_tokens - 1 : -1, 0].float()


def micro_batches(columns: Columns, size: int | None) -> Iterator[Columns]:
    """Slices of at most ``size`` rows; all rows at once for None, and nothing when there are none."""
    num_rows = len(next(iter(columns.values())))
    for start in range(0, num_rows, size or max(num_rows, 1)):
        stop = start + size if size else num_rows
        yield {name: column[start:stop] for name, column in columns.items()}


def learning_rate_factor(
    step: int, *, shape: str, warmup_steps: int, total_steps: int | None, min_ratio: float
) -> float:
    """Share of the peak learning rate at an optimizer step, counted from 0.

    >>> [learning_rate_factor(s, shape="linear", warmup_steps=2, total_steps=4, min_ratio=0.0) for s in range(5)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if shape == "constant":
        return 1.0
    if total_steps is None:
        raise ValueError(f"a {shape} schedule needs the total number of optimizer steps")
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    left = 1.0 - progress if shape == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return min_ratio + (1.0 - min_ratio) * left


class TrainEngine:
    """One rank's copy of a model under training.

    `forward_backward` adds up gradients over micro-batches and starts their average over the ranks; `step` waits for it
    and moves the weights. All ranks start equal and get the same averages, so they stay equal.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        optim: OptimConfig,
        *,
        grad_clip: float = 1.0,
        total_steps: int | None = None,
        collective: Collective | None = None,
    ) -> None:
        self.model = model
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._grad_clip = grad_clip
        self._collective = collective or SingleCollective()
        self._pending: Callable[[], Tensor] | None = None
        self.optimizer = torch.optim.AdamW(
            self._parameters,
            lr=optim.lr,
            betas=(optim.betas[0], optim.betas[1]),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
        )
        self.scheduler = LambdaLR(
            self.optimizer,
            lambda step: learning_rate_factor(
                step,
                shape=optim.lr_scheduler_type,
                warmup_steps=optim.lr_warmup_steps,
                total_steps=total_steps,
                min_ratio=optim.min_lr_ratio,
            ),
        )

    def forward_backward(
        self, columns: Columns, loss: Callable[[Columns], LossResult], *, micro_batch_size: int | None = None
    ) -> dict[str, Metric]:
        """Gradients of a mini-batch: this rank's rows through ``loss`` in micro-batches, then averaged over the ranks.

        The loss divides by the counts of the whole mini-batch over all ranks, so that neither micro-batches nor ranks
        change its gradient. A rank without rows takes part with zeros.
        """
        if self._pending is not None:
            raise RuntimeError("a mini-batch waits for its optimizer step; call step() before the next one")
        self.optimizer.zero_grad(set_to_none=True)
        metrics = []
        for micro in micro_batches(columns, micro_batch_size):
            value, numbers = loss(micro)
            value.backward()
            metrics.append(numbers)
        self._pending = self._collective.start_average(self._flat_gradient())
        return merge_metrics(metrics)

    def step(self) -> dict[str, float]:
        """Move the weights by the averaged gradient. Returns ``grad_norm`` (before clipping) and ``lr``."""
        if self._pending is None:
            raise RuntimeError("there is no gradient to step with; call forward_backward() first")
        flat, self._pending = self._pending(), None
        norm = flat.norm()
        if not torch.isfinite(norm):
            raise FloatingPointError(f"the gradient's norm is {norm.item()}; no step was made")
        flat = flat * (self._grad_clip / (norm + 1e-6)).clamp(max=1.0)
        offset = 0
        for parameter in self._parameters:
            parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        lr = float(self.scheduler.get_last_lr()[0])
        self.optimizer.step()
        self.scheduler.step()
        return {"grad_norm": norm.item(), "lr": lr}

    def _flat_gradient(self) -> Tensor:
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        return torch.cat([part.reshape(-1) for part in parts])

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer and schedule, for a checkpoint."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, under this engine's own learning rate and other options."""
        self.model.load_state_dict(state["model"])
        options = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": options})
        place = {name: state["scheduler"][name] for name in ("last_epoch", "_step_count")}
        self.scheduler.load_state_dict({**self.scheduler.state_dict(), **place})
        epoch, factors = self.scheduler.last_epoch, self.scheduler.lr_lambdas
        rates = [base * factor(epoch) for base, factor in zip(self.scheduler.base_lrs, factors, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.scheduler.load_state_dict({**self.scheduler.state_dict(), "_last_lr": rates})
