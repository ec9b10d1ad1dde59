"""Calls by reference: columns stay where they were made, and go from worker to worker."""

import re

import pytest
import torch

from kapell.decorators import Dispatch, Reduction, register
from kapell.protocol import DataProto, StoredBatch
from kapell.ray_backend import LostBatchError, RayWorkerGroup
from kapell.workergroup import ClassWithInitArgs, Worker, WorkerFailedError

WIDE = 250_000  # float32: a megabyte a row
BATCH = DataProto.from_dict({"id": torch.arange(6)}, {"text": [f"row {row}" for row in range(6)]}, {"step": 3})


class Maker(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO, reads=("id",), writes=("wide", "square", "maker", "cells"))
    def make(self, batch):
        ids = batch.column("id")
        wide = ids.float()[:, None].expand(-1, WIDE).contiguous()
        tensors = {"wide": wide, "square": ids**2, "maker": torch.full_like(ids, self.rank)}
        return DataProto.from_dict(tensors, {"cells": [[n] for n in ids.tolist()]}, {"metrics": {"rows": len(batch)}})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("wide", "cells"), writes=("total",))
    def total(self, batch):
        assert type(batch) is DataProto
        assert set(batch.columns) == {"wide", "cells"}
        wide = batch.column("wide")
        wide += 1  # it is this worker's own
        batch.column("cells")[0].append(self.rank)
        return DataProto.from_dict({"total": (wide - 1).mean(-1)})

    @register(Dispatch.DP_COMPUTE_PROTO, materialize_futures=False, collect=Reduction.LIST)
    def look(self, batch):
        return type(batch).__name__, batch.stored_columns, batch[:1].column("square").tolist()


@pytest.fixture(scope="module")
def makers(backend):
    with backend.resource_pool([2]) as pool, RayWorkerGroup(pool, ClassWithInitArgs(Maker), role="maker") as group:
        yield group


def test_what_is_read_elsewhere_does_not_come_to_the_controller(makers, arrived_here):
    referring = makers.by_reference()
    made = referring.make(BATCH)
    assert isinstance(made, StoredBatch)
    assert made.meta_info["metrics"] == {"rows": [3, 3]}
    assert made.column_facts["wide"].shape == (6, WIDE)
    batch = BATCH.union(made)[[5, 0, 3, 2, 1, 4]]
    totals = referring.total(batch)
    assert totals.column("total").tolist() == [5, 0, 3, 2, 1, 4]
    assert sum(arrived_here) < 30_000
    assert totals.meta_info == made.select([], [], []).meta_info
    whole = batch.get()
    assert sum(arrived_here) > 6 * 4 * WIDE
    assert whole.meta_info["step"] == 3
    assert whole.non_tensor_batch["cells"].tolist() == [[5], [0], [3], [2], [1], [4]]  # nobody's writing shows
    whole.batch["wide"] += 1
    assert batch.get(columns=["wide"]).batch["wide"][:, 0].tolist() == [5, 0, 3, 2, 1, 4]


def test_it_gives_what_calls_by_value_give(makers):
    by_value = BATCH.union(makers.make(BATCH))
    by_reference = BATCH.union(makers.by_reference().make(BATCH))
    assert by_reference.get() == by_value
    order = [3, 3, 0]
    assert makers.total(by_reference[order]) == makers.total(by_value[order])


def test_calls_that_are_not_waited_for_chain_by_reference(makers, arrived_here):
    referring = makers.by_reference()
    made = referring.make.options(blocking=False)(BATCH)
    total = referring.total.options(blocking=False)(made)
    assert total.get().column("total").tolist() == list(range(6))
    assert sum(arrived_here) < 30_000


def test_a_method_may_take_the_reference_itself(makers):
    made = makers.by_reference().make(BATCH)
    told = makers.look(made)
    assert told == [("StoredBatch", made.stored_columns, [0]), ("StoredBatch", made.stored_columns, [9])]


def test_a_lost_worker_takes_its_columns_with_it_and_nobody_elses(makers, lose_worker, wait_until):
    made = makers.by_reference().make(BATCH)
    lose_worker(makers, 1)
    errors = []

    def is_lost():  # Ray takes a moment to let go of them
        try:
            made.get(columns=["square"])
        except LostBatchError as error:
            errors.append(error)
        return bool(errors)

    assert wait_until(is_lost)
    assert re.search(r"stayed with rank 1, .* lost .*get\(\) what must outlive", str(errors[0]))
    assert made[:3].column("square").tolist() == [0, 1, 4]
    makers.restart(1)
    with pytest.raises(WorkerFailedError, match="stayed with rank 1"):
        makers.total(made)
    assert makers.total(made[[0, 1]]).column("total").tolist() == [0, 1]
