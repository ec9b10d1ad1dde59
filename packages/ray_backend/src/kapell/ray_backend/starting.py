"""Starting a group: actors on their bundles, ranks from where they landed, a rendezvous, then the constructors."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kapell.workergroup import ClassWithInitArgs, colocated_roles, failed_start, placement_env

from .failures import lost_worker, own_error
from .host import AsyncWorkerHost, HostFacts, WorkerHost
from .ordering import node_key, order_places, seats
from .pools import RayResourcePool
from .workers import Inline, pack_argument

__all__ = ["GroupStart", "StartTimeoutError", "Starter"]

logger = logging.getLogger(__name__)

_REPORT_EVERY = 30.0  # seconds between two lines about workers that are slow to start
_FAILURE_GRACE_SECONDS = 1.0  # when one constructor fails, others often fail alike a moment later
_HOST = ray.remote(WorkerHost)
_ASYNC_HOST = ray.remote(AsyncWorkerHost)


class StartTimeoutError(TimeoutError):
    """The workers' processes or constructors did not finish in time; those that did were ended."""

    def __init__(self, role: str, stage: str, waited: float, ranks: Sequence[int]) -> None:
        super().__init__(role, stage, waited, tuple(ranks))
        self.role = role
        self.stage = stage
        self.waited = waited
        self.ranks = tuple(ranks)

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return (
            f"{self.role}: {self.stage} of rank {ranks} is not done after {self.waited:.0f} s; look at the "
            f"workers' logs, or raise start_timeout"
        )


@dataclass(frozen=True, kw_only=True)
class GroupStart:
    """What a group of workers is started from."""

    pool: RayResourcePool
    """Where."""
    cls_with_init: ClassWithInitArgs
    """What."""
    role: str
    """Name in errors and logs."""
    name_prefix: str
    """First part of the actors' names."""
    worker_env: Mapping[str, str] = field(default_factory=dict)
    """Variables that each worker's process starts with."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Ray options of the actors."""
    use_gpu: bool = True
    """Whether workers take their share of the pool's accelerator."""
    device_name: str = "cuda"
    """Kind of device, as torch names it."""
    strategy: str = "STRICT_PACK"
    """Placement strategy of the pool, if this group is its first."""
    detached: bool = False
    """Whether the actors outlive this program."""
    master: tuple[str, int] | None = None
    """Address and port of the rendezvous, when the caller gives them."""
    master_ports: Sequence[int] | None = None
    """Ports to choose from; any free one when None."""
    timeout: float = 1800.0
    """Seconds for the processes and the constructors together."""


