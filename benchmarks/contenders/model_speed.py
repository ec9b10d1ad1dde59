"""Tokens a second of sampling and of training, beside transformers' own ``generate`` and a plain torch loop."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from kapell.trainer.algorithms import BatchTotals, position_ids
from kapell.trainer.config import OptimConfig
from kapell.trainer.engine import TrainEngine
from kapell.trainer.objectives import PolicyObjective
from kapell.trainer.sampler import Sampling, sample, sample_streams

_PROMPT_LENGTH = 32
_GROUP = 8
_SHAPES = {"tiny": (64, 2, 4, 13), "small": (256, 4, 8, 8192)}  # width, layers, heads, vocabulary


class _OnModels:
    """Measures each shape in turn."""

    metric = ""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._tasks: list[Task] = []

    def prepare(self, rows: int, response: int) -> None:
        self._tasks = [Task(shape, rows, response) for shape in _SHAPES]
        for task in self._tasks:
            self.make(task)

    def make(self, task: Task) -> None:
        """Make what is not measured."""

    def run(self, task: Task) -> int:
        """Do it; the number of tokens."""
        raise NotImplementedError

    def round(self) -> dict[str, float]:
        numbers = {}
        for task in self._tasks:
            began = time.perf_counter()
            tokens = self.run(task)
            numbers[f"{self.metric}, {task.shape} model"] = tokens / (time.perf_counter() - began)
        return numbers


class Task:
    """A model, prompts for it, and responses to train on."""

    def __init__(self, shape: str, rows: int, response: int) -> None:
        width, layers, heads, vocabulary = _SHAPES[shape]
        torch.manual_seed(1)
        config = GPT2Config(
            vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=heads, n_positions=256,
            pad_token_id=0, eos_token_id=None, bos_token_id=None,
            embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, attention_dropout=0.0,
        )  # fmt: skip
        self.shape, self.rows, self.length = shape, rows, response
        self.model = GPT2LMHeadModel(config).eval()
        prompts = torch.randint(3, vocabulary, (max(1, rows // _GROUP), _PROMPT_LENGTH))
        self.prompts = prompts.repeat_interleave(_GROUP, 0)[:rows]
        responses = torch.randint(3, vocabulary, (rows, response))
        ids = torch.cat([self.prompts, responses], 1)
        self.columns: dict[str, torch.Tensor] = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": position_ids(torch.ones_like(ids)),
            "responses": responses,
            "response_mask": torch.ones_like(responses),
            "old_log_probs": torch.full(responses.shape, -2.5),
            "advantages": torch.randn(responses.shape),
        }
        self.engine: Any = None
        self.totals: Any = None
        self.optimizer: Any = None


class KapellSampling(_OnModels):
    metric = "sampling"

    def run(self, task: Task) -> int:
        rollout = sample(
            task.model,
            task.prompts,
            torch.ones_like(task.prompts),
            sampling=Sampling(),
            uniforms_BT=sample_streams(1, 0, range(task.rows), task.length),
            eos_token_ids=(),
            pad_token_id=0,
        )
        return int(rollout.response_mask.sum())


class TransformersSampling(_OnModels):
    metric = "sampling"

    @torch.no_grad()
    def run(self, task: Task) -> int:
        made = task.model.generate(
            task.prompts,
            attention_mask=torch.ones_like(task.prompts),
            do_sample=True,
            top_k=0,
            max_new_tokens=task.length,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        # Both give the sampled tokens' log-probabilities, which reinforcement learning needs.
        tokens = made.sequences[:, _PROMPT_LENGTH:]
        torch.stack(made.logits, 1).log_softmax(-1).gather(-1, tokens[..., None])
        return tokens.numel()


class KapellTraining(_OnModels):
    """Forward, backward and step of the engine, with the entropy that it always reports."""

    metric = "training"

    def make(self, task: Task) -> None:
        task.engine = TrainEngine(task.model, OptimConfig())
        task.totals = BatchTotals.of(task.columns["response_mask"])

    def run(self, task: Task) -> int:
        objective = PolicyObjective(
            options={"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0}
        )
        task.engine.forward_backward(task.columns, lambda columns: objective(task.model, columns, task.totals))
        task.engine.step()
        return task.columns["input_ids"].numel()


class PlainTraining(_OnModels):
    """The same loss in a dozen lines of torch, over all logits, as tutorials have it."""

    metric = "training"

    def make(self, task: Task) -> None:
        task.optimizer = torch.optim.AdamW(task.model.parameters(), lr=2e-3)

    def run(self, task: Task) -> int:
        columns = task.columns
        logits = task.model(columns["input_ids"], attention_mask=columns["attention_mask"], use_cache=False).logits
        log_probs = logits[:, -task.length - 1 : -1].log_softmax(-1)
        chosen = log_probs.gather(-1, columns["responses"][..., None])[..., 0]
        entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
        ratio = (chosen - columns["old_log_probs"]).exp()
        advantages = columns["advantages"]
        loss = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages).mean()
        task.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
        task.optimizer.step()
        entropy.item()  # reported, as ours is
        return columns["input_ids"].numel()
