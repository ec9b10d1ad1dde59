"""The models that a run's roles begin with: where each comes from, and whether it fits the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .config import Config, CriticModelConfig, ModelConfig
from .lora import Adapter, build_with_adapter, check_targets
from .models import (
    LongestRow,
    build_policy,
    build_value_model,
    check_length,
    load_config_of,
    model_folder,
    new_model_config,
)

__all__ = ["ModelSource", "critic_source", "policy_source", "reference_source"]


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where a role's model comes from. Called, in each worker, it makes the model, each time with equal weights."""

    key: str
    """The group of the configuration that describes it, for messages."""
    build: Callable[..., PreTrainedModel]
    """Makes it without an adapter: `build_policy` or `build_value_model`."""
    config: PreTrainedConfig
    """Its Hugging Face configuration."""
    folder: str | None
    """Where its weights are, from wherever a worker runs. None: they are drawn from the seed."""
    seed: int = 1
    """Seed of all weights that are new."""
    adapter: Adapter | None = None
    """The adapter on it."""

    def __call__(self) -> PreTrainedModel:
        """The model."""
        build = partial(self.build, self.config, folder=self.folder, seed=self.seed)
        return build() if self.adapter is None else build_with_adapter(build, self.adapter, seed=self.seed)

    def check(self, row: LongestRow) -> None:
        """Raise ``ValueError``, with the key, where the architecture, the adapter or a row does not fit.

        No weights are made or read.
        """
        try:
            with torch.device("meta"):
                model = self.build(self.config)
        except Exception as error:  # each architecture has other ones for what it cannot be
            raise ValueError(f"{self.key}: no model can be made of this configuration: {error}") from error
        try:
            check_length(self.config, row)
            if self.adapter is not None:
                check_targets(model, self.adapter)
        except ValueError as error:
            raise ValueError(f"{self.key}: {error}") from error


def policy_source(config: Config, tokenizer: PreTrainedTokenizerBase) -> ModelSource:
    """The policy's. Raises ``ValueError`` for a model without a place for each of the tokenizer's tokens."""
    model, data, key = config.actor_rollout_ref.model, config.data, "actor_rollout_ref.model"
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
        _check_vocabulary(hf_config, tokenizer, model.path)
    adapter, seed = _adapter(model, "CAUSAL_LM"), config.trainer.seed
    return ModelSource(
        key=key, build=build_policy, config=hf_config, folder=_folder(model.path), seed=seed, adapter=adapter
    )


def critic_source(config: Config, policy: ModelSource) -> ModelSource:
    """The critic's, which begins as the policy where it has no folder of its own."""
    model, seed = config.critic.model, config.trainer.seed + 1
    hf_config = load_config_of(model.path) if model.path else policy.config
    folder, adapter = _folder(model.path) or policy.folder, _adapter(model, "TOKEN_CLS")
    return ModelSource(
        key="critic.model", build=build_value_model, config=hf_config, folder=folder, seed=seed, adapter=adapter
    )


def reference_source(config: Config, tokenizer: PreTrainedTokenizerBase) -> ModelSource | None:
    """The reference's, where it is another model than the policy's starting point."""
    path = config.actor_rollout_ref.ref.model.path
    if path is None or not config.use_reference:
        return None
    hf_config = load_config_of(path)
    _check_vocabulary(hf_config, tokenizer, path)
    return ModelSource(key="actor_rollout_ref.ref.model", build=build_policy, config=hf_config, folder=_folder(path))


def _folder(path: str | None) -> str | None:
    return None if path is None else str(model_folder(path))


def _adapter(model: ModelConfig | CriticModelConfig, task_type: Literal["CAUSAL_LM", "TOKEN_CLS"]) -> Adapter | None:
    if not model.lora_rank:
        return None
    return Adapter(
        rank=model.lora_rank, alpha=model.lora_alpha, target_modules=model.target_modules, task_type=task_type
    )


def _check_vocabulary(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, folder: str) -> None:
    if len(tokenizer) > config.vocab_size:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, the model in {folder} only {config.vocab_size}")
