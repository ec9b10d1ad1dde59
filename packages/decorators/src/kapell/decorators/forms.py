"""The form of a call: what the number, names and types of its arguments say, whatever their values are."""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from kapell.decorators import calls
from kapell.decorators.arguments import Slot
from kapell.decorators.markers import PerWorker, Replicate
from kapell.decorators.splitter import Splitter, always
from kapell.decorators.splitting import lookup_splitter, num_splitters

__all__ = ["CallForm", "CallForms"]

_KEPT_FORMS = 64  # ways to give a method its arguments; most programs use one


class CallForm(NamedTuple):
    """What all calls with arguments of these types have in common."""

    slots: tuple[Slot, ...]
    """Where each argument stands."""
    splitters: tuple[Splitter | None, ...] | None
    """How each argument is cut, None for one without rows; instead of them all None where values must be looked at."""


class CallForms:
    """The forms in which one method is called, each looked at once."""

    def __init__(self, method: str, signature: inspect.Signature | None, *, types: bool) -> None:
        self._method = method
        self._signature = signature
        self._types = types  # whether arguments must suit their annotations
        self._known: dict[Any, CallForm] = {}

    def checked(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallForm:
        """The form of a call. Raises ``TypeError`` when the method does not take these arguments."""
        named = (tuple(kwargs), *map(type, kwargs.values())) if kwargs else ()
        key = (num_splitters(), named, *map(type, args))
        form = self._known.get(key)
        if form is None or form.splitters is None:
            by_type = True
            if self._signature is not None:
                by_type = calls.check_call(self._method, self._signature, args, kwargs, types=self._types)
            if form is None:
                form = self._found(args, kwargs, by_type)
                if len(self._known) < _KEPT_FORMS:
                    self._known[key] = form
        return form

    def _found(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], by_type: bool) -> CallForm:
        label = calls.labels(self._signature, len(args))
        positional = [Slot(None, index, label(index)) for index in range(len(args))]
        slots = (*positional, *[Slot(name, None, name) for name in kwargs])
        types = [*map(type, args), *map(type, kwargs.values())]
        if not (by_type and all(map(_says_all, types))):
            return CallForm(slots, None)
        return CallForm(slots, tuple(map(lookup_splitter, types)))


def _says_all(cls: type) -> bool:
    """Whether the type says how each value of it is laid out: no columns, markers or futures, rows always or never."""
    if issubclass(cls, Replicate | PerWorker) or getattr(cls, "__kapell_future__", False):
        return False
    if hasattr(cls, "is_padding_enabled"):
        return False
    splitter = lookup_splitter(cls)
    if splitter is None:
        return True
    by_position = splitter.take is not None and splitter.cut is not None
    return by_position and splitter.has_rows is always and splitter.columns is None
