import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from kapell.protocol import DataProto
from kapell.ray_backend.borrowing import borrowing, is_borrowable
from kapell.ray_backend.shipping import Shipped, pack

BATCH = DataProto.from_dict(
    {"a": torch.arange(4)}, {"s": np.arange(4.0), "t": list("abcd")}, meta_info={"n": {"m": [1]}}
)


def read(value):
    """What another process reads, and the memory that it reads from."""
    buffers = []
    shipped = Shipped(pack(value), borrowable=is_borrowable(value))
    stream = pickle.dumps(shipped, protocol=5, buffer_callback=buffers.append)
    store = [bytes(buffer.raw()) for buffer in buffers]
    return pickle.loads(stream, buffers=store)


@pytest.mark.parametrize(
    "value", [BATCH, torch.arange(3), np.arange(3), TensorDict({"a": torch.arange(3)}, batch_size=[3])]
)
def test_plain_columns_can_be_borrowed(value):
    assert is_borrowable(value)


@pytest.mark.parametrize(
    "value",
    [
        [np.arange(3)],
        np.array([np.arange(2), None], dtype=object),
        torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged),
        DataProto.from_dict({"a": torch.arange(2)}, {"s": [np.arange(2), np.arange(3)]}),
        DataProto.from_dict({"a": torch.arange(2)}, meta_info={"weights": np.arange(2)}),
        TensorDict({"a": torch.arange(3)}, batch_size=[]),
        np.zeros(()),
    ],
)
def test_what_joining_would_not_copy_is_not_borrowed(value):
    assert not is_borrowable(value)


def test_borrowed_parts_refuse_writing_and_their_join_is_ordinary():
    with borrowing():
        parts = [read(BATCH), read(BATCH)]
    with pytest.raises(RuntimeError, match="read-only"):
        parts[0].batch["a"].add_(1)
    joined = DataProto.concat(parts)
    assert type(joined.batch["a"]) is torch.Tensor
    joined.batch["a"] += 1
    joined.non_tensor_batch["s"] += 1
    assert joined.batch["a"].tolist() == [1, 2, 3, 4] * 2
    assert parts[0].batch["a"].tolist() == [0, 1, 2, 3]
    assert joined.non_tensor_batch["t"].tolist() == list("abcdabcd")


def test_outside_of_borrowing_the_same_value_arrives_private():
    back = read(BATCH)
    back.batch["a"].add_(1)
    back.non_tensor_batch["s"] += 1


def test_a_batch_of_read_only_tensors_can_be_borrowed_as_the_ordinary_one_that_arrives():
    with borrowing():
        shown = read(BATCH)
    assert is_borrowable(shown)
    back = read(shown)
    back.batch["a"].add_(1)
    assert shown.batch["a"].tolist() == [0, 1, 2, 3]
