"""Scores model-written Python by the share of tests it passes; it runs in a sandbox and never sees what is expected."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .reward import RewardError
from .sandbox import SandboxLimits, run_python

__all__ = ["CallTests", "CodeReward", "ProgramTests", "extract_code", "parse_tests"]

# A fence of any language, so that its end is not taken for the beginning of the next one.
_FENCE = re.compile(
    r"(?:^[ \t>]*```|```(?=py|[\w+#-]*[ \t\r]*\n))[ \t]*([^\s`]*)[^\n`]*\n(.*?)(?:```|\Z)",
    re.DOTALL | re.IGNORECASE | re.MULTILINE,
)
_PYTHON = re.compile(r"py(thon)?[\d.]*", re.IGNORECASE)
_NO_LITERAL = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)
_MAX_LONGER = 1000  # characters that another spelling of an equal value may take on top of four times as many


@dataclass(frozen=True)
class ProgramTests:
    """A program that is fed each input and must print each output; spaces at the ends of lines do not count."""

    inputs: tuple[str, ...]
    """What stands on standard input."""
    outputs: tuple[str, ...]
    """What must come on standard output."""

    def passed(self, code: str, limits: SandboxLimits) -> list[bool]:
        """Whether each test is passed; each runs in a process of its own."""
        results = [run_python(code, stdin=text, limits=limits) for text in self.inputs]
        return [
            result.ended == "exit" and result.status == 0 and _stripped(result.stdout) == _stripped(wanted)
            for result, wanted in zip(results, self.outputs, strict=True)
        ]


@dataclass(frozen=True)
class CallTests:
    """Expressions over what the code defines, and the value each must have. They run in one process, in order."""

    calls: tuple[str, ...]
    """Python expressions, such as ``add(1, 2)``."""
    expected: tuple[str, ...]
    """Python expressions without the code, such as ``3``."""
    setup: str = ""
    """Code that runs before the model's, such as imports."""

    def passed(self, code: str, limits: SandboxLimits) -> list[bool]:
        """Whether each test is passed; what comes after an endless one is not."""
        wanted = self.expected
        if not all(map(_is_literal, wanted)):  # a process to compute them takes as long as the code's own
            wanted = _values(self.setup, self.expected, limits)
            for expression, value in zip(self.expected, wanted, strict=True):
                if value is None or not _is_literal(value):
                    raise ValueError(f"the expected value {expression} is not plain Python data, but {value}")
        given = _values(f"{self.setup}\n{code}", self.calls, limits)
        return [value is not None and _equal(value, str(want)) for value, want in zip(given, wanted, strict=True)]


@dataclass(frozen=True, kw_only=True)
class CodeReward:
    """A reward function (``(data_source, solution_str, ground_truth, extra_info)``) for code.

    ``ground_truth`` holds the tests, as `parse_tests` reads them. The score is the share passed; with it come
    ``num_tests``, ``num_passed`` and ``exact_match``, 1 where all are.

    The expected values stay outside the process that runs the model's code, so that neither leaving early, nor
    printing, nor writing into the test's own channel can earn more than answering right. What can still earn an
    undeserved score: a test that only asks whether something is true (``assert is_sorted(f([3, 1]))``) is put inside
    that process, where an object may lie; and answers may be learned by heart, as with any tests.
    """

    limits: SandboxLimits = field(default_factory=SandboxLimits)
    """What each run may use."""

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
    ) -> dict[str, float]:
        """Score one response. Raises `RewardError` for tests that cannot be read."""
        try:
            passed = parse_tests(ground_truth).passed(extract_code(solution_str), self.limits)
        except ValueError as error:
            raise RewardError(f"data_source {data_source!r}: {error}") from error
        score = sum(passed) / len(passed)
        return {
            "score": score,
            "exact_match": float(all(passed)),
            "num_passed": float(sum(passed)),
            "num_tests": float(len(passed)),
        }


