"""Starting a group: actors on their bundles, ranks from where they landed, a rendezvous, then the constructors."""

from __future__ import annotations

import inspect
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import GetTimeoutError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from kapell.workergroup import CALL_SECONDS, ClassWithInitArgs, check_worker_env, colocated_roles, placement_env

from .calling import Inline, Stored, pack_argument
from .failures import own_error
from .host import AsyncWorkerHost, HostFacts, WorkerHost
from .occupancy import Occupied, occupy
from .ordering import node_key, order_places, seats
from .placement import release_of
from .pools import RayResourcePool
from .start_answers import StartTimeoutError, gather_start

__all__ = ["START_SECONDS", "Beside", "GroupStart", "Starter", "end_actors"]

START_SECONDS = 1800.0
"""For the constructors: loading a large model takes minutes."""
_HOST = ray.remote(WorkerHost)
_ASYNC_HOST = ray.remote(AsyncWorkerHost)


@dataclass(frozen=True)
class Beside:
    """The process of another group whose place a rank shares."""

    node_id: str
    """Ray's id of its node."""
    devices: Mapping[str, str]
    """The variables with the devices that it sees."""


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
    read_only: bool = False
    """Whether arrays and tensors arrive at the workers as views that refuse to be written."""
    timeout: float = START_SECONDS
    """Seconds for the processes and the constructors together."""
    beside: Sequence[Beside] = ()
    """For each rank the process whose node and devices it uses, instead of a share of the pool."""


