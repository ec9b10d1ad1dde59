"""From a checkpoint to a model in Hugging Face format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from .checkpoint import CheckpointStore, check_checkpoint
from .lora import read_adapted, save_adapted
from .role_checkpoint import HUGGINGFACE
from .run_checkpoint import POLICY
from .state_files import CheckpointError, read_state
from .tokenizer import load_tokenizer

__all__ = ["ROLES", "export_model", "find_checkpoint"]

ROLES: Mapping[str, Any] = {POLICY: AutoModelForCausalLM, "critic": AutoModelForTokenClassification}
"""The roles that can be exported, and the transformers class that reads each."""


def export_model(run: str | Path, folder: str | Path, *, step: str | None = None, role: str = POLICY) -> Path:
    """Write a role of a run's checkpoint into a new folder, with the tokenizer; the checkpoint that was read.

    ``step`` is a number, ``best``, or None for the newest. ``AutoModelForCausalLM`` reads the policy, and
    ``AutoModelForTokenClassification`` and ``critic.model.path`` the critic. Raises `CheckpointError`, and
    ``FileExistsError`` for a folder that is not empty.
    """
    target = Path(folder).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not empty; name a new folder")
    checkpoint = find_checkpoint(run, step)
    if not (checkpoint / role).is_dir():
        present = [name for name in ROLES if (checkpoint / name).is_dir()]
        raise CheckpointError(checkpoint, f"it has no {role}; it has {', '.join(present) or 'no model'}")
    weights: dict[str, Tensor] = read_state(checkpoint / role, "model")
    config = AutoConfig.from_pretrained(checkpoint / role / HUGGINGFACE, local_files_only=True)
    dtype = next(weight.dtype for weight in weights.values() if weight.is_floating_point())
    model = ROLES[role].from_config(config, dtype=dtype)
    adapted = read_adapted(model, checkpoint / role / HUGGINGFACE)
    try:
        (adapted or model).load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(checkpoint / role, f"its weights are not those of its configuration: {error}") from error
    if adapted:
        save_adapted(adapted, target)
    else:
        model.save_pretrained(target)
    load_tokenizer(checkpoint / POLICY / HUGGINGFACE).save_pretrained(target)
    return checkpoint


def find_checkpoint(run: str | Path, step: str | None = None) -> Path:
    """The checkpoint of a step of a run, ``best``, or the newest good one; or the folder itself where it is one."""
    folder = Path(run).expanduser()
    store = CheckpointStore(folder)
    if not store.steps():
        hint = f"; {folder / 'model'} is in Hugging Face format already" if (folder / "model").is_dir() else ""
        if (folder / "metrics.jsonl").exists():
            raise CheckpointError(folder, f"the run has no checkpoint (trainer.save_freq was -1){hint}")
        check_checkpoint(folder)
        return folder
    if step is None:
        newest = store.newest_good()
        assert newest is not None
        return newest
    known = {str(number): store.folder_of(number) for number in store.steps()}
    if (best := store.named_best()) is not None:
        known["best"] = store.folder_of(best)
    if step not in known:
        raise CheckpointError(folder, f"it has no checkpoint {step}; it has {', '.join(known)}")
    check_checkpoint(known[step])
    return known[step]
