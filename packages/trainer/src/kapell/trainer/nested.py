"""Nested values of a configuration: as plain containers, under dotted keys, and as YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

__all__ = ["dotted", "plain", "to_yaml"]


def dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested values under dotted keys; an empty mapping is a leaf.

    >>> dict(dotted({"data": {"seed": 1}, "logger": []}))
    {'data.seed': 1, 'logger': []}
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def plain(value: Any) -> Any:
    """Mappings as dicts and sequences as lists, as they come back from YAML."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def to_yaml(values: Mapping[str, Any]) -> str:
    """Nested values as YAML that reads back as they are, by YAML's own rules and by OmegaConf's.

    >>> to_yaml({"name": "1e-4", "lr": 1e-4})
    "name: '1e-4'\\nlr: 0.0001\\n"
    """
    return yaml.dump(plain(values), Dumper=_Dumper, sort_keys=False)


class _Dumper(yaml.SafeDumper):
    """Quotes each text that somebody might take for a number: OmegaConf knows more of them than YAML 1.1."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+.0-9][-+.0-9eE_:]*\Z"), list("-+.0123456789"))
