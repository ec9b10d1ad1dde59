"""The command ``kapell``: train, generate with the result, show a configuration."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .config import Config
from .config_load import ResolvedConfig, load_config
from .hooks import Hook

__all__ = ["main"]

_USAGE_ERROR = 2
_INTERRUPTED = 130  # as shells report a program that Ctrl-C ended


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status."""
    options = _parser().parse_args(arguments)
    console = Console()
    errors = Console(stderr=True)
    try:
        options.run(options, console)
    except KeyboardInterrupt:
        errors.print("interrupted")
        sys.exit(_INTERRUPTED)
    except _user_errors() as error:
        if options.traceback:
            raise
        errors.print(f"[bold red]error:[/bold red] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(_USAGE_ERROR)


def _user_errors() -> tuple[type[Exception], ...]:
    """Errors whose message says all that a user needs; any other shows its traceback."""
    from kapell.workergroup import BackendNotFoundError

    from .reward import RewardError

    return (UserError, RewardError, BackendNotFoundError)


class UserError(Exception):
    """A mistake in what the user gave."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kapell", description="Reinforcement learning of language models.")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train", help="train a model", description="Train a model; see `kapell config` for keys."
    )
    show = commands.add_parser("config", help="show the configuration and where each value comes from")
    for command, function in ((train, _train), (show, _show_config)):
        command.add_argument("--config", action="append", default=[], metavar="FILE", help="YAML file; may be repeated")
        command.add_argument(
            "overrides", nargs="*", metavar="KEY=VALUE", help="such as trainer.total_training_steps=20"
        )
        command.set_defaults(run=function)
    generate = commands.add_parser("generate", help="let a trained model answer")
    generate.add_argument("folder", metavar="RUN", help="folder of a run, or of a Hugging Face model")
    generate.add_argument("prompts", nargs="+", metavar="PROMPT")
    generate.add_argument("--max-new-tokens", type=int, default=64)
    generate.add_argument("--temperature", type=float, default=None, help="sample; without it the most probable token")
    generate.add_argument("--seed", type=int, default=1)
    generate.set_defaults(run=_generate)
    samples = commands.add_parser("samples", help="show the responses of a validation")
    samples.add_argument("folder", metavar="RUN", help="folder of a run")
    samples.add_argument("--step", type=int, default=None, help="which validation; the last by default")
    samples.add_argument("--num", type=int, default=20, help="how many of its responses")
    samples.set_defaults(run=_show_samples)
    report = commands.add_parser("report", help="write one HTML page about a run, or about two")
    report.add_argument("folder", metavar="RUN", help="folder of a run")
    report.add_argument("other", metavar="RUN2", nargs="?", help="folder of a run to compare with")
    report.add_argument("--output", metavar="FILE", help="where to write it; RUN/report.html by default")
    report.set_defaults(run=_report)
    return parser


def _load(options: argparse.Namespace) -> ResolvedConfig:
    try:
        return load_config(options.config, options.overrides)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def _show_config(options: argparse.Namespace, console: Console) -> None:
    table = Table("key", "value", "from")
    for key, value, origin in _load(options).leaves():
        style = None if origin == "default" else "bold"
        table.add_row(key, escape(str(value)), escape(origin), style=style)
    console.print(table)


def _train(options: argparse.Namespace, console: Console) -> None:
    resolved = _load(options)
    config = resolved.config
    _quiet_libraries()
    with console.status("loading data and model"):
        import torch

        from .build import prepare, train
        from .display import LiveDisplay
        from .generations import GenerationFiles
        from .loggers import build_loggers
        from .run_folder import RunFiles, new_run_folder

        torch.set_num_threads(config.trainer.torch_threads)
        try:
            folder = new_run_folder(config.trainer.default_local_dir)
            trackers = build_loggers(
                config.trainer.logger,
                folder,
                project=config.trainer.project_name,
                experiment=config.trainer.experiment_name or folder.name,
                config={key: value for key, value, _ in resolved.leaves()},
            )
            prepared = prepare(config, folder)
        except (ValueError, OSError) as error:
            raise UserError(str(error)) from error
    (folder / "config.yaml").write_text(resolved.to_yaml())
    (folder / "config_origins.yaml").write_text(resolved.origins_to_yaml())
    title = f"{config.algorithm.adv_estimator} on {config.backend.name}, {_num_workers(config)} workers → {folder}"
    hooks: list[Hook] = list(trackers)
    if "file" in config.trainer.logger:
        hooks.append(RunFiles(folder))
    if "console" in config.trainer.logger:
        shown = config.trainer.log_val_generations
        hooks.append(LiveDisplay(console, title=title, folder=folder, num_samples=shown))
    if (rollouts := config.trainer.rollout_data_dir) or config.trainer.validation_data_dir:
        hooks.append(GenerationFiles(rollouts=rollouts, validation=config.trainer.validation_data_dir))
    train(prepared, folder, hooks=hooks)
    console.print(f"Try it: [bold]kapell generate {escape(str(folder))} PROMPT[/bold]", highlight=False)


def _generate(options: argparse.Namespace, console: Console) -> None:
    _quiet_libraries()
    from .generate import generate_texts

    folder = Path(options.folder).expanduser()
    try:
        texts = generate_texts(
            folder / "model" if (folder / "model").is_dir() else folder,
            options.prompts,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            seed=options.seed,
        )
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    for text in texts:
        console.print(text, markup=False, highlight=False)


def _show_samples(options: argparse.Namespace, console: Console) -> None:
    from .generations import read_samples, samples_table

    try:
        samples = read_samples(options.folder, step=options.step)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    console.print(samples_table(samples, step=samples[0]["step"], num_rows=options.num))


def _report(options: argparse.Namespace, console: Console) -> None:
    from .report import write_report

    folders = [options.folder, *([options.other] if options.other else [])]
    try:
        page = write_report(folders, options.output or Path(options.folder) / "report.html")
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    console.print(f"wrote {page}", markup=False, highlight=False, soft_wrap=True)


def _num_workers(config: Config) -> int:
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def _quiet_libraries() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is read from local folders
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)
