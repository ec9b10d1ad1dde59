"""Variables by which Ray is told, while it starts or is imported, what it has no parameter for."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["default_variable"]


@contextmanager
def default_variable(name: str, value: str) -> Generator[None]:
    """Inside, the environment variable has this value, unless it has one already.

    It is taken away again: `ray start` as a child of this program is to serve a cluster.
    """
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
