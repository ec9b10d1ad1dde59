"""What a configuration will do: the step and why, the roles and why, processes, stages, and keys without effect."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kapell.workergroup import BackendNotFoundError, load_backend

from .batch_sizes import update_plans
from .choices import estimator_reads
from .config import Config, RewardModelConfig, TrainerConfig
from .config_load import ResolvedConfig
from .devices import DeviceType
from .generations import generation_files
from .inactive import InactiveKey, inactive_settings
from .loggers import build_loggers
from .observe import ObservedStage
from .prepare import prepare
from .resume import find_resume
from .stand_in import StandInRun, observe_stand_in
from .updates import UpdatePlan

__all__ = ["PlannedPool", "PlannedRole", "RunPlan", "plan_run", "reason_of_step"]


@dataclass(frozen=True)
class PlannedRole:
    """A group of workers."""

    name: str
    """Its name among the roles."""
    worker: str
    """The class of its workers."""
    reason: str
    """Why it exists."""
    pool: str
    """The pool whose processes it lives in."""


@dataclass(frozen=True)
class PlannedPool:
    """Processes for one or more roles."""

    name: str
    """Its name here."""
    nodes: int
    """Machines."""
    processes_per_node: int
    """Worker processes on each."""
    device: DeviceType
    """Where their models are and compute."""
    gpus: int
    """GPUs that it asks its backend for: one per process on CUDA; under ``backend=local`` all share this process's."""

    @property
    def processes(self) -> int:
        """Worker processes in all."""
        return self.nodes * self.processes_per_node


@dataclass(frozen=True)
class RunPlan:
    """What `plan_run` found."""

    step: str
    """The step function, by import path."""
    summary: str
    """What it does, in its own words."""
    reason: str
    """Why it is this one."""
    roles: list[PlannedRole]
    """The groups of workers."""
    pools: list[PlannedPool]
    """The processes they live in."""
    sizes: dict[str, str]
    """Rows, mini-batches and lengths of a step, and the way of its columns."""
    stages: list[ObservedStage]
    """The stages of a step, in order."""
    inactive: list[InactiveKey]
    """The keys that were set and do nothing."""
    obstacle: str | None
    """Why a run would end before its workers start, in the run's own words: a checkpoint or a file that is not there, a
    logger or a backend that is not installed, a model that does not fit. None where nothing is in the way."""


def plan_run(resolved: ResolvedConfig) -> RunPlan:
    """The plan of a configuration. One step is run in small, so that roles and stages are those of the run itself.

    Checkpoint, loggers, data, rewards and models are then looked for and checked as a run does it; what is wrong with
    them is the plan's ``obstacle``. Raises ``ValueError`` for a configuration that cannot run whatever they are.
    """
    config = resolved.config
    seen = observe_stand_in(config)
    step = seen.step
    return RunPlan(
        step=f"{step.__module__}.{getattr(step, '__name__', step)}",
        summary=" ".join((step.__doc__ or "").split()),
        reason=reason_of_step(config),
        roles=_roles(config, seen),
        pools=_pools(config),
        sizes=_sizes(config),
        stages=seen.observer.stages,
        inactive=inactive_settings(resolved),
        obstacle=_obstacle(config),
    )


def _obstacle(config: Config) -> str | None:
    own = config.trainer.default_local_dir
    with tempfile.TemporaryDirectory() as folder:
        place = Path(own).expanduser() if own else Path(folder)
        try:
            generation_files(config.trainer, place, find_resume(config, place))
            build_loggers(config.trainer.logger, folder, project="", experiment="", config={})
            prepare(config, folder)
            load_backend(config.backend.name)  # a run that could be prepared asks for it next
        except (ValueError, OSError, BackendNotFoundError) as error:
            return str(error)
    return None


def reason_of_step(config: Config) -> str:
    """Why the step function is the one that it is."""
    estimator = config.algorithm.adv_estimator
    if config.use_critic:
        return f"algorithm.adv_estimator={estimator} needs values, so there is a critic"
    if estimator_reads(config, "reward_baselines"):
        return f"algorithm.adv_estimator={estimator} needs the score of a greedy response to each prompt"
    return f"algorithm.adv_estimator={estimator} needs no values, so there is no critic"


