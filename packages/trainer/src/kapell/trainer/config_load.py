"""Reads YAML files and dotted overrides into a `Config`, and says of each value where it came from."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .config import Config
from .nested import to_yaml
from .verl_keys import instead_of_key, instead_of_value

__all__ = ["ConfigError", "ResolvedConfig", "load_config"]

_COMMAND_LINE = "command line"
_TWO_BOUNDS = re.compile(r"(\A(?=[0-9._]+\Z)|:\s+)([0-9.]+_[0-9.]+)(?=\s*(?:[,}#]|$))", re.MULTILINE)
_WHOLE_NUMBER = re.compile(r"[-+]?[0-9]+")
_LARGEST_BITS = 63  # and a sign: what torch takes as a seed or a size
_LIKE = 0.75  # of 1; below it names of other groups are chance
_MISSING = "???"  # OmegaConf's mark of a value that is still to come, which it would leave out without a word


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key, what was expected and what came."""


@dataclass(frozen=True)
class ResolvedConfig:
    """A checked configuration and the origin of its values."""

    config: Config
    """The typed values."""
    values: Mapping[str, Any]
    """The same as nested plain containers."""
    origins: Mapping[str, str]
    """Dotted key to the file or "command line" that set it; a key that is not here has its default."""

    def to_yaml(self) -> str:
        """The whole configuration as YAML, which `load_config` reads back."""
        return to_yaml(self.values)

    def origins_to_yaml(self) -> str:
        """Where each value came from that is no default, by its dotted key."""
        return to_yaml(self.origins)

    def leaves(self) -> Iterator[tuple[str, Any, str]]:
        """Each dotted key with its value and origin ("default", a file, or "command line")."""
        for key, value in _leaves(self.values):
            yield key, value, self.origins.get(key, "default")


def load_config(files: Sequence[str | Path] = (), overrides: Sequence[str] = ()) -> ResolvedConfig:
    """The configuration from its defaults, YAML files and ``key.sub=value`` overrides; later ones win.

    Raises `ConfigError` for unknown keys (all of them, each with the nearest known one or, for one of verl's, what
    stands in its place), a wrong type or a value out of range, and ``FileNotFoundError`` for a missing file.

    >>> load_config(overrides=["trainer.seed=7"]).config.trainer.seed
    7
    """
    merged: Any = OmegaConf.structured(Config)
    origins: dict[str, str] = {}
    unknown: list[str] = []
    layers = [(origin, _checked_layer(layer, origin, unknown)) for origin, layer in _layers(files, overrides)]
    if unknown:
        raise ConfigError("\n".join(f"unknown key {told}" for told in unknown))
    for origin, layer in layers:
        try:
            merged = OmegaConf.merge(merged, layer)
        except OmegaConfBaseException as error:
            raise _type_error(error, origin) from error
        origins.update(dict.fromkeys((key for key, _ in _leaves(layer)), origin))
    try:
        values: Any = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise _type_error(error, "interpolation") from error
    for key, value in _leaves(values):  # once more: OmegaConf reads the text 'inf' as a number, and follows references
        _check_finite(key, value, origins.get(key, "default"))
    return ResolvedConfig(_build(Config, values, ""), values, origins)


def _layers(files: Sequence[str | Path], overrides: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for file in files:
        path = Path(file)
        if not path.is_file():
            raise FileNotFoundError(f"no configuration file {path}")
        yield str(path), _as_mapping(partial(_read_file, path), f"configuration file {path}")
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"override {override!r} is not of the form group.key=value")
        yield _COMMAND_LINE, _as_mapping(partial(_read_override, key, value), f"override {override!r}")


def _read_file(path: Path) -> Any:
    return OmegaConf.load(io.StringIO(_keep_bounds(path.read_text(encoding="utf-8"))))


def _read_override(key: str, value: str) -> Any:
    text = _keep_bounds(value)
    read: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    if isinstance(read["value"], bool | int | float) and _takes_text(_kind_of(key)):
        text = f"'{value.strip()}'"  # 007 is a name, not the number 7
    return OmegaConf.from_dotlist([f"{key}={text}"])


def _keep_bounds(text: str) -> str:
    """The YAML with two bounds such as 0.5_2, which it would read as the number 0.52, in quotes."""
    return _TWO_BOUNDS.sub(r"\1'\2'", text)


def _as_mapping(parse: Callable[[], Any], what: str) -> Mapping[str, Any]:
    """What the parser reads, as plain containers; its error in terms of ``what``."""
    try:
        layer: Any = OmegaConf.to_container(parse())
    except (yaml.YAMLError, ValueError, OmegaConfBaseException) as error:
        raise ConfigError(f"{what} is not valid YAML: {error}") from error
    if not isinstance(layer, dict):
        raise ConfigError(f"{what} must hold groups such as `trainer:`, got a {type(layer).__name__}")
    return layer


def _checked_layer(
    layer: Mapping[str, Any], origin: str, unknown: list[str], cls: Any = Config, prefix: str = ""
) -> dict[str, Any]:
    """The layer with its short forms written out; keys that do not exist are told in ``unknown``."""
    hints = get_type_hints(cls)
    known = [field.name for field in fields(cls)]
    checked = {}
    for key, value in layer.items():
        if key not in known:
            unknown.append(_unknown_key(f"{prefix}{key}", value, known, origin))
            continue
        kind = hints[key]
        if is_dataclass(kind):
            shorthand = getattr(kind, "shorthand", None)
            if shorthand and not isinstance(value, Mapping):
                value = {shorthand: value}
            if not isinstance(value, Mapping):
                names = ", ".join(field.name for field in fields(kind))
                raise ConfigError(f"{prefix}{key} is a group with the keys {names}; got {value!r} ({origin})")
            value = _checked_layer(value, origin, unknown, kind, f"{prefix}{key}.")
        elif get_origin(kind) is list and value is not None and not isinstance(value, list):
            value = [value]
        _check_value(f"{prefix}{key}", kind, value, origin)
        checked[key] = value
    return checked


