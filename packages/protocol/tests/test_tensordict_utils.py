"""Plain TensorDicts, by verl's names."""

import copy
import io
import pickle
import time

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from kapell.protocol import DataProto, deserialize_single_tensor, deserialize_tensordict, serialize_single_tensor
from kapell.protocol import serialize_tensordict as serialize
from kapell.protocol import tensordict_utils as tu
from kapell.protocol.columns import ValueStack, parts_of


@pytest.fixture
def table():
    return tu.get_tensordict({"x": torch.arange(3), "l": [[1], "b", {}], "n": np.arange(3, dtype=np.int8)}, {"t": 0.5})


def test_lists_become_one_value_a_row_and_the_rest_values_for_all(table):
    assert table.batch_size == torch.Size([3])
    assert (table["l"], table["t"]) == ([[1], "b", {}], 0.5)
    assert table[1]["l"] == "b"
    assert tu.get_tensordict({}, {"t": 1}).batch_size == torch.Size([])


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"a": torch.ones(2), "b": [1]}, ValueError, "'b' has 1 rows, but there are 2 in column 'a'"),
        ({"a": [torch.ones(2)]}, TypeError, "'a' is a list of tensors"),
        ({"a": 5}, TypeError, "'a' is a tensor, a list or an array, got int"),
        ({"a": torch.tensor(1)}, ValueError, "'a' has no rows"),
    ],
)
def test_columns_that_do_not_fit_are_named(columns, error, message):
    with pytest.raises(error, match=message):
        tu.get_tensordict(columns)
    with pytest.raises(ValueError, match="'a' is both"):
        tu.get_tensordict({"a": [1]}, {"a": 1})


def test_row_operations_keep_the_input_and_the_columns_together(table):
    before = copy.deepcopy(table)
    results = [
        tu.index_select_tensor_dict(table, [2, 0]),
        *tu.chunk_tensordict(table, 2),
        tu.concat_tensordict([table, table]),
        tu.pad_to_divisor(table, 4)[0],
        tu.unpad(table, 1),
        tu.contiguous(table),
        *tu.make_iterator(table, 2, 1, seed=1, dataloader_kwargs={"shuffle": True}),
    ]
    for result in results:
        for x, value in zip(result["x"].tolist(), result["l"], strict=True):
            assert value == [[1], "b", {}][x]
        assert result["t"] == 0.5
    tu.assert_tensordict_eq(table, before)


def test_entries_can_be_read_and_taken_out(table):
    assert tu.get(table, "l") == [[1], "b", {}]
    assert tu.get(table, "t") == tu.get_non_tensor_data(table, "t", None) == 0.5
    assert tu.get(table, "nope", 7) == tu.get_non_tensor_data(table, "nope", 7) == 7
    assert sorted(tu.get_keys(table, ["x", "t"]).keys()) == ["t", "x"]
    with pytest.raises(KeyError, match="'nope'"):
        tu.pop_keys(table, ["x", "nope"])
    assert "x" in table.keys()  # noqa: SIM118
    assert sorted(tu.pop_keys(table, ["x", "t"]).keys()) == ["t", "x"]
    assert tu.pop(table, "l") == [[1], "b", {}]
    assert tu.pop(table, "l", 3) == 3
    assert list(table.keys()) == ["n"]


def test_differences_are_assertions_that_name_the_entry(table):
    for name, other in (("x", torch.tensor([0, 1, 5])), ("t", NonTensorData(0.25)), ("l", ValueStack.of([1, 2, 3]))):
        changed = copy.deepcopy(table)
        changed[name] = other
        with pytest.raises(AssertionError, match=f"'{name}'"):
            tu.assert_tensordict_eq(table, changed)
    with pytest.raises(AssertionError, match=r"\['t'\]"):
        tu.assert_tensordict_eq(table, table.exclude("t"))


def test_writing_one_value_of_a_row_reaches_the_tensordict(table):
    table["l"][0] = "changed"
    assert table["l"] == ["changed", "b", {}]
    assert tu.index_select_tensor_dict(table, [0])["l"] == ["changed"]


