"""Which rows each worker gets."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kapell.protocol import DataProto
from kapell.trainer.balance import RowSizes, balanced_call

NUM_PROMPT, NUM_TOKENS = 3, 20


def batch_of(answers: list[list[int]]) -> DataProto:
    """A batch of prompts, each with answers of these lengths."""
    prompts = [[prompt % 7, prompt // 7, 1] for prompt, lengths in enumerate(answers) for _ in lengths]
    lengths_B = torch.tensor([length for lengths in answers for length in lengths])
    answered_BT = (torch.arange(NUM_TOKENS) < lengths_B[:, None]).long()
    prompts_BP = torch.tensor(prompts).reshape(-1, NUM_PROMPT)
    return DataProto.from_dict(
        tensors={
            "input_ids": torch.cat([prompts_BP, answered_BT], dim=1),
            "attention_mask": torch.cat([torch.ones_like(prompts_BP), answered_BT], dim=1),
            "responses": answered_BT,
            "row": torch.arange(len(prompts_BP)),
        }
    )


def parts_of(batch: DataProto, num_workers: int) -> list[np.ndarray]:
    return np.array_split(RowSizes.of(batch).balanced(range(len(batch)), num_workers), num_workers)


def tokens_of(batch: DataProto, rows: np.ndarray) -> int:
    return int(batch.column("attention_mask")[rows.tolist()].sum())


def test_rows_of_one_prompt_go_to_one_worker():
    batch = batch_of([[5, 9, 2, 4]] * 8)
    for rows in parts_of(batch, 4):
        assert len(set((rows // 4).tolist())) == 2


def test_prompts_are_parted_where_one_worker_would_have_too_much():
    batch = batch_of([[20, 20], [1, 1], [1, 1], [1, 1]])
    parts = parts_of(batch, 2)
    assert [20 in batch.column("attention_mask")[rows.tolist()].sum(-1) - NUM_PROMPT for rows in parts] == [True, True]


@given(
    st.lists(st.lists(st.integers(0, NUM_TOKENS), min_size=1, max_size=5), min_size=1, max_size=9), st.integers(1, 4)
)
def test_each_row_goes_somewhere_and_no_worker_has_much_more_than_by_single_rows(answers, num_workers):
    batch = batch_of(answers)
    parts = parts_of(batch, num_workers)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(batch)))
    single = batch.select_idxs(list(range(len(batch))))
    single.batch["input_ids"][:, 0] = torch.arange(len(batch)) + 100  # each prompt different
    most = max(tokens_of(batch, rows) for rows in parts_of(single, num_workers))
    assert max(tokens_of(batch, rows) for rows in parts) <= 1.1 * most


def test_answers_come_back_in_the_order_of_the_batch():
    batch = batch_of([[9, 1], [2, 8], [7, 7], [1, 1]])
    answer = balanced_call(lambda rows: rows.select(batch_keys=["row"]), batch, num_workers=2)
    assert answer.column("row").tolist() == list(range(8))


def test_some_rows_of_a_batch_are_dealt_as_if_they_were_all():
    batch = batch_of([[5, 9], [2, 4], [20, 1], [3, 3]])
    rows = [6, 7, 0, 1]
    alone = batch.select_idxs(rows)
    dealt = RowSizes.of(batch).balanced(rows, 2)
    assert [rows.index(row) for row in dealt] == RowSizes.of(alone).balanced(range(4), 2).tolist()
