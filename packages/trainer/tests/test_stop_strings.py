import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kapell.trainer.build import prepare
from kapell.trainer.config_load import ConfigError, load_config
from kapell.trainer.data import pad_left
from kapell.trainer.rollout_engine import RolloutRequest, SamplerEngine
from kapell.trainer.sampler import Sampling
from kapell.trainer.stop_strings import StopStrings, check_stop_strings

LENGTH = 8


@pytest.fixture(scope="module")
def byte_tokenizer():
    """Byte-level pairs, so that a text is made of tokens that end within words and within characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<pad>"])
    tokenizer.train_from_iterator(["the END of it. xxEN DONE"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")


@pytest.mark.parametrize("text", ["the END", "all at once: END", "and\n\nEND", "ünïcödé", "日本語END"])
@pytest.mark.parametrize("stop", ["END", "d\n\nE", "ïcö", "本語"])
def test_a_string_is_found_when_its_last_token_comes_and_not_before(byte_tokenizer, text, stop):
    ids = byte_tokenizer(text)["input_ids"]
    finder = StopStrings([stop, "never"], byte_tokenizer)
    found = [bool(finder.found(torch.tensor([ids[:end]]))[0]) for end in range(1, len(ids) + 1)]
    first = [stop in byte_tokenizer.decode(ids[:end]) for end in range(1, len(ids) + 1)]
    assert found.index(True) == first.index(True) if stop in text else not any(found)


def test_only_as_many_tokens_are_decoded_as_can_matter(byte_tokenizer, monkeypatch):
    lengths = []
    decode = byte_tokenizer.batch_decode
    monkeypatch.setattr(
        byte_tokenizer, "batch_decode", lambda rows, **options: lengths.append(len(rows[0])) or decode(rows, **options)
    )
    assert StopStrings(["x"], byte_tokenizer).found(torch.ones((1, 500), dtype=torch.long)).tolist() == [False]
    assert lengths == [5]


def test_a_string_with_a_special_token_is_refused_since_it_would_never_come(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"'1<eos>' never comes.*generation_config\.json"):
        check_stop_strings(["2", "1<eos>"], tokenizer)
    config = load_config(overrides=["actor_rollout_ref.rollout.stop=['<eos>']"]).config
    with pytest.raises(ValueError, match="'<eos>' never comes"):
        prepare(config, tmp_path)


def request_for(tokenizer, *stop, num_rows=32):
    prompts, mask = pad_left([tokenizer("12")["input_ids"]] * num_rows, tokenizer.pad_token_id)
    return RolloutRequest(
        prompts=prompts,
        prompt_mask=mask,
        sample_ids=range(num_rows),
        sampling=Sampling(stop=stop),
        max_new_tokens=LENGTH,
        seed=1,
        step=1,
    )


def rollout_of(policy, tokenizer, *stop):
    engine = SamplerEngine(policy, [tokenizer.eos_token_id], tokenizer.pad_token_id, tokenizer)
    return engine.generate(request_for(tokenizer, *stop))


def test_each_row_ends_with_the_token_that_completes_a_stop_string(policy, tokenizer):
    free = rollout_of(policy, tokenizer)
    stopped = rollout_of(policy, tokenizer, "7", "34")
    shorter = 0
    for row in range(32):
        length = int(free.response_mask[row].sum())
        for end in range(1, length + 1):
            text = tokenizer.decode(free.responses[row, :end], skip_special_tokens=True)
            if "7" in text or "34" in text:
                shorter += end < length
                length = end
                break
        mask = torch.arange(LENGTH) < length
        assert stopped.response_mask[row].tolist() == mask.long().tolist()
        assert torch.equal(stopped.responses[row], free.responses[row].where(mask, tokenizer.pad_token_id))
        assert torch.allclose(stopped.rollout_log_probs[row], free.rollout_log_probs[row] * mask, atol=1e-5)
    assert shorter > 5


def test_a_stop_string_needs_a_tokenizer_and_some_text(policy, tokenizer):
    engine = SamplerEngine(policy, [tokenizer.eos_token_id], tokenizer.pad_token_id)
    with pytest.raises(ValueError, match=r"stop strings \['x'\] need a tokenizer"):
        engine.generate(request_for(tokenizer, "x"))
    with pytest.raises(ConfigError, match="must not hold an empty text"):
        load_config(overrides=["actor_rollout_ref.rollout.stop=['']"])
