"""The layers' import times, and the batch: its wire format and its operations."""

from __future__ import annotations

from typing import Literal

from ..harness import Benchmark, Budget, Contender

__all__ = ["BENCHMARKS"]

_IMPORT = "benchmarks.contenders.imports:Import"
_WIRE = "benchmarks.contenders.batch:Wire"
_OPERATIONS = "benchmarks.contenders.batch:BatchOperations"


def _import(name: str, statement: str, site: str = "kapell") -> Contender:
    return Contender(name, _IMPORT, {"statement": statement}, site)


IMPORTS = Benchmark(
    name="imports",
    title="Import time of each layer, in a fresh interpreter",
    contenders=(
        _import("kapell.decorators", "import kapell.decorators"),
        _import("kapell.workergroup", "import kapell.workergroup"),
        _import("kapell.protocol", "import kapell.protocol"),
        _import("torch, tensordict", "import torch, tensordict"),
        _import("kapell.ray_backend (a group)", "from kapell.ray_backend import RayWorkerGroup"),
        _import("ray", "import ray"),
        _import("kapell.trainer (with its loop)", "import kapell.trainer.build"),
        _import("torch, transformers", "import torch; from transformers import AutoModelForCausalLM"),
        _import("verl DataProto", "from verl import DataProto", "verl"),
        _import("verl RayWorkerGroup", "from verl.single_controller.ray import RayWorkerGroup", "verl"),
        _import("trl GRPOTrainer", "from trl import GRPOTrainer", "trl"),
        _import("transfer_queue", "import transfer_queue", "transferqueue"),
        _import("monarch.actor", "from monarch.actor import Actor, endpoint, this_host", "torchmonarch"),
    ),
    sizes=({},),
    quick_sizes=({},),
    units={"time": "s", "heavy libraries": ""},
    axis="",
    rounds=5,
    warmups=0,
    budgets=(
        Budget(text="`import kapell.decorators` under 0.1 s", metric="time", size={}, kind="absolute", limit=0.1),
        Budget(
            text="`import kapell.decorators` loads none of torch, ray, numpy",
            metric="heavy libraries",
            size={},
            kind="absolute",
            limit=0,
        ),
        Budget(
            text="`import kapell.workergroup` under 0.2 s",
            metric="time",
            size={},
            ours="kapell.workergroup",
            kind="absolute",
            limit=0.2,
        ),
        Budget(
            text="`import kapell.workergroup` loads none of torch, ray, numpy",
            metric="heavy libraries",
            size={},
            ours="kapell.workergroup",
            kind="absolute",
            limit=0,
        ),
        Budget(
            text="`import kapell.protocol` no slower than `import torch, tensordict` + 0.3 s",
            metric="time",
            size={},
            ours="kapell.protocol",
            kind="more",
            peer="torch, tensordict",
            limit=0.3,
        ),
    ),
    bound="reading and running module files; torch and ray are nine tenths of the layers that need them.",
)


_WIRE_SIZE = {"megabytes": 50}
_WAYS = ("kapell, out of band", "kapell, with a transport", "kapell, in one stream")


def _wire_budget(text: str, way: int, kind: Literal["faster", "within"], limit: float) -> Budget:
    peer = "verl" if kind == "faster" else "bytes copied twice"
    return Budget(text=text, metric="round trip", size=_WIRE_SIZE, ours=_WAYS[way], kind=kind, peer=peer, limit=limit)


WIRE = Benchmark(
    name="wire",
    title="A DataProto pickled and read back",
    contenders=(
        Contender("kapell, out of band", _WIRE, {"module": "kapell.protocol", "way": "out of band"}),
        Contender("kapell, with a transport", _WIRE, {"module": "kapell.protocol", "way": "transport"}),
        Contender("kapell, in one stream", _WIRE, {"module": "kapell.protocol", "way": "in stream"}),
        Contender("kapell, default protocol", _WIRE, {"module": "kapell.protocol"}),
        Contender("bytes copied twice", _WIRE, {"module": "kapell.protocol", "way": "copies"}),
        Contender("verl", _WIRE, {"module": "verl"}, "verl"),
        Contender(
            "verl, numpy option",
            _WIRE,
            {"module": "verl", "environment": {"VERL_DATAPROTO_SERIALIZATION_METHOD": "numpy"}},
            "verl",
        ),
    ),
    sizes=tuple({"megabytes": megabytes} for megabytes in (1, 5, 20, 50, 200, 500)),
    quick_sizes=tuple({"megabytes": megabytes} for megabytes in (1, 5, 50)),
    units={"round trip": "s"},
    axis="megabytes",
    rounds=9,
    budgets=(
        _wire_budget("50 MB DataProto pickled and read back at least 5 times faster than verl's", 0, "faster", 5),
        _wire_budget("the same, a transport's copy included", 1, "faster", 5),
        _wire_budget("the same, in one stream", 2, "faster", 5),
        _wire_budget("50 MB DataProto pickled and read back within 1.5 times of two copies", 0, "within", 1.5),
        _wire_budget("the same, a transport's copy included", 1, "within", 1.5),
        _wire_budget("the same, in one stream", 2, "within", 1.5),
    ),
    bound="copying memory: first touches of new pages cost more than the copy itself.",
)

_UNITS = dict.fromkeys(("pickle", "chunk", "concat", "union", "select", "select rows"), "s")
_BOTH = (
    Contender("kapell", _OPERATIONS, {"module": "kapell.protocol"}),
    Contender("verl", _OPERATIONS, {"module": "verl"}, "verl"),
)
ROWS = Benchmark(
    name="rows",
    title="DataProto operations as rows grow (1 kB of tensors a row, two object columns)",
    contenders=_BOTH,
    sizes=tuple({"rows": rows} for rows in (10, 100, 1_000, 10_000, 100_000)),
    quick_sizes=tuple({"rows": rows} for rows in (10, 100, 1_000)),
    units=_UNITS,
    axis="rows",
    rounds=7,
    warmups=1,
    bound="Python's cost a call up to about 1,000 rows, then copying; dicts in object columns are pickled one by one.",
)
BYTES = Benchmark(
    name="bytes",
    title="DataProto operations as bytes grow (1,024 rows, two object columns)",
    contenders=_BOTH,
    sizes=tuple({"megabytes": megabytes} for megabytes in (1, 5, 20, 100, 500)),
    quick_sizes=tuple({"megabytes": megabytes} for megabytes in (1, 5, 20)),
    units=_UNITS,
    axis="megabytes",
    rounds=5,
    warmups=1,
    bound="chunk, union and select copy nothing; concat, select rows and pickle copy memory.",
)

BENCHMARKS = (IMPORTS, WIRE, ROWS, BYTES)
