import pytest
from hypothesis import given
from hypothesis import strategies as st

from kapell.decorators import karmarkar_karp
from kapell.trainer.algorithms import micro_batches, num_micro_batches, plan_micro_batches


def sums(parts, lengths):
    return sorted(sum(lengths[row] for row in rows) for rows in parts)


def test_rows_fill_the_budget_exactly():
    lengths = [5, 4, 3, 2, 2]
    (parts,) = plan_micro_batches([lengths], max_tokens=8)
    assert sums(parts, lengths) == [8, 8]


def test_every_rank_makes_as_many_passes():
    plan = plan_micro_batches([[8, 8, 8], [8, 1, 1]], max_tokens=8)
    assert [len(parts) for parts in plan] == [3, 3]
    assert all(parts for parts in plan[1])


def test_a_rank_with_fewer_rows_than_passes_has_empty_ones():
    plan = plan_micro_batches([[8, 8, 8], [8], []], max_tokens=8)
    assert [len(parts) for parts in plan] == [3, 3, 3]
    assert sorted(map(len, plan[1])) == [0, 0, 1]


def test_a_row_above_the_budget_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="row 1 has 9 tokens, above the budget of 8"):
        plan_micro_batches([[8, 9]], max_tokens=8)


def test_too_few_micro_batches_are_refused():
    with pytest.raises(ValueError, match="3 rows need 3 micro-batches of 8 tokens, not 2"):
        micro_batches([8, 8, 8], max_tokens=8, num=2)


def test_ranks_that_decide_by_themselves_agree_with_the_plan():
    lengths = [[8, 8, 8], [8, 1, 1]]
    num = max(num_micro_batches(rank, max_tokens=8) for rank in lengths)
    assert [micro_batches(rank, max_tokens=8, num=num) for rank in lengths] == plan_micro_batches(lengths, max_tokens=8)


@given(st.lists(st.lists(st.integers(0, 20), max_size=25), min_size=1, max_size=4))
def test_plans_hold_every_row_once_within_the_budget(lengths_per_rank):
    plan = plan_micro_batches(lengths_per_rank, max_tokens=20)
    assert len({len(parts) for parts in plan}) == 1
    for parts, lengths in zip(plan, lengths_per_rank, strict=True):
        assert sorted(row for rows in parts for row in rows) == list(range(len(lengths)))
        assert all(total <= 20 for total in sums(parts, lengths))
        if len(lengths) >= len(parts):
            assert all(parts)


def test_simulated_ranks_meet_in_every_pass():
    """Each pass is a meeting of all ranks; with uneven numbers of passes this barrier would never be complete."""
    import threading

    plan = plan_micro_batches([[8, 8, 8], [8, 1, 1], [2]], max_tokens=8)
    barrier = threading.Barrier(len(plan), timeout=10)
    threads = [threading.Thread(target=lambda n: [barrier.wait() for _ in range(n)], args=(len(p),)) for p in plan]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert not barrier.broken


@pytest.mark.parametrize(
    ("costs", "parts", "expected"), [([8, 7, 6, 5, 4, 3, 2, 1], 2, [18, 18]), ([10, 1, 1, 1, 9, 2, 2, 2], 2, [14, 14])]
)
def test_balancing_matches_the_worked_numbers(costs, parts, expected):
    assert sums(karmarkar_karp(costs, parts, equal_size=True), costs) == expected


@pytest.mark.parametrize(("num", "parts", "sizes"), [(206, 4, [51, 51, 52, 52]), (3, 2, [1, 2]), (2, 4, [0, 0, 1, 1])])
def test_balancing_uneven_numbers_loses_no_row(num, parts, sizes):
    result = karmarkar_karp([row % 7 for row in range(num)], parts, equal_size=True)
    assert sorted(map(len, result)) == sizes
    assert sorted(row for rows in result for row in rows) == list(range(num))
