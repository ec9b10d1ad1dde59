"""What single operations do, beyond what must hold for all of them."""

import copy

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from kapell.protocol import (
    DataProto,
    DataProtoConfig,
    DataProtoItem,
    all_gather_data_proto,
    collate_fn,
    fold_batch_dim,
    list_of_dict_to_dict_of_list,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)
from kapell.protocol import tensordict_utils as tu
from kapell.protocol.columns import ValueStack, column_of_objects, same


@pytest.fixture
def batch():
    return DataProto.from_dict({"id": torch.arange(3), "x": torch.arange(6).view(3, 2)}, {"t": list("abc")}, {"s": 1})


def test_pop_takes_columns_out_or_changes_nothing(batch):
    with pytest.raises(KeyError, match="'nope'"):
        batch.pop(["id"], ["nope"])
    with pytest.raises(KeyError, match="'nope'"):
        batch.pop(["id"], meta_info_keys=["nope"])
    assert batch.columns == ("id", "x", "t")
    popped = batch.pop(["id"], ["t"], ["s"])
    assert (popped.columns, popped.meta_info) == (("id", "t"), {"s": 1})
    assert (batch.columns, batch.meta_info) == (("x",), {})
    assert batch.pop(meta_info_keys=[]).batch is None


def test_pop_does_not_reach_into_the_tensordict_that_was_passed_in():
    table = TensorDict({"a": torch.ones(2)}, [2])
    batch = DataProto(batch=table)
    batch.pop(["a"])
    assert list(table.keys()) == ["a"]
    assert len(batch) == 2


def test_select_keeps_what_is_named_and_names_what_is_missing(batch):
    assert batch.select(["x"], []).columns == ("x",)
    assert batch.select(meta_info_keys=[]).meta_info == {}
    assert len(batch.select([], [])) == 3
    for arguments in ({"batch_keys": ["t"]}, {"non_tensor_batch_keys": ["x"]}, {"meta_info_keys": ["x"]}):
        with pytest.raises(KeyError, match="there are"):
            batch.select(**arguments)


def test_select_shares_memory_unless_deepcopy(batch):
    batch.select().batch["id"][0] = 9
    assert batch.batch["id"][0] == 9
    batch.select(deepcopy=True).batch["id"][0] = 5
    assert batch.batch["id"][0] == 9


def test_rename_takes_tensor_and_other_columns(batch):
    assert batch.rename(["id", "t"], ["number", "text"]).columns == ("number", "x", "text")
    assert batch.rename(["id", "x"], ["x", "id"]).batch["id"].shape == (3, 2)
    with pytest.raises(ValueError, match="same length"):
        batch.rename(["id"], ["a", "b"])
    with pytest.raises(ValueError, match="two columns the name 'x'"):
        batch.rename("id", "x")
    with pytest.raises(KeyError, match="'nope'"):
        batch.rename("nope", "x")


def test_union_merges_meta_and_metrics(batch):
    other = DataProto.from_dict({"y": torch.ones(3)}, meta_info={"metrics": {"b": 2}, "new": 3})
    batch.meta_info["metrics"] = {"a": 1}
    assert (batch | other).meta_info == {"s": 1, "metrics": {"a": 1, "b": 2}, "new": 3}
    with pytest.raises(ValueError, match="'s'"):
        batch.union(DataProto(meta_info={"s": 2}))
    with pytest.raises(TypeError):
        batch.union({"a": 1})


def test_padding_appends_copies_of_the_last_or_first_row_and_marks_them(batch):
    batch.padding(2)
    batch.padding(1, "first")
    assert batch.batch["id"].tolist() == [0, 1, 2, 2, 2, 0]
    assert batch.padding_mask.tolist() == [False] * 3 + [True] * 3
    real = ~batch.padding_mask
    assert batch.batch["id"][real].float().mean() == 1.0
    assert batch.without_padding().non_tensor_batch["t"].tolist() == ["a", "b", "c"]


def test_the_padding_mask_follows_its_rows(batch):
    batch.padding(1)
    assert batch[[3, 0]].padding_mask.tolist() == [True, False]
    assert [chunk.padding_mask.tolist() for chunk in batch.chunk(2)] == [[False, False], [False, True]]
    assert batch.repeat(2).padding_mask.sum() == 2
    assert batch.select(["id"]).padding_mask.sum() == 1
    assert batch.union(DataProto.from_dict({"y": torch.ones(4)})).padding_mask.sum() == 1
    batch.reorder([3, 0, 1, 2])
    assert batch.padding_mask.tolist() == [True, False, False, False]


def test_the_padding_mask_is_folded_and_unfolded_with_its_rows(batch):
    batch.padding(3)
    folded = fold_batch_dim(batch, 2)
    assert folded.padding_mask.tolist() == [False, True]
    assert folded.without_padding().batch["id"].tolist() == [[0, 1, 2]]
    unfolded = unfold_batch_dim(folded)
    assert unfolded == batch
    assert torch.equal(unfolded.padding_mask, batch.padding_mask)
    assert fold_batch_dim(batch[:0], 1).padding_mask.tolist() == [False]
    with pytest.raises(ValueError, match="6 rows into 3: row 1 would hold padding beside other rows"):
        fold_batch_dim(batch, 3)


def test_padding_that_makes_no_sense_is_refused(batch):
    for call in (lambda: batch.padding(-1), lambda: batch.padding(1, "middle"), lambda: batch[:0].padding(1)):
        with pytest.raises(ValueError, match="padding"):
            call()
    assert len(batch) == 3
    batch.padding(0)
    assert len(batch) == 3


def test_padding_to_a_divisor_goes_round_the_rows(batch):
    padded, added = pad_dataproto_to_divisor(batch, 8)
    assert (added, padded.batch["id"].tolist()) == (5, [0, 1, 2, 0, 1, 2, 0, 1])
    assert padded.padding_mask.sum() == 5
    assert unpad_dataproto(padded, added) == batch
    same, added = pad_dataproto_to_divisor(batch, 3)
    assert (added, same) == (0, batch)
    assert same is not batch
    assert pad_dataproto_to_divisor(batch[:0], 4)[1] == 0
    with pytest.raises(ValueError, match="at least 1"):
        pad_dataproto_to_divisor(batch, 0)
    with pytest.raises(ValueError, match="4 padding rows from a batch of 3"):
        unpad_dataproto(batch, 4)
    with pytest.raises(TypeError):
        pad_dataproto_to_divisor({}, 2)


def test_auto_padding_is_asked_for_by_batch_or_by_program(batch):
    assert not batch.is_padding_enabled()
    assert DataProto.from_dict({"x": torch.ones(1)}, auto_padding=True).chunk(1)[0].is_padding_enabled()
    DataProtoConfig.auto_padding = True
    try:
        assert batch.is_padding_enabled()
    finally:
        DataProtoConfig.auto_padding = False
    with pytest.raises(TypeError, match="'yes'"):
        DataProtoConfig.auto_padding = "yes"


def test_iterators_are_repeatable_and_cover_every_row(batch):
    def ids(seed, **options):
        pieces = batch.make_iterator(2, 2, seed=seed, dataloader_kwargs=options)
        return [piece.batch["id"].tolist() for piece in pieces]

    assert ids(None) == [[0, 1], [2]] * 2
    assert ids(None, drop_last=True) == [[0, 1]] * 2
    assert ids(3, shuffle=True) == ids(3, shuffle=True)
    assert sorted(row for piece in ids(3, shuffle=True) for row in piece) == [0, 0, 1, 1, 2, 2]
    for arguments in ((0, 1), (2, -1)):
        with pytest.raises(ValueError):
            batch.make_iterator(*arguments)
    with pytest.raises(TypeError, match="num_workers"):
        batch.make_iterator(2, 1, dataloader_kwargs={"num_workers": 2})


def test_a_seeded_iterator_leaves_the_programs_generator_alone(batch):
    before = torch.get_rng_state()
    list(batch.make_iterator(2, 2, seed=1, dataloader_kwargs={"shuffle": True}))
    assert torch.equal(torch.get_rng_state(), before)


def test_sample_level_repeat_repeats_each_row_as_often_as_told(batch):
    for times in ([2, 0, 1], (2, 0, 1), np.array([2, 0, 1]), torch.tensor([2, 0, 1])):
        assert batch.sample_level_repeat(times).batch["id"].tolist() == [0, 0, 2]
    for times in ([1, 2], [1, -1, 1], [0.5, 1, 1]):
        with pytest.raises(ValueError):
            batch.sample_level_repeat(times)


