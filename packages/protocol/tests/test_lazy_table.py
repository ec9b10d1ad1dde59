"""The TensorDict of a batch that was cut, joined or sent is made when it is asked for, and counts from then on."""

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict

from kapell.protocol import DataProto


@pytest.fixture
def batch():
    return DataProto.from_dict({"x": torch.arange(4), "y": torch.ones(4, 2)}, {"t": list("abcd")}, {"step": 1})


WAYS = {
    "slice": lambda batch: batch.slice(0, 4),
    "split_at": lambda batch: batch.split_at([0, 4])[0],
    "concat": lambda batch: DataProto.concat(batch.chunk(2)),
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch)),
    "select_idxs": lambda batch: batch.select_idxs([0, 1, 2, 3]),
    "private": lambda batch: batch.__kapell_private__(copy.deepcopy),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_done_to_the_table_counts(batch, way):
    made = WAYS[way](batch)
    assert made == batch
    made.batch["z"] = torch.zeros(4)
    del made.batch["y"]
    assert made.columns == ("x", "z", "t")
    assert made.slice(1, 3).columns == pickle.loads(pickle.dumps(made)).columns == ("x", "z", "t")
    assert made.batch is made.batch
    assert batch.columns == ("x", "y", "t")


@pytest.mark.parametrize("way", WAYS)
def test_the_table_can_be_replaced(batch, way):
    made = WAYS[way](batch)
    made.batch = TensorDict({"only": torch.zeros(2)}, [2])
    made.non_tensor_batch = {}
    assert (len(made), made.columns, made.nbytes) == (2, ("only",), 8)
    made.batch = None
    assert (len(made), made.columns, made.nbytes) == (0, (), 0)


@pytest.mark.parametrize("way", WAYS)
def test_the_names_of_columns_say_nothing_of_whether_the_table_is_made(batch, way):
    asked, unasked = WAYS[way](batch), WAYS[way](batch)
    assert isinstance(asked.batch, TensorDict)
    assert asked.columns == unasked.columns
    assert asked.nbytes == unasked.nbytes == batch.nbytes
    assert len(asked) == len(unasked)
    assert (asked.column("x") == unasked.column("x")).all()
    assert asked.tensor_columns().keys() == unasked.tensor_columns().keys() == {"x", "y"}
    for made in (asked, unasked):
        with pytest.raises(KeyError, match="no column 'nope'"):
            made.column("nope")


def test_the_dict_of_tensor_columns_is_the_callers(batch):
    piece = batch.slice(0, 2)
    piece.tensor_columns().clear()
    assert piece.columns == ("x", "y", "t")


def test_a_device_that_the_table_notes_stays_noted():
    batch = DataProto(batch=TensorDict({"x": torch.arange(4)}, [4], device="cpu"))
    for way in WAYS.values():
        assert way(batch).batch.device == torch.device("cpu")
    without = DataProto.from_dict({"x": torch.arange(4)})
    assert DataProto.concat([batch, without]).batch.device is None


def test_cutting_at_all_bounds_keeps_the_marks_of_padding(batch):
    batch.padding(2)
    assert [piece.padding_mask.tolist() for piece in batch.split_at([0, 3, 5, 6])] == [
        [False] * 3,
        [False, True],
        [True],
    ]


@pytest.mark.parametrize("bounds", [[0, 5], [2, 1], [-1, 2]])
def test_bounds_outside_the_batch_are_refused(batch, bounds):
    with pytest.raises(ValueError, match="cannot cut 4 rows at"):
        batch.split_at(bounds)


def test_a_column_that_lost_its_rows_is_named(batch):
    batch.non_tensor_batch["t"] = batch.non_tensor_batch["t"][:3]
    for cut in (lambda: batch.split_at([0, 2, 4]), lambda: batch.slice(0, 4)):
        with pytest.raises(ValueError, match="column 't' has 3 rows"):
            cut()


def test_gradients_flow_through_pieces():
    x = torch.ones(4, requires_grad=True)
    pieces = DataProto(batch=TensorDict({"x": x * 2}, [4])).split_at([0, 1, 4])
    sum((piece.batch["x"] * 3).sum() for piece in pieces).backward()
    assert x.grad.tolist() == [6.0] * 4


def test_a_private_copy_shares_nothing_and_keeps_what_lies_on_one_memory_together():
    x = torch.arange(4)
    batch = DataProto(batch=TensorDict({"x": x, "alias": x, "other": torch.arange(4)}, [4]), meta_info={"m": [1]})
    copied = batch.__kapell_private__(copy.deepcopy)
    copied.batch["x"][0] = 9
    copied.meta_info["m"].append(2)
    assert copied.batch["alias"][0] == 9
    assert (batch.batch["x"][0], copied.batch["other"][0], batch.meta_info) == (0, 0, {"m": [1]})


def test_a_private_copy_is_a_leaf_that_wants_its_gradient_where_the_original_is_one():
    leaf = torch.ones(2, requires_grad=True)
    batch = DataProto(batch=TensorDict({"leaf": leaf, "made": leaf * 2}, [2]))
    copied = batch.__kapell_private__(copy.deepcopy).batch
    assert (copied["leaf"].requires_grad, copied["made"].requires_grad) == (True, False)


def test_a_subclass_with_a_constructor_of_its_own_is_built_by_it():
    class Counted(DataProto):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.built = True

    batch = Counted.from_dict({"x": torch.arange(4)})
    assert all(piece.built for piece in (*batch.split_at([0, 2, 4]), *batch.chunk(2), Counted.concat(batch.chunk(2))))
