"""The running workers of a group that another program, or an earlier one, has started: found by name or by handle."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError

from kapell.workergroup import ClassWithInitArgs, LostWorker, failed_ranks

from .host import HostFacts
from .session import EndedSessionError

__all__ = ["BusyWorkersError", "RunningWorker", "class_of", "names_with_prefix", "running_workers"]

logger = logging.getLogger(__name__)

_REPORT_EVERY = 30.0  # seconds between two lines about workers that are busy
_WAY_OUT = (
    "restart the rank in the program that started the group, or start the group anew; a group is attached to with all "
    "its workers, group[:1] then calls some of them"
)


class BusyWorkersError(TimeoutError):
    """Workers of a running group were too busy to be attached to; they go on with what they do."""

    def __init__(self, role: str, timeout: float, workers: Sequence[str]) -> None:
        super().__init__(role, timeout, tuple(workers))
        self.role = role
        self.timeout = timeout
        self.workers = tuple(workers)
        """Their names, or their handles where they have none."""

    def __str__(self) -> str:
        return (
            f"{self.role}: {', '.join(self.workers)} did not answer within {self.timeout:g} s, busy with a call or "
            f"with their start; attach when that is over, or raise start_timeout"
        )


class RunningWorker(NamedTuple):
    """A worker that has answered."""

    name: str
    """Its name in Ray; empty when it was found by its handle."""
    actor: Any
    """Its handle. Ray holds those by name weakly only: keep it."""
    facts: HostFacts
    """Where it is."""


def running_workers(
    names: Sequence[str] | None, handles: Sequence[Any] | None, namespace: str | None, *, role: str, timeout: float
) -> list[RunningWorker]:
    """The workers of these handles, or of these names, in the order of their ranks.

    Raises ``ValueError`` when there is none, or when they are of several groups, `WorkerLostError` when ranks of their
    group are not among them, `BusyWorkersError` when some have not answered after ``timeout`` seconds, and
    `EndedSessionError`.
    """
    lost: list[str] = []
    found = [("", handle) for handle in handles] if handles is not None else _named(names or (), namespace, lost)
    if not found:
        raise ValueError("no workers to attach to: worker_names or worker_handles is empty")
    if not ray.is_initialized():  # a handle without the Ray that it is of; asked, it would start another
        raise EndedSessionError("a worker of worker_handles")
    try:
        asked = [actor.facts.remote() for _, actor in found]
    except Exception as error:
        if type(error) is not Exception:  # Ray has no class for an actor of another session
            raise
        raise EndedSessionError("a worker of worker_handles") from error
    _wait_for(asked, [name or str(actor) for name, actor in found], role, timeout)
    running: list[RunningWorker] = []
    for (name, actor), ref in zip(found, asked, strict=True):
        try:
            running.append(RunningWorker(name, actor, ray.get(ref)))
        except RayActorError as error:
            lost.append(str(error).strip())
    running.sort(key=lambda worker: worker.facts.rank)
    _check_complete(running, lost, role)
    return running


def class_of(worker: RunningWorker, *, role: str, timeout: float) -> ClassWithInitArgs:
    """The class that a worker runs, with its arguments. Raises `BusyWorkersError` as `running_workers` does."""
    asked = worker.actor.describe.remote()
    _wait_for([asked], [worker.name or str(worker.actor)], role, timeout)
    return ray.get(asked)


def _wait_for(asked: Sequence[ray.ObjectRef], workers: Sequence[str], role: str, timeout: float) -> None:
    name_of = dict(zip(asked, workers, strict=True))
    end = time.monotonic() + timeout
    late = list(asked)
    while late:
        remaining = max(0.0, end - time.monotonic())
        _, late = ray.wait(late, num_returns=len(late), timeout=min(remaining, _REPORT_EVERY))
        busy = [name_of[ref] for ref in late]
        if late and remaining <= _REPORT_EVERY:
            raise BusyWorkersError(role, timeout, busy)
        if late:
            logger.warning("%s: waiting to attach to busy workers: %s", role, ", ".join(busy))


def _check_complete(running: Sequence[RunningWorker], lost: Sequence[str], role: str) -> None:
    ranks = [worker.facts.rank for worker in running]
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"the workers are of several groups: their ranks are {ranks}; attach to one group's at a time")
    world_size = running[0].facts.world_size if running else len(lost)
    missing = sorted(set(range(world_size)) - set(ranks))
    if missing:
        # Which of the lost ones had which rank is known as long as they were named in the order of ranks.
        reasons = chain(lost, repeat("no running worker of this rank was found"))
        failures = {rank: LostWorker(f"{reason}; {_WAY_OUT}") for rank, reason in zip(missing, reasons, strict=False)}
        raise failed_ranks(role, "from_detached", world_size, failures)


def _named(names: Sequence[str], namespace: str | None, lost: list[str]) -> list[tuple[str, Any]]:
    """The handles of those that Ray knows; the others are ``lost``. Raises ``ValueError`` when it knows none."""
    found: list[tuple[str, Any]] = []
    for name in names:
        try:
            found.append((name, ray.get_actor(name, namespace)))
        except ValueError:
            lost.append(f"no actor is named {name!r} any more")
    if names and not found:
        namespace, known = _known_names(namespace)
        raise ValueError(
            f"no worker is named {', '.join(map(repr, names))} in namespace {namespace!r}: they have ended, or are in "
            f"another namespace=; names there: {', '.join(known) or 'none'}"
        )
    return found


def names_with_prefix(prefix: str, namespace: str | None) -> list[str]:
    """The names that begin so. Raises ``ValueError`` when none does."""
    namespace, known = _known_names(namespace)
    names = [name for name in known if prefix and name.startswith(prefix)]
    if not names:
        raise ValueError(
            f"no named workers begin with {prefix!r} in namespace {namespace!r}; names there: "
            f"{', '.join(known) or 'none'}"
        )
    return names


def _known_names(namespace: str | None) -> tuple[str, list[str]]:
    """The namespace, by default this program's own, and the names of the actors that run there."""
    namespace = namespace or ray.get_runtime_context().namespace
    entries = ray.util.list_named_actors(all_namespaces=True)
    return namespace, sorted(entry["name"] for entry in entries if entry["namespace"] == namespace)
