"""Scores a batch of responses with a reward function and lays each score on the response's last token."""

# B rows, T response tokens

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from kapell.protocol import DataProto

from .algorithms import Metric
from .metrics import add_metrics
from .reward import RewardFunction, Scores, score_responses

__all__ = ["Scorer", "decode_responses"]

EXACT_MATCH = "exact_match"
"""Whether a response is the ground truth, as the reward function says or else as text."""


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """A reward function with the tokenizer that turns tokens into its text."""

    function: RewardFunction
    """The reward function."""
    tokenizer: PreTrainedTokenizerBase
    """Decodes responses."""
    timeout: float | None = None
    """Seconds that one response may take."""
    on_error: Literal["raise", "zero"] = "raise"
    """What a failure does."""

    def __call__(self, batch: DataProto) -> DataProto:
        """The batch with ``rm_scores`` ``(B, T)``, ``solution_str`` and ``exact_match``.

        Numbers that the function returns beside the score are averaged as ``reward/<name>``.
        """
        solutions = decode_responses(batch, self.tokenizer)
        columns = batch.non_tensor_batch
        result = score_responses(
            self.function,
            data_sources=columns["data_source"].tolist(),
            solutions=solutions,
            ground_truths=columns["ground_truth"].tolist(),
            extra_infos=columns["extra_info"].tolist(),
            timeout=self.timeout,
            on_error=self.on_error,
        )
        matches = result.extra.get(EXACT_MATCH) or [
            solution.strip() == str(truth).strip()
            for solution, truth in zip(solutions, columns["ground_truth"], strict=True)
        ]
        scored = DataProto.from_dict(
            tensors={
                "rm_scores": _on_last_token(result.scores, batch.column("response_mask")),
                EXACT_MATCH: torch.tensor([float(match or 0.0) for match in matches]),
            },
            non_tensors={"solution_str": solutions},
        )
        return add_metrics(batch.union(scored), _reward_metrics(result, matches))


def decode_responses(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of each response, without special tokens."""
    lengths = batch.column("response_mask").sum(-1).tolist()
    rows = zip(batch.column("responses").tolist(), lengths, strict=True)
    return tokenizer.batch_decode([row[:length] for row, length in rows], skip_special_tokens=True)


def _on_last_token(scores: Sequence[float], mask_BT: torch.Tensor) -> torch.Tensor:
    scores_BT = torch.zeros(mask_BT.shape)
    lengths_B = mask_BT.sum(-1)
    if (lengths_B == 0).any():
        row = int((lengths_B == 0).nonzero()[0])
        raise ValueError(f"row {row} has an empty response, so its score has no token to lie on")
    scores_BT[torch.arange(len(scores)), lengths_B - 1] = torch.tensor(scores)
    return scores_BT


def _reward_metrics(result: Scores, matches: Sequence[Any]) -> Mapping[str, Metric]:
    metrics = {"reward/errors": Metric.sum(result.num_errors)}
    for name, values in {**result.extra, EXACT_MATCH: matches}.items():
        numbers = [float(value) for value in values if isinstance(value, Real)]
        if numbers:
            metrics[f"reward/{name}"] = Metric.mean(sum(numbers) / len(numbers), weight=len(numbers))
    return metrics
