import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kapell.trainer.algorithms import position_ids
from kapell.trainer.config import OptimConfig
from kapell.trainer.engine import TrainEngine
from kapell.trainer.forward import policy_forward
from kapell.trainer.micro_batches import MicroBatches, joined, portions

PROMPT, LENGTH = 5, 6
PROMPTS, RESPONSES = [1, 3, 2, 5, 1, 2, 4], [6, 1, 3, 2, 4, 1, 2]


def columns_of(prompts=PROMPTS, responses=RESPONSES):
    generator = torch.Generator().manual_seed(0)
    prompt_mask = torch.arange(PROMPT).flip(0) < torch.tensor(prompts)[:, None]
    mask = (torch.arange(LENGTH) < torch.tensor(responses)[:, None]).long()
    attention = torch.cat([prompt_mask.long(), mask], dim=1)
    ids = torch.randint(3, 13, attention.shape, generator=generator) * attention
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": position_ids(attention),
        "responses": ids[:, PROMPT:],
        "response_mask": mask,
    }


@given(st.lists(st.integers(1, 20), max_size=30), st.integers(20, 60))
def test_a_budget_of_tokens_is_never_exceeded_and_every_row_is_in_one_portion(lengths, max_tokens):
    sizes = MicroBatches(max_tokens=max_tokens)
    num = sizes.num_for(lengths)
    for wanted in (num, num + 2):
        parts = sizes.rows(lengths, wanted)
        assert len(parts) == wanted
        assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
        assert all(sum(lengths[row] for row in part) <= max_tokens for part in parts)


@given(st.integers(0, 20), st.integers(1, 6) | st.none())
def test_portions_by_rows_are_full_but_for_the_last(num_rows, max_rows):
    sizes = MicroBatches(max_rows=max_rows)
    lengths = [1] * num_rows
    parts = sizes.rows(lengths, sizes.num_for(lengths))
    assert [row for part in parts for row in part] == list(range(num_rows))
    assert all(len(part) == (max_rows or num_rows) for part in parts[:-1])


def test_a_row_above_the_budget_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="row 1 has 12 tokens, above the budget of 10"):
        MicroBatches(max_tokens=10).num_for([3, 12])


def test_a_portion_has_no_column_of_padding_only():
    rows = [[1, 5], [3], [0, 6]]
    widths = [(part["input_ids"].shape[1], part["responses"].shape[1]) for part in portions(columns_of(), rows)]
    assert widths == [(3 + 1, 1), (5 + 2, 2), (4 + 6, 6)]


@pytest.mark.parametrize("sizes", [MicroBatches(max_rows=2), MicroBatches(max_tokens=11), MicroBatches()])
def test_portions_put_together_are_the_pass_of_all_rows(policy, sizes):
    columns = columns_of()
    with torch.no_grad():
        whole = policy_forward(policy, columns, temperature=1.0).log_probs * columns["response_mask"]
    made = TrainEngine(policy, OptimConfig()).evaluate(
        columns,
        lambda model, micro: policy_forward(model, micro, temperature=1.0)._asdict(),
        names=("log_probs",),
        micro_batches=sizes,
    )
    assert made["log_probs"].shape == (len(PROMPTS), LENGTH)
    assert torch.allclose(made["log_probs"], whole, atol=1e-5)


def test_no_rows_give_columns_of_no_rows(policy):
    columns = {name: column[:0] for name, column in columns_of().items()}
    made = TrainEngine(policy, OptimConfig()).evaluate(columns, lambda model, micro: {}, names=("values",))
    assert made["values"].shape == (0, LENGTH)


def test_an_empty_portion_is_a_row_that_counts_nowhere(policy):
    columns = columns_of()
    (blank,) = portions(columns, [[]])
    assert blank["responses"].shape == (1, 1)
    assert not blank["response_mask"].any()
    assert policy_forward(policy, blank, temperature=1.0).log_probs.isfinite().all()
    (blank,) = portions({name: column[:0] for name, column in columns.items()}, [[]])
    assert blank["input_ids"].shape == (1, 2)
    given_rows = [[], [0]]
    result = joined([{"x": torch.ones(1, 1)}, {"x": torch.ones(1, 1)}], given_rows, torch.ones(1, 2), ["x"])
    assert result["x"].tolist() == [[1.0, 0.0]]
