"""The roles of a run as workers: the policy, which samples, is updated and keeps its reference, and the critic."""

# B rows, T response tokens

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kapell.decorators import Dispatch, Reduction, register
from kapell.protocol import DataProto
from kapell.workergroup import Worker

from .algorithms import BatchTotals, Metric
from .collective import join_collective, join_process_group
from .config import OptimConfig
from .devices import DeviceType, memory_metrics, set_up_process
from .durable_files import FileRecord
from .engine import TrainEngine
from .forward import MODEL_COLUMNS, Columns, policy_forward, value_forward
from .lora import has_adapter, save_adapted, without_adapter
from .micro_batches import MicroBatches
from .objectives import PolicyObjective, ValueObjective
from .role_checkpoint import load_role, save_role
from .rollout_engine import ROLLOUT_COLUMNS, RolloutEngine, RolloutRequest, SamplerEngine, rollout_columns
from .sampler import Sampling

__all__ = ["ActorRolloutRefWorker", "CriticWorker", "TrainWorker"]


class TrainWorker(Worker):
    """A worker with a model under training, the same on every rank.

    ``build_model`` is called on each rank and must give equal weights on all; ``engine_options`` are `TrainEngine`'s.
    """

    role = "model"

    def __init__(
        self,
        build_model: Callable[[], PreTrainedModel],
        optim: OptimConfig,
        *,
        strategy: Literal["ddp", "fsdp2"] = "ddp",
        device: DeviceType = "cpu",
        torch_threads: int = 1,
        **engine_options: Any,
    ) -> None:
        super().__init__()
        chosen = set_up_process(device, local_rank=self.local_rank, torch_threads=torch_threads)
        place = {"rank": self.rank, "world_size": self.world_size, "address": self.get_master_addr_port()}
        collective = None
        if strategy == "fsdp2":
            join_process_group(**place, device=chosen)
        else:
            collective = join_collective(self.role, **place, device=chosen)
        self._build_model = build_model
        self.engine = TrainEngine(
            build_model(),
            optim,
            strategy=strategy,
            collective=collective,
            device=chosen,
            **engine_options,
        )

    @register(Dispatch.DP_COMPUTE_PROTO, collect=Reduction.LIST)
    def forward_backward(
        self,
        batch: DataProto,
        *,
        objective: PolicyObjective | ValueObjective,
        totals: BatchTotals,
        micro_batches: MicroBatches | None = None,
    ) -> dict[str, Metric]:
        """Gradients of a mini-batch, averaged over the ranks; ``totals`` counts the whole mini-batch."""
        metrics = self.engine.forward_backward(
            _tensors(batch),
            lambda columns: objective(self.engine.model, columns, totals),
            micro_batches=micro_batches,
        )
        return metrics | memory_metrics(self.engine.device)

    @register(Dispatch.ONE_TO_ALL, collect=Reduction.FIRST)
    def optimizer_step(self) -> dict[str, float]:
        """Move the weights. Returns ``grad_norm``, before clipping, and ``lr``."""
        return self.engine.step()

    @register(Dispatch.ONE_TO_ALL, collect=Reduction.LIST)
    def update(
        self,
        batch: DataProto,
        sizes: Sequence[int],
        totals: Sequence[BatchTotals],
        *,
        objective: PolicyObjective | ValueObjective,
        micro_batches: MicroBatches | None = None,
    ) -> list[tuple[dict[str, Metric], dict[str, float]]]:
        """Move the weights over several mini-batches; what `forward_backward` and `optimizer_step` tell of each.

        ``batch`` is this rank's share: ``sizes[i]`` rows for mini-batch ``i``, which has ``totals[i]`` over all ranks.
        Ranks wait for each other within the call, so they must run at the same time (``group.concurrent``).
        """
        reports = []
        bounds = list(itertools.accumulate(sizes, initial=0))
        for rows, total in zip(batch.split_at(bounds), totals, strict=True):
            metrics = self.forward_backward(rows, objective=objective, totals=total, micro_batches=micro_batches)
            reports.append((metrics, self.optimizer_step()))
        return reports

    @register(Dispatch.ONE_TO_ALL)
    def save_model(self, folder: str | Path) -> None:
        """Write the model in Hugging Face format, by rank 0; of one with an adapter, the sum and the adapter alone."""
        state = self.engine.model_state()
        if self.rank != 0:
            return
        if has_adapter(self.engine.model):
            copy = self._build_model()
            copy.load_state_dict(state)
            save_adapted(copy, folder)
        else:
            self.engine.model.save_pretrained(folder, state_dict=state)

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
    """The policy in its three roles, on one copy of the weights.

    The reference is the model of ``build_reference``, or else the policy as it was: without its adapter, or a second,
    frozen copy of one that has none. ``tokenizer`` is needed for stop strings only; ``max_num_seqs`` is the most rows
    that are sampled at once.
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
        max_num_seqs: int | None = None,
        with_reference: bool = False,
        build_reference: Callable[[], PreTrainedModel] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(build_model, optim, **options)
        self._rollout: RolloutEngine = SamplerEngine(
            self.engine.model, tuple(eos_token_ids), pad_token_id, tokenizer, max_num_seqs
        )
        self._reference = self._make_reference(build_reference) if with_reference else None
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
        with self.engine.sampling():
            rollout = self._rollout.generate(request)
        return rollout_columns(request, rollout, policy_version=self._version)

    @register(Dispatch.ONE_TO_ALL, collect=Reduction.FIRST)
    def weights(self) -> dict[str, Tensor]:
        """All weights by name, whole, whatever the strategy: what `load_weights` of a group that samples takes."""
        state = self.engine.model_state()
        return {name: weight.cpu() for name, weight in state.items()} if self.rank == 0 else {}

    @register(Dispatch.ONE_TO_ALL)
    def load_weights(self, weights: Mapping[str, Tensor], *, policy_version: int) -> None:
        """Sample from these weights from now on; responses are marked with their version."""
        self.engine.load_weights(weights)
        self._version = policy_version

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
        micro_batches: MicroBatches | None = None,
    ) -> DataProto:
        """Log-probabilities of the responses, and the entropy at each token, under the current weights.

        ``sum_pi_squared``, the sum of the squared probabilities of all tokens there, only if asked for.
        """
        names = ("log_probs", "entropy", *(["sum_pi_squared"] if with_sum_pi_squared else []))
        made = self.engine.evaluate(
            _tensors(batch),
            lambda model, micro: policy_forward(
                model,
                micro,
                temperature=temperature,
                with_entropy=True,
                with_sum_pi_squared=with_sum_pi_squared,
            )._asdict(),
            names=names,
            micro_batches=micro_batches,
        )
        columns = {"log_probs": "old_log_probs", "entropy": "entropys"}
        return DataProto.from_dict(tensors={columns.get(name, name): column for name, column in made.items()})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=(*MODEL_COLUMNS, "response_mask"), writes=("ref_log_prob",))
    def compute_ref_log_prob(
        self, batch: DataProto, *, temperature: float, micro_batches: MicroBatches | None = None
    ) -> DataProto:
        """Log-probabilities of the responses under the frozen reference."""
        if self._reference is None:
            raise RuntimeError("this worker has no reference model; build it with with_reference=True")
        own = self._reference is self.engine.model
        with without_adapter(self.engine.model) if own else nullcontext():
            made = self.engine.evaluate(
                _tensors(batch),
                lambda model, micro: {"ref_log_prob": policy_forward(model, micro, temperature=temperature).log_probs},
                names=("ref_log_prob",),
                micro_batches=micro_batches,
                model=self._reference,
            )
        return DataProto.from_dict(tensors=made)

    @register(Dispatch.ONE_TO_ALL, collect=Reduction.FIRST)
    def optimizer_step(self) -> dict[str, float]:
        """Move the weights, which makes a new policy version. Returns ``grad_norm``, before clipping, and ``lr``."""
        self._version += 1
        return self.engine.step()

    def _make_reference(self, build: Callable[[], PreTrainedModel] | None) -> PreTrainedModel:
        if build is None and has_adapter(self.engine.model):
            return self.engine.model
        return self.engine.place((build or self._build_model)().requires_grad_(False))

    def extra_state(self) -> dict[str, Any]:
        """The policy's version."""
        return {"policy_version": self._version}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `extra_state`."""
        self._version = state["policy_version"]


class CriticWorker(TrainWorker):
    """The value model."""

    role = "critic"

    @register(Dispatch.DP_COMPUTE_PROTO, reads=(*MODEL_COLUMNS, "response_mask"), writes=("values",))
    def compute_values(self, batch: DataProto, *, micro_batches: MicroBatches | None = None) -> DataProto:
        """The value before each response token."""
        made = self.engine.evaluate(
            _tensors(batch),
            lambda model, micro: {"values": value_forward(model, micro)},
            names=("values",),
            micro_batches=micro_batches,
        )
        return DataProto.from_dict(tensors=made)


def _tensors(batch: DataProto) -> Columns:
    return {name: batch.column(name) for name in batch.columns if name not in batch.non_tensor_batch}
