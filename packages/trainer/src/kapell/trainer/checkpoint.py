"""The checkpoints of a run: folders ``global_step_N`` that appear whole or not at all, and of which some are kept.

A checkpoint is written into a hidden sibling, brought to the disk file by file, listed in ``checkpoint.json`` with the
checksum of each file, and renamed. A kill at any moment leaves the earlier ones as they were.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from .durable_files import FileRecord, file_record, replace_text, sync, write_text
from .state_files import CheckpointError

__all__ = ["BestCheckpoint", "CheckpointStore", "Manifest", "check_checkpoint"]

_FORMAT, _VERSION = "kapell-checkpoint", 1
_MANIFEST = "checkpoint.json"
_LATEST = "latest_checkpointed_iteration.txt"  # verl's name
_BEST = "best_checkpointed_iteration.txt"
_SET_ASIDE = "set_aside"
_FOLDER = re.compile(r"global_step_(\d+)")
_LEFTOVER = re.compile(r"\.global_step_\d+\.(partial|deleted)")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BestCheckpoint:
    """Which checkpoint counts as the best."""

    metric: str
    """Name of a validation metric. A checkpoint whose step was not validated is never the best."""
    mode: Literal["max", "min"] = "max"
    """Whether more or less of it is better."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What ``checkpoint.json`` says."""

    step: int
    """Steps that were trained."""
    validation: Mapping[str, float]
    """The step's validation metrics; empty where it was not validated."""
    files: Mapping[str, FileRecord]
    """Each file by its path in the checkpoint's folder."""


class CheckpointStore:
    """The checkpoints in a run's folder.

    ``keep`` is how many of the newest stay (None or -1: all of them); the ``best`` stays besides.
    """

    def __init__(self, folder: str | Path, *, keep: int | None = None, best: BestCheckpoint | None = None) -> None:
        if keep is not None and keep < 1 and keep != -1:
            raise ValueError(f"keep is how many checkpoints stay, at least 1, or None or -1 for all; got {keep}")
        self._folder = Path(folder)
        self._keep = None if keep == -1 else keep
        self._best = best

    def folder_of(self, step: int) -> Path:
        """Where the checkpoint of a step is or would be."""
        return self._folder / f"global_step_{step}"

    def steps(self) -> list[int]:
        """Steps with a checkpoint, in order, good or damaged."""
        names = (_FOLDER.fullmatch(path.name) for path in self._folder.glob("global_step_*"))
        return sorted(int(match[1]) for match in names if match)

    def newest_good(self) -> Path | None:
        """The newest checkpoint that is whole; None where there are none at all.

        One that is damaged is passed over with a warning. Raises `CheckpointError` where all are.
        """
        faults = []
        for step in reversed(self.steps()):
            try:
                check_checkpoint(self.folder_of(step))
            except CheckpointError as error:
                faults.append(str(error))
                _logger.warning("passing over a checkpoint that cannot be used: %s", error)
            else:
                return self.folder_of(step)
        if faults:
            raise CheckpointError(
                self._folder, f"none of its checkpoints can be used; move them away to start anew: {'; '.join(faults)}"
            )
        return None

    def begin(self, step: int) -> Path:
        """An empty folder into which the checkpoint of a step is written before `commit`."""
        partial = self._folder / f".global_step_{step}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def commit(self, step: int, files: Mapping[str, FileRecord], metrics: Mapping[str, float]) -> Path:
        """Make the folder of `begin` the checkpoint of its step; then delete those that are not kept any more."""
        partial = self._folder / f".global_step_{step}.partial"
        validation = {name: value for name, value in metrics.items() if name.startswith("val") and math.isfinite(value)}
        content = {"format": _FORMAT, "version": _VERSION, "step": step, "validation": validation}
        listed = {"files": {name: asdict(record) for name, record in sorted(files.items())}}
        write_text(partial / _MANIFEST, json.dumps(content | listed, indent=1) + "\n")
        for folder, _, _ in os.walk(partial, topdown=False):
            sync(folder)
        if self.folder_of(step).exists():
            self._set_aside(step)
        partial.rename(self.folder_of(step))
        sync(self._folder)
        replace_text(self._folder / _LATEST, f"{step}")
        self._prune()
        return self.folder_of(step)

    def continue_from(self, step: int) -> list[Path]:
        """Clear what a killed run left half done, and set aside the checkpoints of later steps; their new places.

        What follows is another course of the run: a later start must not take the old one for its continuation.
        """
        for path in list(self._folder.glob(".global_step_*")):
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path)
        moved = [self._set_aside(later) for later in self.steps() if later > step]
        if step in self.steps():
            replace_text(self._folder / _LATEST, f"{step}")
        return moved

    def best(self) -> int | None:
        """The step of the best checkpoint; of equals the newest. None without a metric or a validated checkpoint."""
        if self._best is None:
            return None
        found = []
        for step in self.steps():
            try:
                value = _read_manifest(self.folder_of(step)).validation.get(self._best.metric)
            except CheckpointError:
                continue
            if value is not None:
                found.append((value if self._best.mode == "max" else -value, step))
        return max(found)[1] if found else None

    def named_best(self) -> int | None:
        """The step that ``best_checkpointed_iteration.txt`` names, where its checkpoint is here."""
        path = self._folder / _BEST
        step = int(path.read_text()) if path.exists() else None
        return step if step in self.steps() else None

    def _prune(self) -> None:
        best = self.best()
        if best is not None:
            replace_text(self._folder / _BEST, f"{best}")
        if self._keep is None:
            return
        for step in self.steps()[: -self._keep]:
            if step != best:
                # Renamed first, so that a kill while it is deleted leaves nothing that looks like a damaged checkpoint.
                deleted = self.folder_of(step).rename(self._folder / f".global_step_{step}.deleted")
                shutil.rmtree(deleted)

    def _set_aside(self, step: int) -> Path:
        place = self._folder / _SET_ASIDE
        place.mkdir(exist_ok=True)
        suffixes = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
        targets = (place / f"global_step_{step}{suffix}" for suffix in suffixes)
        target = next(path for path in targets if not path.exists())
        return self.folder_of(step).rename(target)


def check_checkpoint(folder: str | Path) -> Manifest:
    """The manifest of a checkpoint, after a look at every file. Raises `CheckpointError` with the file at fault."""
    folder = Path(folder)
    manifest = _read_manifest(folder)
    for name, record in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(path, "the file is missing from the checkpoint; use an earlier one")
        found = file_record(path)
        if found.num_bytes != record.num_bytes:
            raise CheckpointError(
                path, f"the file has {found.num_bytes} bytes and not {record.num_bytes}; use an earlier checkpoint"
            )
        if found != record:
            raise CheckpointError(
                path, "the file's checksum is wrong, its content has changed; use an earlier checkpoint"
            )
    return manifest


def _read_manifest(folder: Path) -> Manifest:
    path = folder / _MANIFEST
    if not folder.is_dir():
        raise CheckpointError(folder, "there is no such folder")
    if not path.is_file():
        raise CheckpointError(folder, f"this is no checkpoint of Kapell's: it has no {_MANIFEST}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT or content["version"] != _VERSION:
            raise CheckpointError(
                path,
                f"the format is {content['format']!r} {content['version']}, this version reads {_FORMAT} {_VERSION}",
            )
        files = {name: FileRecord(**record) for name, record in content["files"].items()}
        return Manifest(step=int(content["step"]), validation=dict(content["validation"]), files=files)
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(path, f"the file is damaged ({error!r}); use an earlier checkpoint") from None
