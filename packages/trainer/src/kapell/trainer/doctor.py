"""Walks the order in which a run is debugged: each finding is fine, or says what is wrong and the way out.

1. overrides applied, 2. mode, 3. devices, 4. data, 5. workers created, 6. columns present, 7. batch size, response
length and masks agree, 8. the workers' own errors.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kapell.protocol import DataProto
from kapell.workergroup import BackendNotFoundError, load_backend

from .agreement import LARGEST_GAP, disagreements
from .build import Prepared, build_stages, prepare, step_of
from .choices import check_algorithms
from .config import BackendConfig, Config
from .config_load import ResolvedConfig
from .failure import RunFailure, failure_of
from .inactive import inactive_settings
from .observe import Observer
from .plan import reason_of_step
from .roles import worker_groups

__all__ = ["Finding", "check_devices", "check_mode", "check_overrides", "examine_config", "failure_findings"]

_CAUSED = "\nThe above exception was the direct cause of"  # as Python's tracebacks say it
_PROMPTS, _SAMPLES, _WORKERS = 4, 4, 2


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    check: str
    """What was looked at."""
    message: str
    """What was found."""
    way_out: str = ""
    """What to do; empty where nothing is wrong."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.way_out


def examine_config(resolved: ResolvedConfig) -> Iterator[Finding]:
    """Load what the configuration names and run one step of a few prompts in this process; findings as they come.

    What can only be looked at after something that failed is left out.
    """
    yield from check_overrides(resolved)
    mode = check_mode(resolved)
    yield mode
    if not mode.ok:
        return
    yield from _backend_missing(resolved.config)
    yield from check_devices(resolved.config)
    small = _small(resolved.config)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            prepared = prepare(small, folder)
        except Exception as error:  # it is what the doctor reports
            yield Finding("data and model", _title(error), "correct the file, folder or key that is named")
            return
        rows = f"{len(prepared.train)} training prompts, {len(prepared.val or ())} validation prompts"
        if dropped := sum(prompts.num_filtered for prompts in (prepared.train, prepared.val) if prompts is not None):
            rows += f"; {dropped} left out as too long"
        yield Finding("data and model", rows)
        yield from _one_step(prepared, folder)


def check_overrides(resolved: ResolvedConfig) -> Iterator[Finding]:
    """The keys that were set, and each of them that does nothing."""
    changed = [f"{key}={value} ({origin})" for key, value, origin in resolved.leaves() if origin != "default"]
    shown = "; ".join(changed[:8]) + (f"; and {len(changed) - 8} more" if len(changed) > 8 else "")
    yield Finding("overrides", f"{len(changed)} keys set: {shown}" if changed else "none: every key has its default")
    with suppress(ValueError):  # an algorithm that is not known is the next check's finding
        for key in inactive_settings(resolved):
            yield Finding("overrides", f"{key.key}={key.value} ({key.origin}) has no effect", key.reason)


def check_mode(resolved: ResolvedConfig) -> Finding:
    """The step, and whether its algorithms are known."""
    try:
        check_algorithms(resolved.config)
    except ValueError as error:
        return Finding("mode", str(error), "correct the key that is named; `kapell config` shows all")
    step = step_of(resolved.config)
    return Finding("mode", f"{getattr(step, '__name__', step)}: {reason_of_step(resolved.config)}")


def _backend_missing(config: Config) -> Iterator[Finding]:
    try:
        load_backend(config.backend.name)
    except BackendNotFoundError as error:
        yield Finding("backend", str(error), "correct backend.name, or install it; the step below runs in this process")


def check_devices(config: Config) -> Iterator[Finding]:
    """Whether this machine has the GPUs that the run wants of each of its machines; nothing for a run without any."""
    if config.trainer.device == "cpu":
        return
    found, wanted = torch.cuda.device_count(), 1 if config.backend.name == "local" else config.trainer.n_gpus_per_node
    message = f"trainer.device=cuda wants {wanted} on each machine; torch {torch.__version__} finds {found} on this one"
    message += "" if found else ", so the step below runs on the CPU"
    way_out = "lower trainer.n_gpus_per_node, set trainer.device=cpu, or look where the workers will be"
    yield Finding("devices", message, way_out if found < wanted else "")


