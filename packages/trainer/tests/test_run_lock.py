"""Two processes never train in one folder; reading it goes on, and a killed one leaves nothing in the way."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from kapell.trainer.cli import main
from kapell.trainer.run_folder import new_run_folder
from kapell.trainer.run_lock import RunFolderInUseError, lock_run_folder

REWARD = '''
import os, time

calls = 0

def waits(data_source, solution_str, ground_truth, extra_info):
    """The first validation and step pass; then the run stands until it may go on."""
    global calls
    calls += 1
    if calls > 8:
        open("standing", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.05)
    return 0.5
'''
ROWS = [{"data_source": "sums", "prompt": f"{n}+2", "reward_model": {"ground_truth": str(n + 2)}} for n in range(4)]
TRAIN = [
    "train",
    "backend=local",
    "trainer.default_local_dir=run",
    "trainer.n_gpus_per_node=1",
    "trainer.total_training_steps=2",
    "trainer.test_freq=2",
    "trainer.save_freq=1",
    "data.train_files=rows.jsonl",
    "data.val_files=rows.jsonl",
    "data.train_batch_size=2",
    "reward.custom_reward_function.path=waits.py",
    "reward.custom_reward_function.name=waits",
    "reward.timeout=600",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.model.hidden_size=16",
]
COMMAND = [sys.executable, "-c", "from kapell.trainer.cli import main; main()"]


@pytest.fixture
def standing(tmp_path, monkeypatch):
    """A training in another process, in the midst of its second step."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "waits.py").write_text(REWARD)
    with subprocess.Popen([*COMMAND, *TRAIN], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            while not (tmp_path / "standing").exists():
                assert process.poll() is None, process.stdout.read()
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills a process")
def test_a_second_training_is_refused_until_the_first_is_killed(standing, tmp_path, capsys):
    before = contents(tmp_path / "run")
    second = subprocess.run([*COMMAND, *TRAIN], capture_output=True, text=True)
    assert second.returncode == 2
    shown = re.sub(r"\s+", " ", second.stderr)
    assert f"{tmp_path / 'run'} is in use by process {standing.pid} on {socket.gethostname()}, since 2" in shown
    assert "wait for it, end it, or choose another trainer.default_local_dir" in shown
    assert contents(tmp_path / "run") == before

    main(["samples", "run"])
    main(["report", "run"])
    main(["export", "run", "exported"])
    main(["generate", "run", "1+2"])
    assert standing.poll() is None

    standing.send_signal(signal.SIGKILL)
    standing.wait()
    (tmp_path / "go").touch()
    capsys.readouterr()
    main(TRAIN)
    assert "going on from step 1" in re.sub(r"\s+", " ", capsys.readouterr().out)
    lines = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == [0, 1, 2]


def test_a_block_of_the_same_process_may_be_entered_twice_and_is_free_afterwards(tmp_path):
    check = "import sys; from kapell.trainer.run_lock import lock_run_folder\nwith lock_run_folder(sys.argv[1]): pass"

    def other():
        return subprocess.run([sys.executable, "-c", check, tmp_path], capture_output=True, text=True)

    with lock_run_folder(tmp_path):
        with lock_run_folder(tmp_path):
            pass
        refused = other()
    assert f"in use by process {os.getpid()} on" in refused.stderr
    assert other().returncode == 0, "the lock is free after its block"


def test_the_error_names_no_process_before_that_has_written_its_number(tmp_path):
    error = RunFolderInUseError(tmp_path, "another process")
    assert str(error).startswith(f"{tmp_path} is in use by another process; wait")


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len({new_run_folder(None) for _ in range(3)}) == 3
    assert new_run_folder("mine") == new_run_folder("mine")
