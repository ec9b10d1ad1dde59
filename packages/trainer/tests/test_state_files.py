"""States come back as they were, whatever they hold, and a file that is not whole says so."""

import math
import random

import numpy as np
import pytest
import torch

from kapell.trainer.random_states import random_states, set_random_states
from kapell.trainer.state_files import CheckpointError, read_state, write_state

STATE = {
    "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(2, 3)}, 1: {"step": torch.tensor(3.0)}},
    "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "foreach": None, "fused": True, "params": [0, 1]}],
    "bf16": torch.randn(4).bfloat16(),
    "array": np.array([0, 1, 2**32 - 1], dtype=np.uint32),
    "longer": np.array([2**64 - 1], dtype=np.uint64),
    "numpy": np.float32(0.5),
    "odd": {(1, "a"): "β", "__kind__": "tensor"},
    "inf": math.inf,
    "none": torch.zeros(0, 4),
}


def test_a_nested_state_comes_back_with_its_types_and_bits(tmp_path):
    write_state(tmp_path, "it", STATE)
    back = read_state(tmp_path, "it")
    assert list(back) == list(STATE)
    assert torch.equal(back["state"][0]["exp_avg"], STATE["state"][0]["exp_avg"])
    assert torch.equal(back["bf16"].view(torch.int16), STATE["bf16"].view(torch.int16))
    assert back["array"].dtype == np.uint32
    assert back["array"].tolist() == [0, 1, 2**32 - 1]
    assert back["longer"].tolist() == [2**64 - 1]
    assert back["none"].shape == (0, 4)
    for name in ("param_groups", "odd", "inf", "numpy"):
        assert back[name] == STATE[name]


def test_tied_weights_are_written_once_and_views_of_one_memory_apart(tmp_path):
    weight = torch.randn(100, 100)
    state = {"embed": weight, "head": weight, "row": weight[3], "column": weight[:, 3]}
    records = write_state(tmp_path, "tied", state)
    assert records["tied.safetensors"].num_bytes < 4 * 100 * 103
    back = read_state(tmp_path, "tied")
    assert back["embed"] is back["head"]
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_random_numbers_go_on_where_they_stood(tmp_path):
    random.gauss(0, 1)
    np.random.standard_normal()  # leaves a second number behind in the state
    write_state(tmp_path, "random", random_states())

    def draw():
        return random.gauss(0, 1), np.random.standard_normal(), torch.rand(3).tolist()

    expected = draw()
    draw()
    set_random_states(read_state(tmp_path, "random"))
    assert draw() == expected


def test_what_no_file_can_hold_is_refused_with_its_place(tmp_path):
    with pytest.raises(TypeError, match="cannot save a/1/f: a builtin_function_or_method is no number"):
        write_state(tmp_path, "it", {"a": [0, {"f": len}]})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "it.json").unlink(), "it.json: the file is missing"),
        (lambda folder: (folder / "it.json").write_text('{"a'), "it.json: the file is damaged"),
        (lambda folder: (folder / "it.safetensors").write_bytes(b"junk"), "it.safetensors: the file is damaged"),
        (lambda folder: (folder / "it.safetensors").unlink(), "it.safetensors: the file has no tensor 'state/0/step'"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, damage, message):
    write_state(tmp_path, "it", STATE)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        read_state(tmp_path, "it")
