"""The roles of a run as workers: the policy, which samples, is updated and keeps its reference, and the critic."""

# B rows, T response tokens

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kapell.decorators import Dispatch, Reduction, register
from kapell.protocol import DataProto
from kapell.workergroup import Worker

from .algorithms import BatchTotals, Metric
from .collective import join_collective
from .config import OptimConfig
from .durable_files import FileRecord
from .engine import MODEL_COLUMNS, Columns, TrainEngine, micro_batches, policy_forward, value_forward
from .objectives import PolicyObjective, ValueObjective
from .role_checkpoint import load_role, save_role
from .rollout_engine import ROLLOUT_COLUMNS, RolloutEngine, RolloutRequest, SamplerEngine, rollout_columns
from .sampler import Sampling

__all__ = ["ActorRolloutRefWorker", "CriticWorker", "TrainWorker"]


class TrainWorker(Worker):
    """A worker with a model under training, the same on every rank.

    ``build_model`` is called on each rank and must give equal weights on all.
    """

    role = "model"

    def __init__(
        self,
        build_model: Callable[[], PreTrainedModel],
        optim: OptimConfig,
        *,
        grad_clip: float = 1.0,
        total_optimizer_steps: int | None = None,
        torch_threads: int = 1,
    ) -> None:
        super().__init__()
        torch.set_num_threads(torch_threads)
        self.engine = TrainEngine(
            build_model(),
            optim,
            grad_clip=grad_clip,
            total_steps=total_optimizer_steps,
            collective=join_collective(
                self.role, rank=self.rank, world_size=self.world_size, address=self.get_master_addr_port()
            ),
        )

    @register(Dispatch.DP_COMPUTE_PROTO, collect=Reduction.LIST)
    def forward_backward(
        self,
        batch: DataProto,
        *,
        objective: PolicyObjective | ValueObjective,
        totals: BatchTotals,
        micro_batch_size: int | None = None,
    ) -> dict[str, Metric]:
        """Gradients of a mini-batch, averaged over the ranks; ``totals`` counts the whole mini-batch."""
        return self.engine.forward_backward(
            _tensors(batch),
            lambda columns: objective(self.engine.model, columns, totals),
            micro_batch_size=micro_batch_size,
        )

    @register(Dispatch.ONE_TO_ALL, collect=Reduction.FIRST)
    def optimizer_step(self) -> dict[str, float]:
        """Move the weights. Returns ``grad_norm``, before clipping, and ``lr``."""
        return self.engine.step()

    @register(Dispatch.RANK_ZERO)
    def save_model(self, folder: str | Path) -> None:
        """Write the model in Hugging Face format."""
        self.engine.model.save_pretrained(folder)

    @register(Dispatch.ONE_TO_ALL, collect=Reduction.LIST)
    def save_checkpoint(self, folder: str) -> dict[str, FileRecord]:
        """Write the role's state into a folder that all ranks see. Returns each file's record by its path in there."""
        return save_role(folder, self.engine, self.extra_state(), rank=self.rank)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        """Continue from what `save_checkpoint` wrote; the number of ranks may be another."""
        self.load_extra_state(load_role(folder, self.engine, rank=self.rank))

    def extra_state(self) -> dict[str, Any]:
        """What a role of its own keeps besides model, optimizer and random states, equal on all ranks."""
        return {}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `extra_state`."""


class ActorRolloutRefWorker(TrainWorker):
    """The policy in its three roles, on one copy of the weights; the reference is a second, frozen copy.

    ``tokenizer`` is needed for stop strings only.
    """

    role = "actor"

    def __init__(
        self,
        build_model: Callable[[], PreTrainedModel],
        optim: OptimConfig,
        *,
        eos_token_ids: Collection[int],
        pad_token_id: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        with_reference: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(build_model, optim, **options)
        self._rollout: RolloutEngine = SamplerEngine(self.engine.model, tuple(eos_token_ids), pad_token_id, tokenizer)
        self._reference = build_model().requires_grad_(False) if with_reference else None
        self._version = 0

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("prompts", "prompt_mask", "sample_id"),
        writes=ROLLOUT_COLUMNS,
    )
    def generate_sequences(
        self, batch: DataProto, *, sampling: Sampling, max_new_tokens: int, seed: int, step: int
    ) -> DataProto:
        """Continue each prompt; ``sample_id`` with seed and step chooses the row's random numbers."""
        columns = _tensors(batch)
        request = RolloutRequest(
            prompts=columns["prompts"],
            prompt_mask=columns["prompt_mask"],
            sample_ids=columns["sample_id"].tolist(),
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            seed=seed,
            step=step,
        )
        return rollout_columns(request, self._rollout.generate(request), policy_version=self._version)

    @register(Dispatch.RANK_ZERO)
    def policy_version(self) -> int:
        """How many times the weights have moved."""
        return self._version

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=(*MODEL_COLUMNS, "response_mask"),
        writes=("old_log_probs", "entropys", "sum_pi_squared"),
    )
    def compute_log_prob(
        self,
        batch: DataProto,
        *,
        temperature: float,
        with_sum_pi_squared: bool = False,
        micro_batch_size: int | None = None,
    ) -> DataProto:
        """Log-probabilities of the responses, and the entropy at each token, under the current weights.

        ``sum_pi_squared``, the sum of the squared probabilities of all tokens there, only if asked for.
        """
        made = self._forward(
            self.engine.model,
            batch,
            micro_batch_size,
            temperature=temperature,
            with_entropy=True,
            with_sum_pi_squared=with_sum_pi_squared,
        )
        names = {"log_probs": "old_log_probs", "entropy": "entropys"}
        return DataProto.from_dict(tensors={names.get(name, name): column for name, column in made.items()})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=(*MODEL_COLUMNS, "response_mask"), writes=("ref_log_prob",))
    def compute_ref_log_prob(
        self, batch: DataProto, *, temperature: float, micro_batch_size: int | None = None
    ) -> DataProto:
        """Log-probabilities of the responses under the frozen reference."""
        if self._reference is None:
            raise RuntimeError("this worker has no reference model; build it with with_reference=True")
        made = self._forward(self._reference, batch, micro_batch_size, temperature=temperature)
        return DataProto.from_dict(tensors={"ref_log_prob": made["log_probs"]})

    @register(Dispatch.ONE_TO_ALL, collect=Reduction.FIRST)
    def optimizer_step(self) -> dict[str, float]:
        """Move the weights, which makes a new policy version. Returns ``grad_norm``, before clipping, and ``lr``."""
        self._version += 1
        return self.engine.step()

    def extra_state(self) -> dict[str, Any]:
        """The policy's version."""
        return {"policy_version": self._version}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `extra_state`."""
        self._version = state["policy_version"]

    @torch.no_grad()
    def _forward(
        self, model: PreTrainedModel, batch: DataProto, micro_batch_size: int | None, **options: Any
    ) -> dict[str, torch.Tensor]:
        """The fields of `PolicyOutput` that ``options`` ask for, with zeros in masked slots."""
        columns = _tensors(batch)
        mask_BT = columns["response_mask"]
        parts = [
            policy_forward(model, micro, **options)._asdict() for micro in micro_batches(columns, micro_batch_size)
        ]
        if not parts:
            names = ["log_probs", *(name.removeprefix("with_") for name, value in options.items() if value is True)]
            return {name: mask_BT.float() for name in names}
        names = [name for name, column in parts[0].items() if column is not None]
        return {name: torch.cat([part[name] for part in parts]) * mask_BT for name in names}


class CriticWorker(TrainWorker):
    """The value model."""

    role = "critic"

    @register(Dispatch.DP_COMPUTE_PROTO, reads=(*MODEL_COLUMNS, "response_mask"), writes=("values",))
    @torch.no_grad()
    def compute_values(self, batch: DataProto, *, micro_batch_size: int | None = None) -> DataProto:
        """The value before each response token."""
        columns = _tensors(batch)
        mask_BT = columns["response_mask"]
        parts = [value_forward(self.engine.model, micro) for micro in micro_batches(columns, micro_batch_size)]
        values_BT = torch.cat(parts) if parts else mask_BT.float()
        return DataProto.from_dict(tensors={"values": values_BT * mask_BT})


def _tensors(batch: DataProto) -> Columns:
    return {name: batch.column(name) for name in batch.columns if name not in batch.non_tensor_batch}
