"""Functions by name or import path, called with the columns that they name.

An estimator or loss is a plain function. Its positional parameters are the columns it reads (a default makes a column
optional); its keyword-only parameters are options, set from the config. Nothing else has to be declared.
"""

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from kapell.trainer.algorithms.columns import PRODUCERS

__all__ = ["MissingColumnError", "Registry", "call_with_columns", "columns_of", "options_of"]

Function = TypeVar("Function", bound=Callable[..., Any])


class MissingColumnError(KeyError):
    """A function asks for a column that the batch does not have."""

    def __init__(self, function: str, column: str, present: tuple[str, ...]) -> None:
        super().__init__(function, column, present)
        self.function = function
        self.column = column
        self.present = present

    def __str__(self) -> str:
        writer = PRODUCERS.get(self.column, "no stage that is known here")
        return (
            f"{self.function} needs column {self.column!r}, which is written by {writer}; "
            f"present: {', '.join(self.present) or 'none'}"
        )


class Registry(Generic[Function]):
    """Functions of one kind by name; also finds any function by `pkg.mod:attr`, which works in every process."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._functions: dict[str, Function] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._functions))

    def __contains__(self, name: object) -> bool:
        return name in self._functions

    def register(self, name: str) -> Callable[[Function], Function]:
        """Decorator that records a function under `name` and returns it unchanged; a name is taken once."""

        def record(function: Function) -> Function:
            if name in self._functions and not _is_reload(self._functions[name], function):
                raise ValueError(f"{self.kind} {name!r} is already registered as {self._functions[name]!r}")
            _check_signature(function)
            self._functions[name] = function
            return function

        return record

    def get(self, name: str) -> Function:
        """The function of that name, or the one that `pkg.mod:attr` points to."""
        if name in self._functions:
            return self._functions[name]
        if ":" in name:
            return self._imported(name)
        near = difflib.get_close_matches(name, self._functions, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"unknown {self.kind} {name!r}{hint}; known: {', '.join(self)} (or give an import path 'pkg.mod:attr')"
        )

    def path(self, name: str) -> str:
        """The import path `pkg.mod:attr` of that function, to send to another process."""
        function = self.get(name)
        module, qualname = inspect.getmodule(function), getattr(function, "__qualname__", "<object>")
        if module is None or module.__name__ == "__main__" or "<" in qualname:
            raise ValueError(
                f"{self.kind} {name!r} is {function!r}, which other processes cannot import; "
                "define it at the top level of a module"
            )
        return f"{module.__name__}:{qualname}"

    def _imported(self, path: str) -> Function:
        module_name, _, attribute = path.partition(":")
        try:
            target: Any = importlib.import_module(module_name)
            for part in attribute.split("."):
                target = getattr(target, part)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"cannot import {self.kind} {path!r}: {error}") from error
        if not callable(target):
            raise TypeError(f"{self.kind} {path!r} is a {type(target).__name__}, not a function")
        _check_signature(target)
        return target


def columns_of(function: Callable[..., Any]) -> dict[str, bool]:
    """The columns a function reads, each with whether it is required.

    >>> columns_of(lambda values, loss_mask=None, *, gamma=1.0: None)
    {'values': True, 'loss_mask': False}
    """
    return {
        name: parameter.default is parameter.empty
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }


def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The options a function takes, each with its default (`inspect.Parameter.empty` where it is required).

    >>> options_of(lambda values, *, gamma=1.0: None)
    {'gamma': 1.0}
    """
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def call_with_columns(
    function: Callable[..., Any], columns: Mapping[str, Any], options: Mapping[str, Any] | None = None
) -> Any:
    """Call a function with just the columns and options that its signature names; others are left aside."""
    name = getattr(function, "__name__", repr(function))
    arguments: dict[str, Any] = {}
    for column, required in columns_of(function).items():
        if column in columns:
            arguments[column] = columns[column]
        elif required:
            raise MissingColumnError(name, column, tuple(sorted(columns)))
    given = options or {}
    for option, default in options_of(function).items():
        if option in given:
            arguments[option] = given[option]
        elif default is inspect.Parameter.empty:
            raise ValueError(f"{name} needs the option {option!r}; given: {', '.join(sorted(given)) or 'none'}")
    return function(**arguments)


def _is_reload(old: Callable[..., Any], new: Callable[..., Any]) -> bool:
    """Whether a module ran again (reload, a test runner): then the new function takes the old one's place."""
    places = [(inspect.getsourcefile(function), getattr(function, "__qualname__", "<>")) for function in (old, new)]
    return places[0] == places[1] and "<" not in places[0][1]


def _check_signature(function: Callable[..., Any]) -> None:
    allowed = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in allowed:
            raise TypeError(
                f"{function!r} has the parameter {parameter}; name each column as a parameter "
                "and each option as a keyword-only one"
            )
