"""Runs Python that a model wrote, in a process of its own that can do little else than compute.

`run_python` starts a fresh interpreter (``-I -S``: no site packages, no ``PYTHON*`` variables) in a new, empty folder,
with an empty environment and nothing on its standard input but what is given. Before the code runs, the process

- limits its CPU time, memory, open files and the size of a file (``setrlimit``, which nothing can raise again);
- on Linux gives up all capabilities, and, where the system allows it without privileges, enters empty user, network and
  IPC namespaces;
- loses the network, other processes and threads, signals to others, others' limits and priorities, and the modes,
  owners and times of files (a seccomp filter);
- loses all files but its own folder and, for reading, Python's library and shared objects (Landlock).

The caller reads at most ``max_output`` bytes, and ends the whole process group at the time limit. Where the system
cannot close network, files and processes, nothing is run, unless the limits say ``allow_weaker``.

What this does **not** protect against: a hole in the kernel or the CPU (for an adversary's code with time to spare,
use a virtual machine); side channels such as timing; a disk filled by many small files while the code runs; slowing
down its neighbours for ``seconds``; learning the machine's name, the kernel's version, or what Python's and the
system's library folders hold; seeing whether a path exists, its size and its times. System calls that are not on the
list in `kapell.trainer.sandbox_child` are allowed. On a system other than Linux only the limits, the clean environment
and the empty folder remain, so that it needs ``allow_weaker``.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Literal, cast

from . import sandbox_child
from .config_checks import require_positive

__all__ = ["SandboxLimits", "SandboxResult", "SandboxStartError", "SandboxUnavailableError", "run_python"]

# Where an extension module finds shared objects. Asked here, since the interpreter inside starts faster without.
_LIBRARIES = [path for path in (sysconfig.get_config_var("LIBDIR"), "/lib", "/lib64", "/usr/lib", "/usr/lib64") if path]
_CLOSED = ("files", "network", "processes")
_READ_SIZE = 65536
_START_SECONDS = 30.0  # for the interpreter's start on a busy machine; the code's own time counts from there
_MAX_OPEN_FILES = 32
_SHOWN_ERROR = 500
_MIN_MEMORY = 64 * 2**20  # bare Python maps about 30 MB


class SandboxUnavailableError(RuntimeError):
    """The system cannot close what the sandbox must close; nothing was run."""

    def __init__(self, missing: Sequence[str]) -> None:
        super().__init__(missing)
        self.missing = tuple(missing)

    def __str__(self) -> str:
        return (
            f"this system cannot keep sandboxed code from: {', '.join(self.missing)} (Linux 6.2 or newer with seccomp "
            "and Landlock can); run it in a virtual machine and set allow_weaker there"
        )


class SandboxStartError(RuntimeError):
    """The sandbox's own process failed before the code ran, so that nothing is known about the code."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What the code may use."""

    seconds: float = 5.0
    """Wall-clock time, and CPU time rounded up."""
    memory: int = 512 * 2**20
    """Bytes of address space, the interpreter's own (about 30 MB) included."""
    max_output: int = 2**20
    """Bytes that are read of what it prints, and of its answers; more ends it."""
    max_file: int = 16 * 2**20
    """Bytes of a file it writes."""
    allow_weaker: bool = False
    """Run even where network, files and processes cannot be closed. For virtual machines of your own."""

    def __post_init__(self) -> None:
        require_positive(self, "seconds", "memory", "max_output", "max_file")
        if self.memory < _MIN_MEMORY:
            raise ValueError(f"memory must be at least {_MIN_MEMORY} bytes for the interpreter, got {self.memory}")


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """What came of a run."""

    ended: Literal["exit", "signal", "time", "output"]
    """By itself, by a signal (such as the CPU limit's), at the time limit, or because it printed too much."""
    status: int
    """Exit status, or minus the signal."""
    stdout: str
    """What it printed."""
    stderr: str
    """What it printed as errors, such as a traceback."""
    answers: list[dict[str, str]] = field(default_factory=list)
    """For each call that was reached, ``{"value": repr}`` or ``{"error": message}``."""
    seconds: float
    """How long it took, start of the interpreter included."""
    closed: tuple[str, ...]
    """What the system kept it from."""