def test_tensordicts_own_operations_and_pickle_take_our_columns(table):
    assert table[1:]["l"] == ["b", {}]
    assert table[torch.tensor([2, 0])]["l"] == [{}, [1]]
    assert [part["l"] for part in table.chunk(3)] == [[[1]], ["b"], [{}]]
    assert torch.stack([table, table])[1]["l"] == [[1], "b", {}]
    assert table.clone()["l"] == table.to("cpu")["l"] == table["l"]
    assert pickle.loads(pickle.dumps(table))["l"] == table["l"]
    stream = io.BytesIO()
    torch.save(table, stream)
    stream.seek(0)
    assert torch.load(stream, weights_only=False)["l"] == table["l"]


def test_numeric_arrays_come_back_with_their_dtype_even_after_tensordicts_own_operations():
    batch = DataProto.from_dict({"x": torch.ones(4)}, {"n": np.arange(4, dtype=np.int16), "f": np.ones(4, np.float32)})
    table = batch.to_tensordict()
    assert DataProto.from_tensordict(table) == batch
    cut = DataProto.from_tensordict(table[1:3])
    assert cut.non_tensor_batch["n"].dtype == np.int16
    assert cut == batch[1:3]


def test_the_cost_of_a_tensordict_does_not_grow_with_the_rows():
    def seconds(rows):
        batch = DataProto.from_dict(non_tensors={"o": [[row] for row in range(rows)]})
        times = []
        for _ in range(5):
            start = time.perf_counter()
            DataProto.from_tensordict(batch.to_tensordict())
            times.append(time.perf_counter() - start)
        return min(times)

    assert seconds(100_000) < 20 * seconds(10) + 0.01  # a piece a row would cost a second


def test_non_tensor_values_are_checked_against_the_rows():
    table = tu.get_tensordict({"x": torch.ones(3)})
    with pytest.raises(RuntimeError):
        tu.assign_non_tensor(table, bad=[1, 2])
    with pytest.raises(TypeError):
        tu.assign_non_tensor_data({}, "a", 1)
    assert tu.assign_non_tensor(table, good=[1, 2, 3], all=5) is table
    assert (table["good"], table["all"]) == ([1, 2, 3], 5)


def test_rows_of_dicts_become_dense_ragged_or_value_columns():
    rows = [{"a": torch.ones(2), "b": torch.ones(n), "c": torch.ones(n, 4), "d": "x"} for n in (1, 3)]
    table = tu.list_of_dict_to_tensordict(rows)
    assert table["a"].shape == (2, 2)
    assert [row.shape[0] for row in table["b"].unbind()] == [1, 3]
    assert table["c"]._ragged_idx == 1
    assert table["d"] == ["x", "x"]
    for wrong in ([], [{"a": 1}, {"b": 1}]):
        with pytest.raises(ValueError, match="row"):
            tu.list_of_dict_to_tensordict(wrong)


def test_concat_keeps_the_first_value_for_all_rows_and_refuses_other_columns(table):
    other = tu.assign_non_tensor(copy.deepcopy(table), t=0.25)
    assert tu.concat_tensordict([table, other])["t"] == 0.5
    with pytest.raises(ValueError, match="'x'"):
        tu.concat_tensordict([table, table.exclude("x")])
    with pytest.raises(ValueError, match="nothing to concatenate"):
        tu.concat_tensordict([])
    only_values = [tu.get_tensordict({}, {"t": number}) for number in (1, 2)]
    assert tu.concat_tensordict(only_values)["t"] == 1


def test_concat_keeps_the_value_of_each_row_beside_one_for_all_rows():
    shared = tu.get_tensordict({"x": torch.ones(2)}, {"uid": "a"})
    each = tu.get_tensordict({"x": torch.ones(2), "uid": ["b", "c"]})
    assert tu.get(tu.concat_tensordict([shared, each]), "uid") == ["a", "a", "b", "c"]
    assert tu.get(tu.concat_tensordict([each, shared]), "uid") == ["b", "c", "a", "a"]
    tensors = tu.get_tensordict({"x": torch.ones(2), "uid": torch.ones(2)})
    with pytest.raises(ValueError, match="'uid'"):
        tu.concat_tensordict([shared, tensors])


