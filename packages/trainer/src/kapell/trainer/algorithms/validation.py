"""Scores of several answers to each sample: pass@k, best@k, worst@k, maj@k."""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from kapell.trainer.algorithms.metrics import Metric, merge_metrics

__all__ = ["best_at_k", "majority_at_k", "pass_at_k", "validation_metrics"]

_NUM_RESAMPLES = 1000  # as verl: the error of a mean of 0/1 values is then below 0.016


def pass_at_k(scores: Sequence[float], k: int) -> float:
    """Expected best of k different answers out of n; for 0/1 scores with c ones it is 1 - C(n-c,k)/C(n,k).

    Unbiased (Chen et al., 2107.03374, eq. 1, here for any scores): sum over sorted x_i of x_i C(i-1,k-1)/C(n,k).

    >>> round(pass_at_k([1, 1, 0, 0, 0, 0, 0, 0], k=2), 6)
    0.464286
    """
    num = len(scores)
    if not 1 <= k <= num:
        raise ValueError(f"pass@{k} needs k between 1 and the number of answers, which is {num}")
    return sum(score * math.comb(i, k - 1) for i, score in enumerate(sorted(scores))) / math.comb(num, k)


def best_at_k(scores: Sequence[float], k: int) -> tuple[float, float]:
    """Mean and standard deviation of the best of k answers drawn with replacement.

    verl names this best@k and draws 1000 times; this is the limit of that, sum x_i ((i/n)^k - ((i-1)/n)^k).
    It is below pass@k, since the same answer may be drawn twice.

    >>> best_at_k([1, 1, 0, 0, 0, 0, 0, 0], k=2)[0]
    0.4375
    """
    num = len(scores)
    if num == 0 or k < 1:
        raise ValueError(f"best@{k} of {num} answers is not defined")
    chances = [((i + 1) / num) ** k - (i / num) ** k for i in range(num)]
    ordered = sorted(scores)
    least = ordered[0]  # as the origin, it makes the best of equal scores exactly that score
    mean = least + math.fsum(chance * (score - least) for chance, score in zip(chances, ordered, strict=True))
    square = math.fsum(chance * (score - mean) ** 2 for chance, score in zip(chances, ordered, strict=True))
    return mean, math.sqrt(square)


def majority_at_k(
    scores: Sequence[float], predictions: Sequence[Hashable], k: int, *, seed: int = 42
) -> tuple[float, float]:
    """Mean and deviation of the score of the most frequent of k predictions drawn with replacement, 1000 draws.

    A tie goes to the one drawn first; its score is that of its first drawn answer.
    """
    if len(scores) != len(predictions) or not scores:
        raise ValueError(f"{len(predictions)} predictions for {len(scores)} scores")
    numbers: dict[Hashable, int] = {}
    classes = np.array([numbers.setdefault(prediction, len(numbers)) for prediction in predictions])
    drawn = _draws(len(scores), k, seed)  # (draws, k)
    votes = classes[drawn]
    frequency = (votes[:, :, None] == votes[:, None, :]).sum(-1)
    winner = frequency.argmax(-1)  # the first of the largest, so a tie goes to the one drawn first
    values = np.asarray(scores, dtype=float)[drawn[np.arange(len(drawn)), winner]]
    return float(values.mean()), float(values.std())


@lru_cache(maxsize=64)
def _draws(num: int, k: int, seed: int) -> np.ndarray:
    """Which of num answers are drawn, ``(draws, k)``; the same for every sample with as many."""
    return np.random.default_rng(seed).integers(num, size=(_NUM_RESAMPLES, k))


def validation_metrics(
    data_sources: Sequence[str],
    uids: Sequence[Hashable],
    variables: Mapping[str, Sequence[Any]],
    *,
    predictions: Sequence[Hashable] | None = None,
    seed: int = 42,
) -> dict[str, Metric]:
    """Metrics `source/variable/name`, each a mean over samples; a sample is one id within one data source.

    For n answers: mean@n, and if n > 1 std@n and for k = 2, 4, ... and n: pass@k (unbiased), best@k/mean, best@k/std,
    worst@k/mean, worst@k/std, and with predictions maj@k/mean, maj@k/std. A value of None is left out, 0.0 is not;
    variables that hold text are skipped. A sample of which a value is NaN or infinite has NaN for its numbers.
    """
    samples: defaultdict[tuple[str, Hashable], list[int]] = defaultdict(list)
    for row, sample in enumerate(zip(data_sources, uids, strict=True)):
        samples[sample].append(row)
    parts = []
    for (source, _), rows in samples.items():
        for variable, column in variables.items():
            answered = [row for row in rows if column[row] is not None]
            if not answered or isinstance(column[answered[0]], str):
                continue
            votes = None if predictions is None else [predictions[row] for row in answered]
            numbers = _of_one_sample([float(column[row]) for row in answered], votes, seed)
            parts.append(
                {f"{source}/{variable}/{name}": Metric.mean(number, weight=1) for name, number in numbers.items()}
            )
    return merge_metrics(parts)


def _of_one_sample(scores: list[float], votes: list[Hashable] | None, seed: int) -> dict[str, float]:
    num = len(scores)
    defined = all(map(math.isfinite, scores))
    scores = scores if defined else [math.nan] * num
    numbers = {f"mean@{num}": fmean(scores)}
    if num == 1:
        return numbers
    numbers[f"std@{num}"] = pstdev(scores) if defined else math.nan  # it raises AttributeError for NaN
    powers = [2**exponent for exponent in range(1, num.bit_length()) if 2**exponent < num]
    for k in [*powers, num]:
        numbers[f"pass@{k}"] = pass_at_k(scores, k)
        numbers[f"best@{k}/mean"], numbers[f"best@{k}/std"] = best_at_k(scores, k)
        worst, numbers[f"worst@{k}/std"] = best_at_k([-score for score in scores], k)
        numbers[f"worst@{k}/mean"] = 0.0 - worst  # no negative zero
        if votes is not None and all(vote is not None for vote in votes):
            numbers[f"maj@{k}/mean"], numbers[f"maj@{k}/std"] = majority_at_k(scores, votes, k, seed=seed)
    return numbers
