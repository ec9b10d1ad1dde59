"""Calls by reference give what calls by value give, however rows are dispatched."""

import pytest
import torch

from kapell.decorators import Dispatch, Uneven, register
from kapell.protocol import DataProto, StoredBatch
from kapell.workergroup import ClassWithInitArgs, Worker, WorkerFailedError, load_backend


class Worker4(Worker):
    def __init__(self):
        super().__init__()
        self._register_dispatch_collect_info("train", dp_rank=self.rank // 2, is_collect=self.rank % 2 == 0)

    def label(self, batch):
        made = {"twice": batch.column("x") * 2, "rank": torch.full_like(batch.column("x"), self.rank)}
        return DataProto.from_dict(made, {"text": [f"{x}" for x in batch.column("x").tolist()]}, {"kind": "label"})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x",))
    def rows(self, batch):
        return self.label(batch)

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x",), uneven=Uneven.PAD)
    def padded(self, batch):
        assert len(batch) == 2
        return self.label(batch)

    @register(Dispatch.DP_COMPUTE_PROTO, balance_by="x", group_by="group")
    def balanced(self, batch):
        return self.label(batch)

    @register(Dispatch.mesh("train"), reads=("x",))
    def meshed(self, batch):
        return self.label(batch)

    @register(Dispatch.ONE_TO_ALL)
    def whole(self, batch):
        return self.label(batch)

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("twice", "text"), writes=("length",))
    def read(self, batch):
        assert set(batch.columns) == {"twice", "text"}
        return DataProto.from_dict({"length": torch.tensor([len(text) for text in batch.column("text")])})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("twice",))
    def fail(self, batch):
        raise RuntimeError("on purpose")


@pytest.fixture(scope="module", params=["serial", "threads"])
def group(request):
    with load_backend("local")(mode=request.param) as backend:
        yield backend.worker_group(backend.resource_pool([4]), ClassWithInitArgs(Worker4))


BATCH = DataProto.from_dict({"x": torch.tensor([5, 3, 9, 1, 7, 2, 8]), "group": torch.tensor([0, 0, 1, 1, 2, 3, 3])})


@pytest.mark.parametrize("method", ["rows", "padded", "balanced", "meshed"])
def test_rows_come_back_in_the_callers_order(group, method):
    by_value = getattr(group, method)(BATCH)
    by_reference = getattr(group.by_reference(), method)(BATCH)
    assert isinstance(by_reference, StoredBatch)
    assert by_reference.stored_columns == ("twice", "rank", "text")
    assert by_reference.get() == by_value
    assert by_reference.column("twice").tolist() == (BATCH.column("x") * 2).tolist()


@pytest.mark.parametrize("method", ["rows", "padded", "balanced", "meshed"])
def test_what_was_made_by_reference_is_dispatched_like_any_batch(group, method):
    stored = StoredBatch.here(BATCH).union(group.by_reference().rows(BATCH))
    order = [6, 0, 0, 4, 2]
    assert group.read(stored[order]) == group.read(stored.get()[order])
    again = stored.select(["twice", "rank"], ["text"]).union(BATCH)[order]
    assert getattr(group, method)(again) == getattr(group, method)(BATCH[order])


def test_a_batch_for_all_is_read_by_all(group):
    stored = group.by_reference().rows(BATCH).rename("twice", "x")
    assert [part.get() for part in group.by_reference().whole(stored)] == group.whole(stored.get())


def test_views_of_a_group_by_reference_are_by_reference(group):
    view = group.by_reference()[1:3]
    assert view.rows(BATCH).get() == group[1:3].rows(BATCH)
    assert isinstance(group[1:3].by_reference().rows(BATCH), StoredBatch)
    assert isinstance(group.rows(BATCH), DataProto)


def test_the_plan_weighs_what_is_sent_and_an_error_tells_the_shapes(group):
    stored = group.by_reference().rows(BATCH)
    plan = group.read.plan(stored)
    assert plan.rows == (2, 2, 2, 1)
    assert plan.columns == ("twice", "text")
    with pytest.raises(WorkerFailedError, match=r"rank 0 of Worker4.* with 2 rows \(twice: \(2,\) int64\)"):
        group.fail(stored)
    with pytest.raises(ValueError, match="reads column 'text', which the batch does not have"):
        group.read(stored.select(None, []))
