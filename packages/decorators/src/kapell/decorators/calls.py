"""Checks of a call against the method's signature, before anything is sent."""

import difflib
import inspect
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from kapell.decorators.futures import is_future
from kapell.decorators.markers import PerWorker, Replicate
from kapell.decorators.splitting import lookup_splitter, splitter_of

__all__ = ["CallSignature", "check_call", "check_padding_argument", "labels", "signature_of"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class CallSignature(inspect.Signature):
    """A signature that has already looked up what each call is checked against."""

    __slots__ = ("classes", "num_required", "positional")
    classes: dict[str, type]
    """Parameters that are annotated with a class."""
    positional: tuple[str, ...]
    """Parameters that a call by position fills, in order."""
    num_required: int
    """How many of them a call must give; more than there are where a keyword is required."""


def signature_of(cls: type, name: str) -> CallSignature:
    """The signature of a method as its callers see it: without `self` or `cls`, annotations resolved where possible.

    >>> str(signature_of(str, "partition"))
    '(sep, /)'
    """
    return _signature(inspect.getattr_static(cls, name))


@lru_cache(maxsize=4096)
def _signature(member: Any) -> CallSignature:
    function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if not isinstance(member, staticmethod) and parameters and parameters[0].kind in _POSITIONAL:
        parameters = parameters[1:]
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # a hint may name what only a type checker imports; then it is not checked
        hints = {}
    parameters = [p.replace(annotation=hints.get(p.name, p.annotation)) for p in parameters]
    seen = CallSignature(parameters, return_annotation=signature.return_annotation)
    seen.classes = _classes(seen)
    seen.positional = tuple(p.name for p in parameters if p.kind in _POSITIONAL)
    required = [p for p in parameters if p.default is p.empty and p.kind not in _VARIABLE]
    only_by_position = all(p.kind in _POSITIONAL for p in required)
    seen.num_required = len(required) if only_by_position else len(parameters) + 1
    return seen


def _given(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments by parameter. Raises what `inspect.Signature.bind` does."""
    looked_up = isinstance(signature, CallSignature) and hasattr(signature, "num_required")
    if looked_up and not kwargs and signature.num_required <= len(args) <= len(signature.positional):
        # The usual call; `bind` takes longer than all other checks together.
        return dict(zip(signature.positional, args, strict=False))
    return signature.bind(*args, **kwargs).arguments


def _classes(signature: inspect.Signature) -> dict[str, type]:
    if isinstance(signature, CallSignature) and hasattr(signature, "classes"):
        return signature.classes
    classes = {}
    for name, parameter in signature.parameters.items():
        annotation = typing.get_origin(parameter.annotation) or parameter.annotation
        if (
            isinstance(annotation, type)
            and annotation is not inspect.Parameter.empty
            and parameter.kind not in _VARIABLE
        ):
            classes[name] = annotation
    return classes


def check_call(
    method: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, types: bool
) -> bool:
    """Refuse arguments that the method doesn't take, and say what it takes.

    With `types`, also a value without rows where the annotation names a type with rows. Other annotations are left
    to type checkers: workers are often annotated more narrowly than they behave. The answer is whether all arguments
    of the same types would pass.
    """
    try:
        given = _given(signature, args, kwargs)
    except TypeError as error:
        names = [p.name for p in signature.parameters.values()]
        unknown = next((name for name in kwargs if name not in names), None)
        close = difflib.get_close_matches(unknown, names, n=1) if unknown else []
        meant = f"; did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"{method}{signature}: {error}{meant}") from None
    by_type = True
    for name, expected in _classes(signature).items() if types else ():
        if name not in given or lookup_splitter(expected) is None or isinstance(value := given[name], expected):
            continue
        by_type = False
        if splitter_of(value) is not None or value is signature.parameters[name].default:
            continue
        if not isinstance(value, Replicate | PerWorker) and not is_future(value):
            raise TypeError(f"{method}: argument {name!r} must be {expected.__name__}, got {type(value).__name__}")
    return by_type


def check_padding_argument(method: str, signature: inspect.Signature, name: str, given: bool) -> None:
    """Refuse a padding argument that the method lacks, or that the caller gave."""
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    if name not in signature.parameters and not takes_any:
        raise TypeError(f"{method}{signature}: padding_argument={name!r} is not among its parameters")
    if given:
        raise TypeError(f"{method}: {name!r} is filled in by the group and cannot be given")


def labels(signature: inspect.Signature | None, num_args: int) -> Callable[[int], str]:
    """What messages call the positional argument at an index."""
    names: list[str] = []
    for parameter in signature.parameters.values() if signature is not None else ():
        if parameter.kind in _POSITIONAL:
            names.append(parameter.name)
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names.extend(f"{parameter.name}[{index}]" for index in range(num_args - len(names)))
    return lambda index: names[index] if index < len(names) else f"args[{index}]"
