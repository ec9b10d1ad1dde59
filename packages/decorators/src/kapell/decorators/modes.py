"""Dispatch modes as values: how arguments reach the ranks of a group and how results come back."""

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum, StrEnum
from typing import Any, ClassVar

__all__ = [
    "Arguments",
    "CollectFn",
    "Dispatch",
    "DispatchFn",
    "Execute",
    "ModeFunctions",
    "ModePair",
    "Reduction",
    "as_mode",
    "register_dispatch_mode",
    "resolve",
    "update_dispatch_mode",
]

DispatchFn = Callable[..., tuple[Any, Any]]
"""`f(group, *args, **kwargs) -> (args, kwargs)` where each entry is a list with one value a rank."""

CollectFn = Callable[[Any, list[Any]], Any]
"""`g(group, outputs) -> result`, outputs in rank order."""

ModePair = Mapping[str, Callable[..., Any]]
"""`{"dispatch_fn": DispatchFn, "collect_fn": CollectFn}`, verl's form of a custom mode."""


class Arguments(StrEnum):
    """How a mode lays out the arguments of a call."""

    WHOLE = "whole"
    """Every rank receives each argument whole."""
    RANK_ZERO = "rank_zero"
    """Only rank 0 runs and receives each argument whole."""
    PER_WORKER = "per_worker"
    """Each argument is a list with one entry a rank."""
    ROWS = "rows"
    """Arguments with rows are split over the data-parallel ranks; others go whole to every rank."""
    FUNCTION_AND_ROWS = "function_and_rows"
    """As `ROWS`; the first argument is a function, which goes whole to every rank."""
    CUSTOM = "custom"
    """The mode's own `dispatch_fn` returns a list with one entry a rank for each argument."""
    FORBIDDEN = "forbidden"
    """The method is not called through the group."""


class Reduction(StrEnum):
    """How the results of the collected ranks become one result."""

    CONCAT = "concat"
    """Rows are joined in data-parallel order; results without rows become a list."""
    LIST = "list"
    """One entry a collected rank."""
    FIRST = "first"
    """The result of the first collected rank."""
    MEAN = "mean"
    """Mean of numbers, or of each key of dicts, weighted by rows (padding counts nothing)."""
    SUM = "sum"
    """Sum of numbers, or of each key of dicts."""
    MAX = "max"
    """Largest of numbers, or of each key of dicts."""
    MIN = "min"
    """Smallest of numbers, or of each key of dicts."""
    DICT_OF_LISTS = "dict_of_lists"
    """`{key: [value of each rank that has the key, ...]}` of dicts."""


class Execute(Enum):
    """Which ranks run the method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


_MODES: "dict[str, Dispatch]" = {}


def _unknown_mode(name: str) -> str:
    close = difflib.get_close_matches(name.upper(), _MODES, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else ";"
    return (
        f"unknown dispatch mode {name!r}{meant} known: {', '.join(_MODES)}. "
        "A mode of your own is registered in the module that labels methods with it"
    )


class _DispatchMeta(type):
    """Registered modes are attributes of `Dispatch`, as in verl."""

    def __getattr__(cls, name: str) -> "Dispatch":
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in _MODES:
            raise AttributeError(_unknown_mode(name))
        return _MODES[name]

    def __iter__(cls) -> Iterator["Dispatch"]:
        return iter(_MODES.values())


@dataclass(frozen=True)
class Dispatch(metaclass=_DispatchMeta):
    """One dispatch mode: a value that is part of a method's label and travels with it.

    >>> Dispatch.ONE_TO_ALL.arguments
    <Arguments.WHOLE: 'whole'>
    >>> Dispatch.mesh("actor").mesh_name
    'actor'
    """

    name: str
    """What plans and messages call the mode."""
    arguments: Arguments
    """How the arguments reach the ranks."""
    collect: Reduction
    """How results come back when the method declares nothing else."""
    mesh_name: str | None = None
    """The mesh whose data-parallel ranks receive the rows; None for the whole group, one shard a rank."""
    dispatch_fn: DispatchFn | None = None
    """Of a custom mode."""
    collect_fn: CollectFn | None = None
    """Of a custom mode."""

    RANK_ZERO: ClassVar["Dispatch"]
    """Rank 0 runs alone and its result is the result."""
    ONE_TO_ALL: ClassVar["Dispatch"]
    """Every rank receives all arguments whole; results are a list in rank order."""
    ALL_TO_ALL: ClassVar["Dispatch"]
    """Each argument is a list of one entry a rank; results are a list in rank order."""
    DP_COMPUTE: ClassVar["Dispatch"]
    """As `ALL_TO_ALL`."""
    DP_COMPUTE_PROTO: ClassVar["Dispatch"]
    """Rows are split over all ranks and the results joined."""
    DP_COMPUTE_PROTO_WITH_FUNC: ClassVar["Dispatch"]
    """As `DP_COMPUTE_PROTO`, with a function before the batch."""
    DP_COMPUTE_METRIC: ClassVar["Dispatch"]
    """Rows are split over all ranks; results are a list in rank order."""
    DIRECT_ROLLOUT_METHOD: ClassVar["Dispatch"]
    """The method is called on the worker directly, never through the group."""

    @staticmethod
    def mesh(mesh_name: str) -> "Dispatch":
        """Rows are split over the data-parallel ranks of the mesh that workers registered as `mesh_name`."""
        return Dispatch(f"mesh:{mesh_name}", Arguments.ROWS, Reduction.CONCAT, mesh_name=mesh_name)

    @staticmethod
    def custom(dispatch_fn: DispatchFn, collect_fn: CollectFn, *, name: str | None = None) -> "Dispatch":
        """A mode of two functions; the label carries them, so no other process needs a registration."""
        for role, function in (("dispatch_fn", dispatch_fn), ("collect_fn", collect_fn)):
            if not callable(function):
                raise TypeError(f"{role} of a custom dispatch mode must be callable, got {type(function).__name__}")
        name = name or f"custom:{getattr(dispatch_fn, '__name__', type(dispatch_fn).__name__)}"
        return Dispatch(name, Arguments.CUSTOM, Reduction.LIST, dispatch_fn=dispatch_fn, collect_fn=collect_fn)

    def __reduce__(self) -> tuple[Any, ...]:
        # What `update_dispatch_mode` changed here travels too: the other process never ran it.
        current = resolve(self)
        return (Dispatch, tuple(getattr(current, field.name) for field in fields(current)))

    def __str__(self) -> str:
        return self.name


class ModeFunctions(dict[str, Callable[..., Any]]):
    """A predefined mode in verl's form, a pair of functions, that still knows which mode it is."""

    def __init__(self, mode: Dispatch, dispatch_fn: DispatchFn, collect_fn: CollectFn):
        super().__init__(dispatch_fn=dispatch_fn, collect_fn=collect_fn)
        self.mode = mode


