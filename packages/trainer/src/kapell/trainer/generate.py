"""Answers prompts with a saved model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .data import encode_prompt, pad_left
from .models import build_policy, load_config_of, num_positions
from .rollout_engine import RolloutRequest, SamplerEngine
from .rows import PromptRow
from .sampler import Sampling
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
) -> list[str]:
    """The model's answer to each prompt; greedy unless a temperature is given. ``stop`` holds texts that end it."""
    config = load_config_of(folder)
    tokenizer = load_tokenizer(folder)
    model = build_policy(config, folder=folder)
    rows = [PromptRow(prompt, ground_truth=None, data_source="", origin=f"prompt {prompt!r}") for prompt in prompts]
    ids_BP, mask_BP = pad_left([encode_prompt(row, tokenizer) for row in rows], tokenizer.pad_token_id)
    room = (num_positions(config) or ids_BP.shape[1] + max_new_tokens) - ids_BP.shape[1]
    if room < 1:
        raise ValueError(f"the longest prompt has {ids_BP.shape[1]} tokens, which leaves the model no room to answer")
    engine = SamplerEngine(model, [tokenizer.eos_token_id], tokenizer.pad_token_id, tokenizer)
    request = RolloutRequest(
        prompts=ids_BP,
        prompt_mask=mask_BP,
        sample_ids=range(len(rows)),
        sampling=Sampling(temperature=temperature or 1.0, do_sample=temperature is not None, stop=tuple(stop)),
        max_new_tokens=min(max_new_tokens, room),
        seed=seed,
        step=0,
    )
    rollout = engine.generate(request)
    lengths = rollout.response_mask.sum(-1).tolist()
    responses = [row[:length] for row, length in zip(rollout.responses.tolist(), lengths, strict=True)]
    return tokenizer.batch_decode(responses, skip_special_tokens=True)
