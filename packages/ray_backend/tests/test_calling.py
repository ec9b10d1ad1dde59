"""Calls as bytes: what goes in comes out, and what Ray must see goes beside them. No Ray is started."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kapell.protocol import DataProto
from kapell.ray_backend.calling import (
    Inline,
    goes_by_name,
    name_of,
    opened_answer,
    opened_call,
    opened_name,
    pack_argument,
    packed_answer,
    packed_call,
)
from kapell.ray_backend.numbering import CallNumbers, number_of_task
from kapell.ray_backend.shipping import Shipped, pack, unpack
from kapell.workergroup import RankCall, RunTime

RAY_INLINE_BYTES = 100 * 1024  # what is longer Ray puts into its store (max_direct_call_object_size)


class Pending:
    __kapell_future__ = True

    def get(self, timeout=None):
        return 1


def travelled(*args, **kwargs):
    """The arguments as the worker gets them, and how many went beside the bytes."""
    packed = [pack_argument(value) for value in args]
    named = {name: pack_argument(value) for name, value in kwargs.items()}
    head, apart, _ = packed_call(RankCall(0, "f", tuple(packed), named, "role", False, 7, "trace", True))
    assert all(len(piece) < RAY_INLINE_BYTES for piece in (head, *apart) if type(piece) is bytes)
    direct, method, opened, opened_named, options = opened_call(head, apart)
    assert (direct, method, options) == (True, "f", {"target": "role", "wanted": False, "number": 7, "trace": "trace"})
    return list(opened), dict(opened_named), len(apart) - (head if type(head) is int else 0)


@pytest.mark.parametrize(
    "value", [None, True, 3, 2.5, "", "text", "x" * 5000, b"", b"raw", (), (1, 2), [...], {"a": [1]}, ..., {1}]
)
def test_small_values_ride_in_the_bytes(value):
    assert travelled(value, named=value) == ([value], {"named": value}, 0)


def test_arguments_keep_their_places():
    assert travelled(1, "a", [2], x=3, y=[4]) == ([1, "a", [2]], {"x": 3, "y": [4]}, 0)
    assert travelled() == ([], {}, 0)


def test_a_batch_arrives_private_and_writable():
    batch = DataProto.from_dict({"x": torch.arange(3)}, {"t": list("abc")}, {"m": [1]})
    (arrived, array), _, apart = travelled(batch, np.zeros(2))
    assert apart == 0
    assert arrived == batch
    arrived.batch["x"][0] = 9
    array[0] = 9
    assert batch.batch["x"][0] == 0


def test_futures_go_beside_the_bytes_in_their_order():
    first, second = Pending(), Pending()
    args, kwargs, apart = travelled([1], first, "a", x=second)
    assert (args, kwargs, apart) == ([[1], first, "a"], {"x": second}, 2)


@given(st.lists(st.integers(0, 300_000), max_size=4), st.integers(0, 4))
def test_long_calls_travel_in_pieces_that_ray_does_not_put_into_its_store(sizes, place):
    values = [np.full(size, number, dtype=np.uint8) for number, size in enumerate(sizes)]
    future = Pending()
    args, _, apart = travelled(*values[:place], future, *values[place:])
    assert apart == 1
    assert args.pop(min(place, len(values))) is future
    for array, value in zip(args, values, strict=True):
        assert np.array_equal(array, value)
        array[:] = 0


@pytest.mark.parametrize(("kilobytes", "readers"), [(60, 1000), (90, 4), (380, 1)])
def test_an_argument_rides_in_the_call_where_its_copies_for_all_readers_are_small(kilobytes, readers):
    value = np.zeros(kilobytes * 1000, dtype=np.uint8)
    assert type(pack_argument(value, num_readers=readers)) is Inline


class Holder:
    def __init__(self, *arrays):
        self.arrays = arrays


@given(st.lists(st.integers(0, 200), min_size=1, max_size=5), st.integers(0, 300), st.booleans())
def test_whatever_stays_in_the_pickle_arrives_private_and_writable(sizes, room, within):
    arrays = [np.full(size, number, dtype=np.uint8) for number, size in enumerate(sizes)]
    arrays[0].flags.writeable = False
    packed = pack(Holder(*arrays) if within else arrays, room=room)
    kept = list(itertools.takewhile(lambda total: total <= room, itertools.accumulate(sizes)))
    assert sum(buffer.raw().nbytes for buffer in packed.buffers) == sum(sizes) - (kept[-1] if kept else 0)
    sent = [buffer.raw().tobytes() for buffer in packed.buffers]
    for _ in range(2):
        arrived = unpack(packed.head, packed.private, sent)
        for array, other in zip(arrays, arrived.arrays if within else arrived, strict=True):
            assert np.array_equal(array, other)
            other += 100


def test_an_argument_is_packed_once_for_all_ranks():
    packed = pack_argument([1, 2])
    heads = {packed_call(RankCall(rank, "f", (packed,)))[0] for rank in range(3)}
    assert len(heads) == 1


@pytest.mark.parametrize("answer", [None, 1, "x" * 2000, b"", b"raw", [b"raw"], {"a": (1, {2})}, ...])
def test_answers_come_back_as_they_were(answer):
    assert opened_answer(packed_answer(answer)) == answer


@pytest.mark.parametrize("size", [10, 200_000, 2_000_000])
def test_bytes_are_not_taken_for_a_pickle_on_their_way(size):
    for answer in (b"x" * size, pickle.dumps("x" * size)):
        assert opened_answer(packed_answer(answer)) == answer


def test_a_small_answer_is_bytes_on_its_way_and_private_at_its_end():
    batch = DataProto.from_dict({"x": torch.arange(3)}, {"t": list("abc")}, {"m": [1]})
    packed = packed_answer(batch)
    assert type(packed) is bytes
    first, second = opened_answer(packed), opened_answer(packed)
    first.batch["x"][0] = 9
    assert second == batch


def test_a_large_answer_goes_through_the_store():
    assert type(packed_answer(np.zeros(100_000))) is Shipped


@pytest.mark.parametrize(("target", "name"), [("", "ping"), ("actor", "actor.ping"), ("a.b", "a.b.ping")])
def test_a_call_is_named_by_role_and_method(target, name):
    assert name_of(RankCall(0, "ping", target=target)) == name
    assert opened_name(name) == (target, "ping")


def test_only_the_call_whose_name_says_all_goes_by_name():
    call = RankCall(0, "ping", direct=True)
    assert goes_by_name(call)
    others = {"args": (1,), "kwargs": {"x": 1}, "trace": "00-1", "wanted": False, "direct": False}
    assert not any(goes_by_name(call._replace(**{name: value})) for name, value in others.items())


class Ref:
    def __init__(self, task_id):
        self.hex = lambda: task_id
        self.task_id = lambda: self


def test_run_times_of_calls_by_name_get_the_numbers_of_the_calls():
    numbers = CallNumbers()
    numbers.note(Ref("ff01"), 3)
    logged = [
        RunTime(2, 0.0, 1.0),
        RunTime(number_of_task("ff01"), 2.0, 3.0),
        RunTime(number_of_task("ff02"), 4.0, 5.0),
    ]
    assert numbers.numbered({1: logged}) == {1: [RunTime(2, 0.0, 1.0), RunTime(3, 2.0, 3.0)]}
    assert numbers.numbered({1: logged[1:]}) == {1: []}  # told once
