"""Rollouts from a server: a worker role that asks it, and the step that brings the policy's weights there first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kapell.decorators import Dispatch, register
from kapell.protocol import DataProto
from kapell.workergroup import Worker, WorkerGroup

from .openai_engine import OpenAIEngine
from .rollout_engine import ROLLOUT_COLUMNS, RolloutRequest, rollout_columns
from .sampler import Sampling

__all__ = ["RolloutServerWorker", "ServedRollout"]


class RolloutServerWorker(Worker):
    """The rollout role where a server samples: each rank asks it for its share of the rows."""

    def __init__(self, engine: OpenAIEngine) -> None:
        super().__init__()
        self._engine = engine
        self._version = 0

    @register(Dispatch.RANK_ZERO)
    def load_weights(self, folder: str) -> None:
        """Let the server read the policy's weights from a folder."""
        self._engine.load_weights(folder)

    @register(Dispatch.ONE_TO_ALL)
    def set_version(self, version: int) -> None:
        """From now on responses are of this version of the policy."""
        self._version = version

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("prompts", "prompt_mask", "sample_id"),
        writes=ROLLOUT_COLUMNS,
    )
    def generate_sequences(
        self, batch: DataProto, *, sampling: Sampling, max_new_tokens: int, seed: int, step: int
    ) -> DataProto:
        """Continue each prompt."""
        request = RolloutRequest(
            prompts=batch.column("prompts"),
            prompt_mask=batch.column("prompt_mask"),
            sample_ids=batch.column("sample_id").tolist(),
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            seed=seed,
            step=step,
        )
        return rollout_columns(request, self._engine.generate(request), policy_version=self._version)


class ServedRollout:
    """Samples by a group of `RolloutServerWorker`, after the server has got the policy's newest weights."""

    def __init__(self, policy: WorkerGroup, rollout: WorkerGroup, folder: str | Path, *, reload: bool) -> None:
        self._policy = policy
        self._rollout = rollout
        self._folder = Path(folder).absolute()  # the server runs elsewhere
        self._reload = reload
        self._version = -1

    def generate_sequences(self, batch: DataProto, **options: Any) -> DataProto:
        """Continue each prompt with the current policy, or with the server's own weights without ``reload``."""
        if self._reload and (version := self._policy.policy_version()) != self._version:
            self._policy.save_model(str(self._folder))
            self._rollout.load_weights(str(self._folder))
            self._rollout.set_version(version)
            self._version = version
        return self._rollout.generate_sequences(batch, **options)
