"""Futures: bookkeeping on references, and only the shards that are needed are fetched."""

import asyncio
import threading

import numpy as np
import pytest
import torch
from counting_store import CountingStore

from kapell.protocol import DataProto, DataProtoFuture, MemoryStore
from kapell.protocol import tensordict_utils as tu

WHOLE = DataProto.from_dict({"id": torch.arange(10)}, {"t": [f"row {row}" for row in range(10)]}, {"step": 1})


@pytest.fixture
def store():
    return CountingStore()


@pytest.fixture
def refs(store):
    return [store.put(shard) for shard in WHOLE.chunk(4)]  # 3, 3, 2, 2 rows


@pytest.fixture
def future(store, refs):
    return DataProtoFuture(refs, store, rows=[3, 3, 2, 2])


def test_getting_joins_all_shards(future, store, refs):
    assert len(future) == 10
    assert future.get() == WHOLE
    assert store.fetched == refs
    assert future.done()


@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 7, 12])
def test_chunks_of_a_future_are_chunks_of_the_batch(future, pieces):
    assert [chunk.get() for chunk in future.chunk(pieces)] == WHOLE.chunk(pieces)


def test_a_chunk_of_a_chunk(future):
    assert [part.get() for part in future.chunk(2)[1].chunk(3)] == WHOLE.chunk(2)[1].chunk(3)


def test_a_consumer_fetches_only_the_shards_that_overlap_its_rows(future, store, refs):
    chunks = future.chunk(5)
    assert store.fetched == []
    chunks[1].get()  # rows 2 and 3
    assert store.fetched == refs[:2]
    store.fetched.clear()
    chunks[4].get()
    assert store.fetched == refs[3:]
    assert chunks[0].futures == (refs[0],)


def test_futures_join(future):
    first, second, third = future.chunk(3)
    joined = DataProtoFuture.concat([third, first, second])
    assert joined.get().batch["id"].tolist() == [7, 8, 9, 0, 1, 2, 3, 4, 5, 6]
    assert joined.slice(2, 5).get().batch["id"].tolist() == [9, 0, 1]
    with pytest.raises(ValueError, match="nothing to concatenate"):
        DataProtoFuture.concat([])
    with pytest.raises(ValueError, match="another store"):
        DataProtoFuture.concat([future, DataProtoFuture([0], MemoryStore(), rows=[1])])
    with pytest.raises(TypeError, match=r"a DataProtoFuture .* get\(\) futures first"):
        DataProto.concat([first.get(), second])


def test_a_shard_used_twice_is_fetched_once(store, refs):
    twice = DataProtoFuture([refs[0], refs[0]], store, rows=[3, 3])
    assert len(twice.get()) == 6
    assert store.fetched == [refs[0]]


def test_futures_of_unknown_sizes_are_cut_when_they_are_there(store, refs):
    future = DataProtoFuture(refs, store)
    assert future.num_rows is None
    with pytest.raises(TypeError, match="not known"):
        len(future)
    assert [chunk.get() for chunk in future.chunk(3)] == WHOLE.chunk(3)
    assert [part.get() for part in future.chunk(2)[1].chunk(3)] == WHOLE.chunk(2)[1].chunk(3)
    with pytest.raises(ValueError, match="get\\(\\) it first"):
        DataProtoFuture.concat(future.chunk(2))


def test_a_collect_function_sees_all_shards_in_order(store, refs):
    def collect(shards):
        return DataProto.concat(shards[::-1])[:8]

    future = DataProtoFuture(refs, store, rows=[3, 3, 2, 2], collect_fn=collect)
    assert future.get().batch["id"].tolist() == [8, 9, 6, 7, 3, 4, 5, 0]
    assert [part.get().batch["id"].tolist() for part in future.chunk(2)] == [[8, 9, 6, 7], [3, 4, 5, 0]]


def test_a_collect_function_that_can_joins_only_the_rows_of_a_cut(store, refs):
    joined = []

    class Collect:
        def __call__(self, shards):
            raise AssertionError("the whole is not asked for")

        def part(self, shards, index, count):
            joined.append((len(shards), index, count))
            return DataProto.concat(shards).chunk(count)[index]

    future = DataProtoFuture(refs, store, collect_fn=Collect())
    assert [part.get() for part in future.chunk(2)[1].chunk(3)] == WHOLE.chunk(2)[1].chunk(3)
    assert joined == [(4, 1, 2)] * 3


def test_only_named_columns_can_be_asked_for(future):
    assert future.get(columns=["t"]).columns == ("t",)
    with pytest.raises(KeyError, match="'nope'"):
        future.get(columns=["nope"])


def test_waiting_ends_with_the_time_and_says_for_what(store, refs):
    future = DataProtoFuture([*refs, store.promise()], store)
    assert not future.done()
    with pytest.raises(TimeoutError, match=r"1 of 5 values were not there after 0.01 s"):
        future.get(timeout=0.01)


def test_a_result_that_comes_later_can_be_waited_for_and_awaited(store):
    ref = store.promise()
    future = DataProtoFuture([ref], store, rows=[10])
    threading.Timer(0.05, store.fulfil, [ref, WHOLE]).start()

    async def result():
        return await future

    assert asyncio.run(result()) == WHOLE
    assert future.get(timeout=1) == WHOLE


def test_futures_of_tensordicts(store):
    table = tu.get_tensordict({"x": torch.arange(4), "l": list("abcd")})
    future = DataProtoFuture([store.put(part) for part in tu.chunk_tensordict(table, 2)], store, rows=[2, 2])
    tu.assert_tensordict_eq(future.get(), table)
    part = future.chunk(3)[0].get(columns=["l"])
    assert part["l"] == ["a", "b"]


def test_wrong_counts_are_noticed(store, refs):
    with pytest.raises(ValueError, match="4 shards but row counts for 1"):
        DataProtoFuture(refs, store, rows=[3])
    with pytest.raises(ValueError, match="3 rows was said to have 5"):
        DataProtoFuture(refs[:1], store, rows=[5]).get()
    with pytest.raises(ValueError, match="0 pieces"):
        DataProtoFuture(refs, store).chunk(0)


def test_it_is_known_as_a_future_and_shows_itself(future):
    assert future.__kapell_future__ is True
    assert repr(future) == "DataProtoFuture(10 rows of 4 shards)"


def test_an_empty_cut_still_has_the_columns(future):
    assert future.chunk(12)[11].get() == WHOLE[10:]


@pytest.mark.parametrize("rows", [list(range(10)), torch.arange(10), np.arange(10)], ids=["list", "tensor", "array"])
def test_parts_of_rows_that_are_no_batch_are_cut_as_batches_are(rows):
    store = MemoryStore()
    future = DataProtoFuture([store.put(rows)], store, collect_fn=lambda parts: parts[0])
    assert [list(part.get()) for part in future.chunk(4)] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
