"""``kapell doctor``: the debugging order, walked for a configuration or the folder of a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from .common import add_config_arguments, load, quiet_libraries, user_mistakes

if TYPE_CHECKING:
    from .common import Commands

__all__ = ["add_parser"]

_SOMETHING_WRONG = 1


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "doctor",
        help="say what is wrong with a run's folder or a configuration, and the way out",
        description="Walk the debugging order: for RUN by the files it left, for a configuration by one step of a few "
        "prompts in this process. The exit status is 1 when something is wrong.",
    )
    add_config_arguments(parser)
    parser.usage = "kapell doctor [RUN | [--config FILE] [KEY=VALUE ...]]"
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace, console: Console) -> int:
    quiet_libraries()
    with console.status("loading"):
        from ..doctor import examine_config
        from ..doctor_run import examine_run

    wrong = 0
    with user_mistakes():
        folder = _folder(options)
        for finding in examine_run(folder) if folder else examine_config(load(options)):
            mark = "[green]ok   [/green]" if finding.ok else "[bold red]wrong[/bold red]"
            console.print(f"{mark} {finding.check}: {escape(finding.message)}", highlight=False, soft_wrap=True)
            if not finding.ok:
                wrong += 1
                console.print(f"      → {escape(finding.way_out)}", highlight=False, soft_wrap=True)
    console.print("nothing is wrong" if not wrong else f"{wrong} wrong", style="bold")
    return _SOMETHING_WRONG if wrong else 0


def _folder(options: argparse.Namespace) -> Path | None:
    """The run's folder, where the one argument is no ``key=value``."""
    if len(options.overrides) == 1 and not options.config and "=" not in options.overrides[0]:
        return Path(options.overrides[0]).expanduser()
    return None
