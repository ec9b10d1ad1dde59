"""Planning a call: a pure function from a label, the shape of a group and the arguments to a `DispatchPlan`."""

import inspect
from collections.abc import Mapping
from typing import Any

from kapell.decorators.call_layout import CallLayout
from kapell.decorators.mesh import GroupShape
from kapell.decorators.modes import Arguments, resolve
from kapell.decorators.plan import DispatchPlan
from kapell.decorators.spec import MethodSpec

__all__ = ["CallPlanner", "make_plan"]


def make_plan(
    method: str,
    spec: MethodSpec,
    shape: GroupShape,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    signature: inspect.Signature | None = None,
    group: Any = None,
) -> DispatchPlan:
    """Plan one call of `method` over a group of the given shape. Nothing is sent, and no argument is changed.

    `signature` (see `signature_of`) lets wrong calls be refused here; `group` is only handed to the functions of a
    custom mode, which get `shape` without it. Costs time and memory per rank, not per row: shards are cut when the
    plan's arguments are read.

    >>> spec = MethodSpec(dispatch_mode="DP_COMPUTE_PROTO")
    >>> plan = make_plan("double", spec, GroupShape(2), ([1, 2, 3],))
    >>> plan.rows, plan.call_for(1), plan.collect([[2, 4], [6]])
    ((2, 1), (([3],), {}), [2, 4, 6])
    """
    return CallPlanner(method, spec, shape, signature=signature, group=group)(args, kwargs or {})


class CallPlanner:
    """Plans all calls of one method over one group, as `make_plan` does; what they have in common is found once.

    >>> planner = CallPlanner("ping", MethodSpec(dispatch_mode="ONE_TO_ALL"), GroupShape(2))
    >>> planner((), {}).ranks
    (0, 1)
    """

    def __init__(
        self,
        method: str,
        spec: MethodSpec,
        shape: GroupShape,
        *,
        signature: inspect.Signature | None = None,
        group: Any = None,
    ) -> None:
        self._facts = (method, spec, shape, signature)
        self._group = shape if group is None else group
        self._call: CallLayout | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DispatchPlan:
        """Plan one call."""
        method, spec, shape, signature = self._facts
        mode = resolve(spec.dispatch_mode)
        call = self._call
        if call is None or call.mode is not mode:
            call = self._call = CallLayout(method, spec, mode, shape, signature)
        if mode.arguments is Arguments.CUSTOM:
            return call.plan_custom(args, kwargs, self._group)
        return call.plan(args, kwargs)
