"""Groups whose workers read what they are sent where it lies: writing raises, and nobody's data changes."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from kapell.decorators import Dispatch, register
from kapell.protocol import DataProto
from kapell.ray_backend import RayWorkerGroup
from kapell.workergroup import ClassWithInitArgs, Worker


class Reader(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def write(self, value):
        """What became of writing to each column, and their sum."""
        if isinstance(value, DataProto):
            columns = [*value.batch.values(), *value.non_tensor_batch.values()]
        else:
            columns = list(value.values()) if isinstance(value, TensorDict) else [value]
        told = []
        for column in columns:
            try:
                column += 1
            except (RuntimeError, ValueError) as error:
                told.append("read-only" if "read-only" in str(error) else str(error))
            else:
                told.append("written")
        return told, sum(float(column.sum()) for column in columns)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def rows(self, batch):
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO)
    def double(self, batch):
        return batch * 2


@pytest.fixture(scope="module")
def readers(pool):
    with RayWorkerGroup(pool, ClassWithInitArgs(Reader), role="readers", arrivals="read-only") as group:
        yield group


def ones(kind, rows):
    tensor, array = torch.ones(rows), np.ones(rows)
    return {
        "tensor": tensor,
        "array": array,
        "TensorDict": TensorDict({"a": tensor}, batch_size=[rows]),
        "DataProto": DataProto.from_dict({"a": tensor}, {"s": array}),
    }[kind]


@pytest.mark.parametrize("rows", [4, 400_000])
@pytest.mark.parametrize("kind", ["tensor", "array", "TensorDict", "DataProto"])
def test_writing_to_an_arrival_raises_on_every_rank_and_changes_nothing(readers, kind, rows):
    columns = 2 if kind == "DataProto" else 1
    value = ones(kind, rows)
    for _ in range(2):
        assert readers.write(value) == [(["read-only"] * columns, columns * rows)] * 2


@pytest.mark.parametrize("rows", [4, 400_000])
def test_reading_works_as_ever_and_what_comes_back_is_writable(readers, rows):
    doubled = readers.double(torch.ones(rows))
    assert type(doubled) is torch.Tensor
    doubled += 1
    assert doubled.tolist() == [3.0] * rows
    batch = ones("DataProto", rows)
    back = readers.rows(batch)
    back.batch["a"] += 1
    back.non_tensor_batch["s"] += 1
    assert (batch.batch["a"].sum(), batch.non_tensor_batch["s"].sum()) == (rows, rows)
    assert (back.batch["a"].sum(), back.non_tensor_batch["s"].sum()) == (2 * rows, 2 * rows)


def test_a_result_that_is_passed_on_stays_as_it_is_whatever_its_readers_do(readers):
    pending = readers.rows.options(blocking=False)(ones("DataProto", 400_000))
    for _ in range(2):
        for told, total in readers.write(pending):
            assert total == 400_000 * sum(2 if word == "written" else 1 for word in told)
    assert pending.get(timeout=120).batch["a"].sum() == 400_000


def test_another_kind_of_arrivals_is_refused(pool):
    with pytest.raises(ValueError, match=r"arrivals='views' is neither 'private' nor 'read-only'"):
        RayWorkerGroup(pool, ClassWithInitArgs(Reader), arrivals="views")
