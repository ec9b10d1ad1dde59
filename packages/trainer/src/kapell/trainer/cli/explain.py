"""``kapell explain``: who writes and who reads each column."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .common import add_config_arguments, load, quiet_libraries, user_mistakes

if TYPE_CHECKING:
    from .common import Commands

__all__ = ["add_parser"]


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "explain",
        help="show who writes and reads each column in a configuration",
        description="Show who writes and reads each column. One step runs in small, with a stand-in for the model.",
    )
    add_config_arguments(parser)
    parser.add_argument("--mermaid", action="store_true", help="print a Mermaid diagram in place of the table")
    parser.add_argument("--svg", metavar="FILE", help="write a picture")
    parser.set_defaults(run=_explain)


def _explain(options: argparse.Namespace, console: Console) -> None:
    resolved = load(options)
    quiet_libraries()
    with console.status("running one step in small"):
        from ..column_chart import column_chart
        from ..explain import explain_columns, mermaid

        with user_mistakes():
            flow = explain_columns(resolved.config)
    if options.mermaid:
        console.print(mermaid(flow), end="", markup=False, highlight=False, soft_wrap=True)
    if options.svg:
        title = f"Columns of one step with algorithm.adv_estimator={resolved.config.algorithm.adv_estimator}"
        with user_mistakes():
            Path(options.svg).write_text(column_chart(flow, title=title), encoding="utf-8")
        console.print(f"wrote {options.svg}", markup=False, highlight=False, soft_wrap=True)
    if options.mermaid or options.svg:
        return
    columns = [(column.name, _actors(column.writers), _actors(column.readers)) for column in flow.columns]
    _print(console, ("column", "written by", "read by"), columns)
    console.print("* by its workers; the others in the controller", style="dim")
    _print(console, ("stage", "calls"), [(stage, "\n".join(calls)) for stage, calls in flow.calls.items() if calls])


def _actors(actors: Mapping[str, str]) -> str:
    return ", ".join(f"{actor}*" if method else actor for actor, method in actors.items()) or "nobody"


def _print(console: Console, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table()
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
