"""Results that are not there yet, given to the next call in every mode."""

import pytest
from list_batch import ids, run

from kapell.decorators import (
    Dispatch,
    Execute,
    GroupShape,
    MeshLayout,
    MethodSpec,
    Replicate,
    is_future,
    make_plan,
    materialize,
)


def ids_of(batch):
    return batch.column("id")


SHAPE = GroupShape(4, meshes={"tp": MeshLayout((0, 0, 1, 1), (True, False, True, False))})


class Pending:
    __kapell_future__ = True

    def __init__(self, value):
        self.value = value
        self.asked = 0

    def get(self, timeout=None):
        self.asked += 1
        return self.value


class ChunkedPending(Pending):
    def chunk(self, chunks):
        return [ChunkedPending(part) for part in range(chunks)]


def plan(mode, *args, **kwargs):
    return make_plan("f", MethodSpec(dispatch_mode=mode), SHAPE, args, kwargs)


def on_worker(work):
    def call(*args, **kwargs):
        args, kwargs = materialize(args, kwargs)
        return work(*args, **kwargs)

    return call


def test_futures_are_told_by_their_own_mark():
    assert is_future(Pending(1))
    assert not is_future(Pending)
    assert not is_future(object())


@pytest.mark.parametrize("mode", [Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO])
def test_whole_futures_are_materialized_by_the_worker(mode):
    future = Pending(5)
    planned = plan(mode, future)
    assert future.asked == 0
    assert run(planned, on_worker(lambda x: x)) in ([5] * 4, 5)


@pytest.mark.parametrize("mode", [Dispatch.DP_COMPUTE_PROTO, Dispatch.mesh("tp")], ids=str)
@pytest.mark.parametrize("value", [[1, 2, 3, 4, 5], [1]])
def test_the_worker_cuts_its_rows_out_of_a_future(mode, value):
    future = Pending(value)
    planned = plan(mode, x=future, scale=2)
    assert future.asked == 0
    assert run(planned, on_worker(lambda x, scale: [scale * row for row in x])) == [2 * row for row in value]


def test_rows_of_a_future_meet_rows_of_a_batch():
    planned = plan(Dispatch.DP_COMPUTE_PROTO, ids(5), Pending([0, 10, 20, 30, 40]))
    pairs = run(planned, on_worker(lambda batch, x: list(zip(batch.column("id"), x, strict=True))))
    assert pairs == [(row, 10 * row) for row in range(5)]


def test_a_future_that_offers_chunk_is_chunked():
    planned = plan(Dispatch.mesh("tp"), ChunkedPending(None))
    assert [planned.call_for(rank)[0][0].value for rank in range(4)] == [0, 0, 1, 1]


def test_a_future_of_a_type_that_offers_chunk_only_is_chunked_by_the_worker():
    class Letters:
        def __init__(self, text):
            self.text = text

        def __len__(self):
            return len(self.text)

        def chunk(self, chunks):
            return [Letters(letter) for letter in self.text]

        @staticmethod
        def concat(parts):
            return Letters("".join(part.text for part in parts))

    assert run(plan(Dispatch.DP_COMPUTE_PROTO, Pending(Letters("abcd"))), on_worker(lambda x: x)).text == "abcd"


def test_a_future_without_rows_comes_whole():
    assert run(plan(Dispatch.DP_COMPUTE_METRIC, Pending({"lr": 1})), on_worker(lambda x: x)) == [{"lr": 1}] * 4


@pytest.mark.parametrize("mode", [Dispatch.ALL_TO_ALL, Dispatch.DP_COMPUTE])
def test_per_rank_modes_take_an_entry_of_a_future_list(mode):
    assert run(plan(mode, Pending([1, 2, 3, 4])), on_worker(lambda x: x)) == [1, 2, 3, 4]
    assert run(plan(mode, [Pending(rank) for rank in range(4)]), on_worker(lambda x: x)) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="one entry for each of 4 ranks, got 2 entries"):
        run(plan(mode, Pending([1, 2])), on_worker(lambda x: x))
    with pytest.raises(ValueError, match="got int"):
        run(plan(mode, Pending(1)), on_worker(lambda x: x))


def test_unknown_rows_are_neither_padded_nor_balanced():
    for options in ({"uneven": "pad"}, {"balance_by": "id"}):
        spec = MethodSpec(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, **options)
        with pytest.raises(ValueError, match=r"'x' is a future whose rows are not known yet; .*Wait for it first"):
            make_plan("f", spec, SHAPE, (ids(5),), {"x": Pending([1])})


