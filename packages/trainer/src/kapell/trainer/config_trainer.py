"""The configuration of the run itself: how long, on how many workers, what it leaves, and what runs the workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from .config_checks import require_not_negative, require_positive
from .config_conditions import AllOf, Conditions, Contains, Given, Needs

__all__ = ["BackendConfig", "TrainerConfig"]

_DEFAULT_STEPS = 60  # of a run that says nothing of its length
_TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")  # the values of `trainer.logger` that are experiment trackers


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The run: how long, on how many workers, where its results go."""

    total_training_steps: int | None = None
    """Steps in total. Null: as many as ``total_epochs`` makes, or 60 without that."""
    total_epochs: int | None = None
    """Passes over the prompts; the run ends after them, or after ``total_training_steps`` where that comes first."""
    test_freq: int = 10
    """Validate every N steps and after the last; -1 for never."""
    val_before_train: bool = True
    """Validate before the first step too."""
    save_freq: int = -1
    """Write a checkpoint every N steps and after the last; -1 for never."""
    resume_mode: Literal["auto", "disable", "path"] = "auto"
    """``auto`` goes on from the newest good checkpoint where ``default_local_dir`` holds one, ``path`` from
    ``resume_from_path``; ``disable`` refuses a folder that holds a run."""
    resume_from_path: str | None = None
    """With ``resume_mode=path``: the checkpoint, a folder ``global_step_N`` of this run or of another."""
    max_ckpt_to_keep: int | None = None
    """How many of the newest checkpoints stay. Null or -1: all."""
    keep_best: str | None = None
    """The validation metric, such as ``val/exact_match``, whose best checkpoint stays besides and is named in
    ``best_checkpointed_iteration.txt``; only steps that are both saved and validated count."""
    keep_best_mode: Literal["max", "min"] = "max"
    """Whether more or less of it is better."""
    critic_warmup: int = 0
    """First N steps in which only the critic learns. Without a critic the policy learns from the first one."""
    nnodes: int = 1
    """Machines."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where models are and compute. With ``cuda`` each worker process has a GPU of its own; under ``backend=local`` the
    workers take those that this process sees, in turn."""
    n_gpus_per_node: int = 2
    """Worker processes on each machine (verl's name, whatever the device)."""
    torch_threads: int = 1
    """Threads of torch in each worker."""
    data_plane: Literal["value", "reference"] = "value"
    """How the columns that workers make get to those that read them: ``value`` by way of the controller; with
    ``reference`` they stay with the worker that made them, and the controller fetches only what it reads itself."""
    balance_batch: bool = True
    """Give each worker rows with as many tokens in all as the others, where they are computed on at once."""
    seed: int = 1
    """Seed of weights, sampling and order."""
    default_local_dir: str | None = None
    """The run's folder. Null: ``runs/<date and time>``."""
    logger: list[Literal["console", "file", "tensorboard", "wandb", "mlflow", "trackio"]] = field(
        default_factory=lambda: ["console", "file"]
    )
    """Where progress goes: a live display, ``metrics.jsonl`` with the curves, and experiment trackers, each of which
    needs the extra of its name."""
    log_val_generations: int = 0
    """Responses of each validation that the live display shows; ``samples.jsonl`` and ``kapell samples`` have all."""
    rollout_data_dir: str | None = None
    """Folder for the responses of training, one JSONL file per step; in the run's own unless absolute. Null: they are
    not kept."""
    validation_data_dir: str | None = None
    """Folder for those of validation, another one. Null: they are in the run's ``samples.jsonl`` only."""
    project_name: str = "kapell"
    """The run's project in experiment trackers."""
    experiment_name: str | None = None
    """Its name there. Null: the name of its folder."""
    strict_hooks: bool = False
    """A logger that fails ends the run, where otherwise it is reported once."""

    active_if: ClassVar[Conditions] = {
        "val_before_train": Given(".test_freq"),
        "resume_from_path": Needs(".resume_mode", ("path",)),
        "max_ckpt_to_keep": Given(".save_freq"),
        "keep_best_mode": Given(".keep_best"),
        "critic_warmup": Needs("algorithm.adv_estimator", ("gae",)),
        "validation_data_dir": Given(".test_freq"),
        "log_val_generations": AllOf((Given(".test_freq"), Contains(".logger", ("console",)))),
        **dict.fromkeys(("project_name", "experiment_name"), Contains(".logger", _TRACKERS)),
    }

    def __post_init__(self) -> None:
        require_positive(self, "total_epochs", "nnodes", "n_gpus_per_node", "torch_threads")
        if self.max_ckpt_to_keep != -1:
            require_positive(self, "max_ckpt_to_keep")
        require_not_negative(self, "total_training_steps", "critic_warmup", "log_val_generations", "seed")
        if self.rollout_data_dir and self.rollout_data_dir == self.validation_data_dir:
            raise ValueError(
                f"rollout_data_dir and validation_data_dir are both {self.rollout_data_dir!r}, and the files of a step "
                "have the same name in both; give them two folders"
            )
        for name in ("test_freq", "save_freq"):
            if getattr(self, name) < -1 or getattr(self, name) == 0:
                raise ValueError(f"{name} must be -1 (never) or a number of steps, got {getattr(self, name)}")
        if (self.resume_mode == "path") != (self.resume_from_path is not None):
            raise ValueError(
                f"resume_mode=path and resume_from_path need each other, got {self.resume_mode} and "
                f"{self.resume_from_path}"
            )
        if self.keep_best is not None and min(self.save_freq, self.test_freq) < 1:
            raise ValueError(
                f"keep_best={self.keep_best} needs save_freq and test_freq, got {self.save_freq} and {self.test_freq}"
            )

    @property
    def planned_steps(self) -> int | None:
        """Steps in total, as far as the data need not be known; None where ``total_epochs`` alone decides."""
        if self.total_training_steps is None and self.total_epochs is None:
            return _DEFAULT_STEPS
        return self.total_training_steps


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """What runs the workers. ``backend=local`` is short for ``backend.name=local``."""

    shorthand: ClassVar[str] = "name"

    name: str = "ray"
    """``ray``, ``local`` (all workers in this process) or any installed backend."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the backend, such as an address."""
