"""Policies and value models: from a Hugging Face folder, or new ones from a configuration."""

from __future__ import annotations

import copy
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.activations import FastGELUActivation, NewGELUActivation
from transformers.utils import GENERATION_CONFIG_NAME

__all__ = [
    "LongestRow",
    "allow_recomputation",
    "build_policy",
    "build_value_model",
    "check_length",
    "computes_again",
    "drawn_from",
    "end_token_ids",
    "load_config_of",
    "model_folder",
    "new_model_config",
    "num_positions",
    "training_mode",
    "without_dropout",
]

_global_generator = threading.Lock()  # new weights are drawn from torch's global generator, which threads share
_CPU = torch.device("cpu")
_MLP_RATIO = 4  # width of the feed-forward layer over that of the model, as in GPT-2


def new_model_config(
    tokenizer: PreTrainedTokenizerBase,
    *,
    model_type: str = "gpt2",
    hidden_size: int = 64,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 4,
    max_length: int,
    override_config: Mapping[str, Any] | None = None,
) -> PreTrainedConfig:
    """The configuration of a small new model for the tokenizer's vocabulary, in the architecture ``model_type``.

    Raises ``ValueError`` for an architecture that transformers does not have.
    """
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"transformers knows no model_type {model_type!r}; try gpt2, llama, qwen2 or qwen3")
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_attention_heads,
        "head_dim": hidden_size // num_attention_heads,
        "intermediate_size": _MLP_RATIO * hidden_size,
        "max_position_embeddings": max_length,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "is_decoder": True,  # BERT's kind would see the tokens that follow
    }
    known = CONFIG_MAPPING[model_type]()
    shape = {name: value for name, value in shape.items() if hasattr(known, name) and not _is_computed(known, name)}
    for name in override_config or {}:
        if not hasattr(known, name):
            raise ValueError(f"the configuration of {model_type!r} has no field {name!r}")
    try:
        _check_override(known, override_config or {})
        return AutoConfig.for_model(model_type, **{**shape, **(override_config or {})})
    except Exception as error:  # each version of transformers has another kind for a value of the wrong type
        raise ValueError(f"no configuration of {model_type!r} with {override_config or shape}: {error}") from error


def _is_computed(config: PreTrainedConfig, name: str) -> bool:
    """Whether a field follows from others, as Falcon's ``head_dim`` does."""
    return isinstance(found := getattr(type(config), name, None), property) and found.fset is None


def _check_override(known: PreTrainedConfig, values: Mapping[str, Any]) -> None:
    """Refuse dropout, and what is no number where the configuration has one, as later versions of transformers do."""
    for name, value in values.items():
        if _is_dropout(name, value) and value:
            raise ValueError(f"dropout is off in all roles, so {name}={value} would do nothing; leave it out")
        if isinstance(getattr(known, name, None), int | float) and not isinstance(value, int | float | None):
            raise TypeError(f"{name} is a number, got {value!r}")


def model_folder(path: str | Path) -> Path:
    """A folder as processes with other working directories find it, such as the workers of a running Ray."""
    return Path(path).expanduser().absolute()


