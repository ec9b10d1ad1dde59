"""From a configuration to a run: checks and loads what needs no workers, then starts them and trains."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from kapell.workergroup import ClassWithInitArgs, WorkerGroup, colocate, load_backend

from .algorithms import Aggregation, KLKind, get_advantage_estimator, get_policy_loss, options_of
from .config import ActorConfig, Config, CriticConfig, SamplingConfig
from .data import PromptDataset, PromptLoader
from .hooks import Hook, RunSummary
from .models import build_policy, build_value_model, load_config_of, new_model_config
from .objectives import PolicyObjective, ValueObjective
from .openai_engine import OpenAIEngine
from .reward_terms import build_reward
from .rows import PromptRow, read_rows
from .sampler import Sampling
from .scoring import Scorer
from .served_rollout import RolloutServerWorker, ServedRollout
from .stages import AdaptiveKL, Stages, UpdatePlan
from .steps import group_step, ppo_step
from .tasks import reverse_digits
from .tokenizer import build_character_tokenizer, load_tokenizer
from .trainer import Trainer
from .workers import ActorRolloutRefWorker, CriticWorker

__all__ = ["Prepared", "prepare", "train"]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a run needs besides its workers, all loaded and checked."""

    config: Config
    """The configuration."""
    tokenizer: PreTrainedTokenizerBase
    """The tokenizer."""
    train: PromptDataset
    """Training prompts."""
    val: PromptDataset | None
    """Validation prompts."""
    loader: PromptLoader
    """Their order."""
    scorer: Scorer
    """The reward."""
    build_policy: Callable[[], PreTrainedModel]
    """Makes the policy, in each worker."""
    build_critic: Callable[[], PreTrainedModel]
    """Makes the value model, in each worker."""
    total_steps: int
    """Steps of the run."""


def prepare(config: Config, folder: str | Path) -> Prepared:
    """Read the data, the reward function and the model's configuration, and check that they fit together.

    Nothing is started; every mistake that can be seen beforehand is an error here that names its place. The bundled
    task's files are written into ``folder``.
    """
    _check_names(config)
    data, model_folder = config.data, config.actor_rollout_ref.model.path
    if model_folder is not None:
        load_config_of(model_folder)  # a wrong path is the model's, before it is the tokenizer's
    seed = config.trainer.seed if data.seed is None else data.seed
    train_files: Sequence[str | Path] = data.train_files
    val_files: Sequence[str | Path] = data.val_files
    if not train_files:
        train_file, val_file = reverse_digits.write_files(Path(folder) / "data", seed=seed)
        train_files, val_files = [train_file], [val_file]
    read = partial(read_rows, prompt_key=data.prompt_key, data_source_key=data.reward_fn_key)
    train_rows, val_rows = read(train_files), read(val_files)
    tokenizer = _tokenizer(config, [*train_rows, *val_rows])
    encode = partial(
        PromptDataset,
        tokenizer=tokenizer,
        max_prompt_length=data.max_prompt_length,
        filter_overlong=data.filter_overlong_prompts,
    )
    train = encode(train_rows)
    loader = PromptLoader(len(train), batch_size=data.train_batch_size, shuffle=data.shuffle, seed=seed)
    total_steps = config.trainer.total_training_steps
    if config.trainer.total_epochs is not None:
        total_steps = min(total_steps, loader.steps_in(config.trainer.total_epochs))
    sources = list(dict.fromkeys(row.data_source for row in [*train_rows, *val_rows]))
    policy, critic = _model_builders(config, tokenizer)
    return Prepared(
        config=config,
        tokenizer=tokenizer,
        train=train,
        val=encode(val_rows) if val_rows else None,
        loader=loader,
        scorer=Scorer(reward=build_reward(config.reward, sources), tokenizer=tokenizer),
        build_policy=policy,
        build_critic=critic,
        total_steps=total_steps,
    )


