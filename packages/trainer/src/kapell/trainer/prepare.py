"""From a configuration to what a run needs besides its workers, loaded and checked."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kapell.workergroup import load_backend

from .batch_sizes import check_token_budgets
from .choices import check_algorithms
from .config import Config
from .data import DataError, PromptDataset, PromptLoader
from .models import LongestRow, end_token_ids, load_config_of
from .optimizers import check_optimizer
from .reward_model import check_reward_model
from .reward_terms import build_reward
from .role_models import critic_source, policy_source, reference_source
from .rows import PromptRow, read_rows
from .scoring import Scorer
from .stop_strings import check_stop_strings
from .tasks import reverse_digits
from .tokenizer import build_character_tokenizer, load_tokenizer
from .validation import check_metric

__all__ = ["Prepared", "prepare"]

_logger = logging.getLogger(__name__)


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
    build_reference: Callable[[], PreTrainedModel] | None
    """Makes the reference, where it is another model than the policy's starting point."""
    total_steps: int
    """Steps of the run."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a response."""
        return end_token_ids(self.tokenizer, self.config.actor_rollout_ref.model.path)


def prepare(config: Config, folder: str | Path) -> Prepared:
    """Read the data, the reward function and the model's configuration, and check that they fit together.

    Nothing is started; every mistake that can be seen beforehand is an error here that names its place. The bundled
    task's files are written into ``folder``.
    """
    check_algorithms(config)
    _check_optimizers(config)
    _check_backend(config)
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
    check_stop_strings(config.actor_rollout_ref.rollout.stop, tokenizer)
    encode = partial(
        PromptDataset,
        tokenizer=tokenizer,
        max_prompt_length=data.max_prompt_length,
        filter_overlong=data.filter_overlong_prompts,
        truncation=data.truncation,
        template_options=data.apply_chat_template_kwargs,
    )
    train = _encoded(encode, train_rows, "training", data.max_prompt_length)
    val = _encoded(encode, val_rows, "validation", data.max_prompt_length) if val_rows else None
    check_token_budgets(config, train.longest)
    _check_best(config, val_rows)
    loader = PromptLoader(len(train), batch_size=data.train_batch_size, shuffle=data.shuffle, seed=seed)
    ends = [] if config.trainer.planned_steps is None else [config.trainer.planned_steps]
    if config.trainer.total_epochs is not None:
        ends.append(loader.steps_in(config.trainer.total_epochs))
    sources = list(dict.fromkeys(row.data_source for row in [*train_rows, *val_rows]))
    policy, reference = policy_source(config, tokenizer), reference_source(config, tokenizer)
    critic = critic_source(config, policy)
    _warn_of_idle_gpus(config)
    row = LongestRow(prompt=max(train.longest, val.longest if val else 0), response=data.max_response_length)
    for source in (policy, critic if config.use_critic else None, reference):
        if source is not None:
            source.check(row)
    if (model := config.reward.reward_model).enable:
        own = model.use_own_tokenizer
        check_reward_model(str(model.path), vocab_size=None if own else len(tokenizer), row=None if own else row)
    return Prepared(
        config=config,
        tokenizer=tokenizer,
        train=train,
        val=val,
        loader=loader,
        scorer=Scorer(reward=build_reward(config.reward, sources), tokenizer=tokenizer),
        build_policy=policy,
        build_critic=critic,
        build_reference=reference,
        total_steps=min(ends),
    )


def _encoded(encode: Callable[..., PromptDataset], rows: Sequence[PromptRow], what: str, longest: int) -> PromptDataset:
    try:
        prompts = encode(rows)
    except DataError as error:
        raise DataError(f"{what} prompts: {error}") from None
    if left_out := prompts.num_filtered:
        _logger.warning(
            "%d of %d %s prompts are left out: more than data.max_prompt_length=%d tokens",
            left_out,
            len(rows),
            what,
            longest,
        )
    return prompts


def _check_optimizers(config: Config) -> None:
    for key, optim in (
        ("actor_rollout_ref.actor", config.actor_rollout_ref.actor.optim),
        ("critic", config.critic.optim),
    ):
        try:
            check_optimizer(optim)
        except ValueError as error:
            raise ValueError(f"{key}.optim: {error}") from None


def _check_best(config: Config, val_rows: Sequence[PromptRow]) -> None:
    metric, sources = config.trainer.keep_best, list(dict.fromkeys(row.data_source for row in val_rows))
    if metric is None:
        return
    if not sources:
        raise ValueError(f"trainer.keep_best={metric} needs prompts to validate on; set data.val_files")
    try:
        check_metric(metric, sources, config.actor_rollout_ref.rollout.val_kwargs.n)
    except ValueError as error:
        raise ValueError(f"trainer.keep_best: {error}") from None


def _warn_of_idle_gpus(config: Config) -> None:
    """Say that a model of somebody's is going to be trained on the CPU of a machine with GPUs: few mean that."""
    if config.trainer.device == "cpu" and config.actor_rollout_ref.model.path and torch.cuda.is_available():
        _logger.warning(
            "this machine has %d GPUs, which trainer.device=cpu, the default, leaves idle; set trainer.device=cuda",
            torch.cuda.device_count(),
        )


def _check_backend(config: Config) -> None:
    if not (options := config.backend.options):  # a backend that gets none need not be here to be prepared for
        return
    known = inspect.signature(load_backend(config.backend.name))
    try:
        known.bind(**options)
    except TypeError as error:
        takes = ", ".join(known.parameters) or "none"
        raise ValueError(f"backend.options: {error}; backend {config.backend.name} takes {takes}") from None


def _tokenizer(config: Config, rows: Sequence[PromptRow]) -> PreTrainedTokenizerBase:
    folder = config.data.tokenizer or config.actor_rollout_ref.model.path
    if folder is not None:
        return load_tokenizer(Path(folder).expanduser())
    texts = [text for row in rows for text in (row.text, str(row.ground_truth))]
    return build_character_tokenizer(set().union(*map(set, texts)))
