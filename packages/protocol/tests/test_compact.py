"""Small batches of plain columns as one pickle: the same batch as by stand-ins, or none at all."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kapell.protocol import DataProto

ROOM = 1 << 20
MESSAGES = [[{"role": "user", "content": text}] for text in "abc"]
CELLS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.floats(allow_nan=False),
    st.dictionaries(st.text(max_size=2), st.one_of(st.integers(), st.lists(st.none(), max_size=2)), max_size=2),
    st.tuples(st.integers(), st.text(max_size=2)),
)


def tensor(draw, rows):
    dtypes = [torch.float32, torch.float16, torch.int64, torch.bool, torch.uint16, torch.complex64]
    numbers = torch.arange(rows * 12).view(rows, 3, 4).to(draw(st.sampled_from(dtypes)))
    return draw(
        st.sampled_from([numbers, numbers[:, 0, 0], numbers.mT, numbers[:, ::2], numbers[:, :1].expand(-1, 5, -1)])
    )


def array(draw, rows):
    numbers = (
        np.arange(rows * 6).reshape(rows, 2, 3).astype(draw(st.sampled_from(["f4", ">i2", "U3", "S2", "?", "f2"])))
    )
    return draw(st.sampled_from([numbers, numbers[:, 0, 0], np.asfortranarray(numbers), numbers[:, :, ::-1]]))


def objects(draw, rows):
    return draw(st.lists(CELLS, min_size=rows, max_size=rows))


@st.composite
def plain_batches(draw):
    rows = draw(st.integers(1, 5))
    kinds = draw(st.lists(st.sampled_from([tensor, array, objects]), min_size=1, max_size=5))
    columns = {f"{kind.__name__} {number}": kind(draw, rows) for number, kind in enumerate(kinds)}
    tensors = {name: column for name, column in columns.items() if isinstance(column, torch.Tensor)}
    others = {name: column for name, column in columns.items() if name not in tensors}
    return DataProto.from_dict(tensors, others, draw(st.dictionaries(st.text(max_size=3), CELLS, max_size=3)))


@given(plain_batches(), st.booleans())
def test_plain_batches_arrive_as_by_stand_ins_private_and_writable(batch, with_table):
    if with_table:
        assert batch.batch is None or len(batch.batch) == len(batch)
    data = batch.__kapell_bytes__(ROOM)
    first, second = pickle.loads(data), pickle.loads(data)
    usual = pickle.loads(pickle.dumps(batch))
    assert first == usual == batch
    assert first.columns == usual.columns
    assert (first.batch is None) == (batch.batch is None)
    for name in first.columns:
        column, expected = first.column(name), usual.column(name)
        assert type(column) is type(expected)
        if isinstance(column, torch.Tensor):
            assert column.stride() == expected.stride()
            column.zero_()
        elif column.dtype != object:
            assert (column.dtype, column.strides) == (expected.dtype, expected.strides)
            column[...] = column[:1]
    assert second == batch


def nested():
    return torch.nested.nested_tensor([torch.ones(1), torch.ones(2), torch.ones(3)], layout=torch.jagged)


def twice():
    column = torch.arange(3)
    return {"a": column, "b": column}


def same_array(column):
    return DataProto(non_tensor_batch={"a": column, "b": column})


def cyclic():
    cell = [1]
    cell.append(cell)
    return [cell, 1, 2]


def deep():
    cell = [1]
    for _ in range(100_000):
        cell = [cell]
    return [cell, 1, 2]


class OwnBatch(DataProto):
    pass


class Text(str):
    __slots__ = ()


def padded():
    batch = DataProto.from_dict({"x": torch.arange(3)})
    batch.padding(1)
    return batch


def with_list():
    batch = DataProto.from_dict({"x": torch.arange(3)})
    batch.non_tensor_batch["y"] = [1, 2, 3]
    return batch


def with_attribute():
    batch = DataProto.from_dict({"x": torch.arange(3)})
    batch.note = "mine"
    return batch


OTHERS = {
    "gradient": lambda: DataProto.from_dict({"x": torch.ones(3, requires_grad=True)}),
    "half of a float": lambda: DataProto.from_dict({"x": torch.ones(3).bfloat16()}),
    "jagged": lambda: DataProto.from_dict({"x": nested()}),
    "sparse": lambda: DataProto.from_dict({"x": torch.eye(3).to_sparse()}),
    "conjugated": lambda: DataProto.from_dict({"x": torch.ones(3, dtype=torch.complex64).conj()}),
    "negated": lambda: DataProto.from_dict({"x": torch.ones(3, dtype=torch.complex64).conj().imag}),
    "parameter": lambda: DataProto.from_dict({"x": torch.nn.Parameter(torch.ones(3), requires_grad=False)}),
    "no rows": lambda: DataProto.from_dict({"x": torch.ones(0)}),
    "no numbers": lambda: DataProto.from_dict({"x": torch.ones(3, 0)}),
    "one tensor twice": lambda: DataProto.from_dict(twice()),
    "one array twice": lambda: same_array(np.arange(3)),
    "one object array twice": lambda: same_array(np.array(["a", None, 1], dtype=object)),
    "table of objects": lambda: DataProto(non_tensor_batch={"a": np.array([["a", None]] * 3, dtype=object)}),
    "dates": lambda: DataProto.from_dict(non_tensors={"a": np.arange(3).astype("M8[s]")}),
    "records": lambda: DataProto.from_dict(non_tensors={"a": np.zeros(3, dtype=[("x", "i4")])}),
    "memory map": lambda: DataProto.from_dict(non_tensors={"a": np.arange(3).view(np.memmap)}),
    "tensor in a cell": lambda: DataProto.from_dict(non_tensors={"a": [torch.ones(1), 1, 2]}),
    "array in a dict": lambda: DataProto.from_dict(non_tensors={"a": [{"x": np.ones(1)}, 1, 2]}),
    "class of its own": lambda: DataProto.from_dict(non_tensors={"a": [Text("a"), 1, 2]}),
    "key of its own": lambda: DataProto.from_dict(non_tensors={"a": [{Text("a"): 1}, 1, 2]}),
    "cell in itself": lambda: DataProto.from_dict(non_tensors={"a": cyclic()}),
    "deep cell": lambda: DataProto.from_dict(non_tensors={"a": deep()}),
    "function in meta_info": lambda: DataProto.from_dict({"x": torch.ones(3)}, meta_info={"f": len}),
    "tensor in meta_info": lambda: DataProto.from_dict({"x": torch.ones(3)}, meta_info={"f": [torch.ones(1)]}),
    "device": lambda: DataProto.from_dict({"x": torch.ones(3)}).to("cpu"),
    "padding": padded,
    "list": with_list,
    "attribute": with_attribute,
    "subclass": lambda: OwnBatch.from_dict({"x": torch.ones(3)}),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_any_other_batch_is_left_to_stand_ins(kind):
    batch = OTHERS[kind]()
    assert batch.__kapell_bytes__(ROOM) is None


@pytest.mark.parametrize("columns", [{"x": torch.arange(3)}, {"n": np.arange(3)}, {"cells": MESSAGES}])
def test_only_what_has_room_is_small(columns):
    batch = DataProto.from_single_dict(columns)
    assert batch.__kapell_bytes__(3 * 8 - 1) is None
    assert pickle.loads(batch.__kapell_bytes__(3 * 8)) == batch
