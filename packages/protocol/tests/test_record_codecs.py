from importlib.metadata import entry_points

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st
from tensordict import TensorDict

from kapell.protocol import DataProto

CODECS = {point.name: point.load()() for point in entry_points(group="kapell.codecs")}


def stored(value, path):
    [codec] = [codec for codec in CODECS.values() if codec.handles(value)]
    codec.save(value, path)
    return codec.load(path)


def test_each_codec_is_offered_under_its_own_name():
    assert {name: codec.name for name, codec in CODECS.items()} == {name: name for name in CODECS}
    assert {"batch", "tensordict", "tensor", "array"} <= CODECS.keys()


def test_a_batch_with_texts_and_jagged_columns_comes_back(tmp_path):
    lengths = torch.nested.nested_tensor([torch.arange(2), torch.arange(5)], layout=torch.jagged)
    batch = DataProto.from_dict({"x": torch.eye(2), "ids": lengths}, {"text": ["a", "bc"]}, {"step": 3})
    again = stored(batch, tmp_path / "batch.bin")
    assert torch.equal(again.batch["x"], torch.eye(2))
    assert [row.tolist() for row in again.batch["ids"].unbind()] == [[0, 1], [0, 1, 2, 3, 4]]
    assert again.non_tensor_batch["text"].tolist() == ["a", "bc"]
    assert again.meta_info == {"step": 3}


def test_a_batch_with_objects_that_only_pickle_holds_is_refused_by_name(tmp_path):
    batch = DataProto.from_dict(non_tensors={"lock": [object()]})
    with pytest.raises(TypeError, match="lock"):
        stored(batch, tmp_path / "batch.bin")


def test_a_tensordict_comes_back(tmp_path):
    again = stored(TensorDict({"x": torch.arange(6).view(3, 2)}, batch_size=[3]), tmp_path / "dict.bin")
    assert again.batch_size == (3,)
    assert again["x"].tolist() == [[0, 1], [2, 3], [4, 5]]


@given(
    shape=np_st.array_shapes(min_dims=0, max_dims=3, min_side=0),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8]),
)
def test_a_tensor_of_any_shape_comes_back(tmp_path_factory, shape, dtype):
    tensor = (torch.randn(shape) * 5).to(dtype).T if len(shape) == 2 else (torch.randn(shape) * 5).to(dtype)
    again = stored(tensor.requires_grad_(dtype.is_floating_point), tmp_path_factory.mktemp("tensor") / "value.bin")
    assert again.dtype is dtype
    assert torch.equal(again, tensor)
    assert not again.requires_grad


@given(np_st.arrays(st.sampled_from(["f4", "f8", "i8", "u1", "?"]), np_st.array_shapes(min_dims=0, min_side=0)))
def test_an_array_of_any_shape_comes_back(tmp_path_factory, array):
    again = stored(array, tmp_path_factory.mktemp("array") / "value.bin")
    assert again.dtype == array.dtype
    np.testing.assert_array_equal(again, array)


def test_what_safetensors_cannot_hold_is_left_to_others():
    sparse = torch.eye(2).to_sparse()
    for value in (sparse, np.array(["a"]), np.array([None]), np.zeros(2, dtype="c8"), "text"):
        assert not any(codec.handles(value) for codec in CODECS.values())
