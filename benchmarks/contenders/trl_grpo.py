"""TRL's GRPOTrainer on the same task: same model, prompts, group, portions and lengths."""

from __future__ import annotations

import tempfile

import torch
from datasets import Dataset
from transformers import GPT2LMHeadModel, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from .paced import StepDone
from .task import EPOCHS, GROUP, MINI_BATCHES, RESPONSE_LENGTH, model_config, prompts, score, tokenizer


def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    return [score(completion, prompt) for prompt, completion in zip(prompts, completions, strict=True)]


class StepCallback(TrainerCallback):
    """Stops after the last optimizer step of each generation, so that a step is what others call a step."""

    def __init__(self, step_done: StepDone) -> None:
        self._step_done = step_done

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        if state.global_step % (EPOCHS * MINI_BATCHES) == 0:
            self._step_done()


def run(step_done: StepDone, *, threads: int, prompts: int) -> None:
    """GRPO in one process of ``threads`` torch threads."""
    with tempfile.TemporaryDirectory() as folder:
        _train(step_done, folder, threads, prompts)


def _train(step_done: StepDone, folder: str, threads: int, num_prompts: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    rows = num_prompts * GROUP
    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=rows // MINI_BATCHES,
        steps_per_generation=MINI_BATCHES,
        num_iterations=EPOCHS,
        num_generations=GROUP,
        max_completion_length=RESPONSE_LENGTH,
        temperature=1.0,
        beta=0.0,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        max_steps=1_000_000,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    dataset = Dataset.from_dict({"prompt": prompts(9_800)})

    trainer = GRPOTrainer(
        model=GPT2LMHeadModel(model_config()),
        reward_funcs=reward,
        args=config,
        train_dataset=dataset,
        processing_class=tokenizer(),
        callbacks=[StepCallback(step_done)],
    )
    trainer.train()