def load_config_of(folder: str | Path, override_config: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """The configuration of the model saved in a local folder, with some fields replaced."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise FileNotFoundError(f"no model folder {path}")
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} is not a Hugging Face model folder: it has no config.json")
    try:
        if override_config:
            _check_override(AutoConfig.from_pretrained(path, local_files_only=True), override_config)
        return AutoConfig.from_pretrained(path, local_files_only=True, **(override_config or {}))
    except Exception as error:
        changes = f" with {override_config}" if override_config else ""
        raise ValueError(f"no usable model configuration in {path}{changes}: {error}") from error


def end_token_ids(tokenizer: PreTrainedTokenizerBase, folder: str | Path | None) -> tuple[int, ...]:
    """The tokens that end a response: the tokenizer's, and those of the model in ``folder``.

    Those are in its generation configuration, or else in its own, as in transformers' ``generate``: models that chat
    often end a turn with another token than the tokenizer's end of sequence.
    """
    ids: list[int | None] = [tokenizer.eos_token_id]
    if folder is not None:
        path = model_folder(folder)
        own = (path / GENERATION_CONFIG_NAME).is_file()
        config = GenerationConfig.from_pretrained(path, local_files_only=True) if own else load_config_of(path)
        more = getattr(config, "eos_token_id", None)
        ids += more if isinstance(more, list) else [more]
    return tuple(sorted({token for token in ids if token is not None}))


@dataclass(frozen=True, kw_only=True)
class LongestRow:
    """The longest row of a run, in tokens."""

    prompt: int
    """Its prompt."""
    response: int
    """Its response, ``data.max_response_length``."""


def num_positions(config: PreTrainedConfig) -> int | None:
    """How many tokens a row may have; None for a model without such a limit.

    Of rotary positions that are stretched by a factor it is that many times their original number.
    """
    positions = getattr(config, "max_position_embeddings", None)  # also what GPT-2 calls n_positions
    if positions is None or positions < 1:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    return max(positions, int((rope.get("factor") or 1) * (rope.get("original_max_position_embeddings") or positions)))


def check_length(config: PreTrainedConfig, row: LongestRow) -> None:
    """Raise ``ValueError`` where the model has fewer positions than the row has tokens."""
    positions, tokens = num_positions(config), row.prompt + row.response
    if positions is not None and positions < tokens:
        raise ValueError(
            f"the model has {positions} positions (max_position_embeddings), below the {tokens} tokens of a row: the "
            f"longest prompt has {row.prompt}, and data.max_response_length is {row.response}; lower that, shorten "
            "prompts by data.max_prompt_length and data.truncation, or take a model with more positions"
        )


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of the configuration, of its parts too, with all that sets dropout at zero.

    With dropout the policy that is updated would be another than the one that sampled: the ratio of their
    probabilities would be noise where it should be 1.
    """
    plain = copy.deepcopy(config)
    for name, value in list(vars(plain).items()):
        if isinstance(value, PreTrainedConfig):
            setattr(plain, name, without_dropout(value))
        elif _is_dropout(name, value):
            setattr(plain, name, type(value)(0))
    return plain


def _is_dropout(name: str, value: Any) -> bool:
    return "drop" in name and isinstance(value, int | float) and not isinstance(value, bool)


def build_policy(config: PreTrainedConfig, *, folder: str | Path | None = None, seed: int = 1) -> PreTrainedModel:
    """A causal language model in float32, without dropout: the weights of ``folder``, or new ones from ``seed``."""
    return _build(AutoModelForCausalLM, config, folder, seed)


def build_value_model(config: PreTrainedConfig, *, folder: str | Path | None = None, seed: int = 1) -> PreTrainedModel:
    """A model with one number per token: a causal language model's body with a new value head, or a saved one."""
    dropped = ("id2label", "label2id", "num_labels")
    fields = {name: value for name, value in config.to_dict().items() if name not in dropped}
    fields |= {"num_labels": 1, "classifier_dropout": 0.0, "hidden_dropout": 0.0}
    return _build(AutoModelForTokenClassification, type(config).from_dict(fields), folder, seed)


@contextmanager
def drawn_from(seed: int, device: torch.device = _CPU) -> Generator[None]:
    """Within the block torch's global generators start from ``seed``; the CPU's and the device's go on as they were."""
    with _global_generator, torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _build(auto_class: Any, config: PreTrainedConfig, folder: str | Path | None, seed: int) -> PreTrainedModel:
    config = without_dropout(config)
    with drawn_from(seed):
        if folder is None:
            model = auto_class.from_config(config, dtype=torch.float32)
        else:
            model = auto_class.from_pretrained(
                Path(folder).expanduser(), config=config, dtype=torch.float32, local_files_only=True
            )
    return _with_fused_activations(model).eval()


def _with_fused_activations(model: PreTrainedModel) -> PreTrainedModel:
    """Compute GELU's approximation by tanh in torch's one operation: transformers takes nine, a quarter of a pass."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation | FastGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))
    return model


def allow_recomputation(model: PreTrainedModel) -> None:
    """Let layers keep no activations for the backward pass, which computes them again, in `training_mode`.

    Raises ``ValueError`` for an architecture that cannot.
    """
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # transformers' name since version 5
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(options)


def computes_again(model: nn.Module) -> bool:
    """Whether `allow_recomputation` was called."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


@contextmanager
def training_mode(model: PreTrainedModel) -> Generator[None]:
    """Within the block activations are computed again where `allow_recomputation` was called."""
    model.train()
    try:
        yield
    finally:
        model.eval()
