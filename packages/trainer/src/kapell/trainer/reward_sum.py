"""Several rewards with weights as one, and what a row without a score does: end the run, or count as a stated value."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from .reward import RewardError
from .reward_functions import Reward, RewardRows, RowScore

__all__ = ["RewardSum", "RewardTerm", "Scores"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardTerm:
    """One of several rewards."""

    name: str
    """Its name in metrics."""
    reward: Reward
    """What scores."""
    weight: float = 1.0
    """What its scores are multiplied by."""


@dataclass(frozen=True)
class Scores:
    """The scores of some rows."""

    scores: list[float]
    """One per row: the weighted sum of the terms."""
    components: dict[str, list[float]] = field(default_factory=dict)
    """The scores of each term by its name, before the weight."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """What else the terms returned, one entry per row; None where there was nothing under that name. With several
    terms the names are ``<term>/<name>``."""
    errors: dict[str, int] = field(default_factory=dict)
    """Rows that count as the fallback, by term."""


@dataclass(frozen=True)
class RewardSum:
    """The weighted sum of rewards. A row that one of them cannot score raises its `RewardError`, or with ``fallback``
    counts as that value, with one warning a batch and a count.
    """

    terms: Sequence[RewardTerm]
    """The rewards; at least one."""
    fallback: float | None = None
    """The score, in its term, of a row that failed. None: the error is raised."""

    def __post_init__(self) -> None:
        names = [term.name for term in self.terms]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"need one or more rewards with different names, got {names}")

    def __call__(self, rows: RewardRows) -> Scores:
        """Score all rows."""
        totals = [0.0] * len(rows)
        components, extra, errors = {}, {}, {}
        for term in self.terms:
            scored, errors[term.name] = self._settle(term, rows)
            components[term.name] = [row.score for row in scored]
            totals = [total + term.weight * row.score for total, row in zip(totals, scored, strict=True)]
            prefix = f"{term.name}/" if len(self.terms) > 1 else ""
            for name in dict.fromkeys(name for row in scored for name in row.extra):
                extra[f"{prefix}{name}"] = [row.extra.get(name) for row in scored]
        return Scores(totals, components, extra, errors)

    def _settle(self, term: RewardTerm, rows: RewardRows) -> tuple[list[RowScore], int]:
        """A score for each row of one term, and how many of them are the fallback."""
        scored: list[RowScore] = []
        failures: list[RewardError] = []
        for outcome in islice(term.reward(rows), len(rows) + 1):
            if isinstance(outcome, RewardError):
                if self.fallback is None:
                    raise outcome
                failures.append(outcome)
                outcome = RowScore(self.fallback)
            scored.append(outcome)
        if len(scored) != len(rows):
            more = "or more " if len(scored) > len(rows) else ""
            raise RewardError(f"reward {term.name!r} gave {len(scored)} {more}scores for {len(rows)} rows")
        if failures:
            _logger.warning(
                "reward %r failed for %d of %d rows, which count as %g; the first: %s",
                term.name,
                len(failures),
                len(rows),
                self.fallback,
                failures[0],
            )
        return scored, len(failures)
