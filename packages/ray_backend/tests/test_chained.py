"""Futures from group to group: the data goes from worker to worker, not through the program that drives them."""

import numpy as np
import pytest
import torch

from kapell.decorators import Dispatch, register
from kapell.protocol import DataProto
from kapell.ray_backend import RayWorkerGroup, shipping
from kapell.workergroup import ClassWithInitArgs, Worker

ROWS = 50_000
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


@pytest.fixture
def arrived_here(monkeypatch):
    """The bytes that this process has read out of Ray's store."""
    sizes = []
    arrive = shipping._arrive

    def counted(head, private, borrowable, *buffers):
        sizes.append(len(head) + sum(memoryview(buffer).nbytes for buffer in buffers))
        return arrive(head, private, borrowable, *buffers)

    monkeypatch.setattr(shipping, "_arrive", counted)
    return sizes


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
