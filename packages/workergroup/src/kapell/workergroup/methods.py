"""A labelled worker method as a method of the whole group, with options per call."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Any

from kapell.decorators import DispatchPlan, MethodSpec, signature_of

from .errors import KapellError
from .recording import Recorder

if TYPE_CHECKING:
    from .group import WorkerGroup

__all__ = ["CallOptions", "GroupMethod"]


@dataclasses.dataclass(frozen=True)
class CallOptions:
    """How calls of a method are made, as `GroupMethod.options` sets it."""

    blocking: bool
    """Whether the call waits for its result."""
    timeout: float | None = None
    """Seconds from sending to the result; None for the group's own limit."""
    retry: int = 0
    """How often the call is made again after it failed."""
    record: Recorder | str | PathLike[str] | None = None
    """Where the inputs of each rank are stored, for `replay`."""


class GroupMethod:
    """A labelled worker method as a method of the whole group."""

    def __init__(
        self,
        group: WorkerGroup,
        name: str,
        spec: MethodSpec,
        function: Callable[..., Any],
        options: CallOptions | None = None,
    ) -> None:
        self._group = group
        self._spec = spec
        self._function = function
        self._options = options or CallOptions(spec.blocking)
        self._plan = group.planner(name, spec, signature_of(group.worker_class, name))
        self.__name__ = name
        self.__doc__ = function.__doc__
        self.__wrapped__ = function

    @property
    def spec(self) -> MethodSpec:
        """How the method is dispatched."""
        return self._spec

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Dispatch, run and collect; a non-blocking call returns a `PendingCall`."""
        began = time.time()
        plan = self._plan(args, kwargs)
        pending = self._group.start_call(self.__name__, plan, self._options, began=began)
        if not self._options.blocking:
            return pending
        try:
            return pending.get()
        except KapellError as error:
            error.__traceback__ = None  # Kapell's own frames say nothing to the user
            raise

    def plan(self, *args: Any, **kwargs: Any) -> DispatchPlan:
        """What a call with these arguments would send to which rank; runs nothing."""
        return self._plan(args, kwargs)

    def options(
        self,
        *,
        blocking: bool | None = None,
        timeout: float | None = None,
        dispatch: Any = None,
        retry: int | None = None,
        record: Recorder | str | PathLike[str] | None = None,
    ) -> GroupMethod:
        """The same method with other settings for the calls made through it; `CallOptions` explains them.

        ``dispatch`` is another mode. ``retry`` needs a method that is declared ``idempotent``: a call that failed is
        made again on all ranks, after lost workers were restarted.
        """
        if retry and not self._spec.idempotent:
            raise ValueError(
                f"retry={retry} needs a method that may run twice; declare {self.__name__} with "
                "@register(..., idempotent=True) if it may"
            )
        given = {"blocking": blocking, "timeout": timeout, "retry": retry, "record": record}
        changes = {name: value for name, value in given.items() if value is not None}
        spec = self._spec if dispatch is None else dataclasses.replace(self._spec, dispatch_mode=dispatch)
        options = dataclasses.replace(self._options, **changes)
        return GroupMethod(self._group, self.__name__, spec, self._function, options)

    def __repr__(self) -> str:
        return f"<method {self.__name__} of group {self._group.role!r} with {self._group.world_size} workers>"
