"""What is measured, ours and the peers': classes with ``prepare``, ``round`` and ``close``, each loaded in its own
environment by `benchmarks.serve`. Ray ships some of them, so they live in importable modules."""
