"""TRL's GRPOTrainer on the same task: same model, prompts, group, portions and lengths."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable

import torch
from datasets import Dataset
from transformers import GPT2LMHeadModel, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from .paced import PacedLoop
from .task import EPOCHS, GROUP, MINI_BATCHES, RESPONSE_LENGTH, model_config, prompts, score, tokenizer


def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    return [score(completion, prompt) for prompt, completion in zip(prompts, completions, strict=True)]


class StepCallback(TrainerCallback):
    """Stops after the last optimizer step of each generation, so that a step is what others call a step."""

    def __init__(self, step_done: Callable[[], None]) -> None:
        self._step_done = step_done

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        if state.global_step % (EPOCHS * MINI_BATCHES) == 0:
            self._step_done()


class TrlStep:
    """One GRPO step in one process of ``threads`` torch threads."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._loop: PacedLoop | None = None
        self._folder = tempfile.TemporaryDirectory()

    def prepare(self, prompts: int) -> None:
        self.close()
        loop = _make_trainer(prompts, self._folder.name)
        self._loop = PacedLoop(loop)
        self._loop.step()

    def round(self) -> dict[str, float]:
        assert self._loop is not None
        began = time.perf_counter()
        self._loop.step()
        return {"step": time.perf_counter() - began}

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = None


def _make_trainer(num_prompts: int, folder: str) -> Callable[[Callable[[], None]], object]:
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

    def loop(step_done: Callable[[], None]) -> object:
        trainer = GRPOTrainer(
            model=GPT2LMHeadModel(model_config()),
            reward_funcs=reward,
            args=config,
            train_dataset=dataset,
            processing_class=tokenizer(),
            callbacks=[StepCallback(step_done)],
        )
        return trainer.train()

    return loop
