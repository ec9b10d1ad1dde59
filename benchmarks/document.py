"""docs/performance.md: the text is written by hand, the tables between its markers by this module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .harness import Benchmark, Result
from .report import markdown, verdicts

__all__ = ["DOCUMENT", "write_document"]

DOCUMENT = Path(__file__).parent.parent / "docs" / "performance.md"


def write_document(benchmarks: Sequence[Benchmark], results: Mapping[str, Result]) -> None:
    """Replace what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; ``budgets`` is the summary."""
    text = DOCUMENT.read_text()
    text = _replaced(text, "budgets", _summary(benchmarks, results))
    for benchmark in benchmarks:
        if benchmark.name in results:
            table = markdown(benchmark, results[benchmark.name])
            plot = f"\n![{benchmark.title}](benchmarks/{benchmark.name}.png)\n" if benchmark.axis else ""
            text = _replaced(text, benchmark.name, table + plot)
    DOCUMENT.write_text(text)


def _summary(benchmarks: Sequence[Benchmark], results: Mapping[str, Result]) -> str:
    lines = ["| budget | measured | | benchmark |", "|---|---|---|---|"]
    for benchmark in benchmarks:
        result = results.get(benchmark.name)
        if result is None:
            lines += [f"| {budget.text} | not measured | open | `{benchmark.name}` |" for budget in benchmark.budgets]
            continue
        for verdict in verdicts(benchmark, result):
            met = {True: "met", False: "**missed**", None: "open"}[verdict.met]
            lines.append(f"| {verdict.budget.text} | {verdict.figure} | {met} | `{benchmark.name}` |")
    return "\n".join(lines) + "\n"


def _replaced(text: str, name: str, content: str) -> str:
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if begin not in text or end not in text:
        raise ValueError(f"{DOCUMENT} has no markers for {name}; add {begin} and {end} on lines of their own")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{content}{end}{after}"
