"""Where a run begins: anew, or at a checkpoint; and what has changed in its configuration since."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from .checkpoint import CheckpointStore, check_checkpoint
from .config import Config
from .nested import dotted, plain
from .run_checkpoint import CONFIG, POLICY
from .state_files import CheckpointError

__all__ = ["Resume", "find_resume"]

_WHERE = ("trainer.resume_mode", "trainer.resume_from_path", "trainer.default_local_dir")
_OPTIMIZERS = (".optim.optimizer", ".optim.optimizer_impl")


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Where a run begins."""

    checkpoint: Path | None = None
    """The checkpoint to go on from; None for a run from the beginning."""
    step: int = 0
    """Steps that are done in it."""
    begin_again: bool = False
    """The folder holds the logs of a run that ended before its first checkpoint; this run takes its place."""
    changes: tuple[str, ...] = ()
    """Keys that differ from the checkpoint's configuration, as ``key: old → new``."""

    def goes_on(self, folder: Path, *keys: str) -> bool:
        """Whether the run in the folder is the one that was there, and the configuration has these keys as it had."""
        if self.checkpoint is None:
            return self.begin_again
        changed = {change.partition(":")[0] for change in self.changes}
        return self.checkpoint.resolve().parent == folder.resolve() and changed.isdisjoint(keys)

    def __str__(self) -> str:
        if self.checkpoint is None:
            return "from the first step; the run here ended before its first checkpoint" if self.begin_again else ""
        changed = "".join(f"\n  changed {change}" for change in self.changes)
        return f"from step {self.step}, {self.checkpoint}{changed}"


def find_resume(config: Config, folder: str | Path) -> Resume:
    """What ``trainer.resume_mode`` means for a run in ``folder``.

    Raises ``FileExistsError`` for a folder whose run cannot be gone on with, and `CheckpointError` for a checkpoint
    that is damaged or does not fit the configuration.
    """
    folder, trainer = Path(folder), config.trainer
    own = CheckpointStore(folder)
    if trainer.resume_mode == "path":
        assert trainer.resume_from_path is not None
        checkpoint = _checkpoint_at(Path(trainer.resume_from_path).expanduser())
        if checkpoint.resolve().parent != folder.resolve() and _holds_run(folder):
            raise FileExistsError(
                f"{folder} holds a run already, and not the one of {checkpoint}; choose another "
                "trainer.default_local_dir or delete it"
            )
    elif trainer.resume_mode == "auto" and own.steps():
        checkpoint = own.newest_good()
        assert checkpoint is not None
    else:
        return _from_the_beginning(config, folder)
    step = check_checkpoint(checkpoint).step
    return Resume(checkpoint=checkpoint, step=step, changes=tuple(_changes(config, checkpoint)))


def _from_the_beginning(config: Config, folder: Path) -> Resume:
    if not _holds_run(folder):
        return Resume()
    if config.trainer.resume_mode == "disable":
        raise FileExistsError(
            f"{folder} holds a run already; choose another trainer.default_local_dir or delete it, or go on with "
            "trainer.resume_mode=auto"
        )
    before = _read_config(folder / CONFIG)
    if before.get("trainer.save_freq", -1) < 1:
        raise FileExistsError(
            f"{folder} holds a run already, without a checkpoint to go on from (its trainer.save_freq was -1); choose "
            "another trainer.default_local_dir or delete it"
        )
    return Resume(begin_again=True)


def _holds_run(folder: Path) -> bool:
    """Whether a run has left anything here that another would write over."""
    return any((folder / name).exists() for name in ("metrics.jsonl", "model")) or bool(CheckpointStore(folder).steps())


def _checkpoint_at(path: Path) -> Path:
    """The checkpoint at a path; of a run's folder its newest good one."""
    if path.is_dir() and (steps := CheckpointStore(path).steps()):
        newest = CheckpointStore(path).newest_good()
        assert newest is not None, steps
        return newest
    check_checkpoint(path)
    return path


def _changes(config: Config, checkpoint: Path) -> Iterator[str]:
    """Each changed key. Raises `CheckpointError` for a change that the checkpoint cannot follow."""
    before, now = _read_config(checkpoint / CONFIG), dict(dotted(plain(asdict(config))))
    changed = [key for key, value in now.items() if key in before and before[key] != value and key not in _WHERE]
    for key in changed:
        was = f"{key} was {before[key]} and is {now[key]}"
        if config.use_reference and key in _reference_keys(config):
            raise CheckpointError(
                checkpoint,
                f"{was}, which makes another reference model for the KL penalty; give it as it was, or start another "
                "run from the checkpoint's weights (kapell export)",
            )
        if key.endswith(_OPTIMIZERS) and (checkpoint / _role_of(key)).is_dir():
            raise CheckpointError(
                checkpoint, f"{was}, and the moments of one optimizer are not those of another; give it as it was"
            )
    if config.use_critic and not (checkpoint / "critic").is_dir():
        raise CheckpointError(
            checkpoint,
            f"it has no critic, which algorithm.adv_estimator={config.algorithm.adv_estimator} needs; it was saved "
            f"with {before.get('algorithm.adv_estimator')}",
        )
    if not (checkpoint / POLICY).is_dir():
        raise CheckpointError(checkpoint, f"it has no {POLICY}")
    for key in changed:
        yield f"{key}: {before[key]} → {now[key]}"


def _reference_keys(config: Config) -> tuple[str, ...]:
    """What the reference model follows from: it is not in a checkpoint, but built anew."""
    own, model = "actor_rollout_ref.ref.model.path", "actor_rollout_ref.model"
    if config.actor_rollout_ref.ref.model.path is not None:
        return (own,)
    drawn = ("trainer.seed",) if config.actor_rollout_ref.model.path is None else ()
    return (own, f"{model}.path", f"{model}.override_config", *drawn)


def _role_of(key: str) -> str:
    return "critic" if key.startswith("critic.") else POLICY


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return dict(dotted(yaml.safe_load(path.read_text(encoding="utf-8")) or {}))
    except FileNotFoundError:
        return {}
    except yaml.YAMLError as error:
        raise CheckpointError(path, f"the file is damaged: {error}") from error
