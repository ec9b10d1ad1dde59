"""``kapell report``: one HTML page about a run or two."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from .common import user_mistakes

if TYPE_CHECKING:
    from .common import Commands

__all__ = ["add_parser"]


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("report", help="write one HTML page about a run, or about two")
    parser.add_argument("folder", metavar="RUN", help="folder of a run")
    parser.add_argument("other", metavar="RUN2", nargs="?", help="folder of a run to compare with")
    parser.add_argument("--output", metavar="FILE", help="where to write it; RUN/report.html by default")
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace, console: Console) -> None:
    from ..report import write_report

    folders = [options.folder, *([options.other] if options.other else [])]
    with user_mistakes():
        page = write_report(folders, options.output or Path(options.folder) / "report.html")
    console.print(f"wrote {page}", markup=False, highlight=False, soft_wrap=True)
