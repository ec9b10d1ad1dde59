"""Inputs that broke other systems of this kind, and the other inputs that would break for the same reason."""

import pickle

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from kapell.protocol import DataProto, register_meta_policy
from kapell.protocol import tensordict_utils as tu


def ids_of(batch):
    return batch.batch["id"].tolist()


def with_ids(rows, **meta):
    return DataProto.from_dict(
        {"id": torch.arange(rows)}, {"twin": [f"id {row}" for row in range(rows)]}, meta_info=meta
    )


# Uneven pieces


@pytest.mark.parametrize(
    ("rows", "pieces", "sizes"), [(10, 3, [4, 3, 3]), (5, 4, [2, 1, 1, 1]), (3, 5, [1, 1, 1, 0, 0])]
)
def test_uneven_chunks_cut_all_columns_at_the_same_rows_and_are_exactly_as_many_as_asked(rows, pieces, sizes):
    batch = with_ids(rows)
    chunks = batch.chunk(pieces)
    assert [len(chunk) for chunk in chunks] == sizes
    for chunk in chunks:
        assert [f"id {number}" for number in ids_of(chunk)] == chunk.non_tensor_batch["twin"].tolist()
    assert DataProto.concat(chunks) == batch


def test_auto_padding_does_not_change_how_chunks_are_cut():
    batch = DataProto.from_dict({"id": torch.arange(5)}, {"twin": list("abcde")}, auto_padding=True)
    assert [len(chunk) for chunk in batch.chunk(4)] == [2, 1, 1, 1]


def test_every_column_kind_is_cut_at_the_same_rows(make_mixed):
    batch = make_mixed(10)
    for chunk in batch.chunk(3):
        start = int(chunk.batch["id"][0])
        assert chunk == batch[start : start + len(chunk)]


def test_split_gives_pieces_of_the_size_and_one_with_what_remains():
    sizes = [len(piece) for piece in with_ids(146).split(4)]
    assert sizes == [4] * 36 + [2]


@pytest.mark.parametrize("size", [0, -1])
def test_split_size_below_one_is_refused_with_the_rows(size):
    with pytest.raises(ValueError, match=f"3 rows into pieces of {size}"):
        with_ids(3).split(size)


def test_chunk_into_no_pieces_is_refused_with_rows_and_what_to_do():
    with pytest.raises(ValueError, match="3 rows into 0 pieces; ask for at least 1"):
        with_ids(3).chunk(0)


def test_pieces_declare_the_rows_that_they_have(make_mixed):
    for piece, rows in zip(make_mixed(7).split(5), [5, 2], strict=True):
        assert type(len(piece)) is int
        assert len(piece) == rows
        assert piece.batch.batch_size == torch.Size([rows])
        assert all(piece.column(name).shape[0] == rows for name in piece.columns)


# Object columns stay one object a row


@pytest.mark.parametrize(
    "cells",
    [
        [[1, 2], [3, 4]],
        [[1, 2]],
        [[], []],
        [(1, 2), (3, 4)],
        [{"a": 1}, {"a": 2}],
        ["ab", "cd"],
        [np.zeros(2), np.ones(2)],
    ],
)
def test_object_columns_have_one_dimension_through_every_operation(cells):
    batch = DataProto.from_dict(non_tensors={"x": cells})
    rows = len(cells)
    results = [
        batch,
        batch[0:1],
        batch[[0]],
        batch.chunk(2)[0],
        batch.repeat(2),
        DataProto.concat([batch, batch]),
        pickle.loads(pickle.dumps(batch)),
        batch.union(batch),
        DataProto.from_tensordict(batch.to_tensordict()),
    ]
    for result in results:
        column = result.non_tensor_batch["x"]
        assert column.dtype == object
        assert column.shape == (len(result),)
        assert type(column[0]) is type(cells[0])
    assert batch.non_tensor_batch["x"][rows - 1] is cells[rows - 1]


