"""The command ``kapell``: one module per command, each with ``add_parser``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from . import doctor, explain, export, generate, plan, report, samples, show_config, train
from .common import UserError

__all__ = ["main"]

_COMMANDS = (train, show_config, plan, explain, doctor, generate, export, samples, report)
_USAGE_ERROR = 2
_FILE_WIDTH = 1000  # of tables in a file or pipe, where a search should find a whole line
_INTERRUPTED = 130  # as shells report a program that Ctrl-C ended


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status."""
    options = _parser().parse_args(arguments)
    to_terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if to_terminal else _FILE_WIDTH)
    errors = Console(stderr=True)
    try:
        status = options.run(options, console)
    except KeyboardInterrupt:
        errors.print("interrupted")
        sys.exit(_INTERRUPTED)
    except _user_errors() as error:
        if options.traceback:
            raise
        errors.print(f"[bold red]error:[/bold red] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(_USAGE_ERROR)
    if status:
        sys.exit(status)


def _user_errors() -> tuple[type[Exception], ...]:
    """Errors whose message says all that a user needs; any other shows its traceback."""
    from kapell.workergroup import BackendNotFoundError

    from ..reward import RewardError
    from ..state_files import CheckpointError

    return (UserError, RewardError, BackendNotFoundError, CheckpointError)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kapell", description="Reinforcement learning of language models.")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser
