"""Measurements beside the alternatives: ``uv run python -m benchmarks`` runs all, ``... -m benchmarks NAME`` one."""