def test_lists_of_equal_and_of_different_lengths_join():
    joined = DataProto.concat(
        [DataProto.from_dict(non_tensors={"x": cells}) for cells in ([[1, 2], [3, 4]], [[1], [2, 3]])]
    )
    assert joined.non_tensor_batch["x"].tolist() == [[1, 2], [3, 4], [1], [2, 3]]


def test_an_object_array_that_numpy_stacked_becomes_one_list_a_row():
    batch = DataProto.from_dict(non_tensors={"x": np.array([[1, 2], [3, 4]], dtype=object)})
    assert batch.non_tensor_batch["x"].tolist() == [[1, 2], [3, 4]]
    assert batch.non_tensor_batch["x"].shape == (2,)


# Union


@pytest.mark.parametrize("part", ["tensors", "non_tensors"])
def test_union_takes_nan_for_equal_to_nan(part):
    column = torch.tensor([1.0, float("nan")]) if part == "tensors" else [1.0, float("nan")]
    left, right = (DataProto.from_dict(**{part: {"s": column}}) for _ in range(2))
    assert left.union(right) == left


def test_union_takes_object_cells_with_nan_for_equal():
    cells = [1.0, float("nan"), None, "a", {"x": [float("nan")]}, np.array([np.nan])]
    again = [1.0, float("nan"), None, "a", {"x": [float("nan")]}, np.array([np.nan])]
    left, right = (DataProto.from_dict(non_tensors={"s": column}) for column in (cells, again))
    assert left.union(right) == left


@pytest.mark.parametrize("part", ["tensors", "non_tensors"])
def test_union_names_the_column_that_conflicts_and_changes_nothing(part):
    columns = [torch.tensor([1.0, float("nan")]), torch.tensor([2.0, float("nan")])]
    if part == "non_tensors":
        columns = [column.numpy() for column in columns]
    left = DataProto.from_dict(**{part: {"a": columns[0], "s": columns[0]}})
    right = DataProto.from_dict(**{part: {"new": columns[0], "s": columns[1]}})
    before = left.columns
    with pytest.raises(ValueError, match="'s'"):
        left.union(right)
    assert left.columns == before


def test_union_of_different_row_counts_states_both_and_the_cure():
    prompts = DataProto.from_dict(non_tensors={"uid": ["p0", "p1"]})
    answers = DataProto.from_dict({"tokens": torch.zeros(6, 3)})
    with pytest.raises(ValueError, match="2 rows with one of 6 rows; repeat"):
        prompts.union(answers)
    united = prompts.repeat(3, interleave=True).union(answers)
    assert united.non_tensor_batch["uid"].tolist() == ["p0"] * 3 + ["p1"] * 3


def test_repeat_keeps_tensor_and_object_columns_in_one_order():
    batch = with_ids(2, step=3)
    for interleave, order in ((True, [0, 0, 0, 1, 1, 1]), (False, [0, 1, 0, 1, 0, 1])):
        repeated = batch.repeat(3, interleave=interleave)
        assert ids_of(repeated) == order
        assert repeated.non_tensor_batch["twin"].tolist() == [f"id {row}" for row in order]
        assert repeated.meta_info == {"step": 3}


@pytest.mark.parametrize("times", [0, -1])
def test_repeat_below_one_is_refused(times):
    with pytest.raises(ValueError, match=str(times)):
        with_ids(2).repeat(times)


# meta_info


def test_concat_keeps_the_metrics_of_all_parts():
    parts = [with_ids(1, metrics={"loss": rank}, step=7) for rank in range(3)]
    assert DataProto.concat(parts).meta_info == {"metrics": {"loss": [0, 1, 2]}, "step": 7}


def test_concat_keeps_metrics_with_different_keys_and_of_earlier_concats():
    parts = [with_ids(1, metrics={"loss": 0.5}), with_ids(1, metrics={"kl": 0.1}), with_ids(1)]
    first = DataProto.concat(parts[:2])
    assert DataProto.concat([first, with_ids(1, metrics=[{"loss": 0.7}])]).meta_info["metrics"] == {
        "loss": [0.5, 0.7],
        "kl": [0.1],
    }


