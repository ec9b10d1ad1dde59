"""Prompts through a model, each different one once, with a cache for all rows that continue them."""

# B rows, U different prompts, P padded prompt tokens, V vocabulary

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import DynamicCache, PreTrainedModel

from .models import computes_again

__all__ = ["DifferentRows", "different_rows", "prefill", "shared_prompts"]

_LEAST_SHARE = 0.25  # of all tokens
_LEAST_TOKENS = 256  # below it the second pass costs more, even through the smallest model


class DifferentRows(NamedTuple):
    """Which rows of a batch differ."""

    rows: Tensor
    """``(U,)``: the first row of each kind."""
    kind_of_row: Tensor
    """``(B,)``: the place of each row's kind among them."""


def different_rows(*columns_BP: Tensor) -> DifferentRows:
    """The different rows of some columns together.

    >>> rows, kind_of_row = different_rows(torch.tensor([[7], [5], [7]]))
    >>> rows.tolist(), kind_of_row.tolist()
    ([0, 1], [0, 1, 0])
    """
    whole_BX = torch.cat(columns_BP, dim=1)
    # By hash: torch.unique sorts the rows with a call for each two that it compares, a tenth of a small model's pass.
    first: dict[bytes, int] = {}
    first_of_row = [first.setdefault(row.tobytes(), number) for number, row in enumerate(whole_BX.cpu().numpy())]
    as_tensor = partial(torch.tensor, dtype=torch.long, device=whole_BX.device)
    rows_U = as_tensor(list(first.values()))  # rising
    return DifferentRows(rows_U, torch.searchsorted(rows_U, as_tensor(first_of_row)))


def shared_prompts(model: PreTrainedModel, prompts: Mapping[str, Tensor], *, width: int) -> DifferentRows | None:
    """The different ones of the prompts that rows of ``width`` tokens begin with; None where not worth sharing.

    That is where it saves little, and where rows cannot share: with activations that are computed again, which excludes
    a cache, and for a model in parts, in whose passes ranks meet.
    """
    num_rows, num_prompt = prompts["input_ids"].shape
    least = max(_LEAST_TOKENS, _LEAST_SHARE * num_rows * width)
    if (num_rows - 1) * num_prompt < least or not _may_share(model):
        return None
    different = different_rows(*prompts.values())
    return different if (num_rows - len(different.rows)) * num_prompt >= least else None


def prefill(
    model: PreTrainedModel, prompts: Mapping[str, Tensor], different: DifferentRows
) -> tuple[Tensor, DynamicCache]:
    """Next-token logits ``(B, V)`` and the cache of all rows; gradients flow through both.

    ``prompts`` are ``input_ids``, ``attention_mask`` and ``position_ids``, ``(B, P)`` each, padded on the left.
    """
    cache = DynamicCache(config=model.config)
    inputs = {name: column_BP[different.rows] for name, column_BP in prompts.items()}
    output = model(
        inputs.pop("input_ids"),
        **inputs,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    cache.batch_select_indices(different.kind_of_row)
    return output.logits[different.kind_of_row, -1], cache


def _may_share(model: PreTrainedModel) -> bool:
    return not isinstance(model, FSDPModule) and not (model.training and computes_again(model))
