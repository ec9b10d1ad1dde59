"""One process at a time trains in a run's folder: a lock that the operating system ends with its process."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

__all__ = ["RunFolderInUseError", "lock_run_folder"]

_LOCK, _HOLDER = ".lock", ".lock.json"  # two files: some releases of filelock empty the first


class RunFolderInUseError(BlockingIOError):
    """Another process trains in the folder; ``holder`` says which."""

    def __init__(self, folder: str | Path, holder: str) -> None:
        super().__init__(folder, holder)
        self.folder = Path(folder)
        self.holder = holder

    def __str__(self) -> str:
        way_out = "wait for it, end it, or choose another trainer.default_local_dir"
        return f"{self.folder} is in use by {self.holder}; {way_out}"


@contextmanager
def lock_run_folder(folder: str | Path) -> Generator[None]:
    """Keep other processes from training in the folder within the block; those that only read need no lock.

    The folder is created where there is none. A thread may enter it again for the same one. The lock of a killed
    process is free at once, with no file to clean up. Raises `RunFolderInUseError`.
    """
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK, timeout=0, is_singleton=True)
    holder = folder / _HOLDER
    try:
        lock.acquire()
    except Timeout:
        raise RunFolderInUseError(folder, _words(holder)) from None
    try:
        started = datetime.now().isoformat(sep=" ", timespec="seconds")
        holder.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": started}))
        yield
    finally:
        lock.release()


def _words(holder: Path) -> str:
    try:
        values = json.loads(holder.read_text())
        return f"process {values['pid']} on {values['host']}, since {values['started']}"
    except (FileNotFoundError, json.JSONDecodeError):
        return "another process, which has only just begun"
