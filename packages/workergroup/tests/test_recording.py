import json
import os

import numpy as np
import pytest

from kapell.decorators import Dispatch, register
from kapell.workergroup import (
    ClassWithInitArgs,
    LocalWorkerGroup,
    Recorder,
    ResourcePool,
    Worker,
    register_codec,
    replay,
)


class Summer(Worker):
    def __init__(self, scale=1):
        super().__init__()
        self.scale = scale

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def sums(self, rows, config=None):
        if -1 in rows:
            raise ValueError(f"rank {self.rank} of {self.world_size} got {rows}")
        return [self.scale * sum(rows) + int(os.environ["LOCAL_RANK"])]


class ArrayCodec:
    name = "test-arrays"

    def handles(self, value):
        return isinstance(value, np.ndarray)

    def save(self, value, path):
        with path.open("wb") as file:
            np.save(file, value, allow_pickle=False)

    def load(self, path):
        return np.load(path, allow_pickle=False)


register_codec(ArrayCodec())


@pytest.fixture
def group():
    with LocalWorkerGroup(ResourcePool([1, 2]), ClassWithInitArgs(Summer, scale=10), role="summer") as group:
        yield group


def test_a_recorded_call_is_rerun_for_one_rank(group, tmp_path):
    config = {"a": (1, 2.5, None), 3: [True, float("inf")]}
    expected = group.sums.options(record=tmp_path)(list(range(6)), config=config)
    paths = sorted(tmp_path.glob("*.json"))
    assert [path.name for path in paths] == [f"summer-sums-000001-rank{rank}.json" for rank in range(3)]
    again = [replay(path, ClassWithInitArgs(Summer, scale=10)) for path in paths]
    assert [value for part in again for value in part] == expected
    assert "RANK" not in os.environ


def test_record_says_the_rank_context(group, tmp_path):
    group.sums.options(record=str(tmp_path))([1, 2, 3])
    data = json.loads((tmp_path / "summer-sums-000001-rank2.json").read_text())
    assert (data["role"], data["method"], data["rank"], data["world_size"]) == ("summer", "sums", 2, 3)
    assert data["environment"]["LOCAL_RANK"] == "1"
    assert data["args"] == [{"list": [3]}]


def test_only_calls_that_ask_for_it_are_recorded(group, tmp_path):
    group.sums.options(record=tmp_path)([1, 2, 3])
    group.sums([1, 2, 3])
    assert len(list(tmp_path.glob("*.json"))) == 3


def test_a_failing_call_fails_alike_in_the_replay(group, tmp_path):
    with pytest.raises(ExceptionGroup):
        group.sums.options(record=tmp_path)([1, 2, -1])
    with pytest.raises(ValueError, match=r"rank 2 of 3 got \[-1\]"):
        replay(tmp_path / "summer-sums-000001-rank2.json", Summer)


def test_values_beyond_plain_data_go_through_their_codec(group, tmp_path):
    group.sums.options(record=tmp_path)(np.arange(6))
    assert replay(tmp_path / "summer-sums-000001-rank1.json", Summer) == [5]


def test_what_no_codec_handles_is_refused_by_name_unless_pickle_is_allowed(group, tmp_path):
    with pytest.raises(TypeError, match=r"argument 'config'\['x'\] of type builtins.complex without pickle"):
        group.sums.options(record=tmp_path)([1, 2, 3], config={"x": 1j})
    group.sums.options(record=Recorder(tmp_path / "pickled", allow_pickle=True))([1, 2, 3], config={"x": 1j})
    path = tmp_path / "pickled" / "summer-sums-000001-rank0.json"
    with pytest.raises(ValueError, match="allow_pickle=True if you trust it"):
        replay(path, Summer)
    assert replay(path, Summer, allow_pickle=True) == [1]


def test_a_record_cannot_point_outside_its_folder(group, tmp_path):
    group.sums.options(record=tmp_path)(np.arange(6))
    path = tmp_path / "summer-sums-000001-rank0.json"
    path.write_text(path.read_text().replace("summer-sums-000001-rank0-0.bin", "../secret.bin"))
    with pytest.raises(ValueError, match="outside its own folder"):
        replay(path, Summer)


def test_a_codec_name_is_taken_once():
    with pytest.raises(ValueError, match="test-arrays"):
        register_codec(ArrayCodec())
