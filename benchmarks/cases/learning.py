"""."""

BENCHMARKS = ()
