"""What samples responses: the interface of rollout engines, and the built-in one on a model in this process."""

# B rows (prompts times samples), P padded prompt tokens, T response tokens, L = P + T

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kapell.protocol import DataProto

from .algorithms import position_ids
from .devices import moved
from .sampler import Rollout, Sampling, sample, sample_streams
from .stop_strings import StopStrings

__all__ = ["ROLLOUT_COLUMNS", "RolloutEngine", "RolloutRequest", "SamplerEngine", "rollout_columns"]

ROLLOUT_COLUMNS = (
    "responses",
    "response_mask",
    "rollout_log_probs",
    "input_ids",
    "attention_mask",
    "position_ids",
    "policy_version",
)
"""What `rollout_columns` makes: the columns that a worker writes when it samples."""


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """Prompts to be continued."""

    prompts: Tensor
    """``(B, P)`` token ids, padded on the left."""
    prompt_mask: Tensor
    """``(B, P)``: 1 for each token of a prompt."""
    sample_ids: Sequence[int]
    """One per row. With seed and step they choose a row's random numbers, whatever else is in the batch."""
    sampling: Sampling
    """How tokens are chosen."""
    max_new_tokens: int
    """Longest response T."""
    seed: int
    """The run's seed."""
    step: int
    """The step."""


class RolloutEngine(Protocol):
    """Samples responses."""

    def generate(self, request: RolloutRequest) -> Rollout:
        """A response of at most ``max_new_tokens`` for each row, in order."""
        ...


@dataclass(frozen=True)
class SamplerEngine:
    """The built-in engine: `kapell.trainer.sampler` on a model in this process."""

    model: PreTrainedModel
    """The policy; its current weights are used."""
    eos_token_ids: Collection[int]
    """Tokens that end a response."""
    pad_token_id: int
    """Fills what follows."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """Reads the text in which stop strings are looked for; not needed without any."""
    max_num_seqs: int | None = None
    """Most rows in the model's batch and its KV cache; None for all."""

    def generate(self, request: RolloutRequest) -> Rollout:
        """A response for each row, where the prompts are, wherever the model is."""
        stop = request.sampling.stop
        if stop and self.tokenizer is None:
            raise ValueError(f"stop strings {list(stop)} need a tokenizer; give the engine one")
        num_rows = len(request.prompts)
        order_B = torch.arange(num_rows)
        if self.max_num_seqs is not None and num_rows > self.max_num_seqs:
            # Rows with prompts of like lengths go together, which saves padding; samples of one prompt stay neighbours.
            order_B = request.prompt_mask.sum(-1).argsort(stable=True).cpu()
        parts = [self._sample(request, rows) for rows in order_B.split(self.max_num_seqs or max(1, num_rows))]
        place_B = order_B.argsort()
        return Rollout(
            responses=torch.cat([part.responses for part in parts])[place_B],
            response_mask=torch.cat([part.response_mask for part in parts])[place_B],
            rollout_log_probs=torch.cat([part.rollout_log_probs for part in parts])[place_B],
        )

    def _sample(self, request: RolloutRequest, rows: Tensor) -> Rollout:
        stop, ids = request.sampling.stop, [request.sample_ids[row] for row in rows.tolist()]
        device = self.model.device
        rollout = sample(
            self.model,
            request.prompts[rows].to(device),
            request.prompt_mask[rows].to(device),
            sampling=request.sampling,
            uniforms_BT=sample_streams(request.seed, request.step, ids, request.max_new_tokens),
            eos_token_ids=self.eos_token_ids,
            pad_token_id=self.pad_token_id,
            stop_strings=StopStrings(stop, self.tokenizer) if stop and self.tokenizer else None,
        )
        return Rollout(**moved(vars(rollout), request.prompts.device))


def rollout_columns(request: RolloutRequest, rollout: Rollout, *, policy_version: int) -> DataProto:
    """The columns that a rollout adds to its batch, those of the model's next forward pass included."""
    attention_mask_BL = torch.cat([request.prompt_mask, rollout.response_mask], dim=1)
    return DataProto.from_dict(
        tensors={
            "responses": rollout.responses,
            "response_mask": rollout.response_mask,
            "rollout_log_probs": rollout.rollout_log_probs,
            "input_ids": torch.cat([request.prompts, rollout.responses], dim=1),
            "attention_mask": attention_mask_BL,
            "position_ids": position_ids(attention_mask_BL),
            "policy_version": torch.full((len(request.prompts),), policy_version),
        }
    )