def test_concat_refuses_meta_that_differs_and_names_key_and_values():
    with pytest.raises(ValueError, match="Conflicting values for meta_info key 'config': 'A' and 'B'"):
        DataProto.concat([with_ids(1, config="A"), with_ids(1, config="B")])


def test_concat_takes_measurements_that_differ_little_for_one_value():
    assert DataProto.concat([with_ids(1, t=1.0), with_ids(1, t=1.00001)]).meta_info == {"t": 1.0}


@pytest.mark.parametrize(
    "value", [torch.tensor([1, 2]), np.array([1.0, np.nan]), float("nan"), {"a": [torch.ones(2)]}, [np.nan, "x"]]
)
def test_concat_compares_meta_of_any_type(value):
    joined = DataProto.concat([with_ids(1, m=value), with_ids(1, m=pickle.loads(pickle.dumps(value)))])
    assert "m" in joined.meta_info


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (np.array([1]), np.array([1, 2])),
        (True, 1),
        (None, 0),
        ([1], (1,)),
    ],
)
def test_concat_names_the_key_of_meta_that_differs_in_any_type(left, right):
    with pytest.raises(ValueError, match="'m'"):
        DataProto.concat([with_ids(1, m=left), with_ids(1, m=right)])


@pytest.mark.parametrize(
    ("policy", "merged"),
    [("first", 1.0), ("sum", 4.0), ("mean", 2.0), ("list", [1.0, 3.0]), ("per_rank", [1.0, None, 3.0])],
)
def test_declared_policies_merge_meta(policy, merged):
    parts = [with_ids(1, t=1.0), with_ids(1), with_ids(1, t=3.0)]
    assert DataProto.concat(parts, policies={"t": policy}).meta_info == {"t": merged}


def test_a_policy_can_be_declared_for_the_program_but_not_twice_differently():
    register_meta_policy("test/seconds", "sum")
    register_meta_policy("test/seconds", "sum")
    with pytest.raises(ValueError, match="'test/seconds' has the policy 'sum' already"):
        register_meta_policy("test/seconds", "mean")
    parts = [with_ids(1, **{"test/seconds": 2}) for _ in range(2)]
    assert DataProto.concat(parts).meta_info == {"test/seconds": 4}


def children_of(batch):
    return {
        "chunk": batch.chunk(2)[0],
        "split": batch.split(2)[0],
        "slice": batch[0:2],
        "index": batch[[0, 1]],
        "select": batch.select(["id"]),
        "repeat": batch.repeat(2),
        "sample_level_repeat": batch.sample_level_repeat([1] * len(batch)),
        "rename": batch.rename("id", "number"),
        "union": batch.union(DataProto.from_dict({"new": torch.zeros(len(batch))})),
        "to": batch.to("cpu"),
        "concat": DataProto.concat([batch]),
        "item": batch[0],
        "iterator": next(batch.make_iterator(2, 1)),
        "unfold": batch.unfold_column_chunks(2),
    }


@pytest.mark.parametrize("operation", list(children_of(with_ids(4))))
def test_writing_to_the_meta_of_a_result_changes_nobody_else(operation):
    batch = with_ids(4, metrics={"loss": [1.0]}, config={"a": {"b": 1}})
    child = children_of(batch)[operation]
    child.meta_info["k"] = 1
    child.meta_info["metrics"]["loss"].append(2.0)
    child.meta_info["config"]["a"]["b"] = 2
    assert batch.meta_info == {"metrics": {"loss": [1.0]}, "config": {"a": {"b": 1}}}


@pytest.mark.parametrize("operation", list(children_of(with_ids(4))))
def test_adding_a_column_to_a_result_changes_nobody_else(operation):
    batch = with_ids(4)
    child = children_of(batch)[operation]
    child.batch["added"] = torch.zeros(child.batch.batch_size)
    child.non_tensor_batch["also"] = np.zeros(4)
    assert batch.columns == ("id", "twin")


def test_siblings_do_not_share_meta():
    first, second = with_ids(4, metrics={}).chunk(2)
    first.meta_info["metrics"]["loss"] = 1
    assert second.meta_info == {"metrics": {}}


