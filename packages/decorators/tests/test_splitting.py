"""What can be split: known types, types of one's own, and types with the right structure."""

import pickle
from collections import namedtuple

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from list_batch import ListBatch, ids, run
from tensordict import NonTensorStack, TensorDict

from kapell.decorators import (
    Dispatch,
    GroupShape,
    MeshLayout,
    MethodSpec,
    Replicate,
    make_plan,
    nbytes_of,
    register_splitter,
    splitter_of,
)

TP = GroupShape(4, meshes={"tp": MeshLayout((1, 0, 1, 0), (False, True, True, False))})


def plan(value, shape=TP, mode=Dispatch.DP_COMPUTE_PROTO, **options):
    return make_plan("f", MethodSpec(dispatch_mode=mode, **options), shape, (value,))


def jagged(*lengths):
    return torch.nested.as_nested_tensor(
        [torch.arange(n).expand(4, n).contiguous() for n in lengths], layout=torch.jagged
    )


def rows_of(value):
    if isinstance(value, torch.Tensor) and value.is_nested:
        return [row.tolist() for row in value.unbind()]
    if isinstance(value, TensorDict):
        return {name: rows_of(value[name]) for name in value.keys()}  # noqa: SIM118
    return value.tolist() if hasattr(value, "tolist") else value


VALUES = {
    "list": lambda n: list(range(n)),
    "tuple": lambda n: tuple(range(n)),
    "array": lambda n: np.arange(2 * n, dtype=np.float32).reshape(n, 2),
    "object array": lambda n: np.array([{"i": i} for i in range(n)] + [None], dtype=object)[:n],
    "tensor": lambda n: torch.arange(2 * n, dtype=torch.bfloat16).view(n, 2),
    "jagged": lambda n: jagged(*range(1, n + 1)),
    "jagged of equal lengths": lambda n: jagged(*[3] * n),
    "jagged with empty rows": lambda n: jagged(*[i % 2 for i in range(n)]),
    "TensorDict": lambda n: TensorDict(
        {"a": torch.arange(n), "ids": jagged(*range(1, n + 1)), "deep": {"b": torch.ones(n, 2)}}, batch_size=[n]
    ),
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("mode", [Dispatch.DP_COMPUTE_PROTO, Dispatch.mesh("tp")], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 4, 9])
def test_rows_come_back_as_they_went(kind, mode, num_rows):
    value = VALUES[kind](num_rows)
    back = run(plan(value, mode=mode), lambda x: x)
    assert type(back) is type(value)
    if kind == "TensorDict":
        assert back.batch_size == value.batch_size
        assert rows_of(back["deep"]) == rows_of(value["deep"])
    assert rows_of(back) == rows_of(value)
    if hasattr(value, "dtype"):
        assert back.dtype == value.dtype


@pytest.mark.parametrize("kind", VALUES)
def test_shards_differ_by_at_most_one_row(kind):
    planned = plan(VALUES[kind](10), GroupShape(3))
    assert planned.rows == (4, 3, 3)
    lengths = [splitter_of(shard).length(shard) for (shard,), _ in map(planned.call_for, range(3))]
    assert lengths == [4, 3, 3]


@pytest.mark.parametrize("kind", VALUES)
def test_rows_can_be_taken_in_any_order_with_repeats(kind):
    value = VALUES[kind](3)
    splitter = splitter_of(value)
    taken = splitter.take(value, [2, 0, 0])
    assert splitter.length(taken) == 3
    parts = [splitter.take(value, [index]) for index in (2, 0, 0)]
    assert rows_of(splitter.join(parts)) == rows_of(taken)


def test_the_ragged_dimension_is_kept_when_lengths_coincide():
    value = jagged(4, 3, 3)
    planned = plan(value, GroupShape(2))
    shards = [planned.call_for(rank)[0][0] for rank in range(2)]
    assert [shard._ragged_idx for shard in shards] == [2, 2]
    assert [row.shape for row in shards[1].unbind()] == [(4, 3)]


