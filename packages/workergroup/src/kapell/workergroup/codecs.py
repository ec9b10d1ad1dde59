"""Values as files that run no code when read: plain data as JSON, the rest through codecs.

Codecs are registered by `register_codec`, or offered by an installed package as an entry point in the group
"kapell.codecs": a codec's class under the codec's name. (`kapell.protocol` offers those for batches and tensors.)
"""

from __future__ import annotations

import pickle
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Codec", "ValueReader", "ValueWriter", "register_codec"]

_PLAIN = (bool, int, float, str, type(None))


class Codec(Protocol):
    """Stores values of some types in a file of their own, such as tensors as safetensors."""

    @property
    def name(self) -> str:
        """Names the codec in records; the reader must have one of that name."""
        ...

    def handles(self, value: Any) -> bool:
        """Whether it stores this value."""
        ...

    def save(self, value: Any, path: Path) -> None:
        """Write the value."""
        ...

    def load(self, path: Path) -> Any:
        """Read it again, running no code from the file."""
        ...


_ENTRY_POINTS = "kapell.codecs"
_CODECS: dict[str, Codec] = {}


def register_codec(codec: Codec) -> None:
    """Let records hold the values that ``codec`` handles. Refuses a name that is taken."""
    if codec.name in _CODECS:
        raise ValueError(f"a codec named {codec.name!r} is already registered")
    _CODECS[codec.name] = codec


class ValueWriter:
    """Turns values into JSON, with files beside it for what is not plain data. Pickle only when allowed."""

    def __init__(self, stem: Path, *, allow_pickle: bool) -> None:
        self._stem = stem
        self._allow_pickle = allow_pickle
        self._num_files = 0

    def encode(self, name: str, value: Any) -> Any:
        """The JSON for a value called ``name``. Raises ``TypeError`` that names what cannot be stored safely."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind in (list, tuple):
            return {kind.__name__: [self.encode(f"{name}[{i}]", item) for i, item in enumerate(value)]}
        if kind is dict:
            return {
                "dict": [[self.encode(name, key), self.encode(f"{name}[{key!r}]", item)] for key, item in value.items()]
            }
        for codec in _known_codecs().values():
            if codec.handles(value):
                path = self._next_file()
                codec.save(value, path)
                return {"codec": codec.name, "file": path.name}
        if self._allow_pickle:
            path = self._next_file()
            path.write_bytes(pickle.dumps(value, protocol=5))
            return {"pickle": path.name}
        raise TypeError(
            f"cannot record {name} of type {kind.__module__}.{kind.__qualname__} without pickle; register a codec for "
            "it (register_codec), or allow pickle by Recorder(folder, allow_pickle=True)"
        )

    def _next_file(self) -> Path:
        path = self._stem.with_name(f"{self._stem.name}-{self._num_files}.bin")
        self._num_files += 1
        return path


class ValueReader:
    """Reads what `ValueWriter` wrote, from a folder. Pickle only when allowed."""

    def __init__(self, folder: Path, *, allow_pickle: bool) -> None:
        self._folder = folder
        self._allow_pickle = allow_pickle

    def decode(self, data: Any) -> Any:
        """The value of a piece of JSON."""
        if not isinstance(data, dict):
            return data
        if "list" in data:
            return [self.decode(item) for item in data["list"]]
        if "tuple" in data:
            return tuple(self.decode(item) for item in data["tuple"])
        if "dict" in data:
            return {self.decode(key): self.decode(item) for key, item in data["dict"]}
        if "codec" in data:
            return _codec(data["codec"]).load(self._path(data["file"]))
        path = self._path(data["pickle"])
        if not self._allow_pickle:
            raise ValueError(f"{path.name} is a pickle, which can run any code; allow_pickle=True if you trust it")
        return pickle.loads(path.read_bytes())

    def _path(self, name: str) -> Path:
        if Path(name).name != name:
            raise ValueError(f"the record points to {name!r}, outside its own folder")
        return self._folder / name


def _known_codecs() -> dict[str, Codec]:
    """Those that were registered, first, and those that installed packages offer under other names."""
    return _CODECS | {name: codec for name, codec in _offered_codecs().items() if name not in _CODECS}


@cache
def _offered_codecs() -> dict[str, Codec]:
    from importlib.metadata import entry_points  # a seventh of the import time, for programs that record nothing

    return {point.name: point.load()() for point in entry_points(group=_ENTRY_POINTS)}


def _codec(name: str) -> Codec:
    codecs = _known_codecs()
    if name not in codecs:
        close = get_close_matches(name, codecs, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        known = ", ".join(sorted(codecs)) or "none"
        raise KeyError(f"the record needs the codec {name!r}, which is not there{meant} (known: {known})")
    return codecs[name]
