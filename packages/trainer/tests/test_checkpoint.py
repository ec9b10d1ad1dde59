"""Checkpoints appear whole or not at all, whenever the process is killed, and the right ones are kept."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kapell.trainer.checkpoint import BestCheckpoint, CheckpointStore, check_checkpoint
from kapell.trainer.durable_files import write_text
from kapell.trainer.state_files import CheckpointError


def save(store, step, metrics=(), text="state"):
    folder = store.begin(step)
    (folder / "actor").mkdir()
    files = {"actor/model.json": write_text(folder / "actor" / "model.json", f"{text} {step}")}
    files["data.json"] = write_text(folder / "data.json", str(step))
    return store.commit(step, files, dict(metrics))


def test_the_newest_are_kept_and_the_pointer_names_the_last(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (2, 4, 10):
        assert save(store, step) == tmp_path / f"global_step_{step}"
    assert store.steps() == [4, 10]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10"
    assert store.newest_good() == tmp_path / "global_step_10"
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("keep", [None, -1])
def test_all_are_kept_where_no_number_says_otherwise(tmp_path, keep):
    store = CheckpointStore(tmp_path, keep=keep)
    for step in (1, 2, 3):
        save(store, step)
    assert store.steps() == [1, 2, 3]


@pytest.mark.parametrize("keep", [0, -2])
def test_a_number_that_would_keep_none_is_refused(tmp_path, keep):
    with pytest.raises(ValueError, match=f"at least 1, or None or -1 for all; got {keep}"):
        CheckpointStore(tmp_path, keep=keep)


def test_steps_are_compared_as_numbers_and_other_files_stay(tmp_path):
    store = CheckpointStore(tmp_path / "new" / "run", keep=2)
    (tmp_path / "new" / "run" / "global_step_of_mine").mkdir(parents=True)
    for step in (900, 9000, 10000):
        save(store, step)
    assert store.steps() == [9000, 10000]
    assert (tmp_path / "new" / "run" / "global_step_of_mine").is_dir()


def test_a_save_that_fails_midway_leaves_the_checkpoint_before_it(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    folder = store.begin(2)
    (folder / "half").write_text("x")  # and here the disk is full
    assert store.newest_good() == store.folder_of(1)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    save(store, 2)
    assert store.steps() == [2]
    assert not (store.folder_of(2) / "half").exists()


@pytest.mark.parametrize(("mode", "best"), [("max", 4), ("min", 3)])
def test_the_best_by_a_validation_metric_stays_besides_and_of_equals_the_newest(tmp_path, mode, best):
    store = CheckpointStore(tmp_path, keep=1, best=BestCheckpoint(metric="val/exact_match", mode=mode))
    for step, value in enumerate([0.5, 0.1, 0.1, 0.5, 0.3], start=1):
        save(store, step, {"val/exact_match": value, "actor/lr": 1.0})
    save(store, 6, {"actor/lr": 1.0})
    save(store, 7, {"val/exact_match": float("nan")})
    assert store.steps() == [best, 7]
    assert (tmp_path / "best_checkpointed_iteration.txt").read_text() == str(best)
    assert check_checkpoint(store.folder_of(best)).validation.keys() == {"val/exact_match"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "actor/model.json").write_text("sta"), r"actor/model\.json: the file has 3 bytes"),
        (lambda folder: (folder / "actor/model.json").write_text("stote 3"), r"model\.json: the file's checksum is"),
        (lambda folder: (folder / "data.json").unlink(), r"data\.json: the file is missing from the checkpoint"),
        (lambda folder: (folder / "checkpoint.json").write_text("{"), r"checkpoint\.json: the file is damaged"),
        (lambda folder: (folder / "checkpoint.json").unlink(), "no checkpoint of Kapell's: it has no checkpoint.json"),
        (
            lambda folder: (folder / "checkpoint.json").write_text('{"format": "x", "version": 9}'),
            "the format is 'x' 9",
        ),
    ],
)
def test_a_damaged_or_foreign_checkpoint_is_named_and_passed_over_with_a_warning(tmp_path, caplog, damage, message):
    store = CheckpointStore(tmp_path)
    for step in (2, 3):
        save(store, step)
    damage(store.folder_of(3))
    with pytest.raises(CheckpointError, match=message):
        check_checkpoint(store.folder_of(3))
    assert store.newest_good() == store.folder_of(2)
    assert str(store.folder_of(3)) in caplog.text
    damage(store.folder_of(2))
    with pytest.raises(CheckpointError, match="none of its checkpoints can be used"):
        store.newest_good()


def test_later_checkpoints_are_set_aside_when_a_run_goes_on_from_an_earlier_one(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        save(store, step)
    store.begin(4)
    for _ in range(2):
        moved = store.continue_from(1)
        assert sorted(path.parent.name for path in moved) == ["set_aside", "set_aside"]
        assert store.steps() == [1]
        assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
        save(store, 2)
        save(store, 3)
    assert not list(tmp_path.glob(".global_step_*"))
    assert json.loads((tmp_path / "set_aside/global_step_3/checkpoint.json").read_text())["step"] == 3


_KILLED_AT_EACH_OPERATION = """
import os, pathlib, shutil, signal, sys
import test_checkpoint as t

ROOT = pathlib.Path(sys.argv[1])
WATCHED = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}
left = None

def count(event, args):
    global left
    if left is not None and event in WATCHED and str(ROOT) in str(args[0]):
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

sys.addaudithook(count)
os.fsync = lambda descriptor: None  # what is written outlives a killed process without it
moment, finished = 0, False
while not finished:
    shutil.rmtree(ROOT, ignore_errors=True)
    ROOT.mkdir()
    store = t.CheckpointStore(ROOT, keep=1, best=t.BestCheckpoint(metric="val/x"))
    t.save(store, 1, {"val/x": 0.5})
    t.save(store, 2, {"val/x": 0.1})
    child = os.fork()
    if child == 0:
        left = moment
        t.save(store, 3, {"val/x": 0.2})
        os._exit(0)
    finished = os.WIFEXITED(os.waitpid(child, 0)[1])
    good = store.newest_good()
    step = t.check_checkpoint(good).step
    assert step in (2, 3) and (good / "data.json").read_text() == str(step), step
    store.continue_from(step)
    t.save(store, 4, {"val/x": 0.0})
    assert store.steps() == [1, 4], store.steps()
    assert [path.name for path in ROOT.iterdir() if path.name.startswith(".")] == []
    moment += 1
assert step == 3
print(moment)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_a_kill_before_any_file_operation_of_saving_leaves_a_good_checkpoint_and_nothing_in_the_way(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _KILLED_AT_EACH_OPERATION, str(tmp_path / "run")],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20
