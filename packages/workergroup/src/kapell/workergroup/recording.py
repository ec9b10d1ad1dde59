"""Record the inputs of a call per rank, and rerun one rank's call in process, under a debugger, without the cluster."""

from __future__ import annotations

import json
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from kapell.decorators import DispatchPlan, is_future

from .answering import CallRunner
from .codecs import ValueReader, ValueWriter
from .environment import show_worker_env, use_worker_env
from .pool import ClassWithInitArgs
from .routing import Route

__all__ = ["Recorder", "record_call", "replay"]

_FORMAT = 1


@dataclass(frozen=True)
class Recorder:
    """Where and how calls are recorded: ``group.update.options(record=Recorder("calls", allow_pickle=True))(batch)``.

    A folder alone does as well. Plain data is stored as JSON, other values by the codecs of `register_codec`.
    """

    folder: str | PathLike[str]
    """Made when it is not there. Each rank's call becomes a JSON file in it."""
    allow_pickle: bool = False
    """Whether values that no codec handles are pickled instead of refused."""


def record_call(
    recorder: Recorder | str | PathLike[str], route: Route, worker_class: type, method: str, plan: DispatchPlan
) -> list[Path]:
    """Store what each rank of a planned call gets and where it stands; futures are waited for. The files, by rank."""
    if not isinstance(recorder, Recorder):
        recorder = Recorder(recorder)
    folder = Path(recorder.folder)
    folder.mkdir(parents=True, exist_ok=True)
    workers = route.runtime.workers
    paths = []
    for rank in plan.ranks:
        own_rank = route.ranks[rank]
        number = route.runtime.ledger.num_calls + 1
        stem = folder / f"{route.role}-{method}-{number:06d}-rank{own_rank}"
        writer = ValueWriter(stem, allow_pickle=recorder.allow_pickle)
        args, kwargs = plan.call_for(rank)
        data = {
            "format": _FORMAT,
            "role": route.role,
            "target": route.target,
            "worker_class": f"{worker_class.__module__}:{worker_class.__qualname__}",
            "method": method,
            "rank": own_rank,
            "world_size": workers.world_size,
            "environment": dict(workers.environment(own_rank)),
            "args": [writer.encode(f"argument {i}", _value(value)) for i, value in enumerate(args)],
            "kwargs": {name: writer.encode(f"argument {name!r}", _value(value)) for name, value in kwargs.items()},
        }
        path = stem.with_name(f"{stem.name}.json")
        path.write_text(json.dumps(data, indent=1), encoding="utf-8")
        paths.append(path)
    return paths


def replay(path: str | PathLike[str], worker_class: type | ClassWithInitArgs, *, allow_pickle: bool = False) -> Any:
    """Build one worker here, with the recorded rank's place, and run the recorded call on it; the method's result.

    What the worker had learned by then is not in the record: load it in the constructor, whose arguments
    ``ClassWithInitArgs`` gives. Raises what the method raises, so that ``pdb.post_mortem`` finds its frames.
    """
    path = Path(path)
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("format") != _FORMAT:
        raise ValueError(f"{path} has record format {data.get('format')!r}; this version reads {_FORMAT}")
    reader = ValueReader(path.parent, allow_pickle=allow_pickle)
    args = [reader.decode(value) for value in data["args"]]
    kwargs = {name: reader.decode(value) for name, value in data["kwargs"].items()}
    build = worker_class if isinstance(worker_class, ClassWithInitArgs) else ClassWithInitArgs(worker_class)
    show_worker_env()
    with use_worker_env(data["environment"]):
        runner = CallRunner(build())
        try:
            return runner.run(data["method"], args, kwargs)
        finally:
            runner.close()


def _value(argument: Any) -> Any:
    return argument.get() if is_future(argument) else argument
