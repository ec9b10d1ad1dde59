"""Text that ends a response, found in the tokens as they are sampled."""

# R rows, T response tokens so far

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

__all__ = ["StopStrings", "check_stop_strings"]

_MARGIN = 4  # tokens before the longest match: a text cut in the middle may decode to less at its start


def check_stop_strings(strings: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ``ValueError`` for one that never comes: the text of a response is without special tokens."""
    for string in strings:
        if special := [token for token in tokenizer.all_special_tokens if token in string]:
            raise ValueError(
                f"the stop string {string!r} never comes, because responses are read without special tokens such as "
                f"{special[0]}; for that token to end a response, name its id as an eos_token_id in the model's "
                "generation_config.json"
            )


@dataclass(frozen=True)
class StopStrings:
    """Finds stop strings in the text of a response, whatever tokens it is made of."""

    strings: Sequence[str]
    """What ends a response; none of them empty."""
    tokenizer: PreTrainedTokenizerBase
    """Turns tokens into the text in which they are looked for, without special tokens, as rewards see it."""

    def __post_init__(self) -> None:
        if not all(self.strings):
            raise ValueError(f"a stop string must not be empty, got {list(self.strings)}")

    @cached_property
    def _num_tokens(self) -> int:
        """Tokens that may take part in a match: each brings at least one byte."""
        return max((len(string.encode()) for string in self.strings), default=0) + _MARGIN

    def found(self, responses_RT: Tensor) -> Tensor:
        """Whether the last token completes a stop string, ``(R,)`` bool; earlier ones must not have."""
        texts = self.tokenizer.batch_decode(responses_RT[:, -self._num_tokens :].tolist(), skip_special_tokens=True)
        ended = [any(string in text for string in self.strings) for text in texts]
        return torch.tensor(ended, dtype=torch.bool, device=responses_RT.device)
