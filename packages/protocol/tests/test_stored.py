"""Batches by reference: the same rows and columns as batches that are here, and nothing moves before it is read."""

import asyncio
import copy
import pickle

import numpy as np
import pytest
import torch
from counting_store import CountingStore
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from kapell.protocol import ColumnFacts, DataProto, DataProtoFuture, StoredBatch


class Shelf(CountingStore):
    """Travels as itself, as a store that several processes share."""

    def __reduce__(self):
        return "SHELF"


SHELF = Shelf()


@pytest.fixture
def shelf():
    SHELF.__init__()
    return SHELF


@pytest.fixture
def mixed(make_mixed):
    return make_mixed(7)


def halves(batch, shelf):
    """Stored by two workers."""
    return StoredBatch.concat([StoredBatch.put(part, shelf) for part in batch.chunk(2)])


def rows_of(length):
    return st.lists(st.integers(0, length - 1), max_size=8) if length else st.just([])


OPERATIONS = {
    "select_idxs": lambda draw, batch: [draw(rows_of(len(batch)))],
    "slice": lambda draw, batch: [draw(st.integers(-9, 9)), draw(st.integers(-9, 9)), draw(st.sampled_from([1, 2]))],
    "repeat": lambda draw, batch: [draw(st.integers(1, 2)), draw(st.booleans())],
    "sample_level_repeat": lambda draw, batch: [
        np.array(draw(st.lists(st.integers(0, 2), min_size=len(batch), max_size=len(batch))), dtype=np.int64)
    ],
    "rename": lambda draw, batch: [["id", "name"], ["name", "id"]],
    "without_padding": lambda draw, batch: [],
}


@given(st.data(), st.lists(st.sampled_from([*OPERATIONS, "pad", "reorder", "join", "travel"]), max_size=5))
def test_whatever_is_done_to_it_is_done_to_the_batch(data, names):
    batch = DataProto.from_dict(
        {"id": torch.arange(5), "score": torch.arange(10.0).view(5, 2)}, {"name": list("abcde"), "n": np.arange(5)}
    )
    stored = halves(batch.select(["id"], ["name"]), SHELF).union(batch.select(["score"], ["n"]))
    for name in names:
        if name == "pad" and len(batch):
            batch, stored = copy.copy(batch), copy.copy(stored)
            batch.padding(2), stored.padding(2)
        elif name == "reorder":
            order = data.draw(st.permutations(range(len(batch))))
            batch.reorder(order), stored.reorder(order)
        elif name == "join":
            part = data.draw(rows_of(len(batch)))
            batch, stored = (type(some).concat([some[part], some, some[:1]]) for some in (batch, stored))
        elif name == "travel":
            stored = pickle.loads(pickle.dumps(stored, protocol=5))
        elif name in OPERATIONS:
            arguments = OPERATIONS[name](data.draw, batch)
            batch, stored = getattr(batch, name)(*arguments), getattr(stored, name)(*arguments)
    assert len(stored) == len(batch)
    assert set(stored.columns) == set(batch.columns)
    got = stored.get()
    assert got == batch
    assert got.padding_mask.tolist() == stored.padding_mask.tolist() == batch.padding_mask.tolist()


def test_every_kind_of_column_comes_back_as_it_was(mixed, shelf):
    stored = halves(mixed, shelf)
    assert isinstance(stored, DataProtoFuture)
    assert stored.get() == mixed
    assert stored[[6, 2, 2, 5]].get() == mixed[[6, 2, 2, 5]]
    assert stored[[]].get() == mixed[[]]
    for name in mixed.columns:
        assert stored.select().get(columns=[name]).columns == (name,)
        assert stored.column_facts[name] == ColumnFacts.of(mixed.column(name))


def test_cutting_and_iterating_gives_the_parts_of_the_batch(mixed, shelf):
    stored = halves(mixed, shelf)
    assert [part.get() for part in stored.chunk(3)] == mixed.chunk(3)
    assert [part.get() for part in stored.split(3)] == mixed.split(3)
    assert [part.get() for part in stored.split_at([0, 2, 7])] == mixed.split_at([0, 2, 7])
    assert stored[1:4].get() == mixed[1:4]
    assert stored[2].non_tensor_batch["cells"] == [2, 3]
    with pytest.raises(IndexError, match="row 7 is out of range"):
        stored.select_idxs([7])