def run_python(
    code: str, *, calls: Sequence[str] = (), stdin: str = "", limits: SandboxLimits | None = None
) -> SandboxResult:
    """Run ``code`` as a program, then evaluate each expression of ``calls`` in its namespace.

    Answers are what the code's process says they are: trust them as you trust a printed line. Raises
    `SandboxUnavailableError` where the system cannot confine it, and `SandboxStartError` where its process fails by
    itself.

    >>> run_python("def double(x): return 2 * x", calls=["double(21)"]).answers
    [{'value': '42'}]
    """
    limits = limits or SandboxLimits()
    started = time.monotonic()
    required = () if limits.allow_weaker else _CLOSED
    folder = tempfile.mkdtemp(prefix="kapell-sandbox-")
    try:
        asked = {
            "code": code,
            "calls": list(calls),
            "folder": folder,
            "libraries": _LIBRARIES,
            "limits": _resource_limits(limits),
            "required": required,
        }
        with _file_of(json.dumps(asked).encode()) as request, _file_of(stdin.encode("utf-8", "replace")) as input_file:
            reading, writing = os.pipe()
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", sandbox_child.__file__, f"{request.fileno()},{writing}"],
                stdin=input_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env={},
                pass_fds=(request.fileno(), writing),
                start_new_session=True,
            )
        os.close(writing)
        assert process.stdout is not None
        assert process.stderr is not None
        with os.fdopen(reading, "rb") as answers, process.stdout, process.stderr:
            stopped = None
            received = {stream: bytearray() for stream in (answers, process.stdout, process.stderr)}
            try:
                stopped = _receive(received, answers, limits)
            finally:
                _end(process)
    finally:
        _remove(folder)
    lines, stdout, stderr = (bytes(content).decode("utf-8", "replace") for content in received.values())
    if "\n" not in lines:  # not the code's fault: its process tells what it has closed before it runs anything
        how = "did not start in time" if stopped else f"ended with status {process.returncode} before the code ran"
        raise SandboxStartError(f"the sandbox's process {how}: {stderr.strip()[-_SHOWN_ERROR:]}")
    first, *rest = lines.splitlines()
    closed = tuple(json.loads(first)["closed"])
    if missing := [name for name in required if name not in closed]:
        raise SandboxUnavailableError(missing)
    return SandboxResult(
        ended=stopped or ("signal" if process.returncode < 0 else "exit"),
        status=process.returncode,
        stdout=stdout,
        stderr=stderr,
        answers=list(_answers(rest)),
        seconds=time.monotonic() - started,
        closed=closed,
    )


def _resource_limits(limits: SandboxLimits) -> dict[str, int]:
    return {
        "CPU": math.ceil(limits.seconds) + 1,
        "AS": limits.memory,
        "FSIZE": limits.max_file,
        "NOFILE": _MAX_OPEN_FILES,
        "NPROC": 0,
        "CORE": 0,
    }


@contextmanager
def _file_of(content: bytes) -> Generator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield file


def _remove(folder: str) -> None:
    for path, folders, _ in os.walk(folder):
        for name in folders:  # before the walk enters them: the code may have made them unreadable
            with suppress(OSError):
                os.chmod(os.path.join(path, name), stat.S_IRWXU, follow_symlinks=False)
    shutil.rmtree(folder, ignore_errors=True)


def _receive(
    received: Mapping[IO[bytes], bytearray], answers: IO[bytes], limits: SandboxLimits
) -> Literal["time", "output"] | None:
    """Read all streams to their ends, or until a limit, which is returned."""
    deadline = time.monotonic() + _START_SECONDS
    running = False
    with selectors.DefaultSelector() as selector:
        for stream in received:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return "time"
            for key, _ in selector.select(left):
                stream = cast("IO[bytes]", key.fileobj)
                content = os.read(key.fd, _READ_SIZE)
                if not content:
                    selector.unregister(stream)
                received[stream].extend(content)
                if sum(map(len, received.values())) > limits.max_output:
                    return "output"
                if stream is answers and not running:  # its first line says that the code starts now
                    running, deadline = True, time.monotonic() + limits.seconds
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and whatever is in its group."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _answers(lines: Sequence[str]) -> Iterator[dict[str, str]]:
    """The answers as far as they are whole: the code may have written anything, or been cut off."""
    for line in lines:
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(answer, dict) or not all(isinstance(value, str) for value in answer.values()):
            return
        yield answer
