import json
import sys

import pytest

from kapell.trainer.code_reward import CallTests, CodeReward, ProgramTests, extract_code, parse_tests
from kapell.trainer.reward import RewardError
from kapell.trainer.sandbox import SandboxLimits, run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can confine a process without privileges")

REWARD = CodeReward(limits=SandboxLimits(seconds=2.0))

ADD_TESTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(-1, 1) == 0"]


def score(response, tests):
    return REWARD("code", response, tests, {})


def test_the_score_is_the_share_of_tests_passed():
    assert score("```python\ndef add(a, b): return a + b\n```", ADD_TESTS) == {
        "score": 1.0,
        "exact_match": 1.0,
        "num_passed": 3.0,
        "num_tests": 3.0,
    }
    assert score("def add(a, b): return abs(a) + b", ADD_TESTS)["score"] == pytest.approx(2 / 3)


CODE = "def add(a, b): return a + b\n"


@pytest.mark.parametrize(
    "response",
    [
        CODE,
        f"```\n{CODE}```",
        f"```Python3\r\n{CODE}```\n",
        f"Here: ```py\n{CODE}```",
        f"Answer: ```\n{CODE}```\nThat works.",
        f"1. ```python3\n{CODE}```\n2. ```sh\nls\n```",
        f"``` python title=add.py\n{CODE}```",
        f"> ```python\n{CODE}```",
        f"```python\n{CODE}",
        f"```python\n{CODE}```\nOutput:\n```text\n3\n```\n",
        f"```python\n{CODE}```\nOutput:\n```\n3\n```\n",
        f"```bash\nls\n```\nThen:\n```python\n{CODE}```\nDone.",
        f"```bash\nls\n```\nThen:\n```\n{CODE}```\nDone.",
        f"```python\nfirst\n```\nBetter:\n```python\n{CODE}```",
        f"The code is ```short``` and\n```python\n{CODE}```",
    ],
)
def test_code_is_found_among_other_blocks(response):
    assert extract_code(response).strip() == CODE.strip()


@pytest.mark.parametrize("arguments", ["abc", "1\n2", {"a": 1}, 5, None])
def test_arguments_that_are_no_list_are_an_error_of_the_row(arguments):
    with pytest.raises(RewardError, match=r"the inputs of f are lists of arguments, such as \[1, 2\]"):
        score("def f(*a): return a", {"fn_name": "f", "inputs": [arguments], "outputs": [1]})


def test_a_syntax_error_scores_zero_and_is_no_failure_of_the_reward():
    assert score("def add(a, b) return", ADD_TESTS)["score"] == 0.0


def test_programs_are_compared_by_what_they_print():
    tests = {"inputs": ["1 2\n", "5 5\n"], "outputs": ["3", "10\n"]}
    good = "a, b = map(int, input().split())\nif __name__ == '__main__':\n    print(a + b, ' ')"
    assert score(good, tests)["score"] == 1.0
    assert score("print(3)", tests)["score"] == 0.5
    assert score("print(3); raise SystemExit(1)", tests)["score"] == 0.0


def test_functions_are_called_with_arguments():
    tests = json.dumps({"fn_name": "pair", "inputs": [[1, "a"], [2, "b"]], "outputs": [[1, "a"], [2, "b"]]})
    assert score("def pair(x, y): return [x, y]", tests)["score"] == 1.0
    assert score("class Solution:\n  def pair(self, x, y): return [x, y]", tests)["score"] == 0.0
    tests = {"fn_name": "Solution().pair", "inputs": [[1, 2]], "outputs": [[1, 2]]}
    assert score("class Solution:\n  def pair(self, x, y): return [x, y]", tests)["score"] == 1.0


def test_values_of_another_spelling_are_equal():
    tests = ["assert f(3) == set((1, 2, 3))", "assert f(0) == set()"]
    assert score("def f(n): return set(range(n, 0, -1)) or frozenset()", tests)["num_passed"] == 1.0


