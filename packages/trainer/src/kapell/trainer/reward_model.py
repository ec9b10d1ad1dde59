"""The reward model's role: workers that score rows with a sequence classifier of one label."""

# B rows, L prompt and response tokens

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from kapell.decorators import Dispatch, register
from kapell.protocol import DataProto
from kapell.workergroup import Worker, WorkerGroup

from .devices import DeviceType, moved, set_up_process
from .micro_batches import slices
from .models import LongestRow, check_length, load_config_of, num_positions
from .reward import RewardError
from .reward_functions import Outcome, RewardRows, read_score

__all__ = [
    "MODEL_SCORES",
    "ModelReward",
    "RewardModel",
    "RewardModelWorker",
    "build_reward_model",
    "check_reward_model",
]

MODEL_SCORES = "reward_model_scores"
"""The column of the model's scores, ``(B,)``."""


def check_reward_model(folder: str | Path, *, vocab_size: int | None = None, row: LongestRow | None = None) -> None:
    """Raise ``ValueError`` where the folder's model cannot score, before any worker loads it.

    ``vocab_size`` is that of the policy's tokenizer and ``row`` the longest of the run, where the model reads the
    policy's tokens.
    """
    config = load_config_of(folder)
    if config.num_labels != 1:
        raise ValueError(f"the model in {folder} has {config.num_labels} labels; a reward model has one (num_labels=1)")
    if vocab_size is not None and vocab_size > config.vocab_size:
        raise ValueError(
            f"the policy's tokenizer has {vocab_size} tokens, the reward model in {folder} only {config.vocab_size}; "
            "set reward.reward_model.use_own_tokenizer=true"
        )
    if row is not None:
        try:
            check_length(config, row)
        except ValueError as error:
            raise ValueError(f"reward.reward_model.path={folder}: {error}") from None


def build_reward_model(folder: str | Path, *, pad_token_id: int | None = None) -> PreTrainedModel:
    """The sequence classifier saved in ``folder``, in float32.

    ``pad_token_id`` is the policy's, where the model reads the policy's tokens. Raises ``ValueError`` for a folder
    whose model has no head, such as a plain language model.
    """
    check_reward_model(folder)
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        Path(folder).expanduser(), dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(f"the model in {folder} is no reward model: it lacks the weights {', '.join(missing)}")
    if pad_token_id is not None:
        model.config.pad_token_id = pad_token_id
    return model.eval().requires_grad_(False)


class RewardModelWorker(Worker):
    """Scores rows with a sequence classifier; each rank has the whole model and scores its share of the rows.

    The score is the classifier's one logit, which transformers takes at the last token that is no padding.
    """

    def __init__(
        self,
        build_model: Callable[[], PreTrainedModel],
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        micro_batch_size: int | None = None,
        device: DeviceType = "cpu",
        torch_threads: int = 1,
    ) -> None:
        super().__init__()
        self._device = set_up_process(device, local_rank=self.local_rank, torch_threads=torch_threads)
        self._model: Any = build_model().to(self._device)
        self._tokenizer = tokenizer
        self._micro_batch_size = micro_batch_size
        if tokenizer is not None:
            self._model.config.pad_token_id = tokenizer.pad_token_id

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("input_ids", "attention_mask", "position_ids"), writes=(MODEL_SCORES,))
    def compute_rm_score(self, batch: DataProto) -> DataProto:
        """Score the policy's own tokens, for a model that shares its tokenizer."""
        names = ("input_ids", "attention_mask", "position_ids")
        columns = {name: batch.column(name) for name in names}
        return _as_column(self._logits(micro) for micro in slices(columns, self._micro_batch_size))

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("raw_prompt", "solution_str"), writes=(MODEL_SCORES,))
    def compute_rm_score_of_text(self, batch: DataProto) -> DataProto:
        """Score prompt and response as text, by the model's own tokenizer and chat template."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise RuntimeError("this worker has no tokenizer; build it with the reward model's own")
        prompts, responses = (batch.non_tensor_batch[name].tolist() for name in ("raw_prompt", "solution_str"))
        texts = [_conversation(tokenizer, *pair) for pair in zip(prompts, responses, strict=True)]
        size = self._micro_batch_size or max(len(texts), 1)
        encode = partial(
            tokenizer,
            padding=True,
            padding_side="right",  # so that a model which numbers positions by itself starts at the text
            add_special_tokens=tokenizer.chat_template is None,  # a template writes its own
            return_tensors="pt",
        )
        micros = (encode(texts[i : i + size]) for i in range(0, len(texts), size))
        return _as_column(self._logits(self._within_positions(micro)) for micro in micros)

    def _within_positions(self, columns: Any) -> Any:
        tokens, positions = columns["input_ids"].shape[1], num_positions(self._model.config)
        if positions is not None and positions < tokens:
            raise ValueError(
                f"a prompt with its response has {tokens} tokens by the reward model's own tokenizer, and the model "
                f"{positions} positions; lower data.max_response_length or data.max_prompt_length"
            )
        return columns

    @torch.no_grad()
    def _logits(self, columns: Any) -> Tensor:
        return self._model(**moved(columns, self._device)).logits[:, 0].float().cpu()


def _conversation(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str) -> str:
    if tokenizer.chat_template is None:
        return prompt + response
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


def _as_column(parts: Iterator[Tensor]) -> DataProto:
    return DataProto.from_dict(tensors={MODEL_SCORES: torch.cat([torch.zeros(0), *parts])})


@dataclass(frozen=True)
class RewardModel:
    """The group of a reward model's workers, and how it is asked."""

    group: WorkerGroup
    """Workers with the methods of `RewardModelWorker`."""
    by_text: bool = False
    """Whether the model has a tokenizer of its own."""

    def __call__(self, batch: DataProto, solutions: Sequence[str]) -> list[float]:
        """The scores of a batch of responses, whose text is ``solutions``."""
        if not self.by_text:
            return self.group.compute_rm_score(batch).column(MODEL_SCORES).tolist()
        texts = DataProto.from_dict(
            non_tensors={"raw_prompt": batch.non_tensor_batch["raw_prompt"], "solution_str": list(solutions)}
        )
        return self.group.compute_rm_score_of_text(texts).column(MODEL_SCORES).tolist()


@dataclass(frozen=True)
class ModelReward:
    """The reward that a reward model gave to the rows."""

    def __call__(self, rows: RewardRows) -> Iterator[Outcome]:
        """The outcomes, in order; a score that is not finite is an error."""
        if rows.model_scores is None:
            raise ValueError("the rows have no scores of a reward model; the run needs reward.reward_model.enable=true")
        for row, score in enumerate(rows.model_scores):
            try:
                yield read_score(score, f"{rows.place(row)} by the reward model")
            except RewardError as error:
                yield error
