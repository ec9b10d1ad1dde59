"""Kapell's trainer on the bundled task, step by step, as ``kapell train`` runs it."""

from __future__ import annotations

import gc
import os
import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from kapell.trainer.build import prepare, train
from kapell.trainer.config_load import load_config
from kapell.trainer.hooks import Hook
from kapell.workergroup import WorkerGroup

from .paced import PacedLoop
from .task import GROUP, HEADS, HIDDEN_SIZE, LAYERS, RESPONSE_LENGTH


class StepHook(Hook):
    """Stops after each step and keeps its numbers."""

    def __init__(self, step_done: Callable[[], None]) -> None:
        self._step_done = step_done
        self.metrics: Mapping[str, float] = {}

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics = metrics
        self._step_done()


class KapellStep:
    """One GRPO or PPO step on ``workers`` processes of one thread each, or in this process."""

    def __init__(self, algorithm: str, backend: str, workers: int, threads: int = 1) -> None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
        if backend == "ray":
            from .ray_session import start_ray

            start_ray()
        self._algorithm, self._backend, self._workers, self._threads = algorithm, backend, workers, threads
        self._loop: PacedLoop | None = None
        self._hook: StepHook | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._through = 0

    def prepare(self, prompts: int) -> None:
        self.close()
        config = load_config(
            [],
            [
                f"backend={self._backend}",
                f"trainer.n_gpus_per_node={self._workers}",
                f"trainer.torch_threads={self._threads}",
                "trainer.total_training_steps=1000000",
                "trainer.test_freq=-1",
                "trainer.val_before_train=false",
                "trainer.logger=[]",
                f"data.train_batch_size={prompts}",
                f"data.max_response_length={RESPONSE_LENGTH}",
                f"actor_rollout_ref.rollout.n={GROUP if self._algorithm == 'grpo' else 1}",
                f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts // 2}",
                "actor_rollout_ref.actor.ppo_epochs=2",
                f"actor_rollout_ref.model.hidden_size={HIDDEN_SIZE}",
                f"actor_rollout_ref.model.num_hidden_layers={LAYERS}",
                f"actor_rollout_ref.model.num_attention_heads={HEADS}",
                *(
                    ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"]
                    if self._algorithm == "ppo"
                    else ["algorithm.adv_estimator=grpo"]
                ),
            ],
        ).config
        folder = Path(self._folder.name)
        prepared = prepare(config, folder)

        def loop(step_done: Callable[[], None]) -> None:
            self._hook = StepHook(step_done)
            train(prepared, folder, hooks=[self._hook])

        self._loop = PacedLoop(loop)
        self._loop.step()  # starts the workers
        self._through = _bytes_through_controller()

    def round(self) -> dict[str, float]:
        assert self._loop is not None
        assert self._hook is not None
        before, began = time.process_time(), time.perf_counter()
        self._loop.step()
        seconds = time.perf_counter() - began
        numbers = {"step": seconds}
        if self._backend == "ray":
            numbers["controller: processor time"] = time.process_time() - before
            numbers["controller: peak memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
            through, self._through = self._through, _bytes_through_controller()
            numbers["controller: bytes through it"] = self._through - through
        return numbers

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = None


def _bytes_through_controller() -> int:
    """Arguments and results of all calls so far, from the groups' own accounting."""
    # `train` keeps its groups to itself; the views of one group share its accounting.
    views = [thing for thing in gc.get_objects() if isinstance(thing, WorkerGroup) and not thing.closed]
    if not views:
        return 0
    return sum(rank.bytes_in + rank.bytes_out for method in views[0].stats().methods for rank in method.ranks)