def _check_value(key: str, kind: Any, value: Any, origin: str) -> None:
    """Refuse what OmegaConf would turn into another value, or leave out, without a word."""
    if value == _MISSING:
        raise ConfigError(f"{key}: {_MISSING} stands for a value that is missing ({origin}); give one, or leave it out")
    if kind in (bool, bool | None) and not (value is None or _means_truth(value)):
        raise ConfigError(f"{key}: expected true or false, got {value!r} ({origin})")
    if get_origin(kind) is tuple and isinstance(value, list) and len(value) != len(get_args(kind)):
        raise ConfigError(f"{key}: expected {len(get_args(kind))} values, got {value!r} ({origin})")
    _check_finite(key, value, origin)
    if _takes_text(kind):
        for text in value if isinstance(value, list) else [value]:
            if text is not None and not isinstance(text, str | Mapping | list):
                raise ConfigError(
                    f"{key}: expected a text, and YAML reads the {type(text).__name__} {text!r}; write it in quotes "
                    f"({origin})"
                )


def _check_finite(key: str, value: Any, origin: str) -> None:
    """Refuse infinite numbers and NaN, which few comparisons would, and those that have no place in 64 bits."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _check_finite(f"{key}.{name}", inner, origin)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_finite(key, inner, origin)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}: expected a finite number, got {value} ({origin})")
    elif isinstance(value, int) and value.bit_length() > _LARGEST_BITS:
        raise ConfigError(f"{key}: expected a number of at most 64 bits, got {value} ({origin})")


def _means_truth(value: Any) -> bool:
    if isinstance(value, str) and not _WHOLE_NUMBER.fullmatch(value):
        return True  # a word or a reference to another key, which OmegaConf checks
    return value is None or value in (0, 1, "0", "1")


def _takes_text(kind: Any) -> bool:
    return kind in (str, str | None, list[str])


def _unknown_key(key: str, value: Any, siblings: Sequence[str], origin: str) -> str:
    group, _, name = key.lstrip("+~").rpartition(".")  # + and ~ are Hydra's
    prefix = f"{group}." if group else ""
    tail = name
    while isinstance(value, Mapping) and value:  # a whole path was given: its end says most about what was meant
        inner, value = next(iter(value.items()))
        tail = f"{tail}.{inner}"
    whole, everywhere = f"{key}{tail.removeprefix(name)}", _all_keys()
    same_end = [known for known in everywhere if f".{known}".endswith(f".{tail}")][:3]
    near = [f"{prefix}{match}" for match in get_close_matches(name, siblings, n=1)]
    if not same_end and (instead := instead_of_key(f"{prefix}{tail}")):
        return f"{whole} ({origin}); {instead}"
    close = (same_end if "." in tail or not near else near) or _with_like_names(f"{prefix}{tail}", everywhere)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known here: {', '.join(siblings)}"
    return f"{whole} ({origin}); {hint}"


def _with_like_names(key: str, everywhere: Sequence[str]) -> list[str]:
    parts, names = key.split("."), {known.rpartition(".")[2] for known in everywhere}
    for written in (parts[-1], "_".join(parts[-2:])):
        if like := get_close_matches(written, names, n=1, cutoff=_LIKE):
            return [known for known in everywhere if known.rpartition(".")[2] in like][:3]
    return []


def _all_keys(cls: Any = Config, prefix: str = "") -> list[str]:
    hints = get_type_hints(cls)
    keys = []
    for field in fields(cls):
        kind = hints[field.name]
        keys += _all_keys(kind, f"{prefix}{field.name}.") if is_dataclass(kind) else [f"{prefix}{field.name}"]
    return keys


def _type_error(error: OmegaConfBaseException, origin: str) -> ConfigError:
    reason = str(error).partition("\n")[0].rstrip(".")
    key = error.full_key or ""
    instead = instead_of_value(key, error.value) if key else None
    expected = f"; {instead}" if instead else _expected(key) if key else ""
    return ConfigError(f"{error.full_key or 'configuration'}: {reason} ({origin}){expected}")


def _kind_of(key: str) -> Any:
    """The type of a dotted key; None for one that does not exist."""
    kind: Any = Config
    for part in key.split("[")[0].split("."):
        if not is_dataclass(kind) or part not in (hints := get_type_hints(kind)):
            return None
        kind = hints[part]
    return kind


def _expected(key: str) -> str:
    """What the key takes, in words, for the end of an error message."""
    if (kind := _kind_of(key)) is None:
        return ""
    text = kind.__name__ if isinstance(kind, type) and get_origin(kind) is None else str(kind).replace("typing.", "")
    return f"; expected {text}"


def _build(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    """An instance of the group, built from the inside out so that an error carries its group's name."""
    hints = get_type_hints(cls)
    built = {
        name: _build(hints[name], value, f"{prefix}{name}.") if is_dataclass(hints[name]) else value
        for name, value in values.items()
    }
    try:
        return cls(**built)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{prefix}{error}") from None


def _leaves(values: Mapping[str, Any], cls: Any = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each dotted key of the configuration's classes; a free mapping such as ``override_config`` is one value."""
    hints = get_type_hints(cls)
    for name, value in values.items():
        if is_dataclass(hints[name]):
            yield from _leaves(value, hints[name], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
