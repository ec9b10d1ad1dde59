"""The task, the model's shape and the portions that training benchmarks share; needs transformers only."""

from __future__ import annotations

import random
from typing import Any

__all__ = [
    "EOS",
    "EPOCHS",
    "GROUP",
    "HEADS",
    "HIDDEN_SIZE",
    "LAYERS",
    "MINI_BATCHES",
    "RESPONSE_LENGTH",
    "model_config",
    "prompts",
    "score",
    "tokenizer",
]

GROUP = 8
RESPONSE_LENGTH = 6
MINI_BATCHES = 2
EPOCHS = 2
HIDDEN_SIZE, LAYERS, HEADS = 64, 2, 4
PAD, EOS, ANSWER = 0, 1, 2  # then the digits
VOCABULARY = 13


def prompts(count: int) -> list[str]:
    """Strings of four digits."""
    return [f"{number:04d}" for number in random.Random(1).sample(range(10_000), count)]


def model_config(max_length: int = 32) -> Any:
    """The bundled task's model: a GPT-2 of two layers and width 64 over 13 tokens."""
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=VOCABULARY, n_embd=HIDDEN_SIZE, n_layer=LAYERS, n_head=HEADS, n_positions=max_length,
        pad_token_id=PAD, eos_token_id=EOS, bos_token_id=EOS,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, attention_dropout=0.0,
    )  # fmt: skip


def tokenizer() -> Any:
    """One token per character, as the bundled task has it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<answer>", *"0123456789"])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    made.post_processor = processors.TemplateProcessing(single="$A <answer>", special_tokens=[("<answer>", ANSWER)])
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def score(response: str, prompt: str) -> float:
    """Share of positions with the right digit of the reversed prompt, as the bundled task scores."""
    wanted = prompt[::-1]
    right = sum(given == digit for given, digit in zip(response, wanted, strict=False))
    return right / max(len(response), len(wanted))
