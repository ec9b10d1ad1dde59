"""``kapell export``: a checkpoint as a model in Hugging Face format."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.console import Console

from .common import quiet_libraries, user_mistakes

if TYPE_CHECKING:
    from .common import Commands

__all__ = ["add_parser"]


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("export", help="write a checkpoint's model in Hugging Face format")
    parser.add_argument("source", metavar="RUN", help="folder of a run, or of one of its checkpoints")
    parser.add_argument("folder", metavar="FOLDER", help="where to write the model and its tokenizer")
    parser.add_argument("--step", metavar="N", help="which checkpoint, or `best`; the newest by default")
    parser.add_argument("--role", default="actor", choices=("actor", "critic"), help="which of its models")
    parser.add_argument(
        "--base", metavar="FOLDER", help="the base model of an adapter; where the run had it by default"
    )
    parser.set_defaults(run=_export)


def _export(options: argparse.Namespace, console: Console) -> None:
    quiet_libraries()
    from ..export import export_model

    with user_mistakes():
        checkpoint = export_model(
            options.source, options.folder, step=options.step, role=options.role, base=options.base
        )
    console.print(f"wrote {options.role} of {checkpoint} to {options.folder}", markup=False, highlight=False)