@pytest.mark.parametrize("in_tensordict", [False, True])
def test_rows_of_ragged_columns_can_be_padded_to_the_longest(in_tensordict):
    value = torch.nested.nested_tensor_from_jagged(
        torch.arange(32).view(4, 8), offsets=torch.tensor([0, 3, 8]), jagged_dim=2
    )
    value = TensorDict({"ids": value}, [2]) if in_tensordict else value
    splitter = splitter_of(value)
    cut, taken = splitter.cut(value, 0, 2), splitter.take(value, [1, 0])
    joined = splitter.join([splitter.cut(value, 1, 2), splitter.cut(value, 0, 1)])
    for made, order in ((cut, [0, 1]), (taken, [1, 0]), (joined, [1, 0]), (splitter.cut(value, 0, 1), [0])):
        made = made["ids"] if in_tensordict else made
        rows = [torch.arange(32).view(4, 8)[:, :3], torch.arange(32).view(4, 8)[:, 3:]]
        padded = made.to_padded_tensor(0)
        assert padded.shape == (len(order), 4, max(rows[row].shape[1] for row in order))
        assert all(torch.equal(padded[at, :, : rows[row].shape[1]], rows[row]) for at, row in enumerate(order))


def test_ragged_columns_survive_pickling_of_a_shard():
    (shard,), _ = plan(jagged(1, 2, 3, 4), GroupShape(2)).call_for(1)
    assert rows_of(pickle.loads(pickle.dumps(shard))) == rows_of(jagged(3, 4))


def test_non_tensor_rows_follow_their_tensors():
    value = TensorDict({"a": torch.arange(4)}, batch_size=[4])
    value["name"] = NonTensorStack("p", "q", "q", "r", batch_size=[4])
    back = run(plan(value, GroupShape(2)), lambda x: x)
    assert list(back["name"]) == ["p", "q", "q", "r"]


def test_equal_non_tensor_rows_of_two_ranks_stay_two_values():
    def work(part):
        part["who"] = NonTensorStack(*["x" if part["a"][0] == 0 else "y"] * 2, batch_size=[2])
        return part

    back = run(plan(TensorDict({"a": torch.arange(4)}, batch_size=[4]), GroupShape(2)), work)
    assert list(back["who"]) == ["x", "x", "y", "y"]


@pytest.mark.parametrize(
    "value", [torch.tensor(1.0), np.float32(1), np.array(3), TensorDict({}, []), "abc", b"abc", {1: 2}]
)
def test_what_has_no_rows_goes_whole_to_every_rank(value):
    assert splitter_of(value) is None
    (argument,) = plan(value).arguments
    assert argument.values == (value,)


def test_a_namedtuple_is_a_record_not_rows():
    record = namedtuple("Record", "lr steps")(0.1, 4)
    assert run(plan(record), lambda x: x.lr) == [0.1] * 4


def test_a_shard_that_ranks_share_is_one_value():
    (argument,) = plan([1, 2, 3, 4], mode=Dispatch.mesh("tp")).arguments
    assert (len(argument.values), list(argument.values), tuple(argument.index)) == (2, [[1, 2], [3, 4]], (1, 0, 1, 0))


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_dispatch_leaves_the_callers_batch_alone(num_rows):
    batch = ids(num_rows, auto_padding=True)

    def work(part):
        part.data["id"] = []
        part.meta_info["new"] = 1
        return

    run(plan(batch), work)
    assert batch.data == {"id": list(range(num_rows))}
    assert batch.meta_info == {}
    assert not any(batch.padding_mask)


def test_a_pandas_table_takes_part_once_registered():
    register_splitter(
        pd.DataFrame,
        length=len,
        take=lambda frame, rows: frame.iloc[list(rows)],
        join=pd.concat,
        columns=lambda frame: frame.columns,
        select=lambda frame, names: frame[list(names)],
        column=lambda frame, name: frame[name],
        nbytes=lambda frame: int(frame.memory_usage(deep=True).sum()),
    )
    frame = pd.DataFrame({"a": range(5), "b": list("vwxyz"), "cost": [5, 1, 1, 1, 1]})
    planned = plan(frame, GroupShape(2), balance_by="cost", reads=["a", "b"])
    back = run(planned, lambda part: part.assign(c=part["a"] * 2))
    pd.testing.assert_frame_equal(back, pd.DataFrame({"a": range(5), "b": list("vwxyz"), "c": range(0, 10, 2)}))
    assert list(planned.call_for(0)[0][0].columns) == ["a", "b"]
    assert len(frame.columns) == 3


