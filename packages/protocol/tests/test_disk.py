"""Batch files: complete, partly readable, and harmless whatever is in them."""

import json
import os
import pickle
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kapell.protocol import BatchFileError, DataProto, UnsafeValueError
from kapell.protocol import tensordict_utils as tu


@pytest.fixture
def path(tmp_path):
    return tmp_path / "batch.kapell"


def test_a_batch_comes_back_as_it_was(make_mixed, path):
    batch = make_mixed(7)
    batch.padding(2)
    batch.save(path)
    loaded = DataProto.load(path)
    assert loaded == batch
    assert torch.equal(loaded.padding_mask, batch.padding_mask)


CELLS = [None, True, 1, 2.5, float("inf"), "é", b"\x00\xff", (1, (2,)), {"a": [1]}, {1: "x", "!": 2}, {3, 4}, 1 + 2j]
CELLS += [np.float32(1.5), np.str_("s"), np.arange(3), np.empty((0, 2)), np.array([1, None], dtype=object)]
CELLS += [torch.ones(2, 3).bfloat16(), torch.tensor(5), frozenset({1})]


def test_objects_of_many_types_come_back_with_their_types(path):
    batch = DataProto.from_dict(non_tensors={"x": CELLS}, meta_info={"m": list(CELLS), "nan": float("nan")})
    batch.save(path)
    loaded = DataProto.load(path)
    assert loaded == batch
    assert list(map(type, loaded.non_tensor_batch["x"])) == list(map(type, CELLS))


@pytest.mark.parametrize(
    "batch", [DataProto(), DataProto(meta_info={"a": 1}), DataProto.from_dict({"x": torch.zeros(0, 2)})]
)
def test_empty_batches_come_back(batch, path):
    batch.save(path)
    assert DataProto.load(path) == batch


def test_entries_of_tensordicts_come_back(path):
    table = tu.get_tensordict({"x": torch.ones(2), "l": [[1], "a"]})
    DataProto(batch=table).save(path)
    tu.assert_tensordict_eq(DataProto.load(path).batch, table)


def test_columns_that_share_memory_can_be_saved(path):
    parent = torch.arange(12).view(3, 4)
    batch = DataProto.from_dict({"a": parent[:, :2], "b": parent[:, 1:], "c": parent})
    batch.save(path)
    assert DataProto.load(path) == batch


def test_columns_and_row_ranges_are_read_alone(make_mixed, path):
    batch = make_mixed(9)
    batch.save(path)
    for start, stop in ((0, 9), (2, 5), (4, 4), (0, 1), (8, 20), (-3, None)):
        assert DataProto.load(path, rows=slice(start, stop)) == batch[start:stop]
    part = DataProto.load(path, columns=["channels", "cells"], rows=slice(2, 4))
    assert part.columns == ("channels", "cells")
    assert part == batch[2:4].select(["channels"], ["cells"])


def test_asking_for_a_column_that_is_not_there_or_for_steps_says_so(make_mixed, path):
    make_mixed(3).save(path)
    with pytest.raises(KeyError, match="no column 'nope'"):
        DataProto.load(path, columns=["nope"])
    with pytest.raises(ValueError, match="without a step"):
        DataProto.load(path, rows=slice(0, 3, 2))
    with pytest.raises(FileNotFoundError):
        DataProto.load(path.with_name("missing"))


class Custom:
    """Only pickle can store it."""

    def __eq__(self, other):
        return isinstance(other, Custom)

    __hash__ = None


@pytest.mark.parametrize("place", ["cell", "nested", "meta"])
def test_unknown_objects_are_refused_by_name_and_the_old_file_stays(place, path):
    good = DataProto.from_dict(non_tensors={"x": [1]})
    good.save(path)
    cell = {"cell": Custom(), "nested": {"a": [Custom()]}, "meta": 1}[place]
    bad = DataProto.from_dict(non_tensors={"x": [cell]}, meta_info={"m": Custom()} if place == "meta" else {})
    with pytest.raises(UnsafeValueError, match="Custom"):
        bad.save(path)
    assert DataProto.load(path) == good
    assert os.listdir(path.parent) == [path.name]


def test_columns_that_do_not_fit_are_refused_when_they_are_saved(path):
    columns = {"'s' has 2 rows": np.arange(2.0), "'s' has 4 rows": np.arange(4.0), "'s' of non_tensor_batch": [1, 2, 3]}
    for message, column in columns.items():
        batch = DataProto.from_dict({"x": torch.arange(3)})
        batch.non_tensor_batch["s"] = column
        with pytest.raises((ValueError, TypeError), match=message):
            batch.save(path)
    batch = DataProto.from_dict({"x": torch.arange(3)})
    batch.non_tensor_batch["x"] = np.arange(3)
    with pytest.raises(ValueError, match="'x' is both"):
        batch.save(path)
    assert os.listdir(path.parent) == []


