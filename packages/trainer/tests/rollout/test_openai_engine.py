"""The engine over HTTP against a real server on the loopback interface that runs the same tiny model."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from kapell.trainer.data import pad_left
from kapell.trainer.forward import policy_forward
from kapell.trainer.http_service import ServiceError
from kapell.trainer.models import build_policy, new_model_config
from kapell.trainer.openai_engine import OpenAIEngine
from kapell.trainer.rollout_engine import RolloutEngine, RolloutRequest, SamplerEngine, rollout_columns
from kapell.trainer.sampler import Sampling
from kapell.trainer.tokenizer import build_character_tokenizer

TOKENIZER = build_character_tokenizer("0123456789")
EOS, PAD = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id
UNTIED = {"tie_word_embeddings": False}
CONFIG = new_model_config(TOKENIZER, hidden_size=16, num_attention_heads=2, max_length=24, override_config=UNTIED)


def tiny_model(seed=1):
    model = build_policy(CONFIG, seed=seed)
    with torch.no_grad():  # far from uniform, so that wrong tokens and temperatures show
        model.get_output_embeddings().weight.mul_(30)
    return model


def request_for(*texts, **changes):
    prompts, mask = pad_left([TOKENIZER(text)["input_ids"] for text in texts], PAD)
    request = RolloutRequest(
        prompts=prompts,
        prompt_mask=mask,
        sample_ids=list(range(10, 10 + len(texts))),
        sampling=Sampling(temperature=0.7),
        max_new_tokens=8,
        seed=1,
        step=3,
    )
    return replace(request, **changes)


def engine_for(url, **options):
    return OpenAIEngine(url=url, model="tiny", eos_token_ids=(EOS,), pad_token_id=PAD, backoff=0.01, **options)


@pytest.mark.parametrize("style", ["vllm", "sglang", "token_id"])
def test_greedy_responses_are_those_of_the_built_in_engine(style, serving):
    model = tiny_model()
    request = request_for("1", "234", "5678", "99", sampling=Sampling(do_sample=False))
    engines: list[RolloutEngine] = [SamplerEngine(model, (EOS,), PAD)]
    with serving(model, style=style) as (_, url):
        engines.append(engine_for(url))
        ours, served = (engine.generate(request) for engine in engines)
    assert torch.equal(ours.responses, served.responses)
    assert torch.equal(ours.response_mask, served.response_mask)
    torch.testing.assert_close(ours.rollout_log_probs, served.rollout_log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("style", ["vllm", "sglang"])
def test_stop_strings_end_responses_where_the_built_in_engine_ends_them(style, serving):
    model = tiny_model()
    request = request_for("1", "234", "5678", "99", sampling=Sampling(do_sample=False))
    decode = partial(TOKENIZER.decode, skip_special_tokens=True)
    text = decode(SamplerEngine(model, (EOS,), PAD).generate(request).responses[1])
    stopping = replace(request, sampling=Sampling(do_sample=False, stop=(text[1:3], "no such text")))
    with serving(model, style=style, decode=decode) as (server, url):
        ours = SamplerEngine(model, (EOS,), PAD, TOKENIZER).generate(stopping)
        served = engine_for(url).generate(stopping)
    assert server.requests[0]["stop"] == [text[1:3], "no such text"]
    assert decode(ours.responses[1]) == text[:3] != text
    assert torch.equal(ours.responses, served.responses)
    assert torch.equal(ours.response_mask, served.response_mask)


def test_log_probs_agree_with_recomputed_ones(serving):
    model = tiny_model()
    request = request_for("1", "234", "5678", "99")
    with serving(model) as (_, url):
        rollout = engine_for(url).generate(request)
    columns = rollout_columns(request, rollout, policy_version=4)
    assert columns.column("policy_version").tolist() == [4] * 4
    with torch.no_grad():
        again, *_ = policy_forward(model, {name: columns.column(name) for name in columns.columns}, temperature=0.7)
    gap = (again - rollout.rollout_log_probs) * rollout.response_mask
    assert gap.abs().max() < 1e-5


def test_a_rows_response_depends_on_its_id_and_not_on_its_company(serving):
    with serving(tiny_model()) as (_, url):
        both = engine_for(url, concurrency=2).generate(request_for("12", "34"))
        alone = engine_for(url, concurrency=1).generate(request_for("34", sample_ids=[11]))
        same_prompt = engine_for(url).generate(request_for(*["12"] * 6))
    assert torch.equal(both.responses[1:], alone.responses)
    assert len({tuple(row) for row in same_prompt.responses.tolist()}) > 1


def test_what_is_sent_is_what_the_servers_know(serving):
    with serving(tiny_model()) as (server, url):
        engine_for(url).generate(request_for("12", sampling=Sampling(temperature=0.5, top_k=3, top_p=0.9)))
        engine_for(url).generate(request_for("12", sampling=Sampling(do_sample=False, top_k=3, top_p=0.9)))
    sampled, greedy = server.requests
    assert sampled["prompt"] == TOKENIZER("12")["input_ids"]
    wanted = {"model": "tiny", "temperature": 0.5, "top_p": 0.9, "top_k": 3, "max_tokens": 8, "stop_token_ids": [EOS]}
    assert wanted.items() <= sampled.items()
    assert {"temperature": 0.0, "top_p": 1.0}.items() <= greedy.items()
    assert "top_k" not in greedy


def test_no_rows_ask_nothing(serving):
    with serving(tiny_model()) as (server, url):
        request = request_for("1")
        request = replace(request, prompts=request.prompts[:0], prompt_mask=request.prompt_mask[:0], sample_ids=[])
        assert engine_for(url).generate(request).responses.shape == (0, 8)
    assert server.requests == []


def choice_with(**changes):
    def change(answer):
        choice = answer["choices"][0]
        for name, value in changes.items():
            if name in choice["logprobs"]:
                choice["logprobs"][name] = value(choice["logprobs"][name])
            else:
                choice[name] = value(choice.get(name))
        return answer

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda answer: {}, "no completion with token ids"),
        (lambda answer: {"choices": []}, "no completion with token ids"),
        (choice_with(logprobs=lambda _: None), "no completion with token ids"),
        (choice_with(token_ids=lambda _: None, tokens=lambda _: ["a", "b"]), "text only"),
        (choice_with(token_logprobs=lambda values: values[:-1]), "7 logprobs; need as many"),
        (choice_with(token_logprobs=lambda values: [None, *values[1:]]), "no completion with token ids"),
        (choice_with(token_logprobs=lambda values: [math.nan, *values[1:]]), "not finite"),
        (choice_with(token_ids=lambda ids: ids[:2], token_logprobs=lambda v: v[:2]), "without an end-of-sequence"),
        (choice_with(token_ids=lambda ids: ids * 2, token_logprobs=lambda v: v * 2), "between 1 and 8"),
        (choice_with(token_ids=lambda ids: [], token_logprobs=lambda v: []), "between 1 and 8"),
    ],
)
def test_an_answer_that_training_cannot_use_is_an_error(change, message, serving):
    with serving(tiny_model()) as (server, url):
        server.change = change
        engine = OpenAIEngine(url=url, model="tiny", eos_token_ids=(10_000,), pad_token_id=PAD)
        with pytest.raises(ServiceError, match=message) as caught:
            engine.generate(request_for("12"))
    assert url in str(caught.value)


def test_weights_are_reloaded_from_a_folder(tmp_path, serving):
    other = tiny_model(seed=2)
    other.save_pretrained(tmp_path)
    request = request_for("1", "234", "5678", sampling=Sampling(do_sample=False))
    with serving(tiny_model()) as (_, url):
        engine = engine_for(url, reload_path="/update_weights_from_disk")
        before = engine.generate(request)
        engine.load_weights(str(tmp_path))
        after = engine.generate(request)
    assert not torch.equal(before.responses, after.responses)
    assert torch.equal(after.responses, SamplerEngine(other, (EOS,), PAD).generate(request).responses)


def test_without_a_path_the_server_keeps_its_weights(tmp_path, serving):
    with serving(tiny_model()) as (server, url):
        engine_for(url).load_weights(str(tmp_path))
    assert server.loaded == []
