"""Forward passes over the tokens of responses."""

# B rows, T response tokens, L = prompt and response tokens, V vocabulary

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .algorithms import entropy_from_logits, log_probs_from_logits, sum_pi_squared_from_logits
from .prefill import prefill, shared_prompts

__all__ = ["MODEL_COLUMNS", "Columns", "PolicyOutput", "policy_forward", "value_forward"]

Columns = Mapping[str, Tensor]
"""Columns of a batch by name, all with the same number of rows."""

MODEL_COLUMNS = ("input_ids", "attention_mask", "position_ids", "responses")
"""What a forward pass reads: three of shape ``(B, L)``, and the responses ``(B, T)`` at their end."""


class PolicyOutput(NamedTuple):
    """What a forward pass says of each response token, ``(B, T)`` each."""

    log_probs: Tensor
    """Log-probability of the token."""
    entropy: Tensor | None
    """Entropy of the distribution that it was drawn from."""
    sum_pi_squared: Tensor | None
    """Sum of that distribution's squared probabilities."""


def policy_forward(
    model: PreTrainedModel,
    columns: Columns,
    *,
    temperature: float,
    with_entropy: bool = False,
    entropy_gradient: bool = True,
    with_sum_pi_squared: bool = False,
) -> PolicyOutput:
    """Log-probabilities of the response tokens and, if asked for, what else their distributions say.

    Where it saves enough, a prompt that several rows begin with is computed once (`shared_prompts`).

    Without ``entropy_gradient`` the entropy is only a number to report, and the pass needs less of time and memory: for
    its gradient, several tensors of the logits' size are kept.
    """
    responses_BT = columns["responses"]
    logits_BTV = _response_logits(model, columns)
    shown_BTV = logits_BTV if entropy_gradient else logits_BTV.detach()
    return PolicyOutput(
        log_probs=log_probs_from_logits(logits_BTV, responses_BT, temperature=temperature),
        entropy=entropy_from_logits(shown_BTV, temperature=temperature) if with_entropy else None,
        sum_pi_squared=sum_pi_squared_from_logits(logits_BTV, temperature=temperature) if with_sum_pi_squared else None,
    )


def _response_logits(model: PreTrainedModel, columns: Columns) -> Tensor:
    """The logits that predict each response token, ``(B, T, V)``."""
    whole = {name: columns[name] for name in ("input_ids", "attention_mask", "position_ids")}
    width, num_tokens = whole["input_ids"].shape[1], columns["responses"].shape[1]
    prompts = {name: column_BL[:, : width - num_tokens] for name, column_BL in whole.items()}
    different = shared_prompts(model, prompts, width=width)
    if different is None:
        output = model(**whole, logits_to_keep=num_tokens + 1, use_cache=False)
        return output.logits[:, :-1]  # the logits at a token predict the next one
    first_BV, cache = prefill(model, prompts, different)
    if num_tokens == 1:
        return first_BV[:, None]
    output = model(
        whole["input_ids"][:, -num_tokens:-1],
        attention_mask=whole["attention_mask"][:, :-1],
        position_ids=whole["position_ids"][:, -num_tokens:-1],
        past_key_values=cache,
        use_cache=True,
    )
    return torch.cat([first_BV[:, None], output.logits], dim=1)


def value_forward(model: PreTrainedModel, columns: Columns) -> Tensor:
    """The value before each response token, ``(B, T)``."""
    num_tokens = columns["responses"].shape[1]
    output = model(
        columns["input_ids"],
        attention_mask=columns["attention_mask"],
        position_ids=columns["position_ids"],
        use_cache=False,
    )
    return output.logits[:, -num_tokens - 1 : -1, 0].float()