def test_folding_and_unfolding_are_inverse(batch):
    repeated = batch.repeat(2)
    folded = fold_batch_dim(repeated, 3)
    assert folded.batch["x"].shape == (3, 2, 2)
    assert folded.non_tensor_batch["t"].tolist() == [["a", "a"], ["b", "b"], ["c", "c"]]
    assert unfold_batch_dim(folded) == repeated
    with pytest.raises(ValueError, match="6 rows into 4"):
        fold_batch_dim(repeated, 4)
    with pytest.raises(ValueError, match="'id' starts with"):
        unfold_batch_dim(batch)
    assert len(repeated) == 6


def test_unfolding_column_chunks_cuts_some_columns_and_repeats_the_others(batch):
    batch.non_tensor_batch["pairs"] = DataProto.from_dict(non_tensors={"p": [[1, 2], [3, 4], [5, 6]]}).column("p")
    unfolded = batch.unfold_column_chunks(2, ["x", "pairs"])
    assert unfolded.batch["x"].tolist() == [[0], [1], [2], [3], [4], [5]]
    assert unfolded.non_tensor_batch["pairs"].tolist() == [[1], [2], [3], [4], [5], [6]]
    assert unfolded.batch["id"].tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.unfold_column_chunks(2).batch["x"].shape == (6, 2)
    for arguments in ((3, ["x"]), (2, ["id"]), (3, ["pairs"]), (0, ["x"])):
        with pytest.raises(ValueError):
            batch.unfold_column_chunks(*arguments)
    with pytest.raises(KeyError, match="'nope'"):
        batch.unfold_column_chunks(2, ["nope"])


def test_concat_says_which_part_lacks_which_column(batch):
    with pytest.raises(ValueError, match="part 0 has column 't', part 1 has not"):
        DataProto.concat([batch, batch.select(non_tensor_batch_keys=[])])
    with pytest.raises(ValueError, match="nothing to concatenate"):
        DataProto.concat([])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.zeros(1, 2), "column 'x': .*shape of a row"),
        (torch.zeros(1, dtype=torch.int64), "column 'x': .*dtype"),
        (TensorDict({"y": torch.zeros(1)}, [1]), "column 'x': .*kind"),
    ],
)
def test_concat_names_columns_that_do_not_join(other, message):
    parts = [DataProto(batch=TensorDict({"x": column}, [1])) for column in (torch.zeros(1), other)]
    with pytest.raises(ValueError, match=message):
        DataProto.concat(parts)


def test_text_columns_of_different_lengths_join():
    parts = [DataProto.from_dict(non_tensors={"t": np.array([text])}) for text in ("a", "long")]
    assert DataProto.concat(parts).non_tensor_batch["t"].tolist() == ["a", "long"]


def test_rows_of_nested_tensordicts_follow():
    inner = TensorDict({"a": torch.arange(3)}, [3])
    batch = DataProto(batch=TensorDict({"inner": inner}, [3]))
    assert batch[[2, 0]].batch["inner", "a"].tolist() == [2, 0]
    assert DataProto.concat(batch.chunk(2)) == batch
    assert batch[1].batch["inner", "a"] == 1


def test_items_make_a_batch_again(batch):
    again = collate_fn([batch[row] for row in range(3)])
    assert again.batch["x"].tolist() == batch.batch["x"].tolist()
    assert again.non_tensor_batch["t"].tolist() == ["a", "b", "c"]
    assert isinstance(batch[0], DataProtoItem)


@pytest.mark.parametrize("ragged", [1, 2])
def test_items_of_jagged_columns_make_jagged_columns_again(ragged):
    rows = [torch.full((length, 3) if ragged == 1 else (4, length), float(length)) for length in (1, 3, 2)]
    batch = DataProto.from_dict({"x": tu.nested_tensor_from_tensor_list(rows, ragged)}, {"t": list("abc")})
    assert collate_fn([batch[row] for row in range(3)]).batch["x"]._ragged_idx == ragged
    again = collate_fn([batch[2], batch[1]])
    assert [row.tolist() for row in again.batch["x"].unbind()] == [rows[2].tolist(), rows[1].tolist()]
    assert collate_fn([batch[1], batch[1]]).batch["x"].tolist() == [rows[1].tolist()] * 2


