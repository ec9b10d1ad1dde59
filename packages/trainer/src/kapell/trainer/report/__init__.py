"""One self-contained HTML page about a run, or about two side by side: curves, timing, responses, configuration."""

from .page import render_report, write_report
from .run_data import RunData, load_run

__all__ = ["RunData", "load_run", "render_report", "write_report"]
