"""Answers prompts with a saved model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .data import encode_prompt, pad_left
from .models import build_policy, end_token_ids, load_config_of, num_positions
from .rollout_engine import RolloutRequest, SamplerEngine
from .rows import PromptRow
from .sampler import Sampling
from .stop_strings import check_stop_strings
from .tokenizer import load_tokenizer

__all__ = ["generate_texts"]


def generate_texts(
    folder: str | Path,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 64,
    temperature: float | None = None,
    stop: Sequence[str] = (),
    seed: int = 1,
    raw: bool = False,
    template_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """The model's answer to each prompt: the most probable tokens, or drawn ones with a ``temperature`` above 0.

    ``stop`` holds texts that end an answer. Where the tokenizer has a chat template, a prompt is what a user says, and
    the template gets ``template_options``; with ``raw`` it is the text that the model goes on from. Raises
    ``ValueError`` for numbers that mean nothing, and for a prompt that leaves no room to answer.
    """
    if max_new_tokens < 1 or (temperature is not None and not 0 <= temperature < math.inf):
        raise ValueError(
            "max_new_tokens is 1 or more and the temperature 0 (the most probable token) or above, got "
            f"{max_new_tokens} and {temperature}"
        )
    config = load_config_of(folder)
    tokenizer = load_tokenizer(folder)
    check_stop_strings(stop, tokenizer)
    model = build_policy(config, folder=folder)
    chat = not raw and tokenizer.chat_template is not None
    rows = [
        PromptRow(
            [{"role": "user", "content": prompt}] if chat else prompt,
            ground_truth=None,
            data_source="",
            origin=f"prompt {prompt!r}",
        )
        for prompt in prompts
    ]
    encoded = [encode_prompt(row, tokenizer, template_options=template_options) for row in rows]
    ids_BP, mask_BP = pad_left(encoded, tokenizer.pad_token_id)
    room = (num_positions(config) or ids_BP.shape[1] + max_new_tokens) - ids_BP.shape[1]
    if room < 1:
        raise ValueError(f"the longest prompt has {ids_BP.shape[1]} tokens, which leaves the model no room to answer")
    engine = SamplerEngine(model, end_token_ids(tokenizer, folder), tokenizer.pad_token_id, tokenizer)
    request = RolloutRequest(
        prompts=ids_BP,
        prompt_mask=mask_BP,
        sample_ids=range(len(rows)),
        sampling=Sampling(temperature=temperature or 1.0, do_sample=bool(temperature), stop=tuple(stop)),
        max_new_tokens=min(max_new_tokens, room),
        seed=seed,
        step=0,
    )
    rollout = engine.generate(request)
    lengths = rollout.response_mask.sum(-1).tolist()
    responses = [row[:length] for row, length in zip(rollout.responses.tolist(), lengths, strict=True)]
    return tokenizer.batch_decode(responses, skip_special_tokens=True)
