"""What must not change a loss, its gradient or its metrics, for every loss and estimator in the registries."""

import math

import pytest
import torch

from kapell.trainer.algorithms import (
    Aggregation,
    BatchTotals,
    KLKind,
    advantage_estimators,
    columns_of,
    compute_advantages,
    entropy_loss,
    kl_loss,
    merge_metrics,
    metric_values,
    policy_loss,
    policy_losses,
    value_loss,
)
from kapell.trainer.algorithms.columns import TOKEN_COLUMNS

OPTIONS = {"dro_beta": 0.1, "rollout_is": "sequence", "clip_ratio": 0.1}
SCALE = 16.0
ROWS = 8
SPLITS = {
    "each row alone": [[[row] for row in range(ROWS)]],
    "three uneven": [[[0, 1, 2, 3, 4], [5], [6, 7]]],
    "two ranks": [[[0, 1], [2]], [[3, 4, 5, 6, 7]]],
    "four ranks": [[[0, 1, 2, 3]], [[4]], [[5], [6]], [[7]]],
    "a rank without valid tokens": [[[0, 1, 2, 4], [5, 6, 7]], [[3]]],
}
JUNK = [math.nan, math.inf, -math.inf, 1e9]

LOSSES = (
    [("policy", name) for name in policy_losses] + [("kl", kind) for kind in KLKind] + [("value", ""), ("entropy", "")]
)
LEAF = {"policy": "log_probs", "kl": "log_probs", "value": "vpreds", "entropy": "entropys"}


def make_batch():
    """Random columns; row 3 has no valid token, some rows have observation tokens, some valid tokens are rejected."""
    generator = torch.Generator().manual_seed(0)

    def random():
        return torch.randn(ROWS, 7, generator=generator, dtype=torch.float64)

    mask = (torch.arange(7) < torch.tensor([7, 3, 1, 0, 5, 6, 2, 4])[:, None]) & (random() < 1.2)
    mask[2, 0] = True
    batch = {name: random() for name in ("advantages", "values", "returns", "vpreds", "entropys")}
    batch["log_probs"] = -random().abs()
    batch["old_log_probs"] = batch["log_probs"] + 0.2 * random()
    batch["ref_log_prob"] = batch["log_probs"] + 0.5 * random()
    batch["rollout_is_weights"] = random().exp()
    return batch | {"response_mask": mask, "loss_mask": mask & (random() < 1.0)}


def one_part(kind, name, columns, mode, totals):
    shared = {"mode": mode, "totals": totals, "scale": SCALE}
    if kind == "policy":
        return policy_loss(name, columns, OPTIONS, **shared)
    if kind == "kl":
        return kl_loss(columns["log_probs"], columns["ref_log_prob"], columns["loss_mask"], kind=name, **shared)
    if kind == "value":
        return value_loss(
            columns["vpreds"],
            columns["values"],
            columns["returns"],
            columns["loss_mask"],
            cliprange_value=0.3,
            **shared,
        )
    return entropy_loss(columns["entropys"], columns["loss_mask"], **shared)


def run(kind, name, mode, batch, ranks):
    """Loss, gradient and metrics as data-parallel training over these ranks of micro-batches gives them."""
    leaf = batch[LEAF[kind]].clone().requires_grad_()
    columns = batch | {LEAF[kind]: leaf}
    totals = BatchTotals.combined(
        [BatchTotals.of(batch["loss_mask"][torch.tensor(rows)]) for rank in ranks for rows in rank], dp_size=len(ranks)
    )
    loss, metrics = 0.0, []
    for rank in ranks:
        for rows in rank:
            micro = {key: column[torch.tensor(rows)] for key, column in columns.items()}
            part = one_part(kind, name, micro, mode, totals)
            (part.loss / len(ranks)).backward()  # gradients are averaged over ranks
            loss += float(part.loss.detach()) / len(ranks)
            metrics.append(part.metrics)
    return loss, leaf.grad, metric_values(merge_metrics(metrics))


def whole(kind, name, mode, batch):
    return run(kind, name, mode, batch, [[list(range(len(batch["response_mask"])))]])


