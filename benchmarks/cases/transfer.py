"""Transfers on Ray: a batch through 4 workers and back, one argument for all, memory, start-up."""

from __future__ import annotations

from ..harness import Benchmark, Budget, Contender

__all__ = ["BENCHMARKS"]

_OURS = "benchmarks.contenders.kapell_ray"
_PLAIN = "benchmarks.contenders.plain_ray"
_VERL = "benchmarks.contenders.verl_ray"
_MONARCH = "benchmarks.contenders.monarch_actors"

_LARGE = {"megabytes": 256}
ECHO = Benchmark(
    name="echo",
    title="A batch of 4 float columns through 4 Ray workers and back, private on arrival or read-only",
    contenders=(
        Contender("kapell", f"{_OURS}:KapellEcho"),
        Contender("kapell, read-only", f"{_OURS}:KapellEchoViews"),
        Contender("plain Ray, copied", f"{_PLAIN}:PlainEcho", {"private": True}),
        Contender("plain Ray, views", f"{_PLAIN}:PlainEcho", {"private": False}),
        Contender("verl", f"{_VERL}:VerlEcho", site="verl"),
        # At 256 MB its processes fill 24 GiB, and everyone else's echo waits for memory.
        Contender("TransferQueue", "benchmarks.contenders.queue_echo:QueueEcho", site="transferqueue", max_size=64),
        Contender(
            "Monarch",
            f"{_MONARCH}:MeshEcho",
            site="torchmonarch",
            max_size=64,
        ),
    ),
    sizes=tuple({"megabytes": megabytes} for megabytes in (1, 4, 16, 64, 256)),
    quick_sizes=tuple({"megabytes": megabytes} for megabytes in (1, 4, 16)),
    units={"echo": "s"},
    axis="megabytes",
    rounds=7,
    warmups=10,  # until the pages of the store and of all processes are warm, for everyone
    uses_ray=True,
    budgets=(
        Budget(
            text="256 MB through 4 Ray workers and back at least 8 times faster than verl",
            metric="echo",
            size=_LARGE,
            kind="faster",
            peer="verl",
            limit=8,
        ),
        Budget(
            text="the same within 1.2 times of hand-written Ray with numpy arrays copied once at each receiver",
            metric="echo",
            size=_LARGE,
            kind="within",
            peer="plain Ray, copied",
            limit=1.2,
        ),
        Budget(
            text="the same with read-only arrivals within 1.2 times of hand-written Ray with numpy views",
            metric="echo",
            size=_LARGE,
            ours="kapell, read-only",
            kind="within",
            peer="plain Ray, views",
            limit=1.2,
        ),
    ),
    bound="memory copies: into the store, out of it at each receiver, and once more to join; first touches of pages.",
)

CHAIN = Benchmark(
    name="chain",
    title="Three calls in a chain on a batch that the first makes, 2 Ray workers",
    contenders=(
        Contender("kapell, futures passed on", f"{_OURS}:KapellChain", {"way": "future"}),
        Contender("kapell, by reference", f"{_OURS}:KapellChain", {"way": "reference"}),
        Contender("kapell, through the controller", f"{_OURS}:KapellChain", {"way": "value"}),
    ),
    sizes=tuple({"megabytes": megabytes} for megabytes in (1, 4, 16, 64, 256)),
    quick_sizes=tuple({"megabytes": megabytes} for megabytes in (1, 4)),
    units={"chain": "s", "bytes through the controller": "B"},
    axis="megabytes",
    rounds=5,
    uses_ray=True,
    budgets=(
        Budget(
            text="a chain of calls on 256 MB brings under 10 kB through the controller",
            metric="bytes through the controller",
            size=_LARGE,
            kind="absolute",
            limit=10_000,
        ),
        Budget(
            text="the same by reference",
            metric="bytes through the controller",
            size=_LARGE,
            ours="kapell, by reference",
            kind="absolute",
            limit=10_000,
        ),
    ),
    bound="making the batch, and for each call a copy into the store and one out of it, of each rank's own rows.",
)

