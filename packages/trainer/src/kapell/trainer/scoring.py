"""Scores a batch of responses and lays each score on the response's last token."""

# B rows, T response tokens

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from kapell.protocol import DataProto

from .algorithms import Metric, on_last_token, response_lengths
from .metrics import add_metrics
from .reward_functions import RewardRows
from .reward_model import RewardModel
from .reward_sum import RewardSum, Scores

__all__ = ["Scorer", "decode_responses"]

EXACT_MATCH = "exact_match"
"""Whether a response is the ground truth, as the reward says (under this name or `acc`) or else as text."""
_NUMBER = (Real, np.bool_)  # numpy's truth values are not among Python's numbers
_ACCURACY = "acc"  # as verl's rewards call it


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """A reward with the tokenizer that turns tokens into its text."""

    reward: RewardSum
    """The reward."""
    tokenizer: PreTrainedTokenizerBase
    """Decodes responses."""
    reward_model: RewardModel | None = None
    """Scores the rows first, where the reward has a term of it."""

    def __call__(self, batch: DataProto) -> DataProto:
        """The batch with ``rm_scores`` ``(B, T)``, ``exact_match``, ``reward_components`` ``(B, K)``, the score of each
        reward, ``solution_str``, and ``reward_extra``, what else the rewards returned for the row.

        Numbers in it are averaged as ``reward/<name>``, or ``reward/<name>_returned`` where scoring has a number of
        that name itself, such as the count ``reward/errors``.
        """
        columns = batch.non_tensor_batch
        solutions = decode_responses(batch, self.tokenizer)
        rows = RewardRows(
            data_sources=columns["data_source"].tolist(),
            solutions=solutions,
            ground_truths=columns["ground_truth"].tolist(),
            extra_infos=columns["extra_info"].tolist(),
            model_scores=None if self.reward_model is None else self.reward_model(batch, solutions),
        )
        result = self.reward(rows)
        matches = _matches(result, rows)
        scored = DataProto.from_dict(
            tensors={
                "rm_scores": on_last_token(torch.tensor(result.scores).float(), batch.column("response_mask")),
                EXACT_MATCH: torch.tensor(matches),
                "reward_components": torch.tensor(list(result.components.values())).T.contiguous(),
            },
            non_tensors={"solution_str": rows.solutions, "reward_extra": _per_row(result, len(rows))},
        )
        return add_metrics(batch.union(scored), _reward_metrics(result, matches))


def decode_responses(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of each response up to its last token, without special tokens.

    Tokens that the mask leaves out on the way, such as what a tool answered, are part of it.
    """
    lengths = response_lengths(batch.column("response_mask")).tolist()
    rows = zip(batch.column("responses").tolist(), lengths, strict=True)
    return tokenizer.batch_decode([row[:length] for row, length in rows], skip_special_tokens=True)


def _per_row(result: Scores, num_rows: int) -> np.ndarray:
    """What the rewards returned beside the score, and their own scores where there are several, as a mapping a row."""
    columns = result.extra if len(result.components) == 1 else {**result.components, **result.extra}
    rows = np.empty(num_rows, dtype=object)
    for row in range(num_rows):
        rows[row] = {name: values[row] for name, values in columns.items()}
    return rows


def _matches(result: Scores, rows: RewardRows) -> list[float]:
    """1 for each row that is right: as the first reward says that says anything, else by comparing the texts."""
    texts = zip(rows.solutions, rows.ground_truths, strict=True)
    matches = [float(solution.strip() == str(truth).strip()) for solution, truth in texts]
    for said in (EXACT_MATCH, _ACCURACY):
        for name, values in result.extra.items():
            if name.rpartition("/")[2] == said:
                told = zip(values, matches, strict=True)
                return [float(value) if isinstance(value, _NUMBER) else match for value, match in told]
    return matches


def _reward_metrics(result: Scores, matches: Sequence[float]) -> Mapping[str, Metric]:
    metrics = {"reward/errors": Metric.sum(sum(result.errors.values()))}
    columns: list[tuple[str, Sequence[Any]]] = [(EXACT_MATCH, matches)]
    columns += [column for column in result.extra.items() if column[0] != EXACT_MATCH]  # which the matches are of
    if len(result.components) > 1:
        columns += result.components.items()
        metrics |= {f"reward/{term}/errors": Metric.sum(count) for term, count in result.errors.items()}
    for name, values in columns:
        key = f"reward/{name}"
        while key in metrics:
            key += "_returned"
        numbers = [float(value) for value in values if isinstance(value, _NUMBER)]
        if numbers:
            metrics[key] = Metric.mean(sum(numbers) / len(numbers), weight=len(numbers))
    return metrics