def assert_same(actual, expected):
    assert actual[0] == pytest.approx(expected[0], abs=1e-6)
    torch.testing.assert_close(actual[1], expected[1], atol=1e-6, rtol=0)
    assert actual[2] == pytest.approx(expected[2], abs=1e-6)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("mode", Aggregation)
@pytest.mark.parametrize(("kind", "name"), LOSSES)
def test_losses_do_not_depend_on_micro_batches_and_ranks(kind, name, mode, split):
    batch = make_batch()
    expected = whole(kind, name, mode, batch)
    assert expected[1].any()
    assert_same(run(kind, name, mode, batch, SPLITS[split]), expected)


@pytest.mark.parametrize("mode", Aggregation)
@pytest.mark.parametrize(("kind", "name"), LOSSES)
def test_losses_do_not_depend_on_the_order_of_rows(kind, name, mode):
    batch = make_batch()
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    loss, gradient, metrics = whole(kind, name, mode, batch)
    shuffled = whole(kind, name, mode, {key: column[order] for key, column in batch.items()})
    assert_same(shuffled, (loss, gradient[order], metrics))


def padded(batch, left, right, junk):
    return {
        key: torch.nn.functional.pad(column, (left, right), value=False if column.dtype == torch.bool else junk)
        if key in TOKEN_COLUMNS or column.dtype == torch.bool
        else column
        for key, column in batch.items()
        if isinstance(column, torch.Tensor)
    }


@pytest.mark.parametrize(("left", "right"), [(2, 0), (0, 3), (1, 2)])
@pytest.mark.parametrize("mode", Aggregation)
@pytest.mark.parametrize(("kind", "name"), LOSSES)
def test_losses_do_not_depend_on_padding(kind, name, mode, left, right):
    batch = make_batch()
    loss, gradient, metrics = whole(kind, name, mode, batch)
    wider = whole(kind, name, mode, padded(batch, left, right, math.nan))
    assert_same(wider, (loss, torch.nn.functional.pad(gradient, (left, right)), metrics))


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize(("kind", "name"), LOSSES)
def test_junk_in_masked_slots_does_not_reach_losses(kind, name, junk):
    batch = make_batch()
    mask = batch["response_mask"]
    spoiled = {
        key: torch.where(mask, column, junk) if key in TOKEN_COLUMNS else column for key, column in batch.items()
    }
    # value, KL and entropy losses know the loss mask only; what lies under it is just as valid to them
    for mode in Aggregation:
        expected = whole(kind, name, mode, batch)
        actual = whole(kind, name, mode, spoiled)
        assert_same(actual, expected)
        assert not actual[1][~mask].any()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.uint8])
@pytest.mark.parametrize(("kind", "name"), LOSSES)
def test_losses_take_masks_of_any_dtype(kind, name, dtype):
    batch = make_batch()
    expected = whole(kind, name, "token-mean", batch)
    masks = {key: batch[key].to(dtype) for key in ("response_mask", "loss_mask")}
    assert_same(whole(kind, name, "token-mean", batch | masks), expected)


def make_scored_batch():
    batch = make_batch()
    generator = torch.Generator().manual_seed(5)
    mask = batch["response_mask"]
    rewards = torch.randn(ROWS, 7, generator=generator, dtype=torch.float64) * mask
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "values": batch["values"],
        "old_log_probs": batch["old_log_probs"],
        "sum_pi_squared": torch.rand(ROWS, 7, generator=generator, dtype=torch.float64),
        "rollout_is_weights": batch["rollout_is_weights"],
        "reward_baselines": torch.randn(ROWS, generator=generator, dtype=torch.float64),
        "reward_components": torch.randn(ROWS, 7, generator=generator, dtype=torch.float64),  # as wide as T
        "uid": torch.tensor([4, 4, 4, 4, 9, 9, 9, 1]),
    }


@pytest.fixture(params=sorted(advantage_estimators))
def estimator(request):
    return request.param


def select(batch, rows):
    return {key: column[torch.as_tensor(rows)] for key, column in batch.items()}