# Pickling


def test_pickling_changes_neither_sender_nor_what_it_can_do(make_mixed):
    batch = make_mixed(3)
    before, copy = batch.batch, batch.clone()
    first, second = (pickle.loads(pickle.dumps(batch, protocol=5)) for _ in range(2))
    assert batch.batch is before
    assert first == second == batch == copy
    for party in (batch, first):
        party.batch["new"] = torch.zeros(3)
        party.batch["id"][0] = 5


def test_one_row_of_a_large_tensor_pickles_small():
    batch = DataProto.from_dict({"x": torch.zeros(1000, 1000)})
    assert len(pickle.dumps(batch.chunk(1000)[0])) < 8000


@pytest.mark.parametrize(
    "column",
    [
        torch.tensor([[True, False]] * 2),
        torch.randn(2, 3).bfloat16(),
        torch.tensor([[1, 255]] * 2, dtype=torch.uint8),
        torch.tensor([[1, 65535]] * 2, dtype=torch.uint16),
        torch.randn(2, 3).to(torch.float8_e5m2),
        torch.randn(3, 2).t(),
        torch.randn(2, 1).expand(2, 5),
        torch.randn(2, 3, dtype=torch.complex64).conj(),
        torch.empty(2, 0),
    ],
    ids=["bool", "bf16", "uint8", "uint16", "fp8", "transposed", "expanded", "conjugate", "empty"],
)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_every_dtype_and_layout_survives_pickling(column, protocol):
    batch = DataProto.from_dict({"x": column})
    arrived = pickle.loads(pickle.dumps(batch, protocol=protocol))
    assert arrived.batch["x"].dtype == column.dtype
    assert arrived == batch


# Ragged columns


def test_ragged_columns_of_equal_length_keep_their_ragged_dimension():
    steps = [[(4, 3), (4, 5)], [(4, 3), (4, 3)], [(4, 6)]]
    batches = []
    for shapes in steps:
        rows = [torch.randn(*shape) for shape in shapes]
        batches.append(DataProto.from_dict({"x": tu.nested_tensor_from_tensor_list(rows)}))
    for batch in batches:
        pieces = batch.chunk(len(batch))
        assert all(piece.batch["x"]._ragged_idx == 2 for piece in pieces)
        assert DataProto.concat(pieces) == batch
    joined = DataProto.concat(batches)
    assert [tuple(row.shape) for row in joined.batch["x"].unbind()] == [shape for step in steps for shape in step]
    padded = joined.batch["x"].to_padded_tensor(0.0)
    assert padded.shape == (5, 4, 6)
    assert torch.equal(padded[1, :, :5], batches[0].batch["x"].unbind()[1])


def test_a_piece_whose_ragged_dimension_torch_guessed_joins_the_others():
    equal = torch.nested.as_nested_tensor([torch.ones(4, 3), torch.ones(4, 3)], layout=torch.jagged)
    unequal = torch.nested.as_nested_tensor([torch.ones(4, 3), torch.ones(4, 5)], layout=torch.jagged)
    assert equal._ragged_idx != unequal._ragged_idx
    for pieces in ([equal, unequal], [unequal, equal]):
        joined = DataProto.concat([DataProto.from_dict({"x": piece}) for piece in pieces]).batch["x"]
        assert joined._ragged_idx == 2
        assert sorted(tuple(row.shape) for row in joined.unbind()) == [(4, 3)] * 3 + [(4, 5)]


def test_a_dense_piece_joins_jagged_ones():
    dense = DataProto.from_dict({"x": torch.arange(6).view(2, 3)})
    ragged = DataProto.from_dict({"x": tu.nested_tensor_from_tensor_list([torch.tensor([7])])})
    rows = DataProto.concat([dense, ragged]).batch["x"].unbind()
    assert [row.tolist() for row in rows] == [[0, 1, 2], [3, 4, 5], [7]]