class Starter:
    """Starts the workers of one group, and single ones again."""

    def __init__(self, start: GroupStart) -> None:
        self._start = start
        worker_class = start.cls_with_init.worker_class
        roles = colocated_roles(start.cls_with_init).values()
        # Calls of one rank run in their order, in the process's main thread, unless the caller asks for overlap.
        overlap = start.options.get("max_concurrency", 1) > 1
        is_async = any(map(_has_async_methods, (worker_class, *(role.worker_class for role in roles))))
        self._host = _ASYNC_HOST if overlap and is_async else _HOST
        # A random part: leftovers of another run, or a second group of the same name, must not collide.
        self._name = f"{start.name_prefix}{worker_class.__name__}-{uuid4().hex[:6]}"
        check_worker_env(start.worker_env)  # before anything is started
        check_worker_env(_env_vars(start.options), 'runtime_env["env_vars"]')
        self._groups = start.pool.pgs
        self._packed_class: Any = None
        self._occupied: Occupied | None = None
        self.names: list[str] = []
        self.facts: list[HostFacts] = []
        self.envs: list[dict[str, str]] = []
        self._places = start.pool.places

    def start_all(self) -> list[Any]:
        """The actors in rank order, each with its worker built. On failure none is left, nor a reservation for them.

        Raises `WorkerFailedError` with the constructors' own errors, or `StartTimeoutError`.
        """
        start = self._start
        earlier = start.pool.pgs
        self._groups = start.pool.get_placement_groups(start.strategy, device_name=start.device_name)
        deadline = time.monotonic() + start.timeout
        actors: list[Any] = []
        try:
            self._take_shares()
            names = [self._actor_name(position) for position in range(len(self._places))]
            actors = [self._actor(position, name) for position, name in enumerate(names)]
            facts = self._answers("start of the process", [actor.facts.remote() for actor in actors], deadline)
            order = self._rank_order(facts)
            actors = [actors[position] for position in order]
            self._places = [self._places[position] for position in order]
            self.facts = [facts[position] for position in order]
            self.names = [names[position] for position in order]
            self.envs = self._environments(actors[0], deadline)
            self._packed_class = pack_argument(start.cls_with_init, num_readers=len(self._places))
            builds = [self._build(actor, env) for actor, env in zip(actors, self.envs, strict=True)]
            self._answers("__init__", builds, deadline)
        except BaseException:  # Ctrl-C while models load leaves no process either
            self.leave()
            end_actors(actors, [facts.actor_id for facts in self.facts])
            if self._groups is not earlier:
                start.pool.close()
            raise
        return actors

    def start_one(self, rank: int) -> tuple[Any, HostFacts, str]:
        """A new actor for a rank, on the same bundle and with the same environment; where it is, and its name."""
        name = f"{self._actor_name(rank)}-{uuid4().hex[:6]}"  # the lost one's name may not be free yet
        actor = self._actor(rank, name)
        deadline = time.monotonic() + self._start.timeout
        actor_ids: list[str] = []
        try:
            (facts,) = self._answers("start of the process", [actor.facts.remote()], deadline, rank)
            actor_ids.append(facts.actor_id)
            if rank == 0 and self._start.master is None:
                self._claim(actor, [int(self.envs[0]["MASTER_PORT"])], deadline)
            self._answers("__init__", [self._build(actor, self.envs[rank])], deadline, rank)
        except BaseException:
            end_actors([actor], actor_ids)
            raise
        return actor, facts, name

    def leave(self) -> None:
        """Give the group's share of the pool back. Harmless when repeated."""
        if self._occupied is not None:
            self._occupied.leave()
        self._packed_class = None  # in Ray's store; nobody is started any more

    def _take_shares(self) -> None:
        if not self._start.beside:
            groups = self._groups
            assert groups is not None
            places = [(groups[place.group].id.hex(), place.bundle) for place in self._places]
            self._occupied = occupy(places, self._start.pool.max_colocate_count)

    def _actor(self, position: int, name: str) -> Any:
        start, place = self._start, self._places[position]
        options = {**self._where(position), **start.options}
        runtime_env: dict[str, Any] = dict(start.options.get("runtime_env") or {})
        if start.worker_env:
            # From the start of the process, since some variables are read before any of our code runs.
            runtime_env["env_vars"] = {**_env_vars(start.options), **start.worker_env}
        if runtime_env:
            options["runtime_env"] = runtime_env
        if start.detached:
            options["lifetime"] = "detached"
        options["name"] = name
        return self._host.options(**options).remote(f"{start.role} {place.group}:{place.bundle}")

    def _where(self, position: int) -> dict[str, Any]:
        start, place = self._start, self._places[position]
        if start.beside:
            node_id = start.beside[position].node_id
            return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}
        assert self._groups is not None
        return {
            **start.pool.resources.actor_options(use_accelerator=start.use_gpu),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self._groups[place.group], placement_group_bundle_index=place.bundle
            ),
        }

    def _actor_name(self, position: int) -> str:
        place = self._places[position]
        return f"{self._name}_{place.group}:{place.bundle}"

    def _rank_order(self, facts: Sequence[HostFacts]) -> list[int]:
        if self._start.beside:
            return list(range(len(facts)))
        nodes = [node_key(fact.address, "", fact.node_id) for fact in facts]
        return order_places(self._places, nodes, [fact.devices for fact in facts])

    def _environments(self, first: Any, deadline: float) -> list[dict[str, str]]:
        start = self._start
        address, port = start.master or (self.facts[0].address, self._claim(first, start.master_ports, deadline))
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
                **(start.beside[rank].devices if start.beside else {}),
            }
            for rank, seat in enumerate(layout)
        ]

    def _answers(self, stage: str, refs: Sequence[ray.ObjectRef], deadline: float, first_rank: int = 0) -> list[Any]:
        role = self._start.role
        return gather_start(role, stage, refs, deadline, first_rank=first_rank, world_size=len(self._places))

    def _claim(self, actor: Any, ports: Sequence[int] | None, deadline: float) -> int:
        try:
            seconds = min(max(0.0, deadline - time.monotonic()), CALL_SECONDS)  # Ray takes no endless time
            return ray.get(actor.claim.remote(ports), timeout=seconds)
        except GetTimeoutError:
            raise StartTimeoutError(self._start.role, "claim of a port", self._start.timeout, [0]) from None
        except RayTaskError as error:
            raise own_error(error) from None

    def _build(self, actor: Any, env: Mapping[str, str]) -> ray.ObjectRef:
        packed = self._packed_class
        if isinstance(packed, Inline):
            packed = packed.data
        elif isinstance(packed, Stored):
            packed = packed.ref
        return actor.build.remote(env, packed, self._start.read_only)


def _env_vars(options: Mapping[str, Any]) -> Mapping[str, str]:
    return (options.get("runtime_env") or {}).get("env_vars") or {}


def _has_async_methods(worker_class: type) -> bool:
    return any(inspect.iscoroutinefunction(inspect.getattr_static(worker_class, name)) for name in dir(worker_class))


def end_actors(actors: Sequence[Any], actor_ids: Collection[str]) -> None:
    """End processes, and give back what they had reserved for groups of their own."""
    for actor in actors:
        ray.kill(actor, no_restart=True)
    release_of(actor_ids)
