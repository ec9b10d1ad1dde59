"""Prompts as batches: encoded once, dealt in a seeded order that can be resumed, padded on the left."""

# B prompts, P tokens of the longest prompt

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kapell.protocol import DataProto

from .rows import DataError, PromptRow

__all__ = [
    "LoaderState",
    "PromptDataset",
    "PromptLoader",
    "Truncation",
    "encode_prompt",
    "in_batches",
    "pad_left",
    "truncate",
]


def encode_prompt(
    row: PromptRow, tokenizer: PreTrainedTokenizerBase, *, template_options: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of a row's prompt; chat messages go through the tokenizer's chat template, with its further options."""
    if isinstance(row.prompt, str):
        _require_known_characters(row.prompt, row.origin, tokenizer)
        return tokenizer(row.prompt)["input_ids"]
    if tokenizer.chat_template is None:
        raise DataError(f"{row.origin} holds chat messages, but the tokenizer has no chat template; give text instead")
    _require_known_characters(row.text, row.origin, tokenizer)
    encoded: Any = tokenizer.apply_chat_template(
        row.prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **(template_options or {})
    )
    return encoded["input_ids"]


def _require_known_characters(text: str, origin: str, tokenizer: PreTrainedTokenizerBase) -> None:
    model = tokenizer.backend_tokenizer.model if tokenizer.is_fast else None
    if type(model).__name__ != "WordLevel" or tokenizer.unk_token is not None:
        return
    if unknown := sorted(set(text) - tokenizer.get_vocab().keys()):
        raise DataError(f"{origin}: the tokenizer has no token for {unknown}")


def pad_left(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both of shape ``(B, P)``, with padding before the shorter sequences.

    >>> ids_BP, mask_BP = pad_left([[5, 6], [7]], pad_id=0)
    >>> ids_BP.tolist(), mask_BP.tolist()
    ([[5, 6], [0, 7]], [[1, 1], [0, 1]])
    """
    width = max(len(sequence) for sequence in sequences)
    ids_BP = torch.full((len(sequences), width), pad_id, dtype=torch.long)
    mask_BP = torch.zeros((len(sequences), width), dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids_BP[row, width - len(sequence) :] = torch.as_tensor(sequence)
        mask_BP[row, width - len(sequence) :] = 1
    return ids_BP, mask_BP


Truncation = Literal["error", "left", "right", "middle"]
"""Where tokens are cut from a prompt that is too long."""


def truncate(ids: Sequence[int], length: int, where: Truncation) -> list[int]:
    """At most ``length`` of the ids.

    >>> truncate([1, 2, 3, 4, 5], 3, "left"), truncate([1, 2, 3, 4, 5], 3, "middle")
    ([3, 4, 5], [1, 4, 5])
    """
    if where == "error" or len(ids) <= length:
        return list(ids)
    first = {"left": 0, "right": length, "middle": length // 2}[where]
    return [*ids[:first], *ids[len(ids) - (length - first) :]]


class PromptDataset:
    """Encoded prompts with what their rewards need."""

    def __init__(
        self,
        rows: Sequence[PromptRow],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_length: int,
        filter_overlong: bool = False,
        truncation: Truncation = "error",
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.rows: list[PromptRow] = []
        self._ids: list[list[int]] = []
        self._pad_id: int = tokenizer.pad_token_id
        for row in rows:
            ids = encode_prompt(row, tokenizer, template_options=template_options)
            if len(ids) > max_prompt_length and filter_overlong:
                continue
            ids = truncate(ids, max_prompt_length, truncation)
            if len(ids) > max_prompt_length:
                raise DataError(
                    f"{row.origin}: the prompt has {len(ids)} tokens, more than data.max_prompt_length="
                    f"{max_prompt_length}; raise it, or set data.filter_overlong_prompts=true or data.truncation"
                )
            self.rows.append(row)
            self._ids.append(ids)
        self.num_filtered = len(rows) - len(self.rows)
        self.longest = max(map(len, self._ids), default=0)
        if not self.rows:
            raise DataError(
                f"all {len(rows)} have more than data.max_prompt_length={max_prompt_length} tokens; raise it, or set "
                "data.truncation in place of data.filter_overlong_prompts"
            )

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Sequence[int]) -> DataProto:
        """The prompts at ``indices``: ``prompts`` and ``prompt_mask``, ``(B, P)``, and what rewards need."""
        ids_BP, mask_BP = pad_left([self._ids[index] for index in indices], self._pad_id)
        rows = [self.rows[index] for index in indices]
        columns: dict[str, list[Any]] = {
            "uid": [str(index) for index in indices],
            "raw_prompt": [row.text for row in rows],
            "data_source": [row.data_source for row in rows],
            "ground_truth": [row.ground_truth for row in rows],
            "extra_info": [row.extra_info for row in rows],
        }
        return DataProto.from_dict(
            tensors={"prompts": ids_BP, "prompt_mask": mask_BP, "index": torch.tensor(list(indices))},
            non_tensors=columns,
        )


@dataclass(frozen=True)
class LoaderState:
    """Where a `PromptLoader` stands."""

    epoch: int = 0
    """Passes that are complete."""
    offset: int = 0
    """Prompts already dealt in this pass."""


class PromptLoader:
    """Deals prompt indices in batches, epoch after epoch; the last batch of an epoch may be smaller.

    The order of an epoch follows from ``seed`` and the epoch's number alone, so `state` is all that resuming needs.

    >>> loader = PromptLoader(5, batch_size=2, shuffle=False, seed=1)
    >>> [loader.next_batch() for _ in range(4)]
    [[0, 1], [2, 3], [4], [0, 1]]
    """

    def __init__(self, num_prompts: int, *, batch_size: int, shuffle: bool, seed: int) -> None:
        if num_prompts < 1 or batch_size < 1:
            raise ValueError(f"need at least one prompt and a batch of one, got {num_prompts} and {batch_size}")
        self._num_prompts = num_prompts
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self.state = LoaderState()

    def steps_in(self, epochs: int) -> int:
        """Number of batches in that many passes."""
        return epochs * -(-self._num_prompts // self._batch_size)

    def batch_sizes(self) -> Iterator[int]:
        """Prompts in each batch from the first one on, without end."""
        return cycle(list(map(len, in_batches(self._num_prompts, self._batch_size))))

    def next_batch(self) -> list[int]:
        """Indices of the next prompts."""
        order = self._order(self.state.epoch)
        end = min(self.state.offset + self._batch_size, self._num_prompts)
        indices = order[self.state.offset : end]
        done = end == self._num_prompts
        self.state = LoaderState(self.state.epoch + done, 0 if done else end)
        return indices

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands, for a checkpoint."""
        return {"epoch": self.state.epoch, "offset": self.state.offset, "num_prompts": self._num_prompts}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from what `state_dict` returned. Raises ``ValueError`` for another number of prompts."""
        if state["num_prompts"] != self._num_prompts:
            raise ValueError(
                f"the position {state['offset']} is one in {state['num_prompts']} training prompts, here are "
                f"{self._num_prompts}; give the data files and data keys as they were"
            )
        self.state = LoaderState(state["epoch"], state["offset"])

    def _order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._num_prompts))
        return np.random.default_rng((self._seed, epoch)).permutation(self._num_prompts).tolist()


def in_batches(num_prompts: int, batch_size: int) -> Iterator[list[int]]:
    """Each index once, in order, at most ``batch_size`` at a time."""
    for start in range(0, num_prompts, batch_size):
        yield list(range(start, min(start + batch_size, num_prompts)))