def test_subclasses_use_the_splitter_of_their_base():
    class Rows(list):
        pass

    assert splitter_of(Rows([1])).kind == "list"
    assert splitter_of(torch.nn.Parameter(torch.ones(2))).kind == "Tensor"


def test_a_type_is_registered_once():
    for cls in (list, "numpy.ndarray", np.ndarray):
        with pytest.raises(ValueError, match="already registered"):
            register_splitter(cls, length=len, take=lambda v, i: v, join=sum)


def test_a_splitter_needs_a_way_to_cut():
    with pytest.raises(ValueError, match=r"needs take=\.\.\. .* or chunk=\.\.\."):
        register_splitter(frozenset, length=len, join=sum)


def test_a_type_can_be_registered_by_its_dotted_name():
    class Late:
        def __init__(self, rows):
            self.rows = rows

    name = f"{Late.__module__}.{Late.__qualname__}"
    register_splitter(
        name, length=lambda v: len(v.rows), take=lambda v, i: Late([v.rows[k] for k in i]), join=lambda parts: parts[0]
    )
    assert splitter_of(Late([1, 2])).kind == "Late"


class ChunkOnly:
    """The least that takes part: length, chunk and concat, cut by torch's rule."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def chunk(self, chunks):
        size = max(1, -(-len(self) // chunks))
        return [ChunkOnly(self.rows[start : start + size]) for start in range(0, len(self), size)]

    @classmethod
    def concat(cls, parts):
        return cls([row for part in parts for row in part.rows])


def test_length_chunk_and_concat_are_enough():
    planned = plan(ChunkOnly(list(range(10))))
    assert planned.rows == (3, 3, 3, 1)
    assert run(planned, lambda x: x).rows == list(range(10))


def test_a_chunk_of_too_few_parts_is_refused():
    with pytest.raises(ValueError, match=r"chunk\(4\) of argument 'args\[0\]' \(ChunkOnly, 5 rows\) gave 3 parts"):
        plan(ChunkOnly(list(range(5))))


def test_two_rules_of_cutting_are_not_mixed():
    with pytest.raises(ValueError, match=r"cuts argument .* at \[3, 3, 3, 1\] rows; this call needs \[3, 3, 2, 2\]"):
        make_plan("f", MethodSpec(dispatch_mode=Dispatch.DP_COMPUTE_PROTO), TP, (ChunkOnly([0] * 10), [0] * 10))


def test_chunk_only_types_can_be_neither_padded_nor_balanced():
    with pytest.raises(TypeError, match=r"chunk only: argument 'args\[0\]' cannot be padded"):
        plan(ChunkOnly([0] * 10), uneven="pad")
    with pytest.raises(ValueError, match="in another order"):
        plan(ChunkOnly([1, 2, 3, 4, 5, 6, 7, 8]), balance_by=lambda batch: batch.rows)


def test_arguments_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"'args\[0\]' has 5 rows, 'y' has 6 rows; wrap .* in Replicate"):
        make_plan("f", MethodSpec(dispatch_mode=Dispatch.DP_COMPUTE_PROTO), TP, (ids(5),), {"y": [1] * 6})
    assert make_plan("f", MethodSpec(dispatch_mode=Dispatch.DP_COMPUTE_PROTO), TP, (ids(5), Replicate([1] * 6)))


def test_sizes_in_bytes_are_those_of_the_rows():
    assert nbytes_of(torch.ones(1000, 1000)[:1]) == 4000
    assert nbytes_of(np.ones((10, 10))[:1]) == 80
    assert nbytes_of(jagged(1, 2)) > 0
    assert nbytes_of(TensorDict({"a": torch.ones(2), "d": {"b": torch.ones(2)}}, [2])) == 16


@given(st.integers(0, 30), st.integers(1, 9), st.sampled_from(["list", "tuple", "array", "tensor"]))
def test_any_size_over_any_world_loses_and_moves_nothing(num_rows, world, kind):
    value = VALUES[kind](num_rows)
    planned = plan(value, GroupShape(world))
    assert max(planned.rows) - min(planned.rows) <= 1
    assert sum(planned.rows) == num_rows
    back = run(planned, lambda x: x)
    assert rows_of(back) == rows_of(value)


def test_a_structural_type_is_recognised_by_its_methods():
    assert splitter_of(ids(2)).kind == ListBatch.__name__
    assert splitter_of(ChunkOnly([])).take is None
