"""``kapell generate``: a trained model answers."""

from __future__ import annotations

import argparse
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rich.console import Console

from .common import quiet_libraries, user_mistakes

if TYPE_CHECKING:
    from ..config import Config
    from .common import Commands

__all__ = ["add_parser"]


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("generate", help="let a trained model answer")
    parser.add_argument(
        "folder", metavar="RUN", help="folder of a run, finished or with a checkpoint, or of a Hugging Face model"
    )
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument(
        "--temperature", type=float, default=None, help="sample; 0, the default: the most probable token"
    )
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="ends an answer; repeatable. Default: those of the run"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--raw", action="store_true", help="the model goes on from the PROMPT itself, without its chat template"
    )
    parser.set_defaults(run=_generate)


def _generate(options: argparse.Namespace, console: Console) -> None:
    quiet_libraries()
    from ..generate import generate_texts

    folder = Path(options.folder).expanduser()
    with user_mistakes(), _model_of(folder) as model:
        config = _config_of(folder)
        stop = config.actor_rollout_ref.rollout.stop if config else []
        texts = generate_texts(
            model,
            options.prompts,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            stop=stop if options.stop is None else options.stop,
            seed=options.seed,
            raw=options.raw,
            template_options=config.data.apply_chat_template_kwargs if config else None,
        )
    for text in texts:
        console.print(text, markup=False, highlight=False)


@contextmanager
def _model_of(folder: Path) -> Generator[Path]:
    """The folder of a run's model; while it has none, of its newest checkpoint's; or the folder itself."""
    from ..checkpoint import CheckpointStore
    from ..export import export_model

    if (folder / "model").is_dir():
        yield folder / "model"
    elif not CheckpointStore(folder).steps():
        yield folder
    else:
        with TemporaryDirectory() as temporary:
            export_model(folder, temporary)
            yield Path(temporary)


def _config_of(folder: Path) -> Config | None:
    """The configuration of a run; None for a folder that holds a model alone."""
    from ..config_load import load_config

    file = folder / "config.yaml"
    return load_config([file]).config if file.is_file() else None