def train(prepared: Prepared, folder: str | Path, *, hooks: Sequence[Hook] = ()) -> RunSummary:
    """Start the workers, train, save the model into ``folder/model`` and end the workers, whatever happens."""
    trainer_config, rollout = prepared.config.trainer, prepared.config.actor_rollout_ref.rollout
    with _worker_groups(prepared) as groups:
        policy = groups["actor_rollout_ref"]

        def save(name: str) -> None:
            policy.save_model(str(Path(folder) / name))
            prepared.tokenizer.save_pretrained(Path(folder) / name)

        summary = Trainer(
            ppo_step if prepared.config.use_critic else group_step,
            _stages(prepared, groups, folder),
            prepared.train,
            prepared.loader,
            total_steps=prepared.total_steps,
            val=prepared.val,
            val_sampling=_sampling(rollout.val_kwargs),
            val_samples=rollout.val_kwargs.n,
            val_batch_size=prepared.config.data.val_batch_size,
            val_before_train=trainer_config.val_before_train,
            test_freq=trainer_config.test_freq,
            save=lambda step: save(f"global_step_{step}/model"),
            save_freq=trainer_config.save_freq,
            hooks=hooks,
            strict_hooks=trainer_config.strict_hooks,
        ).fit()
        save("model")
    return summary


def _check_names(config: Config) -> None:
    """Refuse names that the algorithms do not know, before anything is loaded."""
    actor = config.actor_rollout_ref.actor
    for key, look_up, name in (
        ("algorithm.adv_estimator", get_advantage_estimator, config.algorithm.adv_estimator),
        ("algorithm.kl_penalty", KLKind, config.algorithm.kl_penalty),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", get_policy_loss, actor.policy_loss.loss_mode),
        ("actor_rollout_ref.actor.loss_agg_mode", Aggregation, actor.loss_agg_mode),
        ("actor_rollout_ref.actor.kl_loss_type", KLKind, actor.kl_loss_type),
        ("critic.loss_agg_mode", Aggregation, config.critic.loss_agg_mode),
    ):
        try:
            look_up(name)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{key}: {error}") from None


def _tokenizer(config: Config, rows: Sequence[PromptRow]) -> PreTrainedTokenizerBase:
    folder = config.data.tokenizer or config.actor_rollout_ref.model.path
    if folder is not None:
        return load_tokenizer(Path(folder).expanduser())
    texts = [text for row in rows for text in (row.text, str(row.ground_truth))]
    return build_character_tokenizer(set().union(*map(set, texts)))


def _model_builders(
    config: Config, tokenizer: PreTrainedTokenizerBase
) -> tuple[Callable[[], PreTrainedModel], Callable[[], PreTrainedModel]]:
    model, data = config.actor_rollout_ref.model, config.data
    if model.path is None:
        hf_config: PreTrainedConfig = new_model_config(
            tokenizer,
            model_type=model.model_type,
            hidden_size=model.hidden_size,
            num_hidden_layers=model.num_hidden_layers,
            num_attention_heads=model.num_attention_heads,
            max_length=data.max_prompt_length + data.max_response_length,
            override_config=model.override_config,
        )
    else:
        hf_config = load_config_of(model.path, model.override_config)
        if len(tokenizer) > hf_config.vocab_size:
            raise ValueError(
                f"the tokenizer has {len(tokenizer)} tokens, the model in {model.path} only {hf_config.vocab_size}"
            )
    seed, critic_path = config.trainer.seed, config.critic.model.path
    critic_config = load_config_of(critic_path) if critic_path else hf_config
    return (
        partial(build_policy, hf_config, folder=model.path, seed=seed),
        partial(build_value_model, critic_config, folder=critic_path or model.path, seed=seed + 1),
    )


@contextmanager
def _worker_groups(prepared: Prepared) -> Generator[Mapping[str, WorkerGroup]]:
    """The roles of the run, all in the same processes, which end with the block."""
    config, threads = prepared.config, prepared.config.trainer.torch_threads
    tokenizer = prepared.tokenizer
    actor = config.actor_rollout_ref.actor
    policy = ClassWithInitArgs(
        ActorRolloutRefWorker,
        prepared.build_policy,
        actor.optim,
        eos_token_ids=_eos_token_ids(prepared),
        pad_token_id=tokenizer.pad_token_id,
        with_reference=config.use_reference,
        grad_clip=actor.grad_clip,
        total_optimizer_steps=_optimizer_steps(prepared, _plan(actor, actor)),
        torch_threads=threads,
    )
    roles = {"actor_rollout_ref": policy}
    if config.use_critic:
        roles["critic"] = ClassWithInitArgs(
            CriticWorker,
            prepared.build_critic,
            config.critic.optim,
            grad_clip=config.critic.grad_clip,
            total_optimizer_steps=_optimizer_steps(prepared, _plan(config.critic, actor)),
            torch_threads=threads,
        )
    if config.actor_rollout_ref.rollout.name == "openai":
        roles["rollout"] = ClassWithInitArgs(RolloutServerWorker, _openai_engine(prepared))
    # Threads that spin while they wait would take the cores from the other workers.
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    with load_backend(config.backend.name)(**config.backend.options) as backend:
        pool = backend.resource_pool([config.trainer.n_gpus_per_node] * config.trainer.nnodes)
        group = backend.worker_group(pool, colocate(roles), role="workers", worker_env=environment)
        yield group.spawn(roles)


