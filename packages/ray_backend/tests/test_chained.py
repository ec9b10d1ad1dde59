"""Futures from group to group: the data goes from worker to worker, not through the program that drives them."""

import numpy as np
import pytest
import torch

from kapell.decorators import Dispatch, register
from kapell.protocol import DataProto
from kapell.protocol.arrivals import Arrivals
from kapell.ray_backend import RayWorkerGroup
from kapell.workergroup import ClassWithInitArgs, Worker

ROWS = 100_000  # over a megabyte a rank: smaller results are copied faster than they are looked at
ROW_BYTES = 16  # two float32, one int64


class Link(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO)
    def make(self, seeds):
        return DataProto.from_dict({"x": torch.full((ROWS, 2), float(seeds[0]))}, {"y": np.full(ROWS, seeds[0])})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def double(self, batch):
        return DataProto.from_dict({"x": batch.batch["x"] * 2}, {"y": batch.non_tensor_batch["y"]})

    @register(Dispatch.ONE_TO_ALL)
    def total(self, batch):
        return float(batch.batch["x"].sum()) + float(batch.non_tensor_batch["y"].sum())


@pytest.fixture(scope="module")
def links(backend):
    with (
        backend.resource_pool([1]) as pool,
        RayWorkerGroup(pool, ClassWithInitArgs(Link), role="first") as first,
        RayWorkerGroup(pool, ClassWithInitArgs(Link), role="second") as second,
    ):
        yield first, second


def test_three_calls_in_a_chain_bring_nothing_of_their_batches_to_the_controller(links, arrived_here):
    first, second = links
    made = first.make.options(blocking=False)([3])
    doubled = second.double.options(blocking=False)(made)
    totals = first.total(doubled)
    assert totals == [ROWS * (2 * 6 + 3)]
    assert sum(arrived_here) < 1000
    assert first.stats()["make"].fetched == second.stats()["double"].sent == second.stats()["double"].fetched == 0
    assert first.stats()["total"].fetched == 8

    batch = doubled.get(timeout=120)
    assert len(batch) == ROWS
    assert sum(arrived_here) > ROW_BYTES * ROWS
    assert second.stats()["double"].fetched == ROW_BYTES * ROWS


def test_some_columns_that_the_controller_asks_for_are_counted_with_what_came_with_them(links, arrived_here):
    first, _ = links
    before = first.stats()["make"].fetched
    made = first.make.options(blocking=False)([4])
    assert list(made.get(timeout=120, columns=["y"]).non_tensor_batch) == ["y"]
    # A rank's result is one object of the store: it comes as a whole.
    assert first.stats()["make"].fetched - before == ROW_BYTES * ROWS
    assert sum(arrived_here) > ROW_BYTES * ROWS


class Reader(Worker):
    """Notes how many bytes arrive as copies, besides what is joined of them."""

    def __init__(self):
        super().__init__()
        self.copied = 0
        copy = Arrivals._copy

        def noted(arrivals, source):
            self.copied += source.nbytes
            return copy(arrivals, source)

        Arrivals._copy = noted

    @register(Dispatch.DP_COMPUTE_PROTO)
    def mine(self, batch):
        first = [float(batch.batch["x"][0, 0]), float(batch.non_tensor_batch["y"][0])]
        batch.batch["x"][:] = -1  # what arrives is this rank's own
        batch.non_tensor_batch["y"][:] = -1
        return [(self.copied, len(batch), *first)]

    @register(Dispatch.ONE_TO_ALL)
    def all_of(self, batch):
        batch.batch["x"][:] = -1
        return self.copied, len(batch)


def test_a_rank_copies_only_its_own_rows_of_a_future(backend):
    with (
        backend.resource_pool([3]) as pool,
        RayWorkerGroup(pool, ClassWithInitArgs(Link), role="maker") as all_makers,
        RayWorkerGroup(pool, ClassWithInitArgs(Reader), role="reader") as readers,
    ):
        made = all_makers[:2].make.options(blocking=False)([1, 2])
        rows = (66_667, 66_667, 66_666)
        assert readers.mine(made) == [(0, rows[0], 1.0, 1.0), (0, rows[1], 1.0, 1.0), (0, rows[2], 2.0, 2.0)]
        first = all_makers[0].make.options(blocking=False)([5])
        assert [(copied, size) for copied, size, *_ in readers.mine(first)] == [(0, 33_334), (0, 33_333), (0, 33_333)]
        assert float(first.get(timeout=240).batch["x"].min()) == 5.0
        assert readers.all_of(made) == [(0, 2 * ROWS)] * 3
        batch = made.get(timeout=240)
        assert (float(batch.batch["x"].min()), int(batch.non_tensor_batch["y"].min())) == (1.0, 1)
