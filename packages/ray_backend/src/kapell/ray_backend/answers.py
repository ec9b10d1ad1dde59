"""The ranks' answers to a call, read by others than the call itself: its parts, and whoever it is passed on to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, OwnerDiedError

from kapell.workergroup import FAILURE_GRACE_SECONDS, failed_ranks

from .failures import answer_error
from .host import HostFacts
from .session import EndedSessionError, check_cluster, check_session, this_session
from .storing import store_full

__all__ = ["Answers"]


@dataclass(frozen=True)
class Answers:
    """References to a call's answers, with all that an error about them says, in whatever process they are read."""

    role: str
    """Name of the group."""
    method: str
    """The method that was called."""
    num_ranks: int
    """How many ranks it runs on."""
    givers: Mapping[ray.ObjectRef, tuple[int, HostFacts]]
    """The rank behind each reference and where it is, in the order in which the answers are joined."""
    origin: tuple[str, str] | None
    """The session of Ray in which the call was made."""
    session: tuple[str, str] | None = field(default_factory=this_session)
    """The session of Ray in which the references are read."""

    def get(self, refs: Sequence[ray.ObjectRef], timeout: float | None = None) -> list[Any]:
        """The answers behind some of the references.

        Raises `WorkerFailedError` or `WorkerLostError` as the call does, but without the other ranks' results;
        ``TimeoutError`` after ``timeout`` seconds, and `EndedSessionError`.
        """
        self._check()
        try:
            return ray.get(list(refs), timeout=timeout)
        except GetTimeoutError:
            late = sorted(self.givers[ref][0] for ref in ray.wait(list(refs), num_returns=len(refs), timeout=0)[1])
            raise TimeoutError(f"{self._label}: ranks {late} had not answered after {timeout} s") from None
        except Exception as first:  # Ray's, or of a class that cannot be rebuilt here
            raise self._error(refs, first) from None

    def wait(
        self, refs: Sequence[ray.ObjectRef], timeout: float | None
    ) -> tuple[list[ray.ObjectRef], list[ray.ObjectRef]]:
        """Wait until all are there or the time is over; those that are there and those that are not."""
        self._check()
        # Waiting alone brings nothing to this node: a future that is looked at here may be read elsewhere.
        return ray.wait(list(refs), num_returns=len(refs), timeout=timeout, fetch_local=False) if refs else ([], [])

    def _error(self, refs: Sequence[ray.ObjectRef], first: Exception) -> Exception:
        """What to raise when Ray has raised ``first``: it tells one rank's failure, whichever that is."""
        failures: dict[int, Exception] = {}
        done, late = self.wait(refs, FAILURE_GRACE_SECONDS)
        for ref in done:
            rank, facts = self.givers[ref]
            no_room = partial(store_full, what=f"the answer of rank {rank}", nbytes=0, node_id=facts.node_id)
            try:
                ray.get(ref)
            except OwnerDiedError:  # the program that made the call has ended
                return EndedSessionError(f"call {self._label}")
            except Exception as error:
                failures[rank] = answer_error(error, facts.process, no_room)
        unfinished = sorted(self.givers[ref][0] for ref in late)
        return failed_ranks(self.role, self.method, self.num_ranks, failures, unfinished) if failures else first

    @property
    def _label(self) -> str:
        return f"{self.role}.{self.method}"

    def _check(self) -> None:
        check_session(self.session, f"call {self._label}")
        check_cluster(self.origin, f"call {self._label}")

    def __reduce__(self) -> tuple[Any, ...]:
        check_session(self.session, f"call {self._label}")
        return Answers, (self.role, self.method, self.num_ranks, self.givers, self.origin)