def failure_findings(failure: RunFailure | None) -> Iterator[Finding]:
    """An error's own words, or those of each worker behind it."""
    if failure is None:
        yield Finding("errors", "none")
    elif failure.workers:
        for worker in failure.workers:
            yield Finding("worker error", f"{worker.place}: {worker.error}", _last_frame(worker.traceback))
    else:
        yield Finding("error", failure.error, _last_frame(failure.traceback))


def _one_step(prepared: Prepared, folder: Path) -> Iterator[Finding]:
    observer = Observer()
    batch: DataProto | None = None
    started = False
    error: Exception | None = None
    try:
        with worker_groups(prepared) as groups:
            started = True
            places = ", ".join(f"{role}: {group.world_size}" for role, group in groups.items())
            yield Finding("workers", f"created in this process ({places})")
            stages = build_stages(prepared, observer.groups(groups), folder)
            prompts = prepared.train.batch(prepared.loader.next_batch())
            batch = observer.run(step_of(prepared.config), stages, prompts)
    except Exception as failure:  # it is what the doctor reports
        error = failure
    if not started:
        yield Finding("workers", "not all could be created", "the workers' own errors below say why")
    else:
        yield from _columns(observer)
    if batch is not None:
        yield from _agreement(batch, prepared)
    yield from failure_findings(None if error is None else failure_of(error))


def _columns(observer: Observer) -> Iterator[Finding]:
    for stage in observer.stages:
        if missing := [name for name in stage.reads if name not in stage.before]:
            yield Finding(
                "columns",
                f"stage {stage.name} needs {', '.join(missing)}; the batch has {', '.join(stage.before)}",
                "run the stage that makes it first; `kapell explain` shows who writes each column",
            )
            return
    ended = [stage.name for stage in observer.stages if stage.after is not None]
    unfinished = [stage.name for stage in observer.stages if stage.after is None]
    if unfinished:
        yield Finding("columns", f"stage {unfinished[0]} did not end", "the errors below say why")
    elif ended:
        yield Finding("columns", f"each of {len(ended)} stages found the columns it needs")


def _agreement(batch: DataProto, prepared: Prepared) -> Iterator[Finding]:
    config = prepared.config
    samples, longest = config.actor_rollout_ref.rollout.n, config.data.max_response_length
    prompts = min(config.data.train_batch_size, len(prepared.train))
    found = disagreements(
        batch,
        num_prompts=prompts,
        samples_per_prompt=samples,
        max_response_length=longest,
        largest_gap=LARGEST_GAP[config.actor_rollout_ref.model.dtype],
    )
    for words in found:
        yield Finding("agreement", words, "look at the stage or worker method that writes the column")
    lengths_B = batch.column("response_mask").sum(-1)
    if not found:
        yield Finding(
            "agreement",
            f"{len(batch)} rows = {prompts} prompts x {samples} samples; responses of {int(lengths_B.min())} to "
            f"{int(lengths_B.max())} tokens (at most {longest}); masks, tokens and log-probabilities agree",
        )


def _small(config: Config) -> Config:
    """The same run with a few prompts and workers in this process, on the CPU where there is no other device."""
    policy, trainer, reward = config.actor_rollout_ref, config.trainer, config.reward
    if not torch.cuda.is_available():
        trainer = replace(trainer, device="cpu")
    prompts = min(config.data.train_batch_size, _PROMPTS)
    return replace(
        config,
        data=replace(config.data, train_batch_size=prompts),
        actor_rollout_ref=replace(
            policy,
            # A model in parts needs processes of their own, and gives the same numbers as a whole one.
            actor=replace(
                policy.actor, ppo_mini_batch_size=min(policy.actor.ppo_mini_batch_size, prompts), strategy="ddp"
            ),
            rollout=replace(policy.rollout, n=min(policy.rollout.n, _SAMPLES)),
        ),
        critic=replace(config.critic, ppo_mini_batch_size=None, strategy="ddp"),
        reward=replace(reward, reward_model=replace(reward.reward_model, nnodes=1, n_gpus_per_node=1)),
        trainer=replace(trainer, nnodes=1, n_gpus_per_node=min(trainer.n_gpus_per_node, _WORKERS), critic_warmup=0),
        backend=BackendConfig(name="local"),
    )


def _last_frame(text: str) -> str:
    """Where an exception was raised, from its traceback, as the place to look at."""
    text = text.partition(_CAUSED)[0]  # the first cause comes first
    frames = [line.strip() for line in text.splitlines() if line.strip().startswith("File ")]
    return f"look at {frames[-1]}" if frames else "see the traceback"


def _title(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
