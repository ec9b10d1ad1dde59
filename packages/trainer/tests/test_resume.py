"""N steps, kill, resume and M steps are N+M steps, bit for bit; and what cannot be gone on with says why."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kapell.trainer.config_load import ConfigError, load_config
from kapell.trainer.generations import generation_files
from kapell.trainer.resume import find_resume
from kapell.trainer.state_files import CheckpointError

SCRIPT = Path(__file__).with_name("resume_runs.py")
resume_runs = SimpleNamespace(**runpy.run_path(str(SCRIPT)))

VARIANTS = {
    "lora": [
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.model.lora_rank=2",
        "critic.model.lora_rank=2",
    ],
    "grpo": ["trainer.max_ckpt_to_keep=1", "trainer.keep_best=val/exact_match", "actor_rollout_ref.actor.ppo_epochs=3"],
    "ppo": [
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=20",
        "trainer.n_gpus_per_node=2",
        "trainer.critic_warmup=1",
        "actor_rollout_ref.actor.policy_loss.loss_mode=noisy_loss:noisy",
    ],
}
MOMENTS = {
    "lora": [["line", 3, 0], ["save", 4, 25]],
    "grpo": [
        ["line", 3, 0],
        ["before", 4, 0],
        ["save", 4, 0],
        ["save", 4, 20],
        ["save", 4, 45],
        ["time", 4, 5],
    ],
    "ppo": [["before", 2, 0], ["save", 2, 5], ["line", 5, 0]],
}
MEASURED = ("timing_s/", "perf/throughput", "perf/time_per_step")


def records(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in lines]


def states(folder):
    """Checksums of weights, optimizers, random states, and of all else that a checkpoint holds but for seconds."""
    files = json.loads((folder / "checkpoint.json").read_text())["files"]
    return {name: record["crc32"] for name, record in files.items() if name not in ("trainer.json", "report.json")}


def times(folder):
    """When each file of a run was written, but for what a start writes before it looks at a checkpoint."""
    early = {"config.yaml", ".lock", ".lock.json"}
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name not in early}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with data, and files that need not outlive a crash of the machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    resume_runs.write_files(tmp_path)
    return tmp_path


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_killed_and_resumed_run_is_the_uninterrupted_one_bit_for_bit(here, variant):
    overrides, moments = VARIANTS[variant], MOMENTS[variant]
    arguments = [str(here), json.dumps(overrides), json.dumps(moments)]
    killed = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)
    assert killed.returncode == 0, killed.stdout + killed.stderr
    whole = here / "whole"
    resume_runs.run(whole, overrides)
    for number, moment in enumerate(moments):
        folder = here / f"run{number}"
        resume_runs.run(folder, overrides)
        assert records(folder) == records(whole), moment
        assert (folder / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes(), moment
        assert states(folder / "global_step_6") == states(whole / "global_step_6"), moment
        weights = [path / "model" / "model.safetensors" for path in (folder, whole)]
        assert weights[0].read_bytes() == weights[1].read_bytes(), moment
        shutil.rmtree(folder)


def damage(folder):
    weights = folder / "actor" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\1\2\3\4")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    here = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        resume_runs.write_files(here)
        resume_runs.run(here / "run", [])
    return here / "run"


@pytest.fixture
def trained(here, finished):
    """A run of six steps with checkpoints after 2, 4 and 6."""
    return shutil.copytree(finished, here / "run")


def test_a_damaged_checkpoint_is_passed_over_and_set_aside_and_the_run_comes_to_the_same_end(trained, caplog):
    expected, lines = states(trained / "global_step_6"), records(trained)
    damage(trained / "global_step_6")
    assert find_resume(resume_runs.config_of(), trained).step == 4
    resume_runs.run(trained, [])
    assert "global_step_6/actor/model.safetensors: the file's checksum is wrong" in caplog.text
    assert states(trained / "global_step_6") == expected
    assert records(trained) == lines
    assert (trained / "set_aside" / "global_step_6").is_dir()
    for step in (2, 4, 6):
        damage(trained / f"global_step_{step}")
    with pytest.raises(CheckpointError, match="none of its checkpoints can be used; move them away"):
        resume_runs.run(trained, [])


def test_a_run_may_be_longer_than_planned_and_says_what_changed(trained):
    longer = ["trainer.total_training_steps=8", "actor_rollout_ref.actor.optim.lr=0.001"]
    resume = find_resume(resume_runs.config_of(*longer), trained)
    assert str(resume).splitlines() == [
        f"from step 6, {trained / 'global_step_6'}",
        "  changed actor_rollout_ref.actor.optim.lr: 0.002 → 0.001",
        "  changed trainer.total_training_steps: 6 → 8",
    ]
    summary = resume_runs.run(trained, longer)
    assert summary.steps == 8
    lines = records(trained)
    assert [line["step"] for line in lines] == list(range(9))
    rates = [line["actor/lr"] for line in lines[5:]]
    assert rates[0] > rates[1] < rates[2] > rates[3]  # what was planned as the end is not the end
    assert 0.0 <= rates[3] < rates[2] < 0.001


def test_a_run_that_goes_on_keeps_its_own_responses_and_no_other_runs(here, tmp_path):
    kept = [f"trainer.rollout_data_dir={tmp_path / 'kept'}"]
    resume_runs.run(here / "run", kept)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "9.jsonl").touch()

    def files(*overrides):
        config = resume_runs.config_of(*overrides, "trainer.total_training_steps=8")
        return generation_files(config.trainer, here / "run", find_resume(config, here / "run"))

    assert files() is None
    assert files(*kept) is not None
    for others in ("trainer.validation_data_dir", "trainer.rollout_data_dir"):
        (tmp_path / others).mkdir()
        (tmp_path / others / "9.jsonl").touch()
        with pytest.raises(FileExistsError, match="holds the responses of another run already"):
            files(f"{others}={tmp_path / others}")


def test_another_run_begins_at_a_checkpoint_by_its_path(trained, here):
    path = ["trainer.resume_mode=path", "trainer.resume_from_path=run/global_step_4"]
    resume_runs.run(here / "branch", path)
    assert [line["step"] for line in records(here / "branch")] == [4, 5, 6]
    assert states(here / "branch" / "global_step_6") == states(trained / "global_step_6") | {
        "config.yaml": states(here / "branch" / "global_step_6")["config.yaml"]
    }
    with pytest.raises(FileExistsError, match="branch holds a run already, and not the one of run/global_step_4"):
        resume_runs.run(here / "branch", path)
    resume_runs.run(trained, path)
    assert [line["step"] for line in records(trained)] == list(range(7))
    assert (trained / "set_aside" / "global_step_6").is_dir()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.resume_mode=disable"], "run holds a run already; choose another trainer.default_local_dir or"),
        (["trainer.resume_mode=path", "trainer.resume_from_path=nowhere"], "nowhere: there is no such folder"),
        (["trainer.resume_mode=path", "trainer.resume_from_path=."], "this is no checkpoint of Kapell's"),
        (
            ["actor_rollout_ref.model.hidden_size=32"],
            r"model.safetensors: \d+ of its \d+ tensors do not fit the model of this run, the first is \S+ with shape",
        ),
        (["actor_rollout_ref.model.num_hidden_layers=2"], "its state does not fit this model and optimizer"),
        (["algorithm.adv_estimator=gae"], "it has no critic, which algorithm.adv_estimator=gae needs; it was saved"),
        (
            ["algorithm.use_kl_in_reward=true", "trainer.seed=3"],
            "trainer.seed was 1 and is 3, which makes another reference model",
        ),
        (
            ["algorithm.use_kl_in_reward=true", "actor_rollout_ref.ref.model.path=run/model"],
            "ref.model.path was None and is run/model, which makes another reference model",
        ),
        (
            ["actor_rollout_ref.actor.optim.optimizer=SGD"],
            "optim.optimizer was AdamW and is SGD, and the moments of one optimizer are not those of another",
        ),
        (["data.train_files=fewer.jsonl"], "the position 0 is one in 7 training prompts, here are 2; give the data"),
        (["data.train_files=other.jsonl"], "huggingface: its tokenizer has"),
    ],
)
def test_what_a_checkpoint_does_not_fit_is_refused_and_nothing_is_changed(trained, here, overrides, message):
    rows = (here / "train.jsonl").read_text().splitlines(keepends=True)
    (here / "other.jsonl").write_text("".join(rows).replace('"0+2"', '"0+2xyz"'))
    (here / "fewer.jsonl").write_text(rows[0].replace('"0+2"', '"0+12345678"') + rows[1])  # has the same characters
    before = times(trained)
    with pytest.raises((CheckpointError, FileExistsError), match=message):
        resume_runs.run(trained, overrides)
    assert times(trained) == before


def test_a_run_without_checkpoints_is_not_written_over(here):
    resume_runs.run(here / "run", ["trainer.save_freq=-1"])
    with pytest.raises(FileExistsError, match=r"without a checkpoint to go on from \(its trainer.save_freq was -1\)"):
        resume_runs.run(here / "run", [])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.resume_mode=path"], "resume_mode=path and resume_from_path need each other, got path and None"),
        (["trainer.resume_from_path=x"], "need each other, got auto and x"),
        (["trainer.keep_best=val/x"], "keep_best=val/x needs save_freq and test_freq, got -1 and 10"),
        (["trainer.max_ckpt_to_keep=0"], "max_ckpt_to_keep must be above 0"),
        (["trainer.max_actor_ckpt_to_keep=1"], "max_ckpt_to_keep"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=overrides)
