"""Whether the columns of a finished step agree with each other: rows, lengths, masks, log-probabilities."""

# B rows, P prompt tokens, T response tokens, L = P + T

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from kapell.protocol import DataProto

__all__ = ["LARGEST_GAP", "disagreements"]

_TOKEN_COLUMNS = (
    *("old_log_probs", "ref_log_prob", "rollout_log_probs", "values", "rm_scores", "entropys"),
    *("token_level_scores", "token_level_rewards", "advantages", "returns"),
)
LARGEST_GAP = {"float32": 1e-3, "bfloat16": 0.2}
"""By how many nats log-probabilities of sampling and training may differ. In float32 it is some units in the last place
of the largest logit (below 1e-5 for small models, about 2e-5 for logits near 46), in bfloat16 some hundredths."""


def disagreements(
    batch: DataProto,
    *,
    num_prompts: int,
    samples_per_prompt: int,
    max_response_length: int,
    largest_gap: float = LARGEST_GAP["float32"],
) -> list[str]:
    """Every disagreement in words, with the columns and the first row where it shows; empty where all agree."""
    columns = {name: batch.column(name) for name in batch.columns if name not in batch.non_tensor_batch}
    found = list(_sizes(batch, columns, num_prompts, samples_per_prompt, max_response_length))
    return found or [*_masks(columns), *_values(columns, largest_gap)]


def _sizes(
    batch: DataProto, columns: Mapping[str, Tensor], num_prompts: int, samples: int, longest: int
) -> Iterator[str]:
    if len(batch) != num_prompts * samples:
        expected = num_prompts * samples
        yield f"the batch has {len(batch)} rows; {num_prompts} prompts with {samples} samples each are {expected}"
    responses_BT = columns["responses"]
    if responses_BT.shape[1] > longest:
        yield f"responses are {responses_BT.shape[1]} tokens long, more than data.max_response_length={longest}"
    for name in ("response_mask", *_TOKEN_COLUMNS):
        if name in columns and columns[name].shape != responses_BT.shape:
            yield f"{name} has shape {_shape(columns[name])}, responses have {_shape(responses_BT)}"
    width = columns["prompts"].shape[1] + responses_BT.shape[1]
    for name in ("input_ids", "attention_mask", "position_ids"):
        if columns[name].shape[-1] != width:
            yield f"{name} is {columns[name].shape[-1]} wide; prompts and responses together are {width}"


def _masks(columns: Mapping[str, Tensor]) -> Iterator[str]:
    mask_BT, prompt_mask_BP = columns["response_mask"], columns["prompt_mask"]
    if (row := _first(mask_BT.sum(-1) == 0)) is not None:
        yield f"row {row}: response_mask is all 0, so the row has no token to learn from"
    whole_BL = torch.cat([prompt_mask_BP, mask_BT], dim=1)
    if (row := _first((columns["attention_mask"] < whole_BL).any(-1))) is not None:
        yield f"row {row}: attention_mask hides tokens that prompt_mask and response_mask count"
    together_BL = torch.cat([columns["prompts"], columns["responses"]], dim=1)
    differs_B = ((columns["input_ids"] != together_BL) & whole_BL.bool()).any(-1)
    if (row := _first(differs_B)) is not None:
        yield f"row {row}: input_ids are not the prompt's tokens followed by the response's"


def _values(columns: Mapping[str, Tensor], largest_gap: float) -> Iterator[str]:
    mask_BT = columns["response_mask"].bool()
    for name in _TOKEN_COLUMNS:
        if name not in columns:
            continue
        if (row := _first((~torch.isfinite(columns[name]) & mask_BT).any(-1))) is not None:
            yield f"row {row}: {name} is not finite at a token of the response"
        if name == "advantages" and (row := _first(((columns[name] != 0) & ~mask_BT).any(-1))) is not None:
            yield f"row {row}: advantages are not 0 where response_mask is 0"
    if {"old_log_probs", "rollout_log_probs"} <= columns.keys():
        gap_BT = torch.where(mask_BT, (columns["old_log_probs"] - columns["rollout_log_probs"]).abs(), 0.0)
        if (row := _first((gap_BT > largest_gap).any(-1))) is not None:
            yield (
                f"row {row}: old_log_probs and rollout_log_probs differ by {gap_BT.max():.3g}; the sampler and the "
                "trained policy are not the same distribution"
            )


def _first(rows_B: Tensor) -> int | None:
    return int(rows_B.nonzero()[0]) if rows_B.any() else None


def _shape(column: Tensor) -> str:
    return " x ".join(map(str, column.shape))
