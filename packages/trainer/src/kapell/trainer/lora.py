"""Low-rank adapters (LoRA) through `peft`, an extra of this package: they alone are trained."""

from __future__ import annotations

import importlib
import importlib.util
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kapell.protocol import serialize_single_tensor

from .models import drawn_from

__all__ = [
    "ADAPTER",
    "Adapter",
    "build_with_adapter",
    "check_targets",
    "has_adapter",
    "save_adapted",
    "split_weights",
    "weights_checksum",
    "without_adapter",
]

ADAPTER = "lora_adapter"
"""Folder, in that of a saved model, with the adapter alone, which ``peft.PeftModel.from_pretrained`` reads."""

_HEADS = ["classifier", "score"]  # of a value model; they are new, so peft trains them whole
_MATRIX = 2  # dimensions of what has a low-rank change
_UNUSED = ".original_module."  # the drawn head that peft keeps beside the trained one


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The shape of an adapter: W becomes W + alpha/rank B A, with A and B of that rank (2106.09685)."""

    rank: int
    """Rank of the change to a weight."""
    alpha: int = 16
    """Its scale, times rank."""
    target_modules: str | Sequence[str] = "all-linear"
    """Which modules: names, a regular expression, or all linear ones but for the output's."""
    task_type: Literal["CAUSAL_LM", "TOKEN_CLS"] = "CAUSAL_LM"
    """What the model is; the head of a value model (``TOKEN_CLS``) is trained whole."""

    def __post_init__(self) -> None:
        if importlib.util.find_spec("peft") is None:
            raise ValueError('lora_rank > 0 needs peft; run: pip install "kapell-trainer[lora]"')


def build_with_adapter(build: Callable[[], PreTrainedModel], adapter: Adapter, *, seed: int) -> Any:
    """The model that ``build`` makes, frozen, with an adapter that changes nothing yet, its A drawn from ``seed``."""
    peft = importlib.import_module("peft")
    targets = adapter.target_modules
    config = peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=0.0,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=_HEADS if adapter.task_type == "TOKEN_CLS" else None,
        task_type=adapter.task_type,
    )
    model = build()
    with drawn_from(seed):
        return peft.get_peft_model(model, config).eval()


def check_targets(model: PreTrainedModel, adapter: Adapter) -> None:
    """Raise ``ValueError`` where the adapter asks for modules that the model does not have.

    The model, best one on the device "meta", gets the adapter and is of no use afterwards.
    """
    targets, module_names = adapter.target_modules, [name for name, _ in model.named_modules() if name]
    known = sorted({name.rpartition(".")[2] for name in module_names if _takes_adapter(model.get_submodule(name))})
    for target in [] if isinstance(targets, str) else targets:
        if not any(f".{name}".endswith(f".{target}") for name in module_names):
            close = get_close_matches(target, known, n=3)
            hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
            raise ValueError(f"target_modules: the model has no module {target!r}; {hint}it has: {', '.join(known)}")
    try:
        with torch.device("meta"):
            build_with_adapter(lambda: model, adapter, seed=1)
    except (ValueError, re.error) as error:
        how = "a text is a regular expression of a module's whole name; " if isinstance(targets, str) else ""
        raise ValueError(f"target_modules={targets}: {error}; {how}the model has: {', '.join(known)}") from error


def _takes_adapter(module: nn.Module) -> bool:
    return getattr(getattr(module, "weight", None), "ndim", 0) == _MATRIX


def has_adapter(model: PreTrainedModel) -> bool:
    """Whether a model was made by `build_with_adapter`."""
    return hasattr(model, "disable_adapter")


def without_adapter(model: PreTrainedModel) -> AbstractContextManager[Any]:
    """Within the block the model is the one that it was before training; does nothing for one without an adapter."""
    return model.disable_adapter() if has_adapter(model) else nullcontext()  # ty: ignore[not-callable]


def save_adapted(model: Any, folder: str | Path) -> None:
    """Write the adapter alone, and the model with the adapter's change added; ``model`` is of no use afterwards."""
    model.save_pretrained(Path(folder) / ADAPTER, save_embedding_layers=False)  # else it asks the model hub
    model.merge_and_unload().save_pretrained(folder)


class SplitWeights(NamedTuple):
    """Weights by name."""

    saved: dict[str, Tensor]
    """What training changes, or may: trained parameters, and buffers."""
    frozen: dict[str, Tensor]
    """What the model was built with and keeps."""


def split_weights(model: PreTrainedModel) -> SplitWeights:
    """The model's weights by whether a checkpoint needs them; tied ones are one object."""
    state = model.state_dict(keep_vars=True)
    frozen = {name for name, weight in state.items() if isinstance(weight, nn.Parameter) and not weight.requires_grad}
    return SplitWeights(
        saved={name: weight for name, weight in state.items() if name not in frozen},
        frozen={name: state[name] for name in state if name in frozen and _UNUSED not in name},
    )


def weights_checksum(weights: Iterable[tuple[str, Tensor]]) -> int | None:
    """A checksum of names and values; None without any."""
    checksum = None
    for name, weight in weights:
        _, _, values = serialize_single_tensor(weight)
        checksum = zlib.crc32(values, zlib.crc32(name.encode(), checksum or 0))
    return checksum
