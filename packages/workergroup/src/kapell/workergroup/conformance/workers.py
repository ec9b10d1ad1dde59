# ruff: noqa: D102 - each method does what its name says, for a test that calls it
"""The workers of the conformance tests. They know nothing but lists and numbers."""

from __future__ import annotations

import ast
import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

from kapell.decorators import Dispatch, Execute, register

from ..colocation import colocated_worker_class
from ..pool import ClassWithInitArgs
from ..worker import Worker

__all__ = [
    "Changer",
    "Checker",
    "Critic",
    "Hybrid",
    "Note",
    "NoteElsewhere",
    "OddError",
    "Picky",
    "Scorer",
    "UnpicklableError",
    "config_of",
    "function_or_failure",
    "label_rows",
]


def label_rows(worker: Worker, rows: list[Any]) -> list[tuple[int, Any]]:
    """Each row with the rank that had it."""
    return [(worker.rank, row) for row in rows]


def function_or_failure(worker: Worker) -> Any:
    """What cannot be pickled from rank 0, an error from rank 1, the rank from others."""
    rank = worker.rank
    if rank == 1:
        raise ValueError(f"no function of rank {rank}")
    return rank if rank else lambda: rank


def _two_to_all(group: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Two entries, dealt to the ranks in turn."""

    def deal(pair: list[Any]) -> list[Any]:
        return [pair[rank % 2] for rank in range(group.world_size)]

    return tuple(deal(arg) for arg in args), {name: deal(value) for name, value in kwargs.items()}


def _sum_of_all(group: Any, outputs: list[Any]) -> Any:
    return sum(outputs)


class Note:
    """A value that calls by reference leave with the worker."""

    def __init__(self, lines: list[Any]) -> None:
        self.lines = lines

    def __kapell_keep__(self, store: Any) -> NoteElsewhere:
        return NoteElsewhere(store, store.put(self))


class NoteElsewhere:
    """A reference to a note."""

    __kapell_future__ = True

    def __init__(self, store: Any, ref: Any) -> None:
        self.store = store
        self.ref = ref

    def get(self, timeout: float | None = None) -> Note:
        (note,) = self.store.get([self.ref], timeout=timeout)
        return note


class OddError(Exception):
    """An exception whose constructor does not take its ``args``."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first}-{second}")
        self.first = first