def test_nothing_is_fetched_before_it_is_read_and_then_only_from_where_it_is(mixed, shelf):
    stored = halves(mixed, shelf)
    part = stored.repeat(2)[[1, 0]].rename("id", "number").union(DataProto.from_dict({"new": torch.ones(2)}))
    assert (len(part), part.meta_info["step"], part.column("new").tolist()) == (2, 7, [1.0, 1.0])
    assert repr(part).splitlines()[0] == "StoredBatch: 2 rows"
    assert shelf.fetched == []
    assert part.column("number").tolist() == [0, 0]
    assert len(shelf.fetched) == 1  # both rows are in the first worker's half
    part.select(["number"], []).column("number")
    assert len(shelf.fetched) == 1  # it is here now
    assert part.futures == stored.futures


def test_large_columns_lie_apart(shelf):
    batch = DataProto.from_dict({"small": torch.zeros(4), "large": torch.zeros(4, 100_000)}, {"text": list("abcd")})
    stored = StoredBatch.put(batch, shelf)
    assert len(stored.futures) == 2
    assert stored.column("text").tolist() == list("abcd")
    (fetched,) = shelf.fetched
    assert shelf.get([fetched])[0].columns == ("small", "text")


def test_what_travels_are_references_and_row_numbers_of_parts_with_rows(shelf):
    def size(num_rows, width):
        batch = DataProto.from_dict({name: torch.zeros(num_rows, width) for name in "abc"})
        stored = StoredBatch.concat([StoredBatch.put(part, shelf) for part in batch.chunk(4)])
        return len(pickle.dumps(stored.chunk(4)[1], protocol=5)), len(pickle.dumps(stored[::-1], protocol=5))

    (cut, turned), (wider, _), (longer, long_turned) = size(8, 2), size(8, 1000), size(8000, 2)
    assert abs(cut - wider) < 16
    assert abs(cut - longer) < 64  # rows that follow each other are a range
    assert long_turned - turned < 1.2 * 8 * 8000  # eight bytes a row otherwise, once for all columns


def test_what_it_weighs_is_what_travels_with_it(mixed, shelf):
    stored = halves(mixed, shelf)
    assert stored.nbytes == stored[2:5].nbytes == 0  # rows that follow each other are a range
    assert stored[[3, 1, 2]].nbytes == 8 * 3
    new = DataProto.from_dict({"new": torch.zeros(7, 3)})
    assert stored[::-1].union(new).nbytes == 8 * 7 + new.nbytes
    assert StoredBatch.here(new).nbytes == new.nbytes


def test_what_is_fetched_is_private(shelf):
    stored = StoredBatch.put(DataProto.from_dict({"x": torch.zeros(3)}, {"cells": [[1], [2], [3]]}), shelf)
    got = stored.get()
    got.batch["x"] += 1
    got.non_tensor_batch["cells"][0].append(9)
    again = stored.get()
    assert again.batch["x"].tolist() == [0, 0, 0]
    assert again.non_tensor_batch["cells"][0] == [1]


def test_columns_are_chosen_by_the_rules_of_the_batch(mixed, shelf):
    stored = halves(mixed, shelf)
    assert stored.select(["id"], []).get() == mixed.select(["id"], [])
    assert stored.select(["id"], ["name"], []).meta_info == {}
    popped = stored.pop(["id"], ["name"], ["step"])
    assert (popped.columns, popped.meta_info) == (("id", "name"), {"step": 7})
    assert "id" not in stored.columns
    assert stored.meta_info == {"settings": {"temperature": 1.0}}
    with pytest.raises(KeyError, match="no tensor column 'missing'"):
        stored.select(["missing"])
    with pytest.raises(KeyError, match="no column 'missing'"):
        stored.column("missing")
    with pytest.raises(ValueError, match="two columns the name 'flag'"):
        stored.rename("half", "flag")


def test_its_parts_read_like_those_of_the_batch(mixed, shelf):
    stored = halves(mixed, shelf)
    assert list(stored.batch) == list(mixed.batch.keys())
    assert list(stored.non_tensor_batch) == list(mixed.non_tensor_batch)
    assert "id" in stored.batch
    assert "id" not in stored.non_tensor_batch
    assert shelf.fetched == []
    assert stored.batch["id"].tolist() == list(range(7))
    assert stored.non_tensor_batch["name"].tolist() == mixed.non_tensor_batch["name"].tolist()
    with pytest.raises(KeyError, match="no column 'id'; there are"):
        stored.non_tensor_batch["id"]


def test_uniting_with_what_is_here_on_either_side(shelf):
    here = DataProto.from_dict({"a": torch.arange(3)}, meta_info={"x": 1})
    there = DataProto.from_dict({"b": torch.arange(3)}, meta_info={"y": 2})
    stored = StoredBatch.put(there, shelf)
    for united in (stored.union(here), here.union(stored), here | stored, stored | here):
        assert isinstance(united, StoredBatch)
        assert united.get() == here.union(there)
        assert united.stored_columns == ("b",)
    with pytest.raises(ValueError, match="3 rows"):
        stored.union(here[:2])


