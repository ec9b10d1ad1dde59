"""What can be wrong with a batch file, or with a value that should go into one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["BatchFileError", "UnsafeValueError"]


class BatchFileError(ValueError):
    """A file that is no batch file, or a damaged one."""

    def __init__(self, path: str | Path, problem: str) -> None:
        super().__init__(f"cannot read a batch from {path}: {problem}")
        self._arguments = (str(path), problem)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments, self.__dict__


class UnsafeValueError(TypeError):
    """A Python object that only pickle can write or read."""

    def __init__(self, where: str, type_name: str) -> None:
        super().__init__(
            f"{where} holds a {type_name}, which only pickle can store; convert it to plain values, or pass "
            "allow_pickle=True (reading such a file runs code from it)"
        )
        self._arguments = (where, type_name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments, self.__dict__
