"""Files that are on the disk, not only in its cache, when a function returns, and checksums to know them by."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FileRecord", "file_record", "replace_text", "sync", "write_text"]

_BLOCK = 2**22  # bytes read at once for a checksum


@dataclass(frozen=True)
class FileRecord:
    """By what a file is recognised as whole."""

    num_bytes: int
    """Its size."""
    crc32: int
    """Its checksum."""


def file_record(path: str | Path) -> FileRecord:
    """Size and checksum of a file."""
    checksum, size = 0, 0
    with Path(path).open("rb") as file:
        while block := file.read(_BLOCK):
            checksum, size = zlib.crc32(block, checksum), size + len(block)
    return FileRecord(size, checksum)


def sync(path: str | Path) -> None:
    """Bring a file's content, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: str | Path, text: str) -> FileRecord:
    """Write a file and return its record."""
    Path(path).write_text(text, encoding="utf-8")
    sync(path)
    return file_record(path)


def replace_text(path: str | Path, text: str) -> None:
    """Write a file that has either its old or its new content, whenever the process is killed."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.partial")
    write_text(temporary, text)
    temporary.replace(path)
    sync(path.parent)
