"""Small runs that are killed, for test_resume.py: ``python resume_runs.py FOLDER OVERRIDES MOMENTS``.

Each moment is a run of its own, in a folder of its own, in a forked process. The first argument of a moment says when
it is killed: ``line`` after a step's line in metrics.jsonl, ``before`` it, ``save`` at a file operation of saving the
step, ``time`` so many milliseconds into saving it.
"""

import functools
import json
import os
import random
import signal
import sys
import traceback
from pathlib import Path

import numpy as np
import torch

from kapell.trainer.build import prepare, train
from kapell.trainer.config_load import load_config
from kapell.trainer.hooks import Hook
from kapell.trainer.resume import find_resume
from kapell.trainer.run_checkpoint import config_to_yaml
from kapell.trainer.run_folder import RunFiles

ROWS = [{"data_source": "sums", "prompt": f"{n}+2", "reward_model": {"ground_truth": str(n + 2)}} for n in range(7)]
REWARD = '''
import random
import numpy as np

def score(data_source, solution_str, ground_truth, extra_info):
    """Part of it is drawn by chance, so that it follows the driver's random states."""
    return {"score": len(set(solution_str)) / 4 + random.random() / 9 + np.random.rand() / 9}
'''
NOISY_LOSS = '''
import torch
from kapell.trainer.algorithms import TokenLosses

def noisy(log_probs, old_log_probs, advantages):
    """Drops out tokens by chance, so that it follows the workers' random states."""
    kept = torch.rand_like(log_probs) > 0.3
    return TokenLosses(kept * -advantages * (log_probs - old_log_probs).exp())
'''
SMALL = [
    "backend=local",
    "data.train_files=train.jsonl",
    "data.val_files=val.jsonl",
    "data.train_batch_size=3",
    "reward.custom_reward_function.path=reward.py",
    "reward.custom_reward_function.name=score",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.model.hidden_size=16",
    "actor_rollout_ref.model.num_hidden_layers=1",
    "trainer.n_gpus_per_node=1",
    "trainer.total_training_steps=6",
    "trainer.test_freq=2",
    "trainer.save_freq=2",
]
WATCHED = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}


def write_files(folder):
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:2]))
    (folder / "reward.py").write_text(REWARD)
    (folder / "noisy_loss.py").write_text(NOISY_LOSS)


@functools.cache
def config_of(*overrides):
    return load_config(overrides=[*SMALL, *overrides]).config


def run(folder, overrides, *, before=(), after=()):
    """A run in ``folder``, which goes on where there is a checkpoint."""
    folder.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    prepared = prepare(config_of(*overrides), folder)
    resume = find_resume(prepared.config, folder)
    (folder / "config.yaml").write_text(config_to_yaml(prepared.config))  # as ``kapell train`` does
    return train(prepared, folder, hooks=[*before, Files(folder), *after], resume=resume)


class Files(RunFiles):
    """Without the curves, which take longer than the run."""

    def on_end(self, summary):
        pass


class KilledAt(Hook):
    def __init__(self, step):
        self.step = step

    def on_metrics(self, step, metrics):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class KilledWhileSaving(Hook):
    """At the file operation ``left`` after the begin of saving, or after ``milliseconds``."""

    def __init__(self, folder, step, *, left=None, milliseconds=None):
        self.folder, self.step, self.left, self.milliseconds = folder, step, left, milliseconds
        self.saving = False
        sys.addaudithook(self.audit)

    def on_save(self, step):
        self.saving = step == self.step
        if self.saving and self.milliseconds is not None:
            # The timer's signal is SIGALRM, whose default action ends the process at once, as SIGKILL does.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self.milliseconds / 1000)

    def audit(self, event, args):
        if self.left is not None and self.saving and event in WATCHED and str(self.folder) in str(args[0]):
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1


def killed_run(folder, overrides, kind, step, amount):
    match kind:
        case "line":
            run(folder, overrides, after=[KilledAt(step)])
        case "before":
            run(folder, overrides, before=[KilledAt(step)])
        case "save":
            run(folder, overrides, before=[KilledWhileSaving(folder, step, left=amount)])
        case "time":
            run(folder, overrides, before=[KilledWhileSaving(folder, step, milliseconds=amount)])


def main():
    root, overrides, moments = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    os.fsync = lambda descriptor: None  # what is written outlives a killed process without it
    os.chdir(root)
    sys.path.insert(0, str(root))
    config_of(*overrides)
    for number, moment in enumerate(moments):
        child = os.fork()
        if child == 0:
            try:
                killed_run(root / f"run{number}", overrides, *moment)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status), f"the run was not killed at {moment}"


if __name__ == "__main__":
    main()
