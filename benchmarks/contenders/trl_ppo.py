"""TRL's PPOTrainer (of its last release that has one) on the same task, with a rule as its reward model."""

from __future__ import annotations

import tempfile
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import GPT2ForSequenceClassification, GPT2LMHeadModel, TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer

from .paced import StepDone
from .task import EOS, EPOCHS, MINI_BATCHES, RESPONSE_LENGTH, model_config, prompts, tokenizer


class RuleReward(nn.Module):
    """The task's score in the shape of a reward model, so that no forward pass is charged to the peer."""

    base_model_prefix = "body"

    def __init__(self) -> None:
        super().__init__()
        self.body = self._score_everywhere
        self.score = nn.Identity()

    def _score_everywhere(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        prompt, response = input_ids[:, :4], input_ids[:, 5:9]
        right = (response == prompt.flip(1)).float().mean(1)
        return SimpleNamespace(hidden_states=[right[:, None, None].expand(-1, input_ids.shape[1], 1)])


class StepCallback(TrainerCallback):
    def __init__(self, step_done: StepDone) -> None:
        self._step_done = step_done

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> object:
        self._step_done()
        return control


def run(step_done: StepDone, *, threads: int, prompts: int) -> None:
    """PPO in one process of ``threads`` torch threads."""
    with tempfile.TemporaryDirectory() as folder:
        _train(step_done, folder, threads, prompts)


def _train(step_done: StepDone, folder: str, threads: int, num_prompts: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    config = PPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        # A micro-batch is an optimizer step here, whatever `num_mini_batches` says.
        per_device_train_batch_size=num_prompts // MINI_BATCHES,
        gradient_accumulation_steps=MINI_BATCHES,
        num_mini_batches=MINI_BATCHES,
        num_ppo_epochs=EPOCHS,
        local_rollout_forward_batch_size=num_prompts,
        response_length=RESPONSE_LENGTH,
        temperature=1.0,
        stop_token_id=EOS,
        total_episodes=num_prompts * 1_000_000,
        num_sample_generations=0,
        learning_rate=2e-3,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    made = tokenizer()
    texts = prompts(9_800)
    dataset = Dataset.from_dict({"input_ids": made(texts)["input_ids"]})

    trainer = PPOTrainer(
        args=config,
        processing_class=made,
        model=GPT2LMHeadModel(model_config()),
        ref_model=GPT2LMHeadModel(model_config()),
        reward_model=RuleReward(),
        value_model=GPT2ForSequenceClassification(_with_one_label()),
        train_dataset=dataset,
        callbacks=[StepCallback(step_done)],
    )
    trainer.log = lambda *_: None  # it would print a line a step
    trainer.train()


def _with_one_label() -> Any:
    config = model_config()
    config.num_labels = 1
    return config
