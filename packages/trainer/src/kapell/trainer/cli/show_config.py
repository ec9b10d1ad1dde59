"""``kapell config``: every key, its value and where that came from."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .common import add_config_arguments, load

if TYPE_CHECKING:
    from .common import Commands

__all__ = ["add_parser"]


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("config", help="show the configuration and where each value comes from")
    add_config_arguments(parser)
    parser.set_defaults(run=_show)


def _show(options: argparse.Namespace, console: Console) -> None:
    table = Table()
    table.add_column("key", no_wrap=True)  # a key that is cut short is no key
    table.add_column("value", overflow="fold")
    table.add_column("from", overflow="fold", min_width=len("default"))
    for key, value, origin in load(options).leaves():
        style = None if origin == "default" else "bold"
        shown = value if isinstance(value, str) else json.dumps(value)  # as it may be given again
        table.add_row(key, escape(shown), escape(origin), style=style)
    console.print(table)