def test_items_of_every_kind_of_column_make_a_batch(make_mixed):
    batch = make_mixed(4)
    inner = {"a": torch.arange(4), "j": batch.batch["jagged"]}
    batch.batch["table"] = TensorDict(inner, [4])
    batch.batch["value"] = ValueStack.of([[1], "b", None, 2])
    batch.batch["shared"] = NonTensorData("all", batch_size=[4])
    again = collate_fn([batch[row] for row in range(4)])
    assert tu.get(again.batch, "shared") == ["all"] * 4
    for name in batch.batch.exclude("shared").keys():  # noqa: SIM118
        assert same(again.batch.get(name), batch.batch.get(name)), name
    for name, column in batch.non_tensor_batch.items():
        assert again.non_tensor_batch[name].tolist() == column.tolist()


def test_items_keep_their_device_and_need_the_same_tensors(batch):
    there = DataProto(batch=TensorDict({"x": torch.ones(2)}, [2], device="cpu"))
    assert collate_fn([there[0], there[1]]).batch.device == torch.device("cpu")
    assert collate_fn([]).batch is None
    with pytest.raises(ValueError, match=r"row 1 has \['x'\] but row 0 has \['id', 'x'\]"):
        collate_fn([batch[0], batch.select(["x"])[1]])
    with pytest.raises(ValueError, match=r"one number of dimensions, got \[0, 1\]"):
        collate_fn([batch.select(["id"])[0], batch.select(["x"]).rename("x", "id")[0]])


def test_rows_of_dicts_become_columns_of_lists():
    assert list_of_dict_to_dict_of_list([]) == {}
    assert list_of_dict_to_dict_of_list([{"a": 1}, {"a": 2, "b": 3}]) == {"a": [1, 2], "b": [3]}


def test_union_of_tensordicts_changes_the_first_or_nothing():
    left, right = TensorDict({"a": torch.ones(2)}, [2]), TensorDict({"b": torch.ones(2), "a": torch.zeros(2)}, [2])
    with pytest.raises(ValueError, match="`a` in tensor_dict1"):
        union_tensor_dict(left, right)
    assert list(left.keys()) == ["a"]
    assert union_tensor_dict(left, right.select("b")) is left
    with pytest.raises(ValueError, match="batch sizes"):
        union_tensor_dict(left, TensorDict({}, [3]))


def test_union_of_array_dicts_gives_a_new_dict():
    left = {"a": np.ones(1)}
    assert list(union_numpy_dict(left, {"b": np.ones(1)})) == ["a", "b"]
    assert list(left) == ["a"]
    with pytest.raises(TypeError, match="`b` in tensor_dict2"):
        union_numpy_dict(left, {"b": [1]})


def test_sizes_are_exact_for_numbers_and_estimated_for_objects():
    batch = DataProto.from_dict({"x": torch.zeros(4, 8)}, {"n": np.zeros(4), "o": ["x" * 1000] * 4})
    sizes = batch.column_bytes()
    assert (sizes["x"], sizes["n"]) == (128, 32)
    assert 4000 < sizes["o"] < 6000
    assert batch.nbytes == sum(sizes.values())


def test_equality_looks_at_values_dtypes_names_and_meta(batch):
    assert batch == batch.clone()
    assert batch != batch[[0, 2, 1]]
    assert batch != batch.rename("id", "no")
    assert batch != "batch"
    other = batch.clone()
    other.batch["id"] = other.batch["id"].float()
    assert batch != other
    other = batch.clone()
    other.meta_info["s"] = 2
    assert batch != other


@pytest.mark.parametrize("dtype", ["i8", "u4", "f4", ">i4"])
def test_arrays_of_other_dtypes_differ_as_tensors_do_and_text_of_other_lengths_does_not(dtype):
    left, right = (DataProto.from_dict(non_tensors={"n": np.arange(3).astype(kind)}) for kind in ("i4", dtype))
    assert left != right
    with pytest.raises(ValueError, match="'n'"):
        left.union(right)
    short, long = (DataProto.from_dict(non_tensors={"t": np.array(["a", "b"], dtype=kind)}) for kind in ("U1", "U9"))
    assert short == long == short.union(long)
    assert short != DataProto.from_dict(non_tensors={"t": np.array(["a", "b"], dtype="S1")})


