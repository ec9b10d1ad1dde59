"""One seeded training on every backend and number of workers, and one that must learn."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch

from kapell.trainer.build import prepare, train
from kapell.trainer.config_load import load_config
from kapell.trainer.hooks import Hook
from kapell.workergroup import load_backend

_SMALL = [
    "trainer.total_training_steps=3",
    "trainer.test_freq=3",
    "data.train_batch_size=6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
]
_VARIANTS = {
    "grpo": [],
    "ppo": [
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "actor_rollout_ref.actor.use_kl_loss=true",
    ],
}
_TIMES = ("timing_s/", "perf/")


class Recorder(Hook):
    def __init__(self):
        self.records = []

    def on_metrics(self, step, metrics):
        self.records.append({"step": step, **metrics})


def run(folder, *overrides):
    torch.set_num_threads(1)
    recorder = Recorder()
    train(prepare(load_config(overrides=overrides).config, folder), folder, hooks=[recorder])
    return recorder.records


def numbers(record):
    return {name: value for name, value in record.items() if not name.startswith(_TIMES)}


@pytest.fixture(scope="module", params=_VARIANTS)
def variant(request):
    return _VARIANTS[request.param]


@pytest.fixture(scope="module")
def reference(variant, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    return run(folder, *_SMALL, *variant, "backend=local", "trainer.n_gpus_per_node=1")


@pytest.fixture(scope="module")
def one_ray():
    """A Ray that all runs of this module join, since starting one takes longer than a run."""
    with load_backend("ray")() as backend:
        backend.start()
        yield


@pytest.mark.parametrize(
    "where",
    [
        ["backend=local", "trainer.n_gpus_per_node=2"],
        ["backend=local", "trainer.n_gpus_per_node=3", "backend.options.mode=threads"],
        ["backend=ray", "trainer.n_gpus_per_node=1"],
        ["backend=ray", "trainer.n_gpus_per_node=2"],
        ["backend=ray", "trainer.n_gpus_per_node=2", "trainer.data_plane=reference"],
    ],
    ids=["local-2", "local-threads-3", "ray-1", "ray-2", "ray-2-by-reference"],
)
def test_backend_and_number_of_workers_change_no_number(tmp_path, variant, reference, where, request):
    if "backend=ray" in where:
        request.getfixturevalue("one_ray")
    records = run(tmp_path, *_SMALL, *variant, *where)
    assert len(records) == len(reference) == 4
    for record, expected in zip(records, reference, strict=True):
        assert numbers(record) == pytest.approx(numbers(expected), abs=1e-5, rel=1e-5)


def test_models_in_parts_change_no_number(tmp_path, variant, reference, one_ray):
    in_parts = ["actor_rollout_ref.actor.strategy=fsdp2", "critic.strategy=fsdp2"]
    records = run(tmp_path, *_SMALL, *variant, "backend=ray", "trainer.n_gpus_per_node=2", *in_parts)
    assert len(records) == len(reference)
    for record, expected in zip(records, reference, strict=True):
        assert numbers(record) == pytest.approx(numbers(expected), abs=1e-5, rel=1e-5)
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_a_model_learns_to_reverse_digits_it_has_not_seen(tmp_path, estimator):
    records = run(
        tmp_path,
        "backend=local",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=50",
        "trainer.test_freq=50",
        f"algorithm.adv_estimator={estimator}",
    )
    assert records[0]["val/exact_match"] < 0.05
    assert records[-1]["val/exact_match"] >= 0.9
    assert max(record.get("training/rollout_log_probs_diff_max", 0.0) for record in records) < 1e-5


def processes_with(mark):
    """Ids of the processes that inherited an environment variable."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if mark.encode() in environment and state != "Z":
                found.append(int(entry.name))
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
@pytest.mark.parametrize("whole_group", [False, True], ids=["to-the-command", "to-the-terminals-group"])
def test_ctrl_c_ends_every_process_of_a_run(tmp_path, whole_group, request):
    mark = f"KAPELL_TEST_RUN={uuid.uuid4()}"
    name, _, value = mark.partition("=")
    process = subprocess.Popen(
        [
            Path(sys.executable).with_name("kapell"),
            "train",
            "trainer.default_local_dir=run",
            "trainer.total_training_steps=10000",
            "backend.options.address=local",  # not the Ray of this module's other tests
        ],
        cwd=tmp_path,
        env={**os.environ, name: value},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    request.addfinalizer(process.kill)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 2):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.5)
    assert len(processes_with(mark)) > 3
    if whole_group:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Run ended early" in output
    assert (tmp_path / "run" / "curves.png").exists()
    assert all(json.loads(line) for line in metrics.read_text().splitlines())
    deadline = time.monotonic() + 20
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left