@pytest.mark.parametrize("lengths", [[2, 2, 2], [0, 3, 1], [0, 0, 0]])
def test_one_dimensional_ragged_columns_with_equal_and_zero_lengths(lengths):
    rows = [torch.arange(length) for length in lengths]
    batch = DataProto.from_dict({"x": tu.nested_tensor_from_tensor_list(rows)})
    for result in (batch[[0, 1, 2]], DataProto.concat(batch.chunk(3)), pickle.loads(pickle.dumps(batch))):
        assert [row.tolist() for row in result.batch["x"].unbind()] == [row.tolist() for row in rows]


# Non-tensor entries of TensorDicts


def values(*cells):
    return NonTensorStack(*[NonTensorData(cell) for cell in cells])


@pytest.mark.parametrize("shared", [False, True], ids=["a value a row", "one value for all"])
def test_values_follow_their_rows_when_equal_in_each_part(shared):
    def part(cell):
        entry = NonTensorData(cell, batch_size=[2]) if shared else values(cell, cell)
        return DataProto(batch=TensorDict({"l": entry}, batch_size=[2]))

    joined = DataProto.concat([part("x"), part("y")])
    assert joined.batch.get("l").tolist() == ["x", "x", "y", "y"]
    joined.reorder([3, 0, 2, 1])
    assert joined.batch.get("l").tolist() == ["y", "x", "y", "x"]
    assert joined[torch.tensor([0, 1])].batch.get("l").tolist() == ["y", "x"]


def test_plain_tensordicts_keep_the_values_of_each_row():
    parts = [tu.get_tensordict({"l": [cell, cell]}) for cell in "xy"]
    joined = tu.concat_tensordict(parts)
    assert joined["l"] == ["x", "x", "y", "y"]
    assert tu.index_select_tensor_dict(joined, [3, 0, 2, 1])["l"] == ["y", "x", "y", "x"]


# Index types