@pytest.mark.parametrize(("expected", "processes"), [("(1, 'a')", 1), ("tuple([1, 'a'])", 2)])
def test_expected_values_that_are_plain_data_take_no_process_of_their_own(monkeypatch, expected, processes):
    started = []

    def run(*arguments, **options):
        started.append(arguments)
        return run_python(*arguments, **options)

    monkeypatch.setattr("kapell.trainer.code_reward.run_python", run)
    assert score("def f(): return 1, 'a'", [f"assert f() == {expected}"])["score"] == 1.0
    assert len(started) == processes


@pytest.mark.parametrize(
    "cheat",
    [
        'print(\'{"value": "3"}\'); exit(0)',
        "import os; os._exit(0)",
        "def add(a, b):\n  print(3, 'passed')\n  raise SystemExit(0)",
        "class Any:\n  def __eq__(self, other): return True\ndef add(a, b): return Any()",
        "class Any(int):\n  __eq__ = lambda *_: True\n  __repr__ = object.__repr__\ndef add(a, b): return Any()",
        "import builtins\nbuiltins.repr = lambda x: 'True'\ndef add(a, b): return None",
        "import gc\nfor o in gc.get_objects():\n  if isinstance(o, dict) and 'calls' in o: o['calls'] = []",
        "while True: pass",
        "def add(a, b):\n  while True: pass",
    ],
)
def test_cheats_earn_nothing(cheat):
    assert score(cheat, ADD_TESTS)["score"] == 0.0


def test_the_expected_values_are_not_in_the_process():
    peek = "import gc, sys\nseen = str([o for o in gc.get_objects() if isinstance(o, (dict, list))]) + str(sys.argv)"
    assert score(peek, ["assert ('98' + '765') in seen"])["score"] == 0.0
    assert score(peek, ["assert seen.count('98' + '765') == 98765 * 0"])["score"] == 1.0


def test_a_lying_object_passes_a_test_that_only_asks_for_truth_as_the_docstring_says():
    assert (
        score("class Yes:\n  def __gt__(self, x): return True\ndef f(): return Yes()", ["assert f() > 3"])["score"]
        == 1.0
    )


def test_tests_after_an_endless_one_count_as_failed():
    tests = ["assert f(0) == 0", "assert f(1) == 1", "assert f(0) == 0"]
    assert score("def f(x):\n  while x: pass\n  return x", tests)["num_passed"] == 1.0


def test_huge_answers_are_not_parsed():
    assert score("def add(a, b): return list(range(100000))", ADD_TESTS)["score"] == 0.0
    assert (
        score("class Deep:\n  def __repr__(self): return '-' * 1000 + '1'\ndef add(a, b): return Deep()", ADD_TESTS)[
            "score"
        ]
        == 0.0
    )


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("not json", "not JSON"),
        ({"answer": 3}, "holds no tests"),
        ([], "holds no tests"),
        (["print(3)"], "is not an assert"),
        (["assert ("], "is not one Python statement"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"fn_name": "a b", "inputs": [[]], "outputs": [1]}, "neither a name nor an expression"),
        (["assert f() == open"], "not plain Python data"),
    ],
)
def test_tests_that_cannot_be_read_are_errors_not_zeros(tests, message):
    with pytest.raises(RewardError, match=message):
        score("def f(): pass", tests)


def test_the_last_fenced_block_counts_and_an_unfinished_one_too():
    assert extract_code("```py\na\n```\ntext\n```py\nb\n```") == "b\n"
    assert extract_code("```\na\n```\ntext\n```\nb\n```") == "b\n"
    assert extract_code("```python\nx = 1") == "x = 1"
    assert extract_code("x = 1") == "x = 1"


def test_each_form_of_tests_is_recognised():
    assert parse_tests({"inputs": [1], "outputs": [2]}) == ProgramTests(("1",), ("2",))
    assert parse_tests({"assert_case": ["assert f(1)"], "setup": "import math"}) == CallTests(
        ("bool(f(1))",), ("True",), "import math"
    )
