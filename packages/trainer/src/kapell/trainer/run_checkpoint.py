"""One checkpoint of a whole run: its roles by their workers, the trainer's own state, tokenizer and configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from kapell.workergroup import WorkerGroup

from .checkpoint import BestCheckpoint, CheckpointStore
from .config import Config
from .durable_files import FileRecord, write_text
from .nested import to_yaml
from .role_checkpoint import HUGGINGFACE, folder_records
from .state_files import CheckpointError, read_state, write_state
from .tokenizer import load_tokenizer

__all__ = ["CONFIG", "POLICY", "RunCheckpoints", "check_tokenizer", "config_to_yaml"]

CONFIG = "config.yaml"
"""The configuration, as ``kapell train --config`` reads it."""
POLICY = "actor"
"""The policy's role; the others have the names of their groups."""

_PARTS = ("trainer", "data", "stages", "report", "random")

_logger = logging.getLogger(__name__)


class RunCheckpoints:
    """Saves and loads a run whose roles have the methods of `kapell.trainer.workers.TrainWorker`."""

    def __init__(
        self,
        store: CheckpointStore,
        groups: Mapping[str, WorkerGroup],
        tokenizer: PreTrainedTokenizerBase,
        *,
        config: Config,
        best: BestCheckpoint | None = None,
    ) -> None:
        self._store = store
        self._groups = groups
        self._tokenizer = tokenizer
        self._config = config
        self._best = best

    def save(self, step: int, trainer_state: Callable[[], Mapping[str, Any]]) -> None:
        """Write the checkpoint of a step: the roles, then what ``trainer_state`` returns."""
        folder = self._store.begin(step).absolute()  # workers may have another working directory
        files: dict[str, FileRecord] = {}
        for role, group in self._groups.items():
            for records in group.save_checkpoint(str(folder / role)):
                files |= {f"{role}/{name}": record for name, record in records.items()}
        self._tokenizer.save_pretrained(folder / POLICY / HUGGINGFACE)
        files |= folder_records(folder, f"{POLICY}/{HUGGINGFACE}")
        files[CONFIG] = write_text(folder / CONFIG, config_to_yaml(self._config))
        state = trainer_state()
        for part in _PARTS:
            files |= write_state(folder, part, state[part])
        metrics = state["report"]["metrics"]
        self._check_best(step, metrics)
        self._store.commit(step, files, metrics)

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """Let the roles continue from a checkpoint; the trainer's state.

        Raises `CheckpointError` where a role is missing from it or does not fit.
        """
        for role, group in self._groups.items():
            folder = checkpoint.absolute() / role
            if not folder.is_dir():
                raise CheckpointError(checkpoint, f"it has no {role}, which this run's configuration asks for")
            try:
                group.load_checkpoint(str(folder))
            except ExceptionGroup as errors:
                raise _first_fault(errors) or errors from None
        return {part: read_state(checkpoint, part) for part in _PARTS}

    def _check_best(self, step: int, metrics: Mapping[str, float]) -> None:
        validation = [name for name in metrics if name.startswith("val")]
        if self._best is None or not validation or self._best.metric in validation:
            return
        near = get_close_matches(self._best.metric, validation, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(validation)}"
        _logger.warning("step %d has no metric trainer.keep_best=%s; %s", step, self._best.metric, hint)


def config_to_yaml(config: Config) -> str:
    """The configuration as YAML, which `kapell.trainer.config_load.load_config` reads back."""
    return to_yaml(asdict(config))


def check_tokenizer(checkpoint: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `CheckpointError` where the checkpoint's policy was trained with other tokens."""
    folder = checkpoint / POLICY / HUGGINGFACE
    saved, here = load_tokenizer(folder).get_vocab(), tokenizer.get_vocab()
    if saved != here:
        raise CheckpointError(
            folder,
            f"its tokenizer has {len(saved)} tokens that are not this run's {len(here)}; a new model's tokens are the "
            "characters of the data: give data.tokenizer and data.train_files as they were",
        )


def _first_fault(errors: ExceptionGroup) -> CheckpointError | None:
    for error in errors.exceptions:
        if isinstance(error, ExceptionGroup):
            error = _first_fault(error)
        if isinstance(error, CheckpointError):
            return error
    return None
