"""Kapell's trainer on the bundled task, step by step, as ``kapell train`` runs it."""

from __future__ import annotations

import gc
import resource
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kapell.protocol import StoredBatch
from kapell.trainer.build import prepare, train
from kapell.trainer.config_load import load_config
from kapell.trainer.hooks import Hook
from kapell.workergroup import WorkerGroup

from .paced import StepDone
from .task import EPOCHS, GROUP, HEADS, HIDDEN_SIZE, LAYERS, MINI_BATCHES, RESPONSE_LENGTH


class ControllerColumns:
    """Counts the columns of batches by reference that the controller brings to itself, or sends as its own."""

    def __init__(self) -> None:
        self.sent = self.fetched = 0
        column, weigh = StoredBatch.column, StoredBatch.nbytes.fget
        assert weigh is not None

        def counted_column(batch: StoredBatch, name: str) -> Any:
            stored = batch._stored.get(name)
            is_new = stored is not None and stored.fetched is None
            value = column(batch, name)
            self.fetched += value.nbytes if is_new else 0
            return value

        def counted_weight(batch: StoredBatch) -> int:
            here = [name for name in batch.columns if name not in batch.stored_columns]
            self.sent += sum(batch.get(columns=here).column_bytes().values())
            return weigh(batch)

        StoredBatch.column = counted_column
        StoredBatch.nbytes = property(counted_weight)


class StepHook(Hook):
    """Stops after each step and tells what the controller spent on it."""

    def __init__(self, step_done: StepDone, *, in_controller: bool) -> None:
        self._step_done = step_done
        self._in_controller = in_controller
        self._processor, self._through, self._own = time.process_time(), 0, 0
        self._columns = ControllerColumns()
        self._group: WorkerGroup | None = None

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step_done(self._controller_numbers if self._in_controller else dict)
        self._processor = time.process_time()

    def _controller_numbers(self) -> dict[str, float]:
        processor = time.process_time()
        through = self._bytes_through_controller() + self._columns.fetched
        own = self._columns.fetched + self._columns.sent
        numbers = {
            "controller: processor time": processor - self._processor,
            "controller: peak memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
            "controller: bytes through it": float(through - self._through),
        }
        if own:  # by reference
            numbers["controller: bytes beside columns of its own"] = float(through - self._through - own + self._own)
        self._through, self._own = through, own
        return numbers

    def _bytes_through_controller(self) -> int:
        """Arguments and results of all calls so far, from the groups' own accounting."""
        if self._group is None:
            # `train` keeps its groups to itself. Views of one group share its accounting, so any one does. Looked for
            # once, in the first step, which nobody counts: it takes a fifth of a second.
            alive = (thing for thing in gc.get_objects() if isinstance(thing, WorkerGroup) and not thing.closed)
            self._group = next(alive, None)
        if self._group is None:
            return 0
        return sum(rank.bytes_in + rank.bytes_out for method in self._group.stats().methods for rank in method.ranks)


def run(
    step_done: StepDone,
    *,
    algorithm: str,
    backend: str,
    workers: int,
    threads: int,
    prompts: int,
    tokens: int = RESPONSE_LENGTH,
    bypass: bool = False,
    data_plane: str = "value",
) -> None:
    """GRPO or PPO on ``workers`` processes of ``threads`` threads each, or in this process.

    ``tokens`` is the longest response. With ``bypass`` the sampler's log-probabilities are the old ones, and no pass
    recomputes them.
    """
    torch.set_num_threads(threads)
    if backend == "ray":
        from .ray_session import start_ray

        start_ray()
    critic = ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"]
    config = load_config(
        [],
        [
            f"backend={backend}",
            f"trainer.n_gpus_per_node={workers}",
            f"trainer.torch_threads={threads}",
            "trainer.total_training_steps=1000000",
            "trainer.test_freq=-1",
            "trainer.val_before_train=false",
            "trainer.logger=[]",
            f"data.train_batch_size={prompts}",
            f"data.max_response_length={tokens}",
            f"trainer.data_plane={data_plane}",
            f"actor_rollout_ref.rollout.n={GROUP if algorithm == 'grpo' else 1}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts // MINI_BATCHES}",
            f"actor_rollout_ref.actor.ppo_epochs={EPOCHS}",
            f"critic.ppo_epochs={EPOCHS}",
            f"algorithm.rollout_correction.bypass_mode={str(bypass).lower()}",
            "actor_rollout_ref.actor.entropy_coeff=0",  # TRL has no such term
            f"actor_rollout_ref.model.hidden_size={HIDDEN_SIZE}",
            f"actor_rollout_ref.model.num_hidden_layers={LAYERS}",
            f"actor_rollout_ref.model.num_attention_heads={HEADS}",
            *(critic if algorithm == "ppo" else ["algorithm.adv_estimator=grpo"]),
        ],
    ).config
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(prepare(config, folder), folder, hooks=[StepHook(step_done, in_controller=backend == "ray")])