def test_what_both_have_must_agree_and_is_compared_only_where_it_may_differ(shelf):
    batch = DataProto.from_dict({"a": torch.arange(3)}, {"t": list("abc")})
    stored = StoredBatch.put(batch, shelf)
    assert stored.union(stored.select(["a"])).columns == stored.columns
    assert shelf.fetched == []
    assert stored.union(StoredBatch.put(batch, shelf)).get() == batch
    assert stored.union(batch).get() == batch.union(stored).get() == batch
    for other in (stored[[2, 1, 0]], batch[[2, 1, 0]]):
        with pytest.raises(ValueError, match="both batches have column"):
            stored.union(other)
        with pytest.raises(ValueError, match="both batches have column"):
            other.union(stored)


@pytest.mark.parametrize("name", ["adv", "n"])
def test_what_was_changed_after_it_was_fetched_differs_from_what_is_stored(name, shelf):
    stored = StoredBatch.put(DataProto.from_dict({"adv": torch.ones(3)}, {"n": np.ones(3)}), shelf)
    changed = stored.column(name)
    changed *= 2
    here = DataProto.from_single_dict({name: changed})
    for left, right in ((stored, here), (here, stored), (stored, StoredBatch.put(here, shelf))):
        with pytest.raises(ValueError, match="both batches have column"):
            left.union(right)
    assert stored.rename(name, "old").union(here).get().column(name).tolist() == [2, 2, 2]


def test_row_numbers_stay_here_when_the_batch_beside_them_is_elsewhere(shelf):
    there = DataProto(batch=TensorDict({"a": torch.zeros(3, device="meta")}, [3], device="meta"))
    stored = StoredBatch.put(DataProto.from_dict({"b": torch.arange(3)}, {"t": list("xyz")}), shelf)
    united = there.union(stored)[[2, 0]]
    assert united.column("b").tolist() == [2, 0]
    assert united.column("t").tolist() == ["z", "x"]
    assert united.column("a").device.type == "meta"


def test_joining_needs_the_same_columns_in_the_same_place(shelf):
    batch = DataProto.from_dict({"a": torch.arange(2), "b": torch.arange(2)})
    stored = StoredBatch.put(batch, shelf)
    half_here = StoredBatch.put(batch.select(["a"]), shelf).union(batch.select(["b"]))
    for parts in ([stored, half_here], [half_here[:0], stored], [stored[:0], half_here], [stored, batch]):
        with pytest.raises(ValueError, match=r"column '[ab]' is stored in one batch and here in another"):
            StoredBatch.concat(parts)
    with pytest.raises(ValueError, match="part 0 has column 'b', part 1 has not"):
        StoredBatch.concat([stored, stored.select(["a"])])
    with pytest.raises(ValueError, match="nothing to concatenate"):
        StoredBatch.concat([])


def test_joining_merges_meta_and_renamed_columns(shelf):
    parts = [DataProto.from_dict({"a": torch.tensor([n])}, meta_info={"metrics": {"n": n}}) for n in range(3)]
    stored = [StoredBatch.put(part, shelf) for part in parts]
    stored[1] = StoredBatch.put(parts[1].rename("a", "z"), shelf).rename("z", "a")
    empty = DataProto(meta_info={"metrics": {"m": 5}})
    joined = StoredBatch.concat([*stored, StoredBatch.put(empty, shelf)])
    assert joined.get() == DataProto.concat([*parts, empty])
    either_way = DataProto.concat([*stored, StoredBatch.put(empty, shelf)])
    assert isinstance(either_way, StoredBatch)
    assert either_way.get() == joined.get()
    assert joined.meta_info["metrics"] == {"n": [0, 1, 2], "m": [5]}


def test_it_serves_as_a_future(shelf):
    stored = StoredBatch.put(DataProto.from_dict({"a": torch.arange(4)}), shelf)
    assert stored.__kapell_future__
    assert stored.done()
    assert stored.num_rows == 4

    async def wait():
        return await stored

    assert asyncio.run(wait()).batch["a"].tolist() == [0, 1, 2, 3]


def test_a_batch_that_the_store_has_not_got_yet_is_waited_for_so_long(shelf):
    stored = StoredBatch.put(DataProto.from_dict({"a": torch.arange(4)}), shelf)
    del shelf._values[stored.futures[0]]
    with pytest.raises(TimeoutError):
        stored.get(timeout=0.01)


def test_a_batch_of_the_callers_own_class_comes_back_as_one(shelf):
    class Own(DataProto):
        pass

    assert type(StoredBatch.put(Own.from_dict({"a": torch.arange(4)}), shelf)[1:].get()) is Own