def test_uneven_chunks_are_exactly_as_many_as_asked(table):
    assert [len(chunk) for chunk in tu.chunk_tensordict(table, 5)] == [1, 1, 1, 0, 0]
    with pytest.raises(ValueError, match="3 rows into 0 pieces"):
        tu.chunk_tensordict(table, 0)


@pytest.mark.parametrize("ragged", [1, 2, 3])
def test_jagged_rows_are_taken_by_values_and_offsets_for_every_ragged_dimension(ragged):
    def row(length):
        shape = [2, 3, 4]
        shape[ragged - 1] = length
        return torch.randn(shape)

    rows = [row(length) for length in (2, 0, 3, 3)]
    nested = tu.nested_tensor_from_tensor_list(rows, ragged)
    taken = tu.index_select_tensor_dict(TensorDict({"x": nested}, [4]), [3, 1, 1, 0])["x"]
    for got, index in zip(taken.unbind(), [3, 1, 1, 0], strict=True):
        assert torch.equal(got, rows[index])
    assert taken._ragged_idx == ragged
    joined = tu.concat_nested_tensors([nested, taken])
    assert joined.shape[0] == 8
    assert torch.equal(joined.unbind()[4], rows[3])


def test_wrong_ragged_dimensions_and_nothing_to_nest_are_refused():
    for arguments in (([torch.ones(2)], 2), ([torch.ones(2)], 0), ([], None)):
        with pytest.raises(ValueError):
            tu.nested_tensor_from_tensor_list(*arguments)
    with pytest.raises(ValueError, match="at least one"):
        tu.concat_nested_tensors([torch.ones(2)])
    pieces = [tu.nested_tensor_from_tensor_list([torch.ones(1, 2), torch.ones(2, 2)], 1)]
    pieces.append(tu.nested_tensor_from_tensor_list([torch.ones(2, 1), torch.ones(2, 2)], 2))
    with pytest.raises(ValueError, match="different ragged dimensions"):
        tu.concat_nested_tensors(pieces)


def test_jagged_tensors_with_holes_are_closed():
    source = torch.arange(20).view(2, 10)
    holes = torch.nested.narrow(source, 1, torch.tensor([1, 2]), torch.tensor([3, 4]), layout=torch.jagged)
    assert parts_of(holes)[0].tolist() == [1, 2, 3, 12, 13, 14, 15]
    batch = DataProto.from_dict({"x": holes})
    assert batch[[1]].batch["x"].values().tolist() == [12, 13, 14, 15]
    assert pickle.loads(pickle.dumps(batch))[1:].batch["x"].values().tolist() == [12, 13, 14, 15]


@pytest.mark.parametrize("tensor", [torch.randn(3, 4).half(), torch.ones(2, 2).t(), torch.empty(0, 2), torch.tensor(3)])
def test_single_tensors_are_serialized_as_dtype_shape_and_bytes(tensor):
    assert torch.equal(deserialize_single_tensor(serialize_single_tensor(tensor)), tensor)
    with pytest.raises(ValueError, match="'load' is no dtype"):
        deserialize_single_tensor(("load", (1,), b"x"))


def test_tensordicts_are_serialized_entry_by_entry():
    table = TensorDict(
        {"a": torch.ones(2), "n": tu.nested_tensor_from_tensor_list([torch.ones(1), torch.ones(3)])}, [2]
    )
    restored = deserialize_tensordict(serialize(table))
    assert restored["a"].tolist() == [1.0, 1.0]
    assert [len(row) for row in restored["n"].unbind()] == [1, 3]
    with pytest.raises(ValueError, match="'a' is encoded as 1 parts"):
        deserialize_tensordict(((2,), None, {"a": (1,)}))
