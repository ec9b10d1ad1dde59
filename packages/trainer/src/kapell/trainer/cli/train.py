"""``kapell train``."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from ..config import Config
from ..config_load import ResolvedConfig
from ..hooks import Hook
from .common import add_config_arguments, load, quiet_libraries, user_mistakes

if TYPE_CHECKING:
    from ..resume import Resume
    from .common import Commands

__all__ = ["add_parser"]


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "train", help="train a model", description="Train a model; see `kapell config` for keys."
    )
    add_config_arguments(parser)
    parser.set_defaults(run=_train)


def _train(options: argparse.Namespace, console: Console) -> None:
    resolved = load(options)
    config = resolved.config
    quiet_libraries()
    with console.status("loading data and model"):
        from ..failure import keep_failure
        from ..resume import find_resume
        from ..run_folder import new_run_folder
        from ..run_lock import lock_run_folder

    with ExitStack() as ends:
        with user_mistakes():
            folder = new_run_folder(config.trainer.default_local_dir)
            ends.enter_context(lock_run_folder(folder))
            resume = find_resume(config, folder)
        (folder / "config.yaml").write_text(resolved.to_yaml())
        (folder / "config_origins.yaml").write_text(resolved.origins_to_yaml())
        with keep_failure(folder):
            _run(resolved, folder, resume, console)
    console.print(f"Try it: [bold]kapell generate {escape(str(folder))} PROMPT[/bold]", highlight=False)


def _run(resolved: ResolvedConfig, folder: Path, resume: Resume, console: Console) -> None:
    config = resolved.config
    with console.status("loading data and model"):
        import torch

        from ..build import prepare, train
        from ..display import LiveDisplay
        from ..generations import generation_files
        from ..loggers import build_loggers
        from ..random_states import seed_generators
        from ..run_folder import RunFiles

        torch.set_num_threads(config.trainer.torch_threads)
        seed_generators(config.trainer.seed)  # a reward of the user's own may draw from them
        with user_mistakes():
            trackers = build_loggers(
                config.trainer.logger,
                folder,
                project=config.trainer.project_name,
                experiment=config.trainer.experiment_name or folder.name,
                config={key: value for key, value, _ in resolved.leaves()},
            )
            generations = generation_files(config.trainer, folder, resume)
            prepared = prepare(config, folder)
    title = f"{config.algorithm.adv_estimator} on {config.backend.name}, {_num_workers(config)} workers → {folder}"
    hooks: list[Hook] = list(trackers)
    if "file" in config.trainer.logger:
        hooks.append(RunFiles(folder))
    if "console" in config.trainer.logger:
        shown = config.trainer.log_val_generations
        hooks.append(LiveDisplay(console, title=title, folder=folder, num_samples=shown))
    if generations is not None:
        hooks.append(generations)
    if str(resume):
        console.print(f"going on {resume}", markup=False, highlight=False, soft_wrap=True)
    train(prepared, folder, hooks=hooks, resume=resume)


def _num_workers(config: Config) -> int:
    return config.trainer.nnodes * config.trainer.n_gpus_per_node