class Starter:
    """Starts the workers of one group, and single ones again."""

    def __init__(self, start: GroupStart) -> None:
        self._start = start
        worker_class = start.cls_with_init.worker_class
        roles = colocated_roles(start.cls_with_init).values()
        is_async = any(map(_has_async_methods, (worker_class, *(role.worker_class for role in roles))))
        self._host = _ASYNC_HOST if is_async else _HOST
        # A random part: leftovers of another run, or a second group of the same name, must not collide.
        self._name = f"{start.name_prefix}{worker_class.__name__}-{uuid4().hex[:6]}"
        # Refuses protected variables before anything is started.
        self._check_env = placement_env(
            rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, master_addr="", master_port=0,
            extra=start.worker_env,
        )  # fmt: skip
        self._groups = start.pool.pgs
        self._packed_class: Any = None
        self.names: list[str] = []
        self.facts: list[HostFacts] = []
        self.envs: list[dict[str, str]] = []
        self._places = start.pool.places

    def start_all(self) -> list[Any]:
        """The actors in rank order, each with its worker built. On failure none is left, nor a reservation for them.

        Raises `WorkerFailedError` with the constructors' own errors, or `StartTimeoutError`.
        """
        start = self._start
        placed_here = start.pool.pgs is None
        self._groups = start.pool.get_placement_groups(start.strategy, device_name=start.device_name)
        deadline = time.monotonic() + start.timeout
        actors: list[Any] = []
        try:
            names = [self._actor_name(position) for position in range(len(self._places))]
            actors = [self._actor(position, name) for position, name in enumerate(names)]
            facts = self._answers([actor.facts.remote() for actor in actors], "start of the process", deadline)
            order = self._rank_order(facts)
            actors = [actors[position] for position in order]
            self._places = [self._places[position] for position in order]
            self.facts = [facts[position] for position in order]
            self.names = [names[position] for position in order]
            self.envs = self._environments(actors[0])
            self._packed_class = pack_argument(start.cls_with_init)
            self._answers(
                [self._build(actor, env) for actor, env in zip(actors, self.envs, strict=True)], "__init__", deadline
            )
        except BaseException:  # Ctrl-C while models load leaves no process either
            for actor in actors:
                ray.kill(actor, no_restart=True)
            if placed_here:
                start.pool.close()
            raise
        return actors

    def start_one(self, rank: int) -> tuple[Any, HostFacts, str]:
        """A new actor for a rank, on the same bundle and with the same environment; where it is, and its name."""
        name = f"{self._actor_name(rank)}-{uuid4().hex[:6]}"  # the lost one's name may not be free yet
        actor = self._actor(rank, name)
        deadline = time.monotonic() + self._start.timeout
        try:
            (facts,) = self._answers([actor.facts.remote()], "start of the process", deadline, first_rank=rank)
            if rank == 0 and self._start.master is None:
                ray.get(actor.claim.remote([int(self.envs[0]["MASTER_PORT"])]))
            self._answers([self._build(actor, self.envs[rank])], "__init__", deadline, first_rank=rank)
        except BaseException:
            ray.kill(actor, no_restart=True)
            raise
        return actor, facts, name

    def _actor(self, position: int, name: str) -> Any:
        start, place = self._start, self._places[position]
        assert self._groups is not None
        options = {**start.pool.resources.actor_options(use_accelerator=start.use_gpu), **start.options}
        runtime_env: dict[str, Any] = dict(start.options.get("runtime_env", {}))
        if start.worker_env:
            # From the start of the process, since some variables are read before any of our code runs.
            runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **start.worker_env}
        if runtime_env:
            options["runtime_env"] = runtime_env
        if start.detached:
            options["lifetime"] = "detached"
        options["name"] = name
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=self._groups[place.group], placement_group_bundle_index=place.bundle
        )
        return self._host.options(**options).remote(f"{start.role} {place.group}:{place.bundle}")

    def _actor_name(self, position: int) -> str:
        place = self._places[position]
        return f"{self._name}_{place.group}:{place.bundle}"

    def _rank_order(self, facts: Sequence[HostFacts]) -> list[int]:
        nodes = [node_key(fact.address, "", fact.node_id) for fact in facts]
        return order_places(self._places, nodes, [fact.devices for fact in facts])

    def _environments(self, first: Any) -> list[dict[str, str]]:
        start = self._start
        address, port = start.master or (self.facts[0].address, self._claimed_port(first))
        layout = seats([(place.group, fact.node_id) for place, fact in zip(self._places, self.facts, strict=True)])
        return [
            {
                **placement_env(
                    rank=rank,
                    world_size=len(layout),
                    local_rank=seat.local_rank,
                    local_world_size=seat.local_world_size,
                    node_rank=seat.node_rank,
                    master_addr=address,
                    master_port=port,
                    extra=start.worker_env,
                ),
                "WG_PREFIX": start.name_prefix,
                "WG_BACKEND": "ray",
                "RAY_LOCAL_RANK": str(seat.local_rank),
                "RAY_LOCAL_WORLD_SIZE": str(seat.local_world_size),
            }
            for rank, seat in enumerate(layout)
        ]

    def _claimed_port(self, first: Any) -> int:
        try:
            return ray.get(first.claim.remote(self._start.master_ports))
        except RayTaskError as error:
            raise own_error(error) from None

    def _build(self, actor: Any, env: Mapping[str, str]) -> ray.ObjectRef:
        packed = self._packed_class
        return actor.build.remote(env, packed.parts if isinstance(packed, Inline) else packed)

    def _answers(self, refs: Sequence[ray.ObjectRef], stage: str, deadline: float, first_rank: int = 0) -> list[Any]:
        """The answers of all; the failures of all that failed, shortly after the first one did."""
        ranks = {ref: first_rank + position for position, ref in enumerate(refs)}
        answers: dict[int, Any] = {}
        failures: dict[int, Exception] = {}
        began = reported = time.monotonic()
        pending = list(refs)
        while pending:
            limit = min(deadline, reported + _REPORT_EVERY) - time.monotonic()
            done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, limit))
            for ref in done:
                try:
                    answers[ranks[ref]] = ray.get(ref)
                except RayTaskError as error:
                    failures[ranks[ref]] = own_error(error)
                except RayError as error:
                    failures[ranks[ref]] = lost_worker(error, "")
                if failures:
                    deadline = min(deadline, time.monotonic() + _FAILURE_GRACE_SECONDS)
            now = time.monotonic()
            if pending and now >= deadline:
                break
            if pending and now - reported >= _REPORT_EVERY:
                reported = now
                late = [ranks[ref] for ref in pending]
                logger.warning("%s: waiting %.0f s for the %s of ranks %s", self._start.role, now - began, stage, late)
        late = [ranks[ref] for ref in pending]
        if failures:
            raise failed_start(self._start.role, len(self._places), failures)
        if late:
            raise StartTimeoutError(self._start.role, stage, time.monotonic() - began, late)
        return [answers[ranks[ref]] for ref in refs]


def _has_async_methods(worker_class: type) -> bool:
    return any(inspect.iscoroutinefunction(inspect.getattr_static(worker_class, name)) for name in dir(worker_class))
