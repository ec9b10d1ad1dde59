"""The command line: ``python -m benchmarks [NAME ...] [--quick] [--rounds N] [--docs]``."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from .catalogue import BENCHMARKS
from .document import DOCUMENT, write_document
from .harness import RESULTS, Benchmark, Result, Series, run_benchmark
from .plots import plot_scaling
from .report import markdown, verdicts

_HISTORY = RESULTS / "results.jsonl"
_PLOTS = Path(__file__).parent.parent / "docs" / "benchmarks"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure Kapell beside the alternatives.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; all when none is named")
    parser.add_argument("--list", action="store_true", help="show the names")
    parser.add_argument("--quick", action="store_true", help="few rounds at small sizes, to see that everything runs")
    parser.add_argument("--rounds", type=int, help="measured rounds, instead of each benchmark's own number")
    parser.add_argument("--docs", action="store_true", help=f"write the last full results into {DOCUMENT.name}")
    options = parser.parse_args()
    by_name = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    if options.list:
        for benchmark in BENCHMARKS:
            print(f"{benchmark.name:12} {benchmark.title}")
        return 0
    unknown = [name for name in options.names if name not in by_name]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; known: {', '.join(by_name)}")
    if not (options.docs and not options.names):
        for name in options.names or by_name:
            _run(by_name[name], quick=options.quick, rounds=options.rounds)
    if options.docs:
        latest = load_latest()
        write_document(BENCHMARKS, latest)
        for name, result in latest.items():
            if name in by_name:
                plot_scaling(by_name[name], result, _PLOTS)
    return 0


def _run(benchmark: Benchmark, *, quick: bool, rounds: int | None) -> None:
    print(f"\n== {benchmark.name}: {benchmark.title}", flush=True)
    result = run_benchmark(
        benchmark, quick=quick, rounds=rounds, say=lambda text: print(f"   {text}", file=sys.stderr, flush=True)
    )
    print(markdown(benchmark, result), flush=True)
    missed = [verdict for verdict in verdicts(benchmark, result) if verdict.met is False]
    for verdict in missed:
        print(f"MISSED: {verdict.budget.text}: {verdict.figure}", flush=True)
    RESULTS.mkdir(exist_ok=True)
    with _HISTORY.open("a") as history:
        history.write(json.dumps(asdict(result)) + "\n")


def load_latest() -> dict[str, Result]:
    """The last full result of each benchmark."""
    latest: dict[str, Result] = {}
    if _HISTORY.is_file():
        for line in _HISTORY.read_text().splitlines():
            record = json.loads(line)
            record["series"] = [Series(**series) for series in record["series"]]
            result = Result(**record)
            if not result.quick:
                latest[result.benchmark] = result
    return latest


if __name__ == "__main__":
    sys.exit(main())
