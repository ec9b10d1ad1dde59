"""From a checkpoint to a model in Hugging Face format."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import GENERATION_CONFIG_NAME

from .checkpoint import CheckpointStore, check_checkpoint
from .config_load import load_config
from .lora import has_adapter, save_adapted, split_weights, weights_checksum
from .role_checkpoint import HUGGINGFACE, check_base
from .role_models import critic_source, policy_source
from .run_checkpoint import CONFIG, POLICY
from .state_files import CheckpointError, read_state
from .tokenizer import load_tokenizer

__all__ = ["ROLES", "export_model", "find_checkpoint"]

ROLES: Mapping[str, Any] = {POLICY: AutoModelForCausalLM, "critic": AutoModelForTokenClassification}
"""The roles that can be exported, and the transformers class that reads each."""


def export_model(
    run: str | Path,
    folder: str | Path,
    *,
    step: str | None = None,
    role: str = POLICY,
    base: str | Path | None = None,
) -> Path:
    """Write a role of a run's checkpoint into a new folder, with the tokenizer; the checkpoint that was read.

    ``step`` is a number, ``best``, or None for the newest. ``base`` is the model that an adapter was trained on, where
    that is not at the run's ``model.path`` any more. ``AutoModelForCausalLM`` reads the policy, and
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
    tokenizer = load_tokenizer(checkpoint / POLICY / HUGGINGFACE)
    weights: dict[str, Tensor] = read_state(checkpoint / role, "model")
    model = _adapted(checkpoint, role, tokenizer, base) or _whole(checkpoint / role, weights, ROLES[role])
    found = model.load_state_dict(weights, strict=False)
    if different := [*found.unexpected_keys, *(split_weights(model).saved.keys() - weights.keys())]:
        raise CheckpointError(checkpoint / role, f"its weights are not those of its configuration: {different}")
    if has_adapter(model):
        save_adapted(model, target)
    else:
        model.save_pretrained(target)
        generation = checkpoint / role / HUGGINGFACE / GENERATION_CONFIG_NAME
        if generation.is_file():  # a critic has none, and older checkpoints do not
            shutil.copy(generation, target)
    tokenizer.save_pretrained(target)
    return checkpoint


def _whole(folder: Path, weights: Mapping[str, Tensor], auto_class: Any) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder / HUGGINGFACE, local_files_only=True)
    dtype = next(weight.dtype for weight in weights.values() if weight.is_floating_point())
    return auto_class.from_config(config, dtype=dtype)


def _adapted(
    checkpoint: Path, role: str, tokenizer: PreTrainedTokenizerBase, base: str | Path | None
) -> PreTrainedModel | None:
    """The base model of the run with its adapter as it began; None where the run trained all weights."""
    config = load_config([checkpoint / CONFIG]).config
    model = config.actor_rollout_ref.model if role == POLICY else config.critic.model
    if not model.lora_rank:
        return None
    if base is not None:
        own = role != POLICY and config.critic.model.path is not None  # the critic did not begin as the policy
        paths = [f"actor_rollout_ref.model.path={base}", f"critic.model.path={base if own else 'null'}"]
        config = load_config([checkpoint / CONFIG], paths).config
    try:
        policy = policy_source(config, tokenizer)
        adapted = policy() if role == POLICY else critic_source(config, policy)()
    except FileNotFoundError as error:
        raise CheckpointError(
            checkpoint, f"its base model is not here ({error}); say where it is with --base"
        ) from error
    saved = read_state(checkpoint / role, "optimizer")["base"]
    check_base(checkpoint / role, saved, weights_checksum(split_weights(adapted).frozen.items()))
    return adapted


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
