import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kapell.trainer.algorithms import position_ids
from kapell.trainer.data import pad_left
from kapell.trainer.forward import policy_forward
from kapell.trainer.models import build_policy, new_model_config
from kapell.trainer.rollout_engine import RolloutRequest, SamplerEngine
from kapell.trainer.sampler import Sampling, _choose, filter_logits, sample, sample_streams

PROMPTS = [[3, 4, 5, 6, 2], [7, 8, 2], [7, 8, 2], [7, 8, 2], [9, 2]]
LENGTH = 6


def rollout_of(model, prompts=PROMPTS, *, sampling=None, ids=None, eos=(1,), pad=0):
    ids_BP, mask_BP = pad_left(prompts, pad_id=pad)
    uniforms = sample_streams(1, 1, range(len(prompts)) if ids is None else ids, LENGTH)
    rollout = sample(
        model,
        ids_BP,
        mask_BP,
        sampling=sampling or Sampling(),
        uniforms_BT=uniforms,
        eos_token_ids=eos,
        pad_token_id=pad,
    )
    return rollout, ids_BP, mask_BP


def recomputed(model, rollout, ids_BP, mask_BP, temperature):
    attention = torch.cat([mask_BP, rollout.response_mask], dim=1)
    columns = {
        "input_ids": torch.cat([ids_BP, rollout.responses], dim=1),
        "attention_mask": attention,
        "position_ids": position_ids(attention),
        "responses": rollout.responses,
    }
    with torch.no_grad():
        return policy_forward(model, columns, temperature=temperature)[0] * rollout.response_mask


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_log_probs_are_those_of_a_full_forward_pass(tokenizer, model_type, temperature):
    config = new_model_config(tokenizer, model_type=model_type, hidden_size=32, max_length=24)
    model = build_policy(config, seed=3)
    rollout, ids_BP, mask_BP = rollout_of(model, sampling=Sampling(temperature=temperature, top_p=0.9, top_k=8))
    expected = recomputed(model, rollout, ids_BP, mask_BP, temperature)
    assert (rollout.rollout_log_probs - expected).abs().max() < 1e-5


def test_what_is_left_between_sampled_and_recomputed_log_probs_is_rounding(tokenizer):
    config = new_model_config(tokenizer, hidden_size=32, num_hidden_layers=12, max_length=24)
    model = build_policy(config, seed=3).double()
    rollout, ids_BP, mask_BP = rollout_of(model)
    gap = (rollout.rollout_log_probs - recomputed(model, rollout, ids_BP, mask_BP, 1.0)).abs().max()
    assert rollout.rollout_log_probs.dtype == torch.float64
    assert gap < 1e-12


def test_a_row_samples_the_same_alone_and_among_others(policy):
    together, _, _ = rollout_of(policy)
    for row, prompt in enumerate(PROMPTS):
        alone, _, _ = rollout_of(policy, [prompt], ids=[row])
        assert torch.equal(alone.responses[0], together.responses[row])
        assert torch.allclose(alone.rollout_log_probs[0], together.rollout_log_probs[row], atol=1e-5)


def test_samples_of_one_prompt_differ_and_two_runs_agree(policy):
    first, _, _ = rollout_of(policy)
    second, _, _ = rollout_of(policy)
    assert torch.equal(first.responses, second.responses)
    assert len({tuple(row) for row in first.responses[1:4].tolist()}) > 1


def test_streams_differ_by_seed_step_and_sample():
    base = sample_streams(1, 1, [5], 4)
    assert not any(
        torch.equal(base, other)
        for other in (sample_streams(2, 1, [5], 4), sample_streams(1, 2, [5], 4), sample_streams(1, 1, [6], 4))
    )


@given(st.lists(st.integers(0, 2**63), max_size=5), st.integers(0, 9))
def test_each_row_has_the_numbers_of_a_generator_of_its_own(sample_ids, length):
    rows = sample_streams(3, 4, sample_ids, length)
    assert rows.shape == (len(sample_ids), length)
    for row, sample_id in zip(rows, sample_ids, strict=True):
        counter = np.array([0, 0, 0, sample_id], dtype=np.uint64)
        own = np.random.Generator(np.random.Philox(key=np.array([3, 4], dtype=np.uint64), counter=counter))
        assert row.tolist() == own.random(length).tolist()


def test_equal_neighbouring_prompts_are_prefilled_once(policy):
    rows = []
    hook = policy.register_forward_pre_hook(
        lambda _module, args, kwargs: rows.append((args or [kwargs["input_ids"]])[0].shape[0]), with_kwargs=True
    )
    rollout_of(policy, eos=())
    hook.remove()
    assert rows == [3, *[5] * (LENGTH - 1)]


def test_padding_that_all_rows_share_is_not_computed(policy):
    widths = []
    hook = policy.register_forward_pre_hook(
        lambda _module, args, kwargs: widths.append((args or [kwargs["input_ids"]])[0].shape[1]), with_kwargs=True
    )
    wide, mask = (torch.nn.functional.pad(column, (9, 0)) for column in pad_left([[3, 4, 2], [5, 2]], pad_id=0))
    uniforms = sample_streams(1, 1, range(2), LENGTH)
    options = {"sampling": Sampling(), "uniforms_BT": uniforms, "eos_token_ids": [1], "pad_token_id": 0}
    padded = sample(policy, wide, mask, **options)
    hook.remove()
    assert widths[0] == 3
    plain = sample(policy, wide[:, 9:], mask[:, 9:], **options)
    assert torch.equal(padded.responses, plain.responses)
    assert torch.equal(padded.rollout_log_probs, plain.rollout_log_probs)


