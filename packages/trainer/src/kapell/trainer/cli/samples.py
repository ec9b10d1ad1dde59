"""``kapell samples``: the responses of a validation as a table."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.console import Console

from .common import user_mistakes

if TYPE_CHECKING:
    from .common import Commands

__all__ = ["add_parser"]


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("samples", help="show the responses of a validation")
    parser.add_argument("folder", metavar="RUN", help="folder of a run")
    parser.add_argument("--step", type=int, default=None, help="which validation; the last by default")
    parser.add_argument("--num", type=int, default=20, help="how many of its responses")
    parser.set_defaults(run=_show)


def _show(options: argparse.Namespace, console: Console) -> None:
    from ..generations import read_samples, samples_table

    with user_mistakes():
        samples = read_samples(options.folder, step=options.step)
    console.print(samples_table(samples, step=samples[0]["step"], num_rows=options.num))