def test_a_clone_copies_columns_a_deepcopy_cells_too_and_a_slice_shares_memory(batch):
    batch.non_tensor_batch["cells"] = column_of_objects([[1], [2], [3]])
    batch.clone().batch["id"][0] = 7
    batch.clone().non_tensor_batch["t"][0] = "z"
    copy.deepcopy(batch).non_tensor_batch["cells"][0].append(2)
    assert batch.batch["id"][0] == 0
    assert (batch.non_tensor_batch["t"][0], batch.non_tensor_batch["cells"][0]) == ("a", [1])
    batch[0:1].batch["id"][0] = 7
    assert batch.batch["id"][0] == 7


def test_the_device_of_the_tensordict_is_kept():
    batch = DataProto(batch=TensorDict({"x": torch.ones(4)}, [4], device="cpu"))
    for result in (batch[[0]], batch[1:], batch.repeat(2), DataProto.concat(batch.chunk(2)), batch.select(["x"])):
        assert result.batch.device == torch.device("cpu")


def test_gathering_over_a_process_group_of_one(batch, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        before = batch.clone()
        all_gather_data_proto(batch, None)
        assert batch == before
        with pytest.raises(TypeError):
            all_gather_data_proto({}, None)
    finally:
        torch.distributed.destroy_process_group()


def test_gathered_rows_travel_by_the_cpu_and_end_where_the_batch_had_them(monkeypatch):
    sent = []

    def gather(parts, own, group):
        sent.append(own)
        parts[:] = [own, DataProto.from_dict({"x": torch.ones(1), "y": torch.ones(1)}).to("cpu")]

    # "meta" stands for a GPU; it has no numbers that could be copied to the CPU.
    monkeypatch.setattr(DataProto, "to", lambda self, device: on(device, self))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)

    def on(device, batch):
        columns = {name: torch.empty_like(column, device=device) for name, column in batch.tensor_columns().items()}
        return DataProto(batch=TensorDict(columns, [len(batch)], device=device))

    batch = DataProto.from_dict({"x": torch.ones(2, device="meta"), "y": torch.ones(2)})
    all_gather_data_proto(batch, None)
    assert {column.device.type for column in sent[0].tensor_columns().values()} == {"cpu"}
    assert len(batch) == 3
    assert batch.batch.device is None
    assert [batch.batch[name].device.type for name in "xy"] == ["meta", "cpu"]


LARGE_ROWS = 3000  # two parts of them, 1 kB a row each, are joined and taken on huge pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.uint16])
def test_large_joins_and_selections_have_the_values_of_small_ones(dtype):
    values = (torch.arange(LARGE_ROWS) % 2).to(dtype)[:, None].expand(-1, 1024).contiguous()
    batch = DataProto.from_dict({"x": values})
    joined = DataProto.concat([batch, batch[:7]])
    assert torch.equal(
        joined.batch["x"],
        torch.from_numpy(np.concatenate([values.view(torch.uint8).numpy()] * 2))[: LARGE_ROWS + 7].view(dtype),
    )
    picked = joined[[LARGE_ROWS, *range(LARGE_ROWS)]]
    assert torch.equal(picked.batch["x"][1:], values)
    picked.batch["x"][:] = 0
    assert torch.equal(joined.batch["x"][:LARGE_ROWS], values)


@pytest.mark.parametrize("rows", [3, LARGE_ROWS])
def test_joins_and_selections_stay_in_the_graph(rows):
    weights = torch.ones(rows, 1024, requires_grad=True)
    batch = DataProto.from_dict({"x": weights * 2})
    joined = DataProto.concat([batch, batch])[list(range(rows + 1))]
    joined.batch["x"].sum().backward()
    assert weights.grad.sum() == 2 * 1024 * (rows + 1)


def test_large_pieces_whose_rows_differ_are_refused_by_name():
    parts = [DataProto.from_dict({"x": torch.zeros(LARGE_ROWS, width)}) for width in (1024, 1023)]
    with pytest.raises(ValueError, match=r"'x'.*shape of a row"):
        DataProto.concat(parts)