def test_rows_that_have_ended_leave_the_batch(policy):
    rows = []
    hook = policy.register_forward_pre_hook(
        lambda _module, args, kwargs: rows.append((args or [kwargs["input_ids"]])[0].shape[0]), with_kwargs=True
    )
    rollout, ids_BP, mask_BP = rollout_of(policy, [[3, 2]] * 64, eos=(1, 4, 7, 9))
    hook.remove()
    running = rollout.response_mask.sum(0).tolist()
    assert rows[0] == 1
    assert all(count <= 64 and count * 0.75 <= max(left, 1) for count, left in zip(rows[1:], running[1:], strict=False))
    assert rows[-1] < 32
    expected = recomputed(policy, rollout, ids_BP, mask_BP, 1.0)
    assert (rollout.rollout_log_probs - expected).abs().max() < 1e-5


def test_responses_end_with_the_first_end_token_and_padding_follows(policy):
    rollout, _, _ = rollout_of(policy, [[3, 2]] * 64, eos=(1, 7))
    for tokens, mask in zip(rollout.responses.tolist(), rollout.response_mask.tolist(), strict=True):
        ends = [t for t, token in enumerate(tokens) if token in (1, 7)]
        length = ends[0] + 1 if ends else LENGTH
        assert mask == [1] * length + [0] * (LENGTH - length)
        assert tokens[length:] == [0] * (LENGTH - length)


def test_a_padding_token_that_is_the_end_token_keeps_one_end_in_the_mask(policy):
    rollout, _, _ = rollout_of(policy, [[3, 2]] * 64, eos=(1,), pad=1)
    lengths = rollout.response_mask.sum(-1)
    shorter = lengths < LENGTH
    assert shorter.any()
    last = rollout.responses.gather(1, (lengths - 1)[:, None])[:, 0]
    assert (last[shorter] == 1).all()


def test_greedy_takes_the_most_probable_token(policy):
    rollout, ids_BP, mask_BP = rollout_of(policy, sampling=Sampling(do_sample=False))
    logits = policy(ids_BP, attention_mask=mask_BP, position_ids=position_ids(mask_BP)).logits[:, -1]
    assert torch.equal(rollout.responses[:, 0], logits.argmax(-1))


def test_samples_follow_the_distribution(policy):
    rollout, ids_BP, mask_BP = rollout_of(policy, [[3, 2]] * 4000)
    logits = policy(ids_BP[:1], attention_mask=mask_BP[:1], position_ids=position_ids(mask_BP[:1])).logits[0, -1]
    counts = torch.bincount(rollout.responses[:, 0], minlength=logits.shape[-1]) / 4000
    assert (counts - logits.softmax(-1)).abs().max() < 0.03


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.75}, [0, 1]),
        ({"top_p": 0.5}, [0]),
        ({"top_k": 1, "top_p": 0.9}, [0]),
        ({}, [0, 1, 2]),
    ],
)
def test_top_k_and_top_p_keep_the_most_probable(options, kept):
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert filter_logits(logits, **options).isfinite()[0].nonzero()[:, 0].tolist() == kept


def test_logits_in_half_precision_are_drawn_from_as_their_log_probs_say(policy):
    logits = torch.tensor([[17.25, 17.125, 9.0]], dtype=torch.bfloat16)
    uniforms = torch.linspace(0, 1, 20_001, dtype=torch.float64)[:-1]
    drawn = _choose(logits.expand(len(uniforms), -1), Sampling(temperature=0.7), uniforms)
    shares = drawn.bincount(minlength=3) / len(uniforms)
    torch.testing.assert_close(shares, (logits[0].float() / 0.7).softmax(-1), rtol=0, atol=1e-4)


def test_no_rows_give_no_rows(policy):
    empty = torch.zeros((0, 3), dtype=torch.long)
    rollout = sample(
        policy,
        empty,
        empty,
        sampling=Sampling(),
        uniforms_BT=torch.zeros((0, LENGTH)),
        eos_token_ids=[1],
        pad_token_id=0,
    )
    assert rollout.responses.shape == (0, LENGTH)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 5, 9])
def test_few_rows_at_once_sample_the_same_in_the_same_places(policy, max_num_seqs):
    prompts = [[3, 4, 5, 6, 2], [7, 2], [7, 2], [9, 8, 2], [3, 4, 5, 6, 2], [9, 2]]
    ids_BP, mask_BP = pad_left(prompts, pad_id=0)
    request = RolloutRequest(
        prompts=ids_BP,
        prompt_mask=mask_BP,
        sample_ids=[40, 3, 4, 11, 7, 0],
        sampling=Sampling(),
        max_new_tokens=LENGTH,
        seed=1,
        step=2,
    )
    shapes = []
    policy.register_forward_pre_hook(lambda _m, args: shapes.append(tuple(args[0].shape)))
    whole = SamplerEngine(policy, [1], 0).generate(request)
    assert shapes[0] == (4, 5), "equal prompts are computed once"
    shapes.clear()
    parts = SamplerEngine(policy, [1], 0, max_num_seqs=max_num_seqs).generate(request)
    assert max(rows for rows, _ in shapes) <= max_num_seqs
    assert torch.equal(parts.responses, whole.responses)
    assert torch.equal(parts.response_mask, whole.response_mask)
    assert torch.allclose(parts.rollout_log_probs, whole.rollout_log_probs, atol=1e-5)
    if max_num_seqs == 3:
        assert [width for _, width in shapes if width > 1] == [2, 5], "short prompts are not padded to the longest"


def test_no_rows_are_sampled_as_none(policy):
    empty = torch.zeros((0, 3), dtype=torch.long)
    request = RolloutRequest(
        prompts=empty, prompt_mask=empty, sample_ids=[], sampling=Sampling(), max_new_tokens=2, seed=1, step=1
    )
    assert SamplerEngine(policy, [1], 0, max_num_seqs=2).generate(request).responses.shape == (0, 2)