RECORDS = np.array([(1, 0.5), (2, 1.5), (3, 2.5)], dtype=[("a", "i4"), ("b", "f8")])
OPAQUE = {
    "records": RECORDS,
    "records of records": np.zeros(3, dtype=[("r", RECORDS.dtype, (2,))]),
    "records with objects": np.array([(1, "x"), (2, None), (3, [4])], dtype=[("a", "i4"), ("o", "O")]),
}
if hasattr(np.dtypes, "StringDType"):  # since numpy 2.0
    OPAQUE["text of any length"] = np.array(["a", "bcd", "ef"], dtype=np.dtypes.StringDType())


@pytest.mark.parametrize("kind", OPAQUE)
def test_arrays_whose_dtype_has_no_name_are_refused_or_pickled_whole(kind, path):
    batch = DataProto.from_dict(non_tensors={"x": OPAQUE[kind]})
    with pytest.raises(UnsafeValueError, match="column 'x' holds a numpy array of"):
        batch.save(path)
    batch.save(path, allow_pickle=True)
    with pytest.raises(UnsafeValueError, match="column 'x' holds a numpy array of"):
        DataProto.load(path)
    assert DataProto.load(path, allow_pickle=True) == batch
    assert DataProto.load(path, rows=slice(1, 3), allow_pickle=True) == batch[1:3]
    assert DataProto.load(path, rows=slice(1, 1), allow_pickle=True).column("x").dtype == OPAQUE[kind].dtype


CELLS_FOR_PICKLE = OPAQUE | {
    "record": RECORDS[0],
    "sparse": torch.eye(3).to_sparse(),
    "jagged": tu.nested_tensor_from_tensor_list([torch.ones(1), torch.ones(2)]),
    "nested": torch.nested.as_nested_tensor([torch.ones(1), torch.ones(2)]),
}


def plain(value):
    if isinstance(value, torch.Tensor):
        return [row.tolist() for row in value.unbind()] if value.is_nested else value.to_dense().tolist()
    return value.dtype, repr(value.tolist())  # records may hold arrays


@pytest.mark.parametrize("kind", CELLS_FOR_PICKLE)
@pytest.mark.parametrize("place", ["column 'x'", "meta_info"])
def test_cells_that_only_pickle_can_store_are_refused_with_their_place_or_pickled(place, kind, path):
    value = CELLS_FOR_PICKLE[kind]
    parts = {"non_tensors": {"x": [{"deep": value}]}} if place != "meta_info" else {"meta_info": {"m": [value]}}
    batch = DataProto.from_dict(**parts)
    with pytest.raises(UnsafeValueError, match=f"^{place} holds a "):
        batch.save(path)
    batch.save(path, allow_pickle=True)
    with pytest.raises(UnsafeValueError, match=f"^{place} holds a "):
        DataProto.load(path)
    loaded = DataProto.load(path, allow_pickle=True)
    again = loaded.meta_info["m"][0] if place == "meta_info" else loaded.non_tensor_batch["x"][0]["deep"]
    assert type(again) is type(value)
    assert plain(again) == plain(value)


@pytest.mark.parametrize("column", [torch.eye(3).to_sparse(), torch.ones(3, device="meta")])
def test_tensor_columns_that_are_more_than_their_numbers_are_refused_by_name(column, path):
    with pytest.raises(TypeError, match=r"column 'x' is a torch.float32 tensor with layout .*, which a batch file"):
        DataProto.from_dict({"x": column}).save(path)
    assert os.listdir(path.parent) == []


def test_pickle_must_be_asked_for_when_writing_and_when_reading(path):
    batch = DataProto.from_dict(non_tensors={"x": [Custom()]})
    batch.save(path, allow_pickle=True)
    with pytest.raises(UnsafeValueError, match="'x' holds a Custom"):
        DataProto.load(path)
    assert DataProto.load(path, allow_pickle=True) == batch


def test_verls_names_use_the_same_format(make_mixed, path):
    make_mixed(2).save_to_disk(path)
    assert DataProto.load_from_disk(path) == DataProto.load(path) == make_mixed(2)


def test_every_truncation_and_every_changed_byte_is_noticed(path):
    DataProto.from_dict({"x": torch.arange(2)}, {"y": ["a", [1]], "z": np.arange(2.0)}, {"s": 1}).save(path)
    good = path.read_bytes()
    for length in range(0, len(good), 7):
        path.write_bytes(good[:length])
        with pytest.raises(BatchFileError):
            DataProto.load(path)
    for position in range(0, len(good), 3):
        path.write_bytes(good[:position] + bytes([good[position] ^ 0x15]) + good[position + 1 :])
        with pytest.raises(BatchFileError):
            DataProto.load(path)


class Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_a_pickle_in_place_of_the_file_is_refused_and_runs_nothing(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for content in (pickle.dumps(Bomb()), struct.pack("<Q", 1 << 62), b"", b"\x00" * 64):
        path.write_bytes(content)
        with pytest.raises(BatchFileError):
            DataProto.load(path)
    torch.save({"x": Bomb()}, path)
    with pytest.raises(BatchFileError):
        DataProto.load(path)
    assert not (tmp_path / "exploded").exists()


def forged(path, change):
    """Change the manifest of a good file, with a right checksum, as an attacker would."""
    import zlib

    from safetensors import safe_open

    DataProto.from_dict(
        {"x": torch.arange(3), "j": tu.nested_tensor_from_tensor_list([torch.ones(1), torch.ones(2), torch.ones(3)])},
        {"o": ["a", "b", "c"], "n": np.arange(3)},
    ).save(path)
    with safe_open(path, framework="pt") as file:
        manifest = json.loads(file.metadata()["kapell"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(manifest, tensors)
    text = json.dumps(manifest)
    save_file(tensors, path, metadata={"kapell": text, "kapell.crc32": str(zlib.crc32(text.encode()))})


def bomb_text():
    import base64

    return base64.b64encode(pickle.dumps(Bomb())).decode()


FORGERIES = {
    "pickled meta": lambda m, t: m.update(meta_info={"!": "pickle", "type": "dict", "data": bomb_text()}),
    "absurd rows": lambda m, t: m.update(rows=1 << 60),
    "negative rows": lambda m, t: m.update(rows=-1),
    "text rows": lambda m, t: m.update(rows="3"),
    "other version": lambda m, t: m.update(version=99),
    "missing tensor": lambda m, t: t.pop("0.data"),
    "path as dtype": lambda m, t: m["columns"][0].update(dtype="../../etc/passwd"),
    "function as dtype": lambda m, t: m["columns"][0].update(dtype="load"),
    "object dtype": lambda m, t: m["columns"][3].update(dtype="|O"),
    "absurd row shape": lambda m, t: m["columns"][3].update(row_shape=[1 << 40, 1 << 40]),
    "unknown part": lambda m, t: m["columns"][0].update(part="__class__"),
    "unknown field": lambda m, t: m["columns"][0].update(evil=1),
    "other ragged dimension": lambda m, t: m["columns"][1].update(ragged=5),
    "cuts outside": lambda m, t: t["1.offsets"].__setitem__(3, 1 << 40),
    "cuts backwards": lambda m, t: t["1.offsets"].__setitem__(1, 5),
    "cuts negative": lambda m, t: t["1.offsets"].__setitem__(0, -5),
    "cells outside": lambda m, t: t["2.offsets"].__setitem__(3, 1 << 40),
    "no columns": lambda m, t: m.pop("columns"),
    "meta is a list": lambda m, t: m.update(meta_info=[1]),
    "absurd array": lambda m, t: m.update(
        meta_info={"a": {"!": "array", "dtype": "<f8", "shape": [1 << 50], "data": ""}}
    ),
    "object array": lambda m, t: m.update(meta_info={"a": {"!": "array", "dtype": "|O", "shape": [1], "data": "AAAA"}}),
    "unknown tag": lambda m, t: m.update(meta_info={"a": {"!": "eval", "data": "1"}}),
    "unhashable key": lambda m, t: m.update(meta_info={"a": {"!": "dict", "items": [[[1], 2]]}}),
}


@pytest.mark.parametrize("forgery", list(FORGERIES))
def test_a_hostile_file_is_a_clear_error_and_runs_nothing(forgery, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def change(manifest, tensors):
        FORGERIES[forgery](manifest, tensors)
        for entry in manifest.get("columns", []):  # an attacker makes the checksums fit
            entry["checksums"] = {}

    import kapell.protocol.disk.reading as reading

    monkeypatch.setattr(reading, "checksum", lambda tensor: None)
    forged(path, change)
    with pytest.raises((BatchFileError, UnsafeValueError)):
        DataProto.load(path)
    assert not (tmp_path / "exploded").exists()


def test_column_names_are_never_paths(path):
    names = ["../../etc/passwd", "/abs", "a\x00b", "", "__metadata__", "0.data"]
    batch = DataProto.from_dict({name: torch.ones(1) for name in names})
    batch.save(path)
    assert DataProto.load(path) == batch
    assert os.listdir(path.parent) == [path.name]


def test_an_ordinary_safetensors_file_is_refused(path):
    save_file({"x": torch.ones(1)}, path)
    with pytest.raises(BatchFileError, match="not one of a batch"):
        DataProto.load(path)


def test_file_errors_survive_pickling():
    for error in (BatchFileError("p", "damaged"), UnsafeValueError("column 'x'", "Custom")):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