def assert_same_advantages(actual, expected):
    torch.testing.assert_close(actual.advantages, expected.advantages, atol=1e-6, rtol=0)
    torch.testing.assert_close(actual.returns, expected.returns, atol=1e-6, rtol=0)
    assert actual.metrics == expected.metrics


def test_advantages_follow_the_order_of_rows(estimator):
    batch = make_scored_batch()
    expected = compute_advantages(estimator, batch, {"gamma": 0.9, "lam": 0.8})
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    moved = compute_advantages(estimator, select(batch, order), {"gamma": 0.9, "lam": 0.8})
    assert expected.advantages.any()
    assert_same_advantages(
        moved, expected._replace(advantages=expected.advantages[order], returns=expected.returns[order])
    )


@pytest.mark.parametrize(("left", "right"), [(2, 0), (0, 3), (1, 2)])
def test_advantages_do_not_depend_on_padding(estimator, left, right):
    batch = make_scored_batch()
    expected = compute_advantages(estimator, batch, {"gamma": 0.9, "lam": 0.8})
    rewards = torch.nn.functional.pad(batch["token_level_rewards"], (left, right))
    wider = batch | padded(batch, left, right, math.nan) | {"token_level_rewards": rewards}
    actual = compute_advantages(estimator, wider, {"gamma": 0.9, "lam": 0.8})
    inside = slice(left, left + 7)
    assert not actual.advantages[:, :left].any()
    assert not actual.advantages[:, left + 7 :].any()
    assert_same_advantages(
        actual._replace(advantages=actual.advantages[:, inside], returns=actual.returns[:, inside]), expected
    )


@pytest.mark.parametrize("junk", JUNK)
def test_junk_in_masked_slots_does_not_reach_advantages(estimator, junk):
    batch = make_scored_batch()
    mask = batch["response_mask"]
    spoiled = {
        key: torch.where(mask, column, junk) if key in TOKEN_COLUMNS - {"token_level_rewards"} else column
        for key, column in batch.items()
    }
    # a row without a valid token has no outcome either
    for key in ("reward_components", "reward_baselines"):
        spoiled[key] = spoiled[key].clone()
        spoiled[key][3] = junk
    expected = compute_advantages(estimator, batch)
    actual = compute_advantages(estimator, spoiled)
    assert_same_advantages(actual, expected)
    assert not actual.advantages[~mask].any()


def test_estimators_called_directly_are_as_safe(estimator):
    batch = make_scored_batch()
    mask = batch["response_mask"]
    spoiled = {
        key: torch.where(mask, column, math.nan) if key in TOKEN_COLUMNS - {"token_level_rewards"} else column
        for key, column in batch.items()
    }
    function = advantage_estimators.get(estimator)
    result = function(**{name: spoiled[name] for name in columns_of(function)})
    assert_same_advantages(result, compute_advantages(estimator, batch))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.uint8])
def test_estimators_take_masks_of_any_dtype(estimator, dtype):
    batch = make_scored_batch()
    expected = compute_advantages(estimator, batch)
    mask = batch["response_mask"].to(dtype)
    assert_same_advantages(compute_advantages(estimator, batch | {"response_mask": mask}), expected)


@pytest.mark.parametrize("estimator", sorted(set(advantage_estimators) - {"gpg"}))  # its alpha is of the whole batch
def test_advantages_without_batch_statistics_can_be_computed_by_groups(estimator):
    batch = make_scored_batch()
    function = advantage_estimators.get(estimator)
    options = {} if estimator in ("grpo", "grpo_passk") else {"norm_scope": "none"}
    expected = compute_advantages(function, batch, options)
    for parts in ([[0, 1, 2, 3], [4, 5, 6], [7]], [[7, 4, 5, 6], [0, 1, 2, 3]]):
        metrics = []
        for rows in parts:
            result = compute_advantages(function, select(batch, rows), options)
            torch.testing.assert_close(result.advantages, expected.advantages[rows], atol=1e-6, rtol=0)
            metrics.append(result.metrics)
        assert metric_values(merge_metrics(metrics)) == metric_values(expected.metrics)