def extract_code(response: str) -> str:
    """The last fenced block that is marked as Python, else the last that is not marked, else the whole response.

    >>> extract_code("Here:\\n```python\\nx = 1\\n```\\nDone.")
    'x = 1\\n'
    """
    blocks = _FENCE.findall(response)
    python = [code for label, code in blocks if _PYTHON.fullmatch(label)]
    code = python or [code for label, code in blocks if not label]
    return code[-1] if code else response


def parse_tests(ground_truth: Any) -> ProgramTests | CallTests:
    """The tests in a row's ground truth: a list, a mapping, or either as JSON text.

    - ``["assert add(1, 2) == 3", ...]`` (also under ``assert_case``), with an optional ``setup`` beside;
    - ``{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}``: standard input and output of a program;
    - ``{"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}``: arguments and value of a function.

    >>> parse_tests(["assert add(1, 2) == 3"])
    CallTests(calls=('add(1, 2)',), expected=('3',), setup='')
    """
    tests = ground_truth
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except json.JSONDecodeError as error:
            raise ValueError(f"the ground truth is text but not JSON ({error}); give tests") from None
    if isinstance(tests, Mapping) and "assert_case" in tests:
        return _from_asserts(tests["assert_case"], str(tests.get("setup", "")))
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= tests.keys():
        return _from_pairs(tests)
    if isinstance(tests, Sequence) and not isinstance(tests, str | bytes):
        return _from_asserts(tests, "")
    raise ValueError(
        f"the ground truth {str(ground_truth)[:200]!r} holds no tests; known: a list of asserts, `assert_case`, "
        "or `inputs` and `outputs` with an optional `fn_name`"
    )


def _from_pairs(tests: Mapping[str, Any]) -> ProgramTests | CallTests:
    inputs, outputs = list(tests["inputs"]), list(tests["outputs"])
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs; need as many of both, and at least one")
    name = tests.get("fn_name")
    if name is None:
        return ProgramTests(tuple(map(str, inputs)), tuple(map(str, outputs)))
    try:
        ast.parse(str(name), mode="eval")
    except SyntaxError:
        raise ValueError(f"fn_name {name!r} is neither a name nor an expression like Solution().solve") from None
    for arguments in inputs:
        if isinstance(arguments, str | bytes | Mapping) or not isinstance(arguments, Iterable):
            raise ValueError(f"the inputs of {name} are lists of arguments, such as [1, 2], got {arguments!r}")
    return CallTests(tuple(f"{name}(*{list(arguments)!r})" for arguments in inputs), tuple(map(repr, outputs)))


def _from_asserts(asserts: Sequence[str], setup: str) -> CallTests:
    pairs = [_split_assert(line) for line in asserts]
    if not pairs:
        raise ValueError("the ground truth holds no tests")
    calls, expected = zip(*pairs, strict=True)
    return CallTests(calls, expected, setup)


def _split_assert(line: Any) -> tuple[str, str]:
    """The two sides of ``assert call == expected``; any other condition must be true."""
    try:
        (statement,) = ast.parse(str(line).strip()).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the test {line!r} is not one Python statement: {error}") from None
    if not isinstance(statement, ast.Assert):
        raise ValueError(f"the test {line!r} is not an assert")
    test = statement.test
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        return ast.unparse(test.left), ast.unparse(test.comparators[0])
    return f"bool({ast.unparse(test)})", "True"


def _values(code: str, calls: Sequence[str], limits: SandboxLimits) -> list[str | None]:
    """The ``repr`` of each call's value; None for one that failed or was not reached."""
    answers = run_python(code, calls=calls, limits=limits).answers[: len(calls)]
    return [answer.get("value") for answer in answers] + [None] * (len(calls) - len(answers))


def _equal(given: str, wanted: str) -> bool:
    """Whether two ``repr`` texts stand for equal plain data."""
    if given == wanted:
        return True
    if len(given) > 4 * len(wanted) + _MAX_LONGER:  # the text may be hostile: not worth the time to parse
        return False
    try:
        return bool(ast.literal_eval(given) == ast.literal_eval(wanted))
    except _NO_LITERAL:
        return False


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except _NO_LITERAL:
        return False
    return True


def _stripped(output: str) -> list[str]:
    return [line.rstrip() for line in output.rstrip().splitlines()]