@pytest.mark.parametrize(
    "options",
    [{"uneven": "pad"}, {"uneven": "refuse"}, {"balance_by": "id"}, {"balance_by": ids_of}, {"group_by": "id"}],
)
@pytest.mark.parametrize("mode", [Dispatch.DP_COMPUTE_PROTO, Dispatch.mesh("tp")], ids=str)
@pytest.mark.parametrize("future", [Pending([1, 2, 3]), ChunkedPending(None)], ids=["whole", "chunked"])
def test_unknown_rows_alone_are_neither_padded_balanced_grouped_nor_refused_by_their_number(options, mode, future):
    spec = MethodSpec(dispatch_mode=mode, **options)
    with pytest.raises(ValueError, match=r"'x' is a future whose rows are not known yet; .*Wait for it first"):
        make_plan("f", spec, SHAPE, (), {"x": future})
    make_plan("f", spec, SHAPE, (ids(4),))  # as such, the call is fine


def test_one_rank_gets_all_rows_however_many_there_are():
    for options in ({"uneven": "pad"}, {"uneven": "refuse"}, {"balance_by": "id"}, {"group_by": "id"}):
        spec = MethodSpec(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, **options)
        planned = make_plan("f", spec, GroupShape(1), (Pending([1, 2, 3]),))
        assert planned.call_for(0)[0][0].get() == [1, 2, 3]


@pytest.mark.parametrize("value", [Pending([1, 2, 3]), 5, Replicate([1, 2])], ids=["future", "no rows", "replicated"])
@pytest.mark.parametrize("options", [{}, {"execute_mode": Execute.RANK_ZERO}], ids=["all", "rank zero"])
def test_a_call_without_known_rows_tells_the_padding_argument_none(value, options):
    spec = MethodSpec(dispatch_mode=Dispatch.mesh("tp"), padding_argument="num_padding", **options)
    planned = make_plan("f", spec, SHAPE, (value,))
    assert [planned.call_for(rank)[1] for rank in planned.ranks] == [{"num_padding": 0}] * len(planned.ranks)


def test_a_call_in_another_mode_tells_the_padding_argument_none():
    spec = MethodSpec(dispatch_mode=Dispatch.ONE_TO_ALL, padding_argument="num_padding")
    assert make_plan("f", spec, SHAPE, ([1, 2],)).call_for(3) == (([1, 2],), {"num_padding": 0})


def test_a_future_that_knows_its_rows_is_planned_like_a_batch():
    class Stored(ChunkedPending):
        num_rows = 5

        def __len__(self):
            return self.num_rows

        def chunk(self, chunks):
            sizes = make_plan(
                "f", MethodSpec(dispatch_mode=Dispatch.DP_COMPUTE_PROTO), GroupShape(chunks), (ids(5),)
            ).rows
            return [[0] * size for size in sizes]

        @staticmethod
        def concat(parts): ...

    future = Stored(None)
    assert plan(Dispatch.DP_COMPUTE_PROTO, future).rows == (2, 1, 1, 1)
    with pytest.raises(ValueError, match=r"'args\[0\]' has 5 rows, 'args\[1\]' has 2 rows"):
        plan(Dispatch.DP_COMPUTE_PROTO, future, [1, 2])
    Stored.num_rows = None
    planned = plan(Dispatch.DP_COMPUTE_PROTO, future)
    assert planned.rows == (0, 0, 0, 0)
    assert [len(planned.call_for(rank)[0][0]) for rank in range(4)] == [2, 1, 1, 1]


def test_a_future_that_is_also_a_list_is_a_future():
    class References(list):
        __kapell_future__ = True
        num_rows = None

        def get(self, timeout=None):
            return [10, 20, 30, 40]

    future = References(["ref"])
    for mode in (Dispatch.DP_COMPUTE_PROTO, Dispatch.ALL_TO_ALL, Dispatch.ONE_TO_ALL, Dispatch.mesh("tp")):
        spec = MethodSpec(dispatch_mode=mode, reads=["a"])
        planned = make_plan("f", spec, SHAPE, (future,))
        got = [materialize(*planned.call_for(rank))[0][0] for rank in range(4)]
        whole = [10, 20, 30, 40]
        expected = {
            "DP_COMPUTE_PROTO": [[10], [20], [30], [40]],
            "ALL_TO_ALL": whole,
            "ONE_TO_ALL": [whole] * 4,
            "mesh:tp": [[10, 20], [10, 20], [30, 40], [30, 40]],
        }
        assert got == expected[mode.name]


class Columns:
    """A batch by reference: its columns are known before it is there."""

    __kapell_future__ = True
    columns = ()

    def __init__(self, names):
        self.columns = names

    def __len__(self):
        return 2

    def chunk(self, count):
        return [self] * count

    @staticmethod
    def concat(parts):
        return parts[0]

    def select(self, names):
        return Columns(tuple(names))

    def get(self, timeout=None):
        return self.columns


@pytest.mark.parametrize("argument", [Columns(("a", "b", "c")), Pending(Columns(("a", "b", "c")))], ids=["it", "later"])
def test_only_the_columns_that_are_read_are_fetched(argument):
    assert materialize((argument, 1), {"batch": argument}, ("c", "a")) == ((("a", "c"), 1), {"batch": ("a", "c")})
    assert materialize((argument,), {}) == ((("a", "b", "c"),), {})