MEMORY = Benchmark(
    name="memory",
    title="Memory of a 256 MB call, in multiples of the batch, beyond what was held before",
    contenders=(
        Contender("kapell", f"{_OURS}:KapellMemory"),
        Contender("plain Ray, copied", f"{_PLAIN}:PlainMemory", {"private": True}),
        Contender("verl", f"{_VERL}:VerlMemory", site="verl"),
    ),
    sizes=(_LARGE,),
    quick_sizes=({"megabytes": 16},),
    units={
        "sending: controller and store": "times",
        "the whole to all: controller and store": "times",
        "echo: all processes and store": "times",
    },
    axis="",
    rounds=3,
    warmups=0,
    uses_ray=True,
    budgets=(
        Budget(
            text="sending B bytes takes at most 1.1 B more of controller and store",
            metric="sending: controller and store",
            size=_LARGE,
            kind="absolute",
            limit=1.1,
        ),
        Budget(
            text="one argument for all workers takes the memory of one put (at most 1.1 times its bytes)",
            metric="the whole to all: controller and store",
            size=_LARGE,
            kind="absolute",
            limit=1.1,
        ),
        Budget(
            text="a 256 MB echo peaks under 3 times the batch over all private memory and the store",
            metric="echo: all processes and store",
            size=_LARGE,
            kind="absolute",
            limit=3.0,
        ),
    ),
    bound="the shards in the store, their private copies, the answers in the store, and the joined result.",
)

_EIGHT = {"workers": 8}
TO_ALL = Benchmark(
    name="toall",
    title="One argument of 64 MB for all workers",
    contenders=(
        Contender("kapell", f"{_OURS}:KapellToAll"),
        Contender("plain Ray, one put, copied", f"{_PLAIN}:PlainToAll"),
        Contender("ray.put alone", f"{_OURS}:KapellPut"),
        Contender("verl", f"{_VERL}:VerlToAll", site="verl"),
        Contender("Monarch", f"{_MONARCH}:MeshToAll", site="torchmonarch", max_size=2),
    ),
    sizes=tuple({"workers": workers} for workers in (1, 2, 4, 8)),
    quick_sizes=({"workers": 2},),
    units={"call": "s"},
    axis="workers",
    rounds=7,
    uses_ray=True,
    budgets=(
        Budget(
            text="64 MB for 8 workers: time within 1.2 times of one put and a copy at each receiver",
            metric="call",
            size=_EIGHT,
            kind="within",
            peer="plain Ray, one put, copied",
            limit=1.2,
        ),
    ),
    bound="one copy into the store, and one private copy at each receiver: eight of those share the machine's cores.",
)

START = Benchmark(
    name="start",
    title="From nothing to the first answer of all workers",
    contenders=(
        Contender("kapell", f"{_OURS}:KapellStart"),
        Contender("plain Ray", f"{_PLAIN}:PlainStart"),
        Contender("verl", f"{_VERL}:VerlStart", site="verl"),
        Contender("Monarch", f"{_MONARCH}:MeshStart", site="torchmonarch"),
    ),
    sizes=tuple({"workers": workers} for workers in (1, 2, 4)),
    quick_sizes=({"workers": 2},),
    units={"ready": "s", "ready, workers import torch": "s"},
    axis="workers",
    rounds=5,
    warmups=1,
    uses_ray=True,
    budgets=(
        Budget(
            text="4 Ray workers ready in a third of verl's time or less",
            metric="ready",
            size={"workers": 4},
            kind="faster",
            peer="verl",
            limit=3,
        ),
        Budget(
            text="the same with workers that import torch, as verl's do",
            metric="ready, workers import torch",
            size={"workers": 4},
            kind="faster",
            peer="verl",
            limit=3,
        ),
    ),
    bound="starting Python processes and importing what the worker needs (torch, here), on the machine's cores.",
)

BENCHMARKS = (ECHO, CHAIN, MEMORY, TO_ALL, START)
