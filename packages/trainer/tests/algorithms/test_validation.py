import math
from itertools import combinations, product
from statistics import fmean

import pytest

from kapell.trainer.algorithms import best_at_k, majority_at_k, metric_values, pass_at_k, validation_metrics

TWO_OF_EIGHT = [1, 0, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(("k", "expected"), [(1, 0.25), (2, 0.464286), (4, 0.785714), (8, 1)])
def test_pass_at_k_matches_the_worked_numbers(k, expected):
    assert pass_at_k(TWO_OF_EIGHT, k) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("scores", [TWO_OF_EIGHT, [0.3, 0.1, 0.7, 0.7, -1.0]])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_mean_over_all_choices(scores, k):
    assert pass_at_k(scores, k) == pytest.approx(fmean(max(chosen) for chosen in combinations(scores, k)))


@pytest.mark.parametrize("k", [0, 9])
def test_pass_at_k_of_too_many_answers_is_refused(k):
    with pytest.raises(ValueError, match="number of answers, which is 8"):
        pass_at_k(TWO_OF_EIGHT, k)


@pytest.mark.parametrize(("k", "expected"), [(2, 0.4375), (4, 0.683594), (8, 0.899887)])
def test_best_at_k_is_the_limit_of_drawing_with_replacement(k, expected):
    assert best_at_k(TWO_OF_EIGHT, k)[0] == pytest.approx(expected, abs=1e-6)


def test_best_at_k_is_the_mean_and_spread_over_all_draws():
    scores = [0.3, 0.1, 0.7]
    best = [max(drawn) for drawn in product(scores, repeat=2)]
    mean, spread = best_at_k(scores, 2)
    assert mean == pytest.approx(fmean(best))
    assert spread == pytest.approx(fmean((b - fmean(best)) ** 2 for b in best) ** 0.5)


def test_majority_vote_of_one_draw_is_the_mean():
    mean, _ = majority_at_k([1, 0, 0, 0], ["a", "b", "b", "c"], 1)
    assert mean == pytest.approx(0.25, abs=0.05)
    assert majority_at_k([1, 1], ["a", "a"], 2) == (1, 0)


def test_majority_vote_is_repeatable():
    arguments = ([1, 0, 0, 1], ["a", "b", "b", "a"], 3)
    assert majority_at_k(*arguments) == majority_at_k(*arguments)


def test_samples_are_told_by_id_and_not_by_their_text():
    values = metric_values(validation_metrics(["m"] * 4, [1, 1, 2, 2], {"score": [1, 0, 0, 0]}))
    assert values["m/score/pass@2"] == 0.5
    assert values["m/score/mean@2"] == 0.25
    one_group = metric_values(validation_metrics(["m"] * 4, [1, 1, 1, 1], {"score": [1, 0, 0, 0]}))
    assert one_group["m/score/pass@4"] == 1.0


def test_equal_ids_of_two_data_sources_are_two_samples():
    values = metric_values(validation_metrics(["x", "x", "y", "y"], [1, 1, 1, 1], {"score": [1, 1, 0, 0]}))
    assert values["x/score/mean@2"] == 1
    assert values["y/score/mean@2"] == 0


def test_names_are_those_of_verl_and_pass_at_k_beside_them():
    values = metric_values(
        validation_metrics(["m"] * 8, ["q"] * 8, {"acc": TWO_OF_EIGHT}, predictions=list("abbacdef"))
    )
    expected = {"mean@8", "std@8"}
    for k in (2, 4, 8):
        expected |= {f"pass@{k}"} | {
            f"{what}@{k}/{stat}" for what in ("best", "worst", "maj") for stat in ("mean", "std")
        }
    assert set(values) == {f"m/acc/{name}" for name in expected}
    assert values["m/acc/worst@2/mean"] == pytest.approx(1 / 16)


def test_one_answer_has_a_mean_only():
    assert metric_values(validation_metrics(["m"], [7], {"score": [0.0]})) == {"m/score/mean@1": 0.0}


def test_a_score_of_zero_counts_and_a_missing_one_does_not():
    for zero in (0.0, 0, False):
        values = metric_values(validation_metrics(["m"] * 3, [1, 1, 1], {"score": [zero, 1.0, None]}))
        assert values["m/score/mean@2"] == 0.5


def test_the_best_of_equal_scores_is_that_score():
    for num, score in product(range(1, 9), [0.1, 1.0, 4.0, -0.3]):
        assert best_at_k([score] * num, k=num) == (score, 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_seen_and_stops_nothing(value):
    metrics = metric_values(validation_metrics(["a"] * 4, ["1", "1", "2", "2"], {"x": [1.0, value, 1.0, 1.0]}))
    assert all(math.isnan(number) for number in metrics.values())
    alone = metric_values(validation_metrics(["a", "b"], ["1", "2"], {"x": [value, 1.0]}))
    assert math.isnan(alone["a/x/mean@1"])
    assert alone["b/x/mean@1"] == 1.0


def test_text_is_not_averaged():
    assert validation_metrics(["m"], [1], {"pred": ["42"]}) == {}


def test_no_samples_give_no_metrics():
    assert validation_metrics([], [], {"score": []}) == {}


def test_columns_of_different_length_are_an_error():
    with pytest.raises(ValueError, match="zip"):
        validation_metrics(["m"], [1, 2], {"score": [0, 1]})
