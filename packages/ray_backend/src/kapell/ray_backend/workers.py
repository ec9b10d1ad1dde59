"""The actors behind a group: started on their bundles, given their ranks, called, waited for, replaced and ended."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from kapell.workergroup import RankCall, RunTime, Workers

from .answers import Answers
from .calling import goes_by_name, name_of, opened_answer, pack_argument, packed_call
from .failures import answer_error
from .host import HostFacts
from .numbering import CallNumbers
from .pools import RayResourcePool
from .session import check_session, this_session
from .starting import end_actors
from .storing import StoreFullError, store_full

__all__ = ["RayWorkers"]

_SIZE_SECONDS = 5.0  # for a worker to say how large an answer was that found no room
_RECEIVED_BYTES = 32 << 20  # a task of its own costs half a millisecond
_BUSY_AFTER_SECONDS = 0.3  # a dead process is known at once, an idle one answers in milliseconds


class RayAnswer:
    """The handle of a call."""

    __slots__ = ("packed", "ref")

    def __init__(self, ref: ray.ObjectRef, packed: bool) -> None:
        self.ref = ref
        self.packed = packed
        """Whether `packed_answer` made it."""

    def open(self, value: Any) -> Any:
        """The answer, when Ray has opened what ``ref`` refers to."""
        return opened_answer(value) if self.packed else value


class RayWorkers(Workers[RayAnswer]):
    """One Ray actor per rank."""

    def __init__(
        self,
        actors: Sequence[Any],
        *,
        role: str,
        facts: Sequence[HostFacts] = (),
        names: Sequence[str] = (),
        envs: Sequence[Mapping[str, str]] = (),
        pool: RayResourcePool | None = None,
        owned: bool = True,
        read_only: bool = False,
        detached: bool = False,
        restart: Callable[[int], Any] | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.actors = list(actors)
        self._role = role
        self._facts = list(facts)
        self.names = list(names)
        self._envs = list(envs)
        self.pool = pool  # keeps the reservation's owner alive
        self._owned = owned
        self._read_only = read_only
        # Views are of the store itself. And what a program has left with workers that outlive it would stay there.
        self._may_receive = owned and not detached and not read_only
        self._restart = restart
        self.session = this_session()
        self._questions: dict[int, ray.ObjectRef] = {}  # whether a rank lives, one at a time
        self._methods: dict[tuple[int, str, str, str], Any] = {}
        self._numbers = CallNumbers()
        # A group that is forgotten gives its places back too.
        self._leave = None if on_close is None else weakref.finalize(self, on_close)

    @property
    def world_size(self) -> int:
        """The number of actors."""
        return len(self.actors)

    def __getstate__(self) -> dict[str, Any]:
        self.check_session()
        # What is under way, the places, and the constructor's arguments stay with the process that made the group.
        left = {"_questions": {}, "_asked": {}, "_methods": {}, "_numbers": CallNumbers()}
        return {**self.__dict__, **left, "_leave": None, "_restart": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.session = this_session()  # that of the process that it was sent to, maybe on another node
        self._may_receive = False  # the workers outlive that process

    def put(self, value: Any, num_readers: int) -> Any:
        """Serialize once; small values ride in the call, larger ones go to the object store."""
        self._check_ray_runs()
        return pack_argument(value, num_readers=num_readers, read_only=self._read_only)

    def submit(self, call: RankCall) -> RayAnswer:
        """Send the call to the actor of its rank."""
        self._check_ray_runs()
        try:
            if goes_by_name(call):
                ref = self._method(call, "call_by_name").remote()
                self._numbers.note(ref, call.number)
            else:
                head, apart, stored = packed_call(call)
                if self._may_receive and stored >= _RECEIVED_BYTES:
                    taken = self._method(call, "receive").remote(head, *apart)
                    ref = self._method(call, "call_received").remote(taken)
                else:
                    ref = self._method(call, "call").remote(head, *apart)
        except Exception:  # Ray has no class for it
            self.check_session()
            raise
        return RayAnswer(ref, call.direct)

    def check_session(self) -> None:
        """Raise `EndedSessionError` when the actors ended with their session of Ray."""
        check_session(self.session, f"group {self._role!r}")

    def _check_ray_runs(self) -> None:
        """As `check_session`, as far as each call can afford it: another session makes itself known by errors."""
        if not ray.is_initialized():
            self.check_session()

    def _method(self, call: RankCall, kind: str) -> Any:
        """What sends a call: to look for it anew costs Ray more than to use it."""
        key = call.rank, kind, call.target, call.method
        method = self._methods.get(key)
        if method is None:
            method = self._methods[key] = getattr(self.actors[call.rank], kind).options(name=name_of(call))
        return method

    def wait(self, handles: Sequence[RayAnswer], timeout: float | None) -> list[RayAnswer]:
        """All that are done by the time that one is."""
        if not handles:
            return []
        self.check_session()
        by_ref = {handle.ref: handle for handle in handles}
        # Waiting alone brings nothing to this node: a result that is looked at here may be read elsewhere.
        done, rest = ray.wait(list(by_ref), num_returns=1, timeout=timeout, fetch_local=False)
        if done and rest:
            more, _ = ray.wait(rest, num_returns=len(rest), timeout=0, fetch_local=False)
            done += more
        return [by_ref[ref] for ref in done]

    def fetch(self, handle: RayAnswer) -> Any:
        """The result, or the worker's own exception, or `LostWorker`."""
        return handle.open(self._got(handle.ref))

    def _got(self, handle: ray.ObjectRef) -> Any:
        try:
            return ray.get(handle)
        except Exception as error:  # Ray's, or of a class that cannot be rebuilt here
            own = answer_error(error, self._node_of(handle), partial(self._no_room, handle))
            raise own from own.__cause__

    def fetch_all(self, handles: Sequence[RayAnswer], timeout: float | None) -> list[Any] | None:
        """All results in one request to Ray; None when one failed or the time is up."""
        self._check_ray_runs()
        refs = [handle.ref for handle in handles]
        try:
            values = ray.get(refs, timeout=None if timeout in (None, math.inf) else max(0.0, timeout))
            return [handle.open(value) for handle, value in zip(handles, values, strict=True)]
        except (GetTimeoutError, RayError):
            return None
        except Exception:  # of a class that cannot be rebuilt here: `fetch` tells the rank
            return None

    def run_times(self, ranks: Sequence[int], timeout: float) -> dict[int, list[RunTime]]:
        """When calls ran, for each rank that is free to answer; each call is told once."""
        if self.session != this_session():
            return {}
        return self._numbers.numbered(super().run_times(ranks, timeout))

    def is_alive(self, rank: int) -> bool:
        """Whether the process is there: Ray fails a question to a dead one at once; a busy one leaves it unanswered."""
        return self.alive([rank])[0]

    def alive(self, ranks: Sequence[int]) -> list[bool]:
        """`is_alive` of each rank, in the time that one takes."""
        if not ranks or self.session != this_session():
            return [False] * len(ranks)
        asked = [self._question(rank) for rank in ranks]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=_BUSY_AFTER_SECONDS)
        gone = set()
        for ref in answered:
            try:
                ray.get(ref)
            except RayError:
                gone.add(ref)
        return [ref not in gone for ref in asked]

    def _question(self, rank: int) -> ray.ObjectRef:
        """Whether the rank lives: the question that it has not answered yet, or a new one."""
        asked = self._questions.get(rank)
        if asked is None or ray.wait([asked], timeout=0)[0]:
            asked = self._questions[rank] = self.actors[rank].facts.remote()
        return asked

    def restart(self, rank: int) -> None:
        """A new process for the rank, on the same bundle."""
        if self._restart is None:
            raise RuntimeError(f"another program has started the workers of {self._role!r}; restart them there")
        self.check_session()
        end_actors([self.actors[rank]], [self._facts[rank].actor_id])
        self._questions.pop(rank, None)
        self._methods = {key: method for key, method in self._methods.items() if key[0] != rank}
        self.actors[rank], self._facts[rank], self.names[rank] = self._restart(rank)

    def close(self) -> None:
        """End the processes; those of an attached group stay."""
        # Ray 2.44 takes this program down when it is told to end what another session has had.
        if self._owned and self.session == this_session() is not None:
            end_actors(self.actors, [facts.actor_id for facts in self._facts])
        if self._leave is not None:
            self._leave()
        # Whoever keeps the closed group keeps neither its constructor's arguments nor what its calls were sent with.
        self._restart = None
        self._methods = {}

    @property
    def facts(self) -> list[HostFacts]:
        """Where each rank's process is."""
        return list(self._facts)

    def visible_devices(self, timeout: float) -> list[Mapping[str, str]]:
        """The variables with the devices that each rank sees.

        Raises `WorkerLostError` when processes are gone, and ``TimeoutError`` that names the ranks that stayed busy.
        """
        self.check_session()
        asked = [actor.visible_devices.remote() for actor in self.actors]
        answers = self.answers(self._role, "visible_devices", dict(enumerate(asked)), self.world_size)
        return answers.get(asked, timeout)

    def answers(self, role: str, method: str, refs: Mapping[int, ray.ObjectRef], num_ranks: int) -> Answers:
        """The answers of these ranks to a call, for others than the call itself to read."""
        givers = {ref: (rank, self._facts[rank]) for rank, ref in refs.items()}
        return Answers(role, method, num_ranks, givers, self.session, self.session)

    def environment(self, rank: int) -> Mapping[str, str]:
        """The variables that tell a rank its place; of an attached group only rank and world size."""
        return self._envs[rank] if self._envs else super().environment(rank)

    def _rank_of(self, handle: ray.ObjectRef) -> int | None:
        actor_id = handle.task_id().actor_id().hex()
        return next((rank for rank, facts in enumerate(self._facts) if facts.actor_id == actor_id), None)

    def _node_of(self, handle: ray.ObjectRef) -> str:
        rank = self._rank_of(handle)
        return "" if rank is None else self._facts[rank].process

    def _no_room(self, handle: ray.ObjectRef, error: Exception) -> StoreFullError:
        """An answer that the store of its node did not take; its worker remembers how large it was."""
        rank = self._rank_of(handle)
        if rank is None:
            return store_full(error, "an answer", 0, "")
        asked = self.actors[rank].answer_bytes.remote(handle.task_id().hex())
        answered, _ = ray.wait([asked], timeout=_SIZE_SECONDS)
        try:
            (nbytes,) = ray.get(answered) or (0,)
        except RayError:  # gone meanwhile
            nbytes = 0
        return store_full(error, f"the answer of rank {rank}", nbytes, self._facts[rank].node_id)
