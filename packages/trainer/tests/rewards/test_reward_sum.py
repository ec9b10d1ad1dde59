import pytest

from kapell.trainer.config import RewardConfig
from kapell.trainer.reward import RewardError
from kapell.trainer.reward_functions import FunctionReward, RewardRows, RowScore, ThreadedReward
from kapell.trainer.reward_sum import RewardSum, RewardTerm
from kapell.trainer.reward_terms import RemoteTerm, build_reward


def rows_of(*solutions):
    count = len(solutions)
    return RewardRows(
        data_sources=["reverse_digits"] * count,
        solutions=list(solutions),
        ground_truths=["4321"] * count,
        extra_infos=[{}] * count,
    )


def term(name, function, weight=1.0):
    return RewardTerm(name, FunctionReward(function=function), weight)


def test_the_total_is_the_weighted_sum_and_each_part_is_kept():
    reward = RewardSum(
        [
            term("right", lambda source, solution, *_: {"score": float(solution == "yes"), "length": len(solution)}),
            term("short", lambda source, solution, *_: -len(solution), weight=0.1),
        ]
    )
    scores = reward(rows_of("yes", "maybe"))
    assert scores.scores == pytest.approx([1.0 - 0.3, -0.5])
    assert scores.components == {"right": [1.0, 0.0], "short": [-3.0, -5.0]}
    assert scores.extra == {"right/length": [3, 5]}
    assert scores.errors == {"right": 0, "short": 0}


def test_a_weight_of_zero_only_watches():
    scores = RewardSum([term("a", lambda *_: 1.0), term("b", lambda *_: 5.0, weight=0.0)])(rows_of("x"))
    assert scores.scores == [1.0]
    assert scores.components["b"] == [5.0]


def test_extra_names_of_some_rows_only_are_filled_with_none():
    def function(source, solution, *_):
        return {"score": 0, "format": 0.0} if solution == "a" else {"score": 1, "note": ""}

    scores = RewardSum([term("task", function)])(rows_of("a", "b"))
    assert scores.extra == {"format": [0.0, None], "note": [None, ""]}


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_another_number_of_scores_than_rows_is_an_error(count):
    reward = RewardSum([RewardTerm("odd", lambda rows: iter([RowScore(1.0)] * count))])
    with pytest.raises(RewardError, match=r"reward 'odd' gave \d (or more )?scores for 2 rows"):
        reward(rows_of("a", "b"))


def test_names_must_differ():
    with pytest.raises(ValueError, match="different names"):
        RewardSum([term("a", lambda *_: 1), term("a", lambda *_: 1)])
    with pytest.raises(ValueError, match="one or more"):
        RewardSum([])


def test_terms_are_built_from_the_configuration(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("async def brevity(data_source, solution_str, ground_truth, extra_info): return -len(solution_str)")
    config = RewardConfig(
        terms={
            "digits": {"type": "function"},
            "brevity": {"type": "function", "path": str(file), "name": "brevity", "weight": 1},
            "tests": {"type": "sandbox", "seconds": 2, "weight": 0.5},
            "judge": {"type": "remote", "url": "http://127.0.0.1:1/score", "batch_size": 8},
        }
    )
    reward = build_reward(config, ["reverse_digits"])
    assert [(part.name, part.weight) for part in reward.terms] == [
        ("digits", 1.0),
        ("brevity", 1.0),
        ("tests", 0.5),
        ("judge", 1.0),
    ]
    assert isinstance(reward.terms[2].reward, ThreadedReward)
    assert reward.terms[3].reward == RemoteTerm(url="http://127.0.0.1:1/score", batch_size=8)
    assert RewardSum(reward.terms[:2])(rows_of("4321")).scores == [-3.0]


def test_without_terms_the_custom_function_or_the_bundled_one_scores(tmp_path):
    assert build_reward(RewardConfig(), ["reverse_digits"])(rows_of("4399")).scores == [0.5]


def test_the_fallback_follows_the_configuration():
    assert build_reward(RewardConfig(fallback_score=-1.0), ["reverse_digits"]).fallback is None
    assert build_reward(RewardConfig(on_error="fallback"), ["reverse_digits"]).fallback == 0.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weight": 1}, r"reward\.terms\.a needs a type \(function, sandbox, remote\)"),
        (3, r"reward\.terms\.a needs a type"),
        ({"type": "sandbx"}, r"reward\.terms\.a\.type: unknown 'sandbx'; did you mean 'sandbox'"),
        ({"type": "sandbox", "second": 3}, r"reward\.terms\.a: unknown 'second'; did you mean 'seconds'"),
        ({"type": "sandbox", "seconds": "3"}, r"reward\.terms\.a\.seconds: expected float, got '3'"),
        ({"type": "sandbox", "concurrency": True}, r"reward\.terms\.a\.concurrency: expected int, got True"),
        ({"type": "sandbox", "seconds": -1}, r"reward\.terms\.a: seconds must be above 0"),
        ({"type": "sandbox", "memory_mb": 1}, r"reward\.terms\.a: memory must be at least"),
        ({"type": "remote"}, r"reward\.terms\.a: .*url"),
        ({"type": "remote", "url": "localhost"}, r"reward\.terms\.a: url must start with http"),
        ({"type": "sandbox", "concurrency": 0}, r"reward\.terms\.a: concurrency must be above 0"),
        ({"type": "function", "weight": "1"}, r"reward\.terms\.a\.weight: expected float"),
        ({"type": "function", "weight": float("nan")}, r"reward\.terms\.a\.weight: expected float, got nan"),
    ],
)
def test_a_wrong_term_is_refused_with_its_key(values, message):
    with pytest.raises(ValueError, match=message):
        build_reward(RewardConfig(terms={"a": values}), ["reverse_digits"])


def test_terms_and_a_custom_function_exclude_each_other():
    from kapell.trainer.config import CustomRewardConfig

    with pytest.raises(ValueError, match="terms and custom_reward_function are both given"):
        RewardConfig(terms={"a": {"type": "function"}}, custom_reward_function=CustomRewardConfig(path="x.py"))