_UPDATED: dict[Dispatch, Dispatch] = {}


def as_mode(mode: Dispatch | ModePair | str) -> Dispatch:
    """The `Dispatch` value of a mode, of a pair of functions, or of a registered name."""
    if isinstance(mode, Dispatch):
        return mode
    if isinstance(mode, str):
        if mode not in _MODES:
            raise ValueError(_unknown_mode(mode))
        return _MODES[mode]
    if isinstance(mode, ModeFunctions):
        return mode.mode
    if isinstance(mode, Mapping):
        missing = [key for key in ("dispatch_fn", "collect_fn") if key not in mode]
        if missing:
            raise ValueError(f"a custom dispatch mode needs 'dispatch_fn' and 'collect_fn'; {missing[0]!r} is missing")
        return Dispatch.custom(mode["dispatch_fn"], mode["collect_fn"])
    hint = "; write @register(...) with parentheses" if callable(mode) else ""
    raise TypeError(
        "dispatch_mode must be a Dispatch, a mapping with 'dispatch_fn' and 'collect_fn', or a registered name, "
        f"got {type(mode).__name__}{hint}"
    )


def register_dispatch_mode(dispatch_mode_name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> Dispatch:
    """Name a custom mode: `Dispatch.<name>` and `register("<name>")` find it in this process from now on.

    A method labelled with it carries both functions, so workers and other controllers need no registration.
    A name that is taken is refused.
    """
    if dispatch_mode_name in _MODES:
        raise ValueError(
            f"dispatch mode {dispatch_mode_name!r} is already registered; choose another name, or change it with "
            "update_dispatch_mode"
        )
    if not dispatch_mode_name.isidentifier() or hasattr(Dispatch, dispatch_mode_name):
        raise ValueError(
            f"{dispatch_mode_name!r} cannot name a dispatch mode: use a new identifier such as 'TWO_TO_ALL'"
        )
    mode = Dispatch.custom(dispatch_fn, collect_fn, name=dispatch_mode_name)
    _MODES[dispatch_mode_name] = mode
    return mode


def update_dispatch_mode(dispatch_mode: Dispatch | str, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> None:
    """Give a registered mode other functions, also for the methods that are already labelled with it."""
    mode = as_mode(dispatch_mode)
    if _MODES.get(mode.name) != mode:
        raise ValueError(_unknown_mode(mode.name))
    _UPDATED[mode] = Dispatch.custom(dispatch_fn, collect_fn, name=mode.name)


def resolve(mode: Dispatch) -> Dispatch:
    """The mode to plan with: the same, unless `update_dispatch_mode` changed it."""
    return _UPDATED.get(mode, mode) if _UPDATED else mode


def _publish_predefined() -> None:
    for mode in (
        Dispatch("RANK_ZERO", Arguments.RANK_ZERO, Reduction.FIRST),
        Dispatch("ONE_TO_ALL", Arguments.WHOLE, Reduction.LIST),
        Dispatch("ALL_TO_ALL", Arguments.PER_WORKER, Reduction.LIST),
        Dispatch("DP_COMPUTE", Arguments.PER_WORKER, Reduction.LIST),
        Dispatch("DP_COMPUTE_PROTO", Arguments.ROWS, Reduction.CONCAT),
        Dispatch("DP_COMPUTE_PROTO_WITH_FUNC", Arguments.FUNCTION_AND_ROWS, Reduction.CONCAT),
        Dispatch("DP_COMPUTE_METRIC", Arguments.ROWS, Reduction.LIST),
        Dispatch("DIRECT_ROLLOUT_METHOD", Arguments.FORBIDDEN, Reduction.LIST),
    ):
        _MODES[mode.name] = mode
        setattr(Dispatch, mode.name, mode)


_publish_predefined()
