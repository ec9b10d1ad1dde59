"""A prompt that rows share is computed once, and nothing else changes."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kapell.trainer import forward
from kapell.trainer.algorithms import BatchTotals
from kapell.trainer.config import OptimConfig
from kapell.trainer.engine import TrainEngine
from kapell.trainer.forward import policy_forward
from kapell.trainer.models import build_policy, new_model_config
from kapell.trainer.objectives import PolicyObjective
from kapell.trainer.prefill import different_rows

TEMPERATURE = 0.7


def rows_of(
    num_prompts: int, samples: int, *, num_prompt: int = 9, num_tokens: int = 5, seed: int = 1
) -> dict[str, Tensor]:
    """Rows with ``num_prompts`` prompts of different lengths, padded on the left, and answers, padded on the right."""
    random = torch.Generator().manual_seed(seed)
    prompt_of_row_B = torch.arange(num_prompts * samples) % num_prompts  # rows of one prompt are not neighbours
    lengths_U = torch.randint(1, num_prompt + 1, (num_prompts,), generator=random)
    lengths_U[0] = num_prompt
    prompts_UP = torch.randint(3, 13, (num_prompts, num_prompt), generator=random)
    mask_UP = (torch.arange(num_prompt) >= num_prompt - lengths_U[:, None]).long()
    responses_BT = torch.randint(3, 13, (len(prompt_of_row_B), num_tokens), generator=random)
    answered_B = torch.randint(1, num_tokens + 1, (len(prompt_of_row_B),), generator=random)
    response_mask_BT = (torch.arange(num_tokens) < answered_B[:, None]).long()
    mask_BL = torch.cat([mask_UP[prompt_of_row_B], response_mask_BT], 1)
    ids_BL = torch.cat([prompts_UP[prompt_of_row_B], responses_BT], 1) * mask_BL
    return {
        "input_ids": ids_BL,
        "attention_mask": mask_BL,
        "position_ids": (mask_BL.cumsum(1) - 1).clamp(min=0),
        "responses": ids_BL[:, num_prompt:],
        "response_mask": response_mask_BT,
        "old_log_probs": -torch.rand(response_mask_BT.shape, generator=random),
        "advantages": torch.randn(response_mask_BT.shape, generator=random),
    }


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(-1, 1)), max_size=9))
def test_rows_are_of_one_kind_where_all_their_columns_are_equal(rows):
    first_BP, second_BP = torch.tensor(rows, dtype=torch.long).reshape(-1, 2).split(1, dim=1)
    found = different_rows(first_BP, second_BP)
    assert [rows[number] for number in found.rows] == list(dict.fromkeys(rows))
    assert [rows[found.rows[kind]] for kind in found.kind_of_row] == rows


def never(*_: object, **__: object) -> None:
    return None


@pytest.fixture
def tokens_computed(monkeypatch):
    """Counts tokens that go through a model."""

    def watch(model) -> list[int]:
        seen: list[int] = []
        model.get_input_embeddings().register_forward_hook(lambda _m, args, _out: seen.append(args[0].numel()))
        return seen

    return watch


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "qwen2", "qwen3", "gemma3_text", "mistral"])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_log_probs_and_gradients_are_those_of_whole_rows(
    tokenizer, tokens_computed, monkeypatch, model_type, num_tokens
):
    config = new_model_config(tokenizer, model_type=model_type, hidden_size=32, max_length=32)
    shared = build_policy(config, seed=3)
    whole = copy.deepcopy(shared)
    columns = rows_of(8, 8, num_tokens=num_tokens)
    seen = tokens_computed(shared)

    def learn(model):
        output = policy_forward(model, columns, temperature=TEMPERATURE, with_entropy=True)
        mask_BT = columns["response_mask"]
        ((output.log_probs + 0.1 * output.entropy) * columns["advantages"] * mask_BT).sum().backward()
        return output.log_probs.detach() * mask_BT

    log_probs_BT = learn(shared)
    assert sum(seen) == 8 * 9 + 64 * (num_tokens - 1)
    monkeypatch.setattr(forward, "shared_prompts", never)
    torch.testing.assert_close(log_probs_BT, learn(whole), rtol=1e-5, atol=1e-5)
    for one, other in zip(shared.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4)


def engine_tokens(tokenizer, tokens_computed, columns, **options) -> int:
    config = new_model_config(tokenizer, hidden_size=16, max_length=32)
    engine = TrainEngine(build_policy(config, seed=3), OptimConfig(lr=1e-3), **options)
    seen = tokens_computed(engine.model)
    totals = BatchTotals.of(columns["response_mask"])
    objective = PolicyObjective(temperature=TEMPERATURE)
    engine.forward_backward(columns, lambda micro: objective(engine.model, micro, totals))
    return sum(seen)


WHOLE = 64 * 14


@pytest.mark.parametrize(
    ("columns", "options", "expected"),
    [
        (rows_of(8, 8), {}, 8 * 9 + 64 * 4),
        (rows_of(64, 1), {}, WHOLE),
        (rows_of(8, 8), {"gradient_checkpointing": True}, WHOLE),
        (rows_of(2, 8), {}, 16 * 14),
    ],
    ids=["shared", "all different", "computed again", "too few to pay"],
)
def test_an_update_shares_prompts_where_it_may_and_pays(tokenizer, tokens_computed, columns, options, expected):
    assert engine_tokens(tokenizer, tokens_computed, columns, **options) == expected


def test_prompts_that_differ_in_their_mask_alone_are_different(tokenizer):
    columns = rows_of(8, 8)
    columns["attention_mask"][:4, 8] = 0  # hides the last token of half of the prompts, in one row each
    model = build_policy(new_model_config(tokenizer, hidden_size=16, max_length=32), seed=3)
    log_probs_BT = policy_forward(model, columns, temperature=1.0).log_probs
    for row in range(8):
        alone = {name: column[row : row + 1] for name, column in columns.items()}
        expected_1T = policy_forward(model, alone, temperature=1.0).log_probs
        torch.testing.assert_close(log_probs_BT[row : row + 1], expected_1T, rtol=1e-4, atol=1e-5)
