import importlib.util
import pickle
import sys
import threading
from collections import OrderedDict
from types import MethodType

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from kapell.protocol import DataProto
from kapell.ray_backend import parallel_put
from kapell.ray_backend.importing import can_workers_import
from kapell.ray_backend.shipping import Shipped, pack, unpack


class Holder:
    def __init__(self, **values):
        self.__dict__.update(values)


def travelled(value):
    """The value as another process would read it: buffers lie in memory that must not be written."""
    head, private, buffers = pack(value)
    return unpack(head, private, [memoryview(bytes(buffer.raw())) for buffer in buffers])


@pytest.mark.parametrize(
    "value",
    [
        np.arange(10.0),
        np.array(["a", None, [1]], dtype=object),
        torch.arange(10),
        torch.arange(12).view(3, 4).t(),
        torch.ones(3, dtype=torch.bfloat16),
        np.empty((0, 3)),
    ],
)
def test_arrays_and_tensors_travel_and_are_writable(value):
    back = travelled(value)
    assert type(back) is type(value)
    assert back.dtype == value.dtype
    assert back.tolist() == value.tolist()
    back[...] = back  # refused by memory that is not private


def test_tensors_inside_own_objects_travel_out_of_band():
    holder = Holder(tensor=torch.ones(100_000), nested={"array": [np.ones(100_000)]})
    packed = pack(holder)
    assert len(packed.head) < 5_000
    back = travelled(holder)
    back.tensor.add_(1)
    back.nested["array"][0][:] = 2
    assert holder.tensor.sum() == 100_000


def test_batches_travel():
    table = TensorDict({"a": torch.arange(4)}, batch_size=[4])
    assert travelled(table)["a"].tolist() == [0, 1, 2, 3]
    batch = DataProto.from_dict({"a": torch.arange(4)}, {"s": np.arange(4.0)}, meta_info={"step": 1})
    back = travelled(batch)
    back.batch["a"] += 1
    back.non_tensor_batch["s"][0] = 9
    assert batch.batch["a"].tolist() == [0, 1, 2, 3]
    assert batch.non_tensor_batch["s"].tolist() == [0, 1, 2, 3]
    assert back.meta_info["step"] == 1


def test_a_slice_sends_only_its_rows():
    whole = torch.zeros(1000, 1000)
    assert pack(whole[:1]).nbytes < 10_000
    assert pack(np.zeros((1000, 1000))[5:6]).nbytes < 20_000


def test_the_stand_in_reads_as_the_value_itself():
    buffers = []
    stream = pickle.dumps(Shipped(pack({"x": np.arange(5)})), protocol=5, buffer_callback=buffers.append)
    back = pickle.loads(stream, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert back["x"].tolist() == [0, 1, 2, 3, 4]
    back["x"][0] = 7


class Unhashable:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is type(self) and other.value == self.value

    __hash__ = None

    def method(self):
        return self.value

    @classmethod
    def made(cls):
        return cls(0)


@pytest.mark.parametrize("kind", ["cells", "meta", "list"])
@pytest.mark.parametrize(
    "value",
    [Unhashable([1]), Unhashable(1).method, Unhashable.made, Unhashable, len, OrderedDict(a=1)],
    ids=repr,
)
def test_values_of_the_users_travel_inside_plain_ones(kind, value):
    cells = np.empty(1, dtype=object)
    cells[0] = value
    whole = {"cells": DataProto(non_tensor_batch={"c": cells}), "meta": DataProto(meta_info={"m": value})}
    back = travelled(whole.get(kind, [value, "text"]))
    arrived = {"cells": lambda: back.non_tensor_batch["c"][0], "meta": lambda: back.meta_info["m"]}
    found = arrived.get(kind, lambda: back[0])()
    assert type(found) is type(value)
    if isinstance(value, MethodType):
        found, value = found(), value()
    assert found == value


def test_closures_and_lambdas_travel_by_value():
    factor = 3
    assert travelled(lambda x: x * factor)(2) == 6


def test_a_file_loaded_under_a_made_up_name_travels_by_value(tmp_path):
    (tmp_path / "reward.py").write_text("SCALE = 2\n\ndef reward(x):\n    return SCALE * x\n")
    spec = importlib.util.spec_from_file_location("made_up_reward", tmp_path / "reward.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["made_up_reward"] = module
    try:
        spec.loader.exec_module(module)
        assert not can_workers_import("made_up_reward")
        packed = pack(module.reward)
    finally:
        del sys.modules["made_up_reward"]
    assert unpack(*packed)(4) == 8


def test_installed_modules_are_known_to_workers():
    for name in ("json", "numpy.linalg", "torch.nn", "kapell.workergroup", "kapell.ray_backend.shipping"):
        assert can_workers_import(name), name


def test_what_cannot_be_pickled_is_refused_where_it_is_sent():
    with pytest.raises(TypeError, match=r"(?i)pickle"):
        pack({"lock": threading.Lock()})


def test_nothing_to_put_is_refused():
    with pytest.raises(ValueError, match="empty"):
        parallel_put([])


@pytest.mark.parametrize("kind", ["tensor", "array", "TensorDict", "DataProto", "list", "own object"])
def test_what_is_sent_read_only_arrives_as_views_that_raise_when_written(kind):
    array, tensor = np.arange(4.0), torch.arange(4)
    value = {
        "tensor": tensor,
        "array": array,
        "TensorDict": TensorDict({"a": tensor}, batch_size=[4]),
        "DataProto": DataProto.from_dict({"a": tensor}, {"s": array}),
        "list": [tensor, {"x": array}],
        "own object": Holder(tensor=tensor, array=array),
    }[kind]
    packed = pack(value, read_only=True)
    store = [memoryview(bytes(buffer.raw())) for buffer in packed.buffers]
    kept = [bytes(memory) for memory in store]
    back = unpack(packed.head, packed.private, store)
    arrived = {
        "tensor": lambda: [back],
        "array": lambda: [back],
        "TensorDict": lambda: [back["a"]],
        "DataProto": lambda: [back.batch["a"], back.non_tensor_batch["s"]],
        "list": lambda: [back[0], back[1]["x"]],
        "own object": lambda: [back.tensor, back.array],
    }[kind]()
    for column in arrived:
        assert column.tolist() == [0, 1, 2, 3]
        with pytest.raises((RuntimeError, ValueError), match="read-only"):
            column += 1
    assert [bytes(memory) for memory in store] == kept
