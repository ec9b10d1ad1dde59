"""Calls: the controller's own cost as groups grow, and tiny calls beside verl, plain Ray and Monarch."""

from __future__ import annotations

from ..harness import Benchmark, Budget, Contender

__all__ = ["BENCHMARKS"]

_PLANNING = "benchmarks.contenders.planning"
_LOCAL = "benchmarks.contenders.local_calls"

_LARGEST = {"ranks": 4096}
_LIST = "call with a list, per rank"
CONTROLLER = Benchmark(
    name="controller",
    title="The controller's cost of a call as the group grows (workers that answer at once)",
    contenders=(
        Contender("kapell", f"{_PLANNING}:KapellCalls"),
        Contender("kapell's accounting alone", f"{_PLANNING}:Accounting"),
        Contender("verl", "benchmarks.contenders.verl_planning:VerlCalls", site="verl"),
    ),
    sizes=tuple({"ranks": ranks} for ranks in (16, 64, 256, 1024, 4096)),
    quick_sizes=tuple({"ranks": ranks} for ranks in (16, 64, 256)),
    units={_LIST: "s", "ping, per rank": "s", "call with a DataProto, per rank": "s"},
    axis="ranks",
    rounds=9,
    budgets=(
        Budget(
            text="a call on 4,096 ranks under 20 µs a rank", metric=_LIST, size=_LARGEST, kind="absolute", limit=20e-6
        ),
        Budget(
            text="a ping of 4,096 ranks under 20 µs a rank",
            metric="ping, per rank",
            size=_LARGEST,
            kind="absolute",
            limit=20e-6,
        ),
    ),
    bound="Python objects per rank; with a DataProto, the views that cut its columns (a few microseconds each).",
)
PLANS = Benchmark(
    name="plans",
    title="Planning a call of 1,000,000 rows",
    contenders=tuple(
        Contender(kind, f"{_PLANNING}:KapellPlans", {"kind": kind})
        for kind in ("tensor", "TensorDict", "numpy", "list")
    ),
    sizes=tuple({"ranks": ranks} for ranks in (8, 64, 512, 4096)),
    quick_sizes=CONTROLLER.quick_sizes,
    units={"plan": "s", "plan by mesh": "s", "plan's memory": "B", "cutting all shards": "s"},
    axis="ranks",
    rounds=7,
    warmups=1,
    bound="Python objects per rank; a list is cut by copying references, everything else by views.",
)
BALANCE = Benchmark(
    name="balance",
    title="Balancing rows over ranks by their lengths (Karmarkar-Karp, equal sizes)",
    contenders=(Contender("kapell", f"{_PLANNING}:KapellBalance"),),
    sizes=({"rows": 1024, "ranks": 8}, {"rows": 16_384, "ranks": 64}, {"rows": 100_000, "ranks": 512}),
    quick_sizes=({"rows": 1024, "ranks": 8},),
    units={"balance": "s"},
    axis="rows",
    rounds=5,
    warmups=1,
    bound="merging partitions in a heap: rows times ranks.",
)
LOCAL = Benchmark(
    name="local",
    title="Kapell's own cost of a tiny call on the local backend (plain calls subtracted)",
    contenders=(
        Contender("kapell, serial", f"{_LOCAL}:LocalCalls", {"mode": "serial"}),
        Contender("kapell, threads", f"{_LOCAL}:LocalCalls", {"mode": "threads"}),
        Contender("plain calls", f"{_LOCAL}:PlainCalls"),
    ),
    sizes=tuple({"workers": workers} for workers in (1, 2, 4, 8)),
    quick_sizes=({"workers": 2}, {"workers": 4}),
    units={"add": "s", "ping": "s", "speed of the machine: sum(range(20,000))": "s"},
    axis="workers",
    rounds=9,
    budgets=(
        Budget(
            text="a data-parallel call on 4 local workers under 100 µs of Kapell's own",
            metric="add",
            size={"workers": 4},
            kind="absolute",
            limit=100e-6,
        ),
    ),
    bound="planning, accounting and copying arguments in Python; with threads, waking them.",
)

_FOUR = {"workers": 4}
_SIX_COLUMNS = "rows of six columns"
TINY = Benchmark(
    name="tiny",
    title="A tiny call of a group on Ray",
    contenders=(
        Contender("kapell", "benchmarks.contenders.kapell_ray:KapellTiny"),
        Contender("plain Ray", "benchmarks.contenders.plain_ray:PlainTiny"),
        Contender("verl", "benchmarks.contenders.verl_ray:VerlTiny", site="verl"),
        Contender("Monarch", "benchmarks.contenders.monarch_actors:MeshTiny", site="torchmonarch"),
    ),
    sizes=tuple({"workers": workers} for workers in (1, 2, 4, 8)),
    quick_sizes=({"workers": 2}, _FOUR),
    units={"ping": "s", "rows": "s", _SIX_COLUMNS: "s"},
    axis="workers",
    rounds=9,
    uses_ray=True,
    budgets=(
        Budget(
            text="ping of 4 Ray workers within 1.3 times of the raw actor calls",
            metric="ping",
            size=_FOUR,
            kind="within",
            peer="plain Ray",
            limit=1.3,
        ),
        Budget(
            text="tiny data-parallel call, 4 Ray workers, within 1.3 times of the raw actor calls with numpy",
            metric="rows",
            size=_FOUR,
            kind="within",
            peer="plain Ray",
            limit=1.3,
        ),
        Budget(
            text="tiny data-parallel call, 4 Ray workers, at least 2.5 times faster than verl",
            metric="rows",
            size=_FOUR,
            kind="faster",
            peer="verl",
            limit=2.5,
        ),
        Budget(
            text="the same with six columns within 1.3 times of the raw actor calls",
            metric=_SIX_COLUMNS,
            size=_FOUR,
            kind="within",
            peer="plain Ray",
            limit=1.3,
        ),
        Budget(
            text="the same with six columns at least 2.5 times faster than verl",
            metric=_SIX_COLUMNS,
            size=_FOUR,
            kind="faster",
            peer="verl",
            limit=2.5,
        ),
    ),
    bound="Ray's actor call, about 0.1 ms of the driver for each, and the workers taking turns on the cores.",
)

BENCHMARKS = (CONTROLLER, PLANS, BALANCE, LOCAL, TINY)
