"""What a role writes into a checkpoint: rank 0 what all ranks share, and each rank its own random states.

``model`` and ``optimizer`` hold the whole state, so that any number of ranks can continue from them; but of weights
that are not trained, those below an adapter, only a checksum: a run builds them from its configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from .durable_files import FileRecord, file_record, sync
from .engine import TrainEngine
from .random_states import random_states, set_random_states
from .state_files import CheckpointError, read_state, write_state

__all__ = ["HUGGINGFACE", "check_base", "folder_records", "load_role", "save_role"]

HUGGINGFACE = "huggingface"
"""Folder with the model's configuration, and with the policy's own for generation and its tokenizer."""


def save_role(folder: str | Path, engine: TrainEngine, extra: Mapping[str, Any], *, rank: int) -> dict[str, FileRecord]:
    """Write this rank's part; the record of each file by its path in ``folder``. Every rank must call it."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    state, base = engine.state_dict(), engine.frozen_checksum()
    records = write_state(path, _own(rank), {"random": random_states()})
    if rank == 0:
        records |= write_state(path, "model", state.pop("model"))
        records |= write_state(path, "optimizer", {**state, "base": base, "extra": dict(extra)})
        _save_configuration(engine.model, path / HUGGINGFACE)
        records |= folder_records(path, HUGGINGFACE)
    return records


def _save_configuration(model: PreTrainedModel, folder: Path) -> None:
    model.config.save_pretrained(folder)
    if (generation := getattr(model, "generation_config", None)) is not None:  # a critic has none
        # Not `save_pretrained`, which refuses settings that go badly together, as those of some published models do.
        generation.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])


def load_role(folder: str | Path, engine: TrainEngine, *, rank: int) -> dict[str, Any]:
    """Continue from what `save_role` wrote, and return its ``extra``.

    A rank that the saved run did not have keeps its random states. Raises `CheckpointError` where the weights do not
    fit the model, or the adapter was trained on other weights than the model's.
    """
    path = Path(folder)
    weights, others = read_state(path, "model"), read_state(path, "optimizer")
    extra, base = others.pop("extra"), others.pop("base")
    _check_shapes(path, weights, engine)
    check_base(path, base, engine.frozen_checksum())
    try:
        engine.load_state_dict({"model": weights, **others})
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(path, f"its state does not fit this model and optimizer: {error}") from error
    if (path / f"{_own(rank)}.json").exists():
        set_random_states(read_state(path, _own(rank))["random"])
    return extra


def check_base(path: Path, saved: int | None, here: int | None) -> None:
    """Raise `CheckpointError` where the weights below an adapter are others than the saved ones, by their checksums."""
    if saved != here:
        raise CheckpointError(
            path,
            "its adapter was trained on another base model than the one that is here now; give the model's keys (and "
            "trainer.seed, from which a new model is drawn) as they were, and the files of the base model",
        )


def folder_records(root: Path, name: str) -> dict[str, FileRecord]:
    """Bring the files of ``root/name`` to the disk; their records by their paths in ``root``."""
    files = [path for path in sorted((root / name).rglob("*")) if path.is_file()]
    for path in files:
        sync(path)
    return {path.relative_to(root).as_posix(): file_record(path) for path in files}


def _own(rank: int) -> str:
    return f"rank_{rank}"


def _check_shapes(path: Path, weights: Mapping[str, Any], engine: TrainEngine) -> None:
    here = {name: tuple(value.shape) for name, value in engine.model.state_dict().items()}
    saved = {name: tuple(value.shape) for name, value in weights.items()}
    different = [name for name, shape in saved.items() if here.get(name) != shape]
    if different:
        name = different[0]
        raise CheckpointError(
            path / "model.safetensors",
            f"{len(different)} of its {len(saved)} tensors do not fit the model of this run, the first is {name} with "
            f"shape {saved[name]} where the model has {here.get(name, 'none of this name')}; "
            "give the model's keys as they were (the checkpoint's config.yaml has them) or start another run",
        )
