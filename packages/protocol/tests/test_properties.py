"""What must hold for every size, dtype and mix of columns."""

import copy
import pickle
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kapell.protocol import DataProto
from kapell.protocol import tensordict_utils as tu

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint8, torch.uint16]
CELLS = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.floats(), st.lists(st.integers(), max_size=2))


def dense(draw, rows):
    shape = (rows, *draw(st.lists(st.integers(0, 3), max_size=2)))
    numbers = torch.arange(int(np.prod(shape))).reshape(shape) % 100
    return numbers.to(draw(st.sampled_from(DTYPES)))


def jagged(draw, rows):
    ragged = draw(st.integers(1, 2))
    lengths = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    values = torch.arange(2.0 * int(offsets[-1])).view((2, -1) if ragged == 2 else (-1, 2))
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets, jagged_dim=ragged)


def objects(draw, rows):
    return draw(st.lists(CELLS, min_size=rows, max_size=rows))


def numbers(draw, rows):
    return np.arange(rows * 2).reshape(rows, 2).astype(draw(st.sampled_from(["f4", "i2", "U3", "M8[s]", "?"])))


@st.composite
def batches(draw, rows=None, tag=""):
    rows = draw(st.integers(0, 7)) if rows is None else rows
    kinds = draw(st.lists(st.sampled_from([dense, jagged, objects, numbers]), min_size=1, max_size=4))
    columns = {f"{tag}{kind.__name__}{number}": kind(draw, rows) for number, kind in enumerate(kinds)}
    tensors = {name: column for name, column in columns.items() if isinstance(column, torch.Tensor)}
    others = {name: column for name, column in columns.items() if name not in tensors}
    return DataProto.from_dict(tensors, others, {"step": draw(st.integers())})


@given(batches(), st.integers(1, 9))
def test_joining_chunks_gives_the_batch(batch, pieces):
    chunks = batch.chunk(pieces)
    assert len(chunks) == pieces
    assert max(map(len, chunks)) - min(map(len, chunks)) <= 1
    assert DataProto.concat(chunks) == batch


@given(batches(), st.integers(1, 9))
def test_joining_splits_gives_the_batch(batch, size):
    assert DataProto.concat(batch.split(size)) == batch


@given(batches(), st.data())
def test_cutting_at_all_bounds_is_cutting_at_each(batch, data):
    bounds = sorted(data.draw(st.lists(st.integers(0, len(batch)), max_size=6)))
    pieces = batch.split_at(bounds)
    assert pieces == [batch.slice(start, stop) for start, stop in pairwise(bounds)]
    assert sum(map(len, pieces)) == (bounds[-1] - bounds[0] if bounds else 0)


@given(batches(), st.randoms())
def test_a_permutation_and_its_inverse_give_the_batch(batch, random):
    order = list(range(len(batch)))
    random.shuffle(order)
    assert batch[order][np.argsort(np.array(order, dtype=np.int64))] == batch


@given(batches(), st.integers(1, 4))
def test_every_nth_row_of_a_repeated_batch_is_the_batch(batch, times):
    assert batch.repeat(times)[::times] == batch
    assert batch.repeat(times, interleave=False)[: len(batch)] == batch


@given(batches(), st.data())
def test_slicing_is_indexing_by_the_same_range(batch, data):
    part = data.draw(st.slices(len(batch)))
    assert batch[part] == batch[range(*part.indices(len(batch)))]


@given(batches(), st.data())
def test_a_mask_is_the_index_of_its_true_entries(batch, data):
    mask = data.draw(st.lists(st.booleans(), min_size=len(batch), max_size=len(batch)))
    assert batch[mask] == batch[[row for row, wanted in enumerate(mask) if wanted]]


@given(batches(), st.sampled_from([2, 4, 5]))
def test_pickling_gives_the_batch(batch, protocol):
    assert pickle.loads(pickle.dumps(batch, protocol=protocol)) == batch


@given(batches())
def test_pickling_out_of_band_gives_the_batch_in_memory_of_its_own(batch):
    buffers = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    arrived = pickle.loads(data, buffers=buffers)
    assert arrived == batch
    before = batch.clone()
    for name in arrived.columns:
        column = arrived.column(name)
        if isinstance(column, torch.Tensor):
            (column.values() if column.is_nested else column).zero_()
        elif column.dtype != object:
            column[...] = np.zeros(1, dtype=column.dtype)[0]
    assert batch == before


@given(st.integers(0, 5), st.data())
def test_union_is_associative(rows, data):
    first, second, third = (data.draw(batches(rows, tag=tag)) for tag in "abc")
    for batch in (first, second, third):
        batch.meta_info = {}
    assert (first | second) | third == first | (second | third)


@given(batches())
def test_a_tensordict_and_back_gives_the_batch(batch):
    assert DataProto.from_tensordict(batch.to_tensordict()) == batch


@given(batches(), st.integers(1, 5))
def test_plain_tensordicts_are_cut_and_joined_by_the_same_rules(batch, pieces):
    table = batch.to_tensordict()
    chunks = tu.chunk_tensordict(table, pieces)
    assert [len(chunk) for chunk in chunks] == [len(chunk) for chunk in batch.chunk(pieces)]
    assert DataProto.from_tensordict(tu.concat_tensordict(chunks)) == batch


@given(batches(), st.integers(1, 4))
def test_padding_can_be_taken_away(batch, extra):
    padded = batch[:]
    if len(batch):
        padded.padding(extra)
        assert padded.padding_mask.sum() == extra
    assert DataProto.concat(padded.chunk(3)).without_padding() == batch


@given(batches())
def test_no_operation_changes_its_input(batch):
    before = copy.deepcopy(batch)
    half = batch[: len(batch) // 2]
    half.meta_info["metrics"] = {"loss": [1.0]}
    results = [
        batch.chunk(2),
        batch.split(2),
        batch.repeat(2),
        batch.sample_level_repeat([2] * len(batch)),
        batch[::-1],
        DataProto.concat([half, batch]),
        batch.union(batch),
        batch.select(deepcopy=True),
        batch.rename(batch.columns[0], "renamed"),
        batch.to("cpu"),
        batch.to_tensordict(),
        list(batch.make_iterator(2, 1, seed=0, dataloader_kwargs={"shuffle": True})),
        pickle.dumps(batch, protocol=5),
        batch.describe(),
        batch.column_bytes(),
        batch.padding_mask,
    ]
    assert len(results) == 16
    assert batch == before