def _openai_engine(prepared: Prepared) -> OpenAIEngine:
    return OpenAIEngine(
        **vars(prepared.config.actor_rollout_ref.rollout.server),
        eos_token_ids=_eos_token_ids(prepared),
        pad_token_id=prepared.tokenizer.pad_token_id,
    )


def _eos_token_ids(prepared: Prepared) -> tuple[int, ...]:
    return (prepared.tokenizer.eos_token_id,)


def _plan(role: ActorConfig | CriticConfig, actor: ActorConfig) -> UpdatePlan:
    return UpdatePlan(
        epochs=role.ppo_epochs,
        prompts_per_mini_batch=role.ppo_mini_batch_size or actor.ppo_mini_batch_size,
        micro_batch_size=role.ppo_micro_batch_size_per_gpu,
        shuffle=role.shuffle,
    )


def _optimizer_steps(prepared: Prepared, plan: UpdatePlan) -> int:
    per_epoch = -(-prepared.config.data.train_batch_size // plan.prompts_per_mini_batch)
    return prepared.total_steps * plan.epochs * per_epoch


def _sampling(config: SamplingConfig) -> Sampling:
    return Sampling(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p, do_sample=config.do_sample)


def _served_rollout(config: Config, groups: Mapping[str, WorkerGroup], folder: str | Path) -> ServedRollout | None:
    if "rollout" not in groups:
        return None
    reload = config.actor_rollout_ref.rollout.server.reload_path is not None
    weights = Path(folder) / "rollout_weights"
    return ServedRollout(groups["actor_rollout_ref"], groups["rollout"], weights, reload=reload)


def _stages(prepared: Prepared, groups: Mapping[str, WorkerGroup], folder: str | Path) -> Stages:
    config = prepared.config
    algorithm, actor, rollout = config.algorithm, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    length = config.data.max_response_length
    known_options = options_of(get_advantage_estimator(algorithm.adv_estimator))
    options: dict[str, Any] = {"gamma": algorithm.gamma, "lam": algorithm.lam, "norm_scope": algorithm.norm_scope}
    options["component_weights"] = [term.weight for term in prepared.scorer.reward.terms]
    return Stages(
        policy=groups["actor_rollout_ref"],
        critic=groups.get("critic"),
        rollout=_served_rollout(config, groups, folder),
        scorer=prepared.scorer,
        samples_per_prompt=rollout.n,
        sampling=_sampling(rollout),
        max_response_length=length,
        adv_estimator=algorithm.adv_estimator,
        adv_options={name: value for name, value in options.items() if name in known_options and value is not None},
        policy_objective=PolicyObjective(
            loss_mode=actor.policy_loss.loss_mode,
            options={
                "clip_ratio": actor.clip_ratio,
                "clip_ratio_low": actor.clip_ratio_low,
                "clip_ratio_high": actor.clip_ratio_high,
                "clip_ratio_c": actor.clip_ratio_c,
            },
            loss_agg_mode=actor.loss_agg_mode,
            temperature=rollout.temperature,
            entropy_coeff=actor.entropy_coeff,
            kl_coef=actor.kl_loss_coef if actor.use_kl_loss else None,
            kl_kind=actor.kl_loss_type,
            max_response_length=length,
        ),
        policy_plan=_plan(actor, actor),
        value_objective=ValueObjective(
            cliprange_value=config.critic.cliprange_value,
            loss_agg_mode=config.critic.loss_agg_mode,
            max_response_length=length,
        ),
        value_plan=_plan(config.critic, actor),
        use_reference=config.use_reference,
        kl_in_reward=AdaptiveKL(algorithm.kl_ctrl) if algorithm.use_kl_in_reward else None,
        kl_penalty=algorithm.kl_penalty,
        log_prob_micro_batch_size=rollout.log_prob_micro_batch_size_per_gpu,
        value_micro_batch_size=config.critic.forward_micro_batch_size_per_gpu,
        critic_warmup=config.trainer.critic_warmup,
        seed=config.trainer.seed,
    )
