"""Samples responses with a KV cache, each from a random stream of its own, so that batching never changes a sample."""

# B rows (prompts times samples), P padded prompt tokens, T response tokens, V vocabulary

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from .algorithms import log_probs_from_logits, position_ids
from .algorithms.masked import widen
from .prefill import different_rows, prefill
from .stop_strings import StopStrings

__all__ = ["Rollout", "Sampling", "filter_logits", "sample", "sample_streams"]

_COMPACT_BELOW = 0.75  # share of running rows at which leaving the others out is worth copying the cache


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 1.0
    """Divides the logits."""
    top_k: int = -1
    """Only the k most probable tokens; -1 for all."""
    top_p: float = 1.0
    """Only the most probable tokens that together reach this probability."""
    do_sample: bool = True
    """Draw; otherwise take the most probable token."""
    stop: tuple[str, ...] = ()
    """Texts that end a response; the tokens of the text are part of it."""


@dataclass(frozen=True)
class Rollout:
    """Sampled responses."""

    responses: Tensor
    """``(B, T)`` token ids, padded on the right."""
    response_mask: Tensor
    """``(B, T)``: 1 for each sampled token, the first end-of-sequence token or those of a stop string included."""
    rollout_log_probs: Tensor
    """``(B, T)``: log-probability of each sampled token at the sampling temperature, before top-k and top-p; 0
    for padding. In float32, or float64 for a model in that."""


def sample_streams(seed: int, step: int, sample_ids: Sequence[int], length: int) -> Tensor:
    """Uniform numbers in [0, 1), ``(B, length)`` float64, that depend on seed, step and the sample's id only.

    >>> both, second = sample_streams(1, 0, [3, 4], 2), sample_streams(1, 0, [4], 2)
    >>> torch.equal(both[1:], second)
    True
    """
    streams = np.empty((len(sample_ids), length))
    bits = np.random.Philox(key=np.array([seed, step], dtype=np.uint64), counter=0)
    generator, state = np.random.Generator(bits), bits.state
    for row, sample_id in enumerate(sample_ids):
        state["state"]["counter"][3] = sample_id  # the low words count the numbers drawn
        bits.state = state  # a new generator for each row takes four times as long
        generator.random(out=streams[row])
    return torch.from_numpy(streams)


def filter_logits(logits_BV: Tensor, *, top_k: int = -1, top_p: float = 1.0) -> Tensor:
    """The logits with -inf for every token outside the top k and the smallest set of probability ``top_p``.

    >>> filter_logits(torch.tensor([[0.5, 0.3, 0.2]]).log(), top_p=0.6).isinf().tolist()
    [[False, False, True]]
    """
    if 0 < top_k < logits_BV.shape[-1]:
        threshold_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < threshold_B1, -torch.inf)
    if top_p < 1.0:
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
        before_BV = sorted_BV.softmax(-1).cumsum(-1) - sorted_BV.softmax(-1)
        dropped_BV = torch.zeros_like(order_BV, dtype=torch.bool).scatter(-1, order_BV, before_BV >= top_p)
        logits_BV = logits_BV.masked_fill(dropped_BV, -torch.inf)
    return logits_BV


def _choose(logits_BV: Tensor, sampling: Sampling, uniforms_B: Tensor) -> Tensor:
    if not sampling.do_sample:
        return logits_BV.argmax(-1)
    scaled_BV = widen(logits_BV) / sampling.temperature  # as for the log-probabilities, before half precision rounds
    kept_BV = filter_logits(scaled_BV, top_k=sampling.top_k, top_p=sampling.top_p)
    # Inverse of the distribution function, in float64: one number per token decides, in vocabulary order.
    cumulative_BV = kept_BV.double().softmax(-1).cumsum(-1)
    targets_B1 = uniforms_B[:, None].to(cumulative_BV) * cumulative_BV[:, -1:]
    return torch.searchsorted(cumulative_BV, targets_B1, right=True).squeeze(-1).clamp(max=logits_BV.shape[-1] - 1)


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    input_ids_BP: Tensor,
    attention_mask_BP: Tensor,
    *,
    sampling: Sampling,
    uniforms_BT: Tensor,
    eos_token_ids: Collection[int],
    pad_token_id: int,
    stop_strings: StopStrings | None = None,
) -> Rollout:
    """Continue each left-padded prompt until an end-of-sequence token, a stop string or the width of ``uniforms_BT``.

    Rows with the same prompt share its prefill; rows that have ended leave the model's batch.
    """
    num_rows, length = uniforms_BT.shape
    device = input_ids_BP.device
    uniforms_BT = uniforms_BT.to(device)
    responses_BT = torch.full((num_rows, length), pad_token_id, dtype=torch.long, device=device)
    mask_BT = torch.zeros_like(responses_BT)
    log_probs_BT = torch.zeros((num_rows, length), dtype=torch.promote_types(model.dtype, torch.float32), device=device)
    if not num_rows:
        return Rollout(responses_BT, mask_BT, log_probs_BT)
    eos = torch.tensor(sorted(eos_token_ids), device=device)
    start = int(attention_mask_BP.any(0).int().argmax())  # columns before it are padding in all rows
    ids_BP, mask_BP = input_ids_BP[:, start:], attention_mask_BP[:, start:]
    prompts = {"input_ids": ids_BP, "attention_mask": mask_BP, "position_ids": position_ids(mask_BP)}
    logits_RV, cache = prefill(model, prompts, different_rows(ids_BP, mask_BP))
    attention_RL = torch.cat([mask_BP, torch.ones_like(responses_BT)], dim=1)
    next_position_R = attention_mask_BP.sum(-1)
    prompt_length = input_ids_BP.shape[1] - start
    rows_R = torch.arange(num_rows, device=device)  # R: the rows that are still in the model's batch
    running_R = torch.ones(num_rows, dtype=torch.bool, device=device)
    for t in range(length):
        tokens_R = _choose(logits_RV, sampling, uniforms_BT[rows_R, t])
        chosen_R = log_probs_from_logits(logits_RV[:, None], tokens_R[:, None], temperature=sampling.temperature)[:, 0]
        responses_BT[rows_R, t] = torch.where(running_R, tokens_R, pad_token_id)
        log_probs_BT[rows_R, t] = torch.where(running_R, chosen_R, 0.0)
        mask_BT[rows_R, t] = running_R.long()
        running_R = running_R & ~torch.isin(tokens_R, eos)
        if stop_strings is not None:
            running_R[running_R.clone()] = ~stop_strings.found(responses_BT[rows_R[running_R], : t + 1])
        num_running = int(running_R.sum())
        if t + 1 == length or not num_running:
            break
        if num_running <= _COMPACT_BELOW * len(rows_R):
            cache.batch_select_indices(running_R.nonzero()[:, 0])
            rows_R, attention_RL, next_position_R = (x[running_R] for x in (rows_R, attention_RL, next_position_R))
            running_R = running_R[running_R]
        output = model(
            responses_BT[rows_R, t : t + 1],
            attention_mask=attention_RL[:, : prompt_length + t + 1],
            position_ids=(next_position_R + t)[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        logits_RV = output.logits[:, -1]
    return Rollout(responses_BT, mask_BT, log_probs_BT)
