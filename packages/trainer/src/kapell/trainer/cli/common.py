"""What commands share: the configuration's arguments, mistakes of the user, quiet libraries."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..config_load import ResolvedConfig, load_config

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["UserError", "add_config_arguments", "load", "quiet_libraries", "user_mistakes"]


class UserError(Exception):
    """A mistake in what the user gave; its message is all that is shown."""


@contextmanager
def user_mistakes() -> Generator[None]:
    """Turn the block's ``ValueError`` and ``OSError`` into `UserError`."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Files and overrides of a configuration."""
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="YAML file; may be repeated")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as trainer.total_training_steps=20")


def load(options: argparse.Namespace) -> ResolvedConfig:
    """The configuration that the arguments ask for."""
    with user_mistakes():
        return load_config(options.config, options.overrides)


def quiet_libraries() -> None:
    """Keep the libraries' own progress and network access away from the user's terminal."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is read from local folders
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)
