import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kapell.trainer.algorithms import Metric, merge_metrics, metric_values


def test_means_of_ranks_are_weighted():
    assert (Metric.mean(0.8, weight=100) + Metric.mean(0.6, weight=200)).value == pytest.approx(0.6667, abs=1e-4)


def test_a_part_that_counted_nothing_is_ignored_even_if_it_is_nan():
    for parts in ((Metric.mean(math.nan, weight=0), Metric.mean(2, weight=3)),):
        assert (parts[0] + parts[1]).value == 2
        assert (parts[1] + parts[0]).value == 2


def test_a_metric_without_any_count_is_nan_and_not_logged():
    nothing = Metric.mean(0, weight=0)
    assert math.isnan(nothing.value)
    assert metric_values({"empty": nothing, "zero": Metric.sum(0)}) == {"zero": 0}


@pytest.mark.parametrize(("make", "expected"), [(Metric.sum, 6), (Metric.max, 3), (Metric.min, 1)])
def test_each_reduction(make, expected):
    assert (make(1) + make(3) + make(2)).value == expected


def test_merging_takes_metrics_that_only_some_parts_have():
    merged = merge_metrics([{"a": Metric.sum(1)}, {"a": Metric.sum(2), "b": Metric.max(5)}, {}])
    assert metric_values(merged) == {"a": 3, "b": 5}


def test_mixed_reductions_are_an_error_with_the_name():
    with pytest.raises(ValueError, match="metric 'loss': cannot join a mean with a sum"):
        merge_metrics([{"loss": Metric.mean(1, weight=1)}, {"loss": Metric.sum(1)}])


def test_negative_weights_are_refused():
    with pytest.raises(ValueError, match="negative, got -1"):
        Metric.mean(1, weight=-1)


def test_metrics_travel_between_processes():
    metric = Metric.mean(0.8, weight=100)
    assert pickle.loads(pickle.dumps(metric)) == metric


@given(
    st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(0, 50)), min_size=1, max_size=20),
    st.integers(1, 5),
)
def test_any_grouping_of_parts_gives_the_mean_of_the_whole(parts, size):
    metrics = [{"m": Metric.mean(value, weight=weight)} for value, weight in parts]
    groups = [merge_metrics(metrics[i : i + size]) for i in range(0, len(metrics), size)]
    total = sum(weight for _, weight in parts)
    merged = merge_metrics(groups)["m"]
    if total:
        assert merged.value == pytest.approx(sum(v * w for v, w in parts) / total, abs=1e-6)
    else:
        assert math.isnan(merged.value)