def _roles(config: Config, seen: StandInRun) -> list[PlannedRole]:
    own_pool = {"reward_model"} if config.reward.reward_model.enable_resource_pool else set()
    return [
        PlannedRole(role, worker, _REASONS[role](config), role if role in own_pool else "workers")
        for role, worker in seen.roles.items()
    ]


def _reason_of_policy(config: Config) -> str:
    policy = config.actor_rollout_ref
    rank = policy.model.lora_rank
    duties = [f"an adapter of rank {rank} on it is trained" if rank else "is trained"] + (
        ["samples"] if policy.rollout.name != "openai" else []
    )
    asking = [
        key
        for key, on in (
            ("algorithm.use_kl_in_reward=true", config.algorithm.use_kl_in_reward),
            ("actor_rollout_ref.actor.use_kl_loss=true", policy.actor.use_kl_loss),
        )
        if on
    ]
    if not asking:
        kept = "no KL penalty asks for a reference"
    else:
        kept = f"keeps {_reference_of(config)} as the reference for {' and '.join(asking)}"
    return f"the policy: {' and '.join(duties)}; {kept}"


def _reference_of(config: Config) -> str:
    policy = config.actor_rollout_ref
    if policy.ref.model.path is not None:
        return f"the model in {policy.ref.model.path}"
    return "itself without the adapter" if policy.model.lora_rank else "a frozen copy"


def _reason_of_critic(config: Config) -> str:
    rank = config.critic.model.lora_rank
    trained = f"; an adapter of rank {rank} and the head are trained" if rank else ""
    return f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs values{trained}"


_REASONS: Mapping[str, Callable[[Config], str]] = {
    "actor_rollout_ref": _reason_of_policy,
    "critic": _reason_of_critic,
    "rollout": lambda config: (
        f"actor_rollout_ref.rollout.name=openai: the server at {config.actor_rollout_ref.rollout.server.url} samples"
    ),
    "reward_model": lambda config: f"reward.reward_model.enable=true: {config.reward.reward_model.path} scores",
}


def _pools(config: Config) -> list[PlannedPool]:
    sizes: dict[str, TrainerConfig | RewardModelConfig] = {"workers": config.trainer}
    model = config.reward.reward_model
    if model.enable and model.enable_resource_pool:
        sizes["reward_model"] = model
    device = config.trainer.device
    asks = device == "cuda" and config.backend.name != "local"
    return [
        PlannedPool(name, size.nnodes, size.n_gpus_per_node, device, size.nnodes * size.n_gpus_per_node * asks)
        for name, size in sizes.items()
    ]


def _sizes(config: Config) -> dict[str, str]:
    data, plans, samples = config.data, update_plans(config), config.actor_rollout_ref.rollout.n
    rows = data.train_batch_size * samples
    sizes = {
        "rows": f"{data.train_batch_size} prompts x {samples} samples = {rows}",
        "rows per worker": f"{rows / _pools(config)[0].processes:g}",
        "longest row": f"{data.max_prompt_length} + {data.max_response_length} tokens",
        "updates of the policy": _updates(data.train_batch_size, plans.actor),
    }
    if config.use_critic:
        sizes["updates of the critic"] = _updates(data.train_batch_size, plans.critic)
    return sizes | {"columns": _DATA_PLANES[config.trainer.data_plane]}


_DATA_PLANES = {
    "value": "by way of the controller (trainer.data_plane=value)",
    "reference": "from worker to worker, those that the controller reads also to it (trainer.data_plane=reference)",
}


def _updates(prompts: int, plan: UpdatePlan) -> str:
    per_update = plan.prompts_per_mini_batch
    number = -(-prompts // per_update)
    most = "" if plan.target_kl is None or plan.epochs == 1 else " at most"
    return f"{plan.epochs} epochs x {number} mini-batches of {per_update} prompts = {plan.epochs * number}{most}"
