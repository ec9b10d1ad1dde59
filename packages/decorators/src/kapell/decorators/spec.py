"""The label that `register` puts on a method, and how to read it."""

import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import update_wrapper, wraps
from typing import Any, TypeVar

from kapell.decorators.modes import Arguments, Dispatch, Execute, ModePair, Reduction, as_mode

__all__ = ["MethodSpec", "Uneven", "register", "spec_of"]

_LABEL = "__kapell_method__"

_Method = TypeVar("_Method", bound="Callable[..., Any] | classmethod[Any, ..., Any] | staticmethod[..., Any]")


class Uneven(StrEnum):
    """What happens to rows that the number of shards does not divide."""

    SHARDS = "shards"
    """Shards differ by at most one row; with fewer rows than shards, some ranks run with zero rows."""
    PAD = "pad"
    """Shards are filled up to one size with marked copies of a row; the padded rows are dropped on collect."""
    REFUSE = "refuse"
    """The call is a ValueError."""


@dataclass(frozen=True, kw_only=True)
class MethodSpec:
    """How one method is called over a group. Checked when made; `dataclasses.replace` gives a changed one."""

    dispatch_mode: Dispatch = Dispatch.ALL_TO_ALL
    """How arguments reach the ranks; a pair of functions or a registered name becomes its value."""
    execute_mode: Execute = Execute.ALL
    """Which ranks run."""
    blocking: bool = True
    """Whether a call waits for the result, unless the call says otherwise."""
    materialize_futures: bool = True
    """Whether the worker's side replaces futures by their values (`materialize`) before the method runs."""
    reads: tuple[str, ...] = ()
    """Columns the method needs: checked before anything is sent, and only these are sent. Empty: not declared."""
    writes: tuple[str, ...] = ()
    """Columns the method makes."""
    strict: bool = False
    """Whether a column in a result that is neither in `writes` nor in the input is an error."""
    uneven: Uneven = Uneven.SHARDS
    """What happens to rows that the number of shards does not divide."""
    padding_argument: str | None = None
    """Keyword that receives how many rows at the end of the worker's shard are padding."""
    collect: Reduction | None = None
    """How results become one; None for what the mode does by itself."""
    balance_by: str | Callable[[Any], Any] | None = None
    """Column with the cost of each row (a 2-D column counts its sum), or a function from the batch to the costs."""
    group_by: str | None = None
    """Column whose equal values stay together on one data-parallel rank."""
    idempotent: bool = False
    """Whether a backend may run the method again after it lost a worker."""

    def __post_init__(self) -> None:
        def fix(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        fix("dispatch_mode", as_mode(self.dispatch_mode))
        if not isinstance(self.execute_mode, Execute):
            raise TypeError(
                f"execute_mode must be Execute.ALL or Execute.RANK_ZERO, got {type(self.execute_mode).__name__}"
            )
        fix("uneven", _word(Uneven, self.uneven, "uneven"))
        if self.collect is not None:
            fix("collect", _word(Reduction, self.collect, "collect"))
        for name in ("reads", "writes"):
            fix(name, _column_names(name, getattr(self, name)))


def register(
    dispatch_mode: Dispatch | ModePair | str = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    *,
    reads: Iterable[str] = (),
    writes: Iterable[str] = (),
    strict: bool = False,
    uneven: Uneven | str = Uneven.SHARDS,
    padding_argument: str | None = None,
    collect: Reduction | str | None = None,
    balance_by: str | Callable[[Any], Any] | None = None,
    group_by: str | None = None,
    idempotent: bool = False,
) -> Callable[[_Method], _Method]:
    """Label a method with a `MethodSpec`, whose fields say what each argument means.

    The function itself comes back: its signature, type and kind (coroutine, generator, class or static method)
    stay, and a plain call of it needs no group. A function that already has a label, such as a parent's method
    that a subclass labels anew, is copied, so the parent keeps its own.

    >>> class Actor:
    ...     @register(Dispatch.DP_COMPUTE_PROTO, reads=["input_ids"])
    ...     def log_prob(self, batch): return batch
    >>> spec_of(Actor.log_prob).reads, Actor().log_prob([1])
    (('input_ids',), [1])
    """
    spec = MethodSpec(
        dispatch_mode=dispatch_mode,  # ty: ignore[invalid-argument-type]
        execute_mode=execute_mode,
        blocking=blocking,
        materialize_futures=materialize_futures,
        reads=reads,  # ty: ignore[invalid-argument-type]
        writes=writes,  # ty: ignore[invalid-argument-type]
        strict=strict,
        uneven=uneven,  # ty: ignore[invalid-argument-type]
        padding_argument=padding_argument,
        collect=collect,  # ty: ignore[invalid-argument-type]
        balance_by=balance_by,
        group_by=group_by,
        idempotent=idempotent,
    )

    _check_together(spec)

    def label(method: _Method) -> _Method:
        return _labelled(method, spec)

    return label


def spec_of(method: Any) -> MethodSpec | None:
    """The label of a function, bound method, class or static method; None where there is none.

    >>> spec_of(print) is None
    True
    """
    spec = getattr(method, _LABEL, None)
    if spec is None:
        spec = getattr(getattr(method, "__func__", None), _LABEL, None)
    return spec if isinstance(spec, MethodSpec) else None


def _check_together(spec: MethodSpec) -> None:
    """Refuse a declaration of which a part has no effect. (A call may still choose another mode for itself.)"""
    mode = spec.dispatch_mode
    if mode.arguments is Arguments.CUSTOM and spec.collect is not None:
        raise ValueError(f"collect={spec.collect.value!r} has no effect: {mode} has a collect_fn of its own")
    if mode.arguments in (Arguments.ROWS, Arguments.FUNCTION_AND_ROWS):
        return
    for name in ("balance_by", "group_by", "padding_argument"):
        if getattr(spec, name) is not None:
            raise ValueError(f"{name} needs a mode that splits rows; {mode} does not")
    if spec.uneven is not Uneven.SHARDS:
        raise ValueError(f"uneven={spec.uneven.value!r} needs a mode that splits rows; {mode} does not")


def _labelled(method: Any, spec: MethodSpec) -> Any:
    if isinstance(method, classmethod | staticmethod):
        return type(method)(_labelled(method.__func__, spec))
    if not callable(method):
        raise TypeError(f"@register labels functions, got {type(method).__name__}")
    function = getattr(method, "__func__", method)
    if spec_of(function) is not None or not isinstance(function, types.FunctionType):
        function = _copy(function)
    setattr(function, _LABEL, spec)
    return function


def _copy(function: Any) -> Any:
    if isinstance(function, types.FunctionType):
        copy = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        update_wrapper(copy, function)
        copy.__dict__.pop("__wrapped__")  # it stands beside the original, not around it
        copy.__dict__.update(function.__dict__)
        return copy

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _word(words: type[StrEnum], value: Any, name: str) -> StrEnum:
    try:
        return words(value)
    except ValueError:
        known = ", ".join(repr(word.value) for word in words)
        raise ValueError(f"unknown {name}={value!r}; known: {known}") from None


def _column_names(name: str, columns: Any) -> tuple[str, ...]:
    if isinstance(columns, str):
        raise TypeError(f"{name} must be a sequence of column names, got the string {columns!r}; write ({columns!r},)")
    names = tuple(columns)
    wrong = [column for column in names if not isinstance(column, str)]
    if wrong:
        raise TypeError(f"{name} must hold column names, got {wrong[0]!r}")
    return names