class UnpicklableError(Exception):
    """An exception that cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Checker(Worker):
    """Does a little of everything; an even number of them forms a mesh of pairs that share their rows."""

    def __init__(self, base: int) -> None:
        super().__init__()
        self.base = base
        self.value = 0
        self.runs = 0
        self._register_dispatch_collect_info("train", dp_rank=self.rank // 2, is_collect=self.rank % 2 == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place(self) -> tuple[int, int]:
        return self.rank, self.world_size

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def echo(self, value: Any) -> Any:
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def echo_later(self, value: Any) -> Any:
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def note(self) -> Note:
        return Note([self.rank])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def note_later(self) -> Note:
        return Note([self.rank])

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def sign(self, note: Note) -> list[Any]:
        note.lines.append(self.rank)
        return note.lines

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def add(self, value: int, other: int = 0) -> int:
        return self.base + value + other

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def compute(self, value: int) -> tuple[int, int]:
        return self.rank, value

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows(self, rows: list[Any], scale: int = 1, config: dict[str, int] | None = None) -> list[Any]:
        offset = (config or {}).get("offset", 0)
        return [row * scale + offset for row in rows]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def labelled_rows(self, rows: list[Any]) -> list[tuple[int, Any]]:
        return label_rows(self, rows)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def total(self, rows: list[int]) -> int:
        return sum(rows)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def first_only(self, value: Any) -> tuple[int, Any]:
        return self.rank, value

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def first_adds(self, value: int, other: int) -> int:
        return self.base + value + other

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    def direct(self) -> int:
        return self.rank

    @register(dispatch_mode={"dispatch_fn": _two_to_all, "collect_fn": _sum_of_all})
    def custom(self, value: int) -> int:
        return value

    @register(dispatch_mode=Dispatch.mesh("train"))
    def mesh_rows(self, rows: list[Any]) -> list[tuple[int, Any]] | None:
        return [(self.rank, row) for row in rows] if self.rank % 2 == 0 else None

    @register(dispatch_mode=Dispatch.mesh("nowhere"))
    def lost_in_mesh(self, rows: list[Any]) -> list[Any]:
        return rows

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def async_rows(self, rows: list[Any]) -> list[tuple[int, Any]]:
        await asyncio.sleep(0)
        return label_rows(self, rows)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_value(self, value: int) -> None:
        self.value = value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_value(self) -> int:
        return self.value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_variable(self, name: str, value: str) -> None:
        os.environ[name] = value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def append_rank(self, values: list[int]) -> list[int]:
        values.append(self.rank)
        return values

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def keep(self, value: Any) -> Any:
        self.kept = value
        return self.kept

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def kept_value(self) -> Any:
        return self.kept

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def nap(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def wait_for(self, path: str) -> int:
        """Busy until the test makes the file, however slow the machine is; without a path not at all."""
        while path and not os.path.exists(path):
            time.sleep(0.01)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def meet(self, folder: str, seconds: float) -> bool:
        """Whether all ranks are in this call at once: each leaves a file and looks for the others'."""
        (Path(folder) / str(self.rank)).touch()
        end = time.monotonic() + seconds
        while len(os.listdir(folder)) < self.world_size and time.monotonic() < end:
            time.sleep(0.01)
        return len(os.listdir(folder)) == self.world_size

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def nap_or_fail(self, seconds: float) -> int:
        if seconds < 0:
            raise ValueError(f"rank {self.rank} cannot sleep {seconds} s")
        time.sleep(seconds)
        return self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def fail_on(self, rows: list[int], ranks: set[int]) -> list[int]:
        if self.rank in ranks:
            raise ValueError(f"no {rows} here")
        return rows

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_with(self, kind: str) -> None:
        if self.rank != 1:
            return
        if kind == "chain":
            try:
                {}["missing"]
            except KeyError as error:
                raise ValueError("from a key") from error
        if kind == "decode":
            b"a\xff".decode()
        if kind == "syntax":
            ast.literal_eval("(")
        errors: dict[str, BaseException] = {
            "stop": StopIteration("the end"),
            "odd": OddError(1, 2),
            "unpicklable": UnpicklableError("holds a lock"),
            "exit": SystemExit("leaving"),
            "interrupt": KeyboardInterrupt("by hand"),
            "group": ExceptionGroup("two", [ValueError("one of two"), KeyError("other of two")]),
        }
        raise errors[kind]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, idempotent=True)
    def third_time_lucky(self) -> int:
        self.runs += 1
        if self.rank == 1 and self.runs < 3:
            raise ValueError(f"run {self.runs}")
        return self.runs

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, idempotent=True)
    def alive_since_start(self) -> int:
        self.runs += 1
        return self.runs

    def unlabelled(self, value: Any = None) -> tuple[int, Any]:
        return self.rank, value


class Picky(Worker):
    """Cannot be built on rank 1; on rank 0 that takes a while."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        if self.rank == 1:
            raise ValueError("bad cfg")
        time.sleep(seconds)


class Scorer(Worker):
    """One role of a colocated worker."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "scorer"
        self._register_dispatch_collect_info("own", dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def score(self, rows: list[int]) -> list[int]:
        return [row + self.rank for row in rows]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def own_name(self) -> str:
        return self.name

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.mesh("own"))
    def in_mesh(self, rows: list[int]) -> list[int]:
        return rows

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self) -> None:
        raise ValueError("the scorer failed")


class Changer(Worker):
    """Changes the arguments of its constructor."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        config["rows"] //= self.world_size
        config["ranks"].append(self.rank)
        self.config = config


def config_of(worker: Any) -> dict[str, Any]:
    """What a `Changer` has made of its argument, be it the worker or its role."""
    return worker.fused_worker_dict.get("role", worker).config


class Critic(Worker):
    """Another role of it, which can reach the first."""

    def __init__(self, scale: int) -> None:
        super().__init__()
        self.name = "critic"
        self.scale = scale
        self._register_dispatch_collect_info("own", dp_rank=self.world_size - 1 - self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def judge(self, rows: list[int]) -> list[int]:
        await asyncio.sleep(0)
        return [row * self.scale for row in rows]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def own_name(self) -> str:
        return self.name

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.mesh("own"))
    def in_mesh(self, rows: list[int]) -> list[int]:
        return rows

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def score_of_neighbour(self, rows: list[int]) -> list[int]:
        return self.fused_worker_dict["scorer"].score(rows)


_Base: Any = colocated_worker_class({"scorer": ClassWithInitArgs(Scorer), "critic": ClassWithInitArgs(Critic, scale=3)})


class Hybrid(_Base):
    """Combines its roles in a method of its own."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def score_and_scale(self, rows: list[int]) -> list[int]:
        return [row * self.critic.scale for row in self.scorer.score(rows)]
