"""Tokenizers: a Hugging Face folder, or one token per character for models trained from scratch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

__all__ = ["ANSWER_TOKEN", "EOS_TOKEN", "PAD_TOKEN", "build_character_tokenizer", "load_tokenizer"]

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
ANSWER_TOKEN = "<answer>"  # stands between prompt and response

# Contents only: a model trained from scratch has no use for role names.
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)


def build_character_tokenizer(alphabet: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character of ``alphabet`` and three special ones.

    A text becomes its characters and ``<answer>``, so that a model continues with the response. Saved with a model it
    loads through ``AutoTokenizer``. A character outside the alphabet is an error when the text is encoded.

    >>> tokenizer = build_character_tokenizer("0123456789")
    >>> len(tokenizer), tokenizer.convert_ids_to_tokens(tokenizer("42")["input_ids"])
    (13, ['4', '2', '<answer>'])
    """
    characters = sorted(set(alphabet))
    if not characters or any(len(character) != 1 for character in characters):
        raise ValueError(f"the alphabet must hold single characters, got {characters!r}")
    vocabulary = {token: index for index, token in enumerate([PAD_TOKEN, EOS_TOKEN, ANSWER_TOKEN, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {ANSWER_TOKEN}", special_tokens=[(ANSWER_TOKEN, vocabulary[ANSWER_TOKEN])]
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        additional_special_tokens=[ANSWER_TOKEN],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
    )


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer saved in a local folder, with a padding token (the end-of-sequence token where it has none)."""
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"no tokenizer folder {path}")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"no usable tokenizer in {path}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer in {path} has no end-of-sequence token; responses could never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