@pytest.mark.parametrize("make", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
@pytest.mark.parametrize(
    ("index", "rows"),
    [([True, False, True], [0, 2]), ([], []), ([-1], [2]), ([0, 0, 2], [0, 0, 2]), ([False] * 3, [])],
)
def test_indexes_mean_the_same_in_every_container_and_for_every_column(make, index, rows):
    picked = with_ids(3)[make(index)]
    assert ids_of(picked) == rows
    assert picked.non_tensor_batch["twin"].tolist() == [f"id {row}" for row in rows]
    assert type(len(picked)) is int
    assert sum(len(chunk) for chunk in picked.chunk(2)) == len(rows)


@pytest.mark.parametrize("make", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
def test_wrong_indexes_are_index_errors(make):
    for index in ([True, False], [True] * 4, [3], [-4], [0, 9]):
        with pytest.raises(IndexError):
            with_ids(3)[make(index)]


def test_indexes_of_numpy_scalars_and_of_mixed_types():
    assert ids_of(with_ids(3)[[np.True_, np.False_, np.True_]]) == [0, 2]
    assert ids_of(with_ids(3)[[np.int64(1), np.int32(0)]]) == [1, 0]
    assert ids_of(with_ids(3)[range(2, 0, -1)]) == [2, 1]
    for index in ([True, 2], [0.5], "ab", (0, 1), True):
        with pytest.raises(TypeError):
            with_ids(3)[index]


def test_a_whole_number_gives_one_row_and_out_of_range_is_an_index_error():
    item = with_ids(3, step=1)[np.int64(-1)]
    assert (int(item.batch["id"]), item.non_tensor_batch["twin"], item.meta_info) == (2, "id 2", {"step": 1})
    with pytest.raises(IndexError, match="row 3 is out of range for 3 rows"):
        with_ids(3)[3]


# No tensors, no rows, nothing


def test_a_batch_without_tensors_can_do_everything():
    batch = DataProto.from_dict(non_tensors={"m": ["a", "b", "c", "d"]})
    assert len(batch) == 4
    assert [len(piece) for piece in batch.chunk(2)] == [2, 2]
    assert [len(piece) for piece in batch.split(3)] == [3, 1]
    assert DataProto.concat(batch.chunk(3)) == batch
    assert batch.union(DataProto.from_dict(non_tensors={"n": [1, 2, 3, 4]})).columns == ("m", "n")
    assert len(batch.repeat(2)) == 8
    batch.reorder([3, 2, 1, 0])
    assert batch.non_tensor_batch["m"].tolist() == ["d", "c", "b", "a"]
    assert batch.select(non_tensor_batch_keys=["m"]) == batch
    assert batch[1:2].non_tensor_batch["m"].tolist() == ["c"]
    assert pickle.loads(pickle.dumps(batch)) == batch
    assert batch.to("cpu") == batch
    batch.padding(2)
    assert len(batch) == 6
    assert batch.batch is None
    assert len(batch.to_tensordict()) == 6
    assert batch[0].batch is None


@pytest.mark.parametrize("rows", [0, 1])
def test_batches_with_no_rows_or_one_can_do_everything(make_mixed, rows):
    batch = make_mixed(rows)
    assert len(batch) == rows
    assert DataProto.concat(batch.chunk(3)) == batch
    assert DataProto.concat(batch.split(3)) == batch
    assert len(batch.repeat(2)) == 2 * rows
    assert batch[[]] == make_mixed(0)
    assert pickle.loads(pickle.dumps(batch, protocol=5)) == batch
    assert batch.union(batch) == batch
    assert batch.clone() == batch
    assert list(batch.make_iterator(2, 1)) == ([batch] if rows else [])
    assert batch.describe()


def test_a_container_with_nothing_has_no_rows():
    for batch in (DataProto(), DataProto.from_dict(), DataProto(None, None, {"a": 1})):
        assert len(batch) == 0
        assert DataProto.concat([batch, batch]) == batch
        assert len(batch.chunk(2)) == 2
        assert pickle.loads(pickle.dumps(batch)) == batch


def test_a_part_without_columns_adds_only_its_meta():
    joined = DataProto.concat([with_ids(2, metrics={"loss": 1}), DataProto(meta_info={"metrics": {"loss": 2}})])
    assert len(joined) == 2
    assert joined.meta_info["metrics"] == {"loss": [1, 2]}


# Construction


def test_construction_changes_nothing_that_was_passed_in():
    tensors, arrays, meta = {"t": torch.zeros(2)}, {"x": [1, 2]}, {}
    batch = DataProto.from_dict(tensors, arrays, meta, auto_padding=True)
    batch.meta_info["new"] = 1
    batch.non_tensor_batch["new"] = np.zeros(2)
    batch.batch["new"] = torch.zeros(2)
    assert (list(tensors), arrays, meta) == (["t"], {"x": [1, 2]}, {})
    given = {"x": np.zeros(2)}
    DataProto(non_tensor_batch=given, meta_info=meta).pop(non_tensor_batch_keys=["x"])
    assert list(given) == ["x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensors": {"t": torch.tensor(1.0)}}, "'t' has no rows"),
        ({"non_tensors": {"t": np.array(1.0)}}, "'t' has no rows"),
        ({"tensors": {"a": torch.zeros(2), "b": torch.zeros(3)}}, "'b' has 3 rows, but there are 2 in column 'a'"),
        (
            {"tensors": {"a": torch.zeros(2)}, "non_tensors": {"b": [1, 2, 3]}},
            "'b' has 3 rows, but there are 2 in the",
        ),
        ({"non_tensors": {"a": [1], "b": [1, 2]}}, "'b' has 2 rows, but there are 1 in column 'a'"),
        ({"tensors": {"a": torch.zeros(2)}, "non_tensors": {"a": [1, 2]}}, "'a' is both"),
    ],
)
def test_columns_that_do_not_fit_are_named_with_their_sizes(arguments, message):
    with pytest.raises(ValueError, match=message):
        DataProto.from_dict(**arguments)


def test_values_that_are_no_columns_are_type_errors_that_name_them():
    with pytest.raises(TypeError, match="'a' of tensors is a tensor, got list"):
        DataProto.from_dict({"a": [1, 2]})
    with pytest.raises(TypeError, match="'a' is a numpy array or a list"):
        DataProto.from_single_dict({"a": 5})
