"""The calls of an update: in one for ranks that can wait for each other, else mini-batch by mini-batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kapell.decorators import Dispatch, Reduction, register
from kapell.protocol import DataProto
from kapell.trainer.algorithms import Metric
from kapell.trainer.metrics import metrics_of
from kapell.trainer.updates import UpdatePlan, learn, mini_batches
from kapell.trainer.workers import TrainWorker
from kapell.workergroup import ClassWithInitArgs, LocalBackend, Worker, WorkerFailedError

NUM_TOKENS = 2


class Objective:
    columns = ("row", "advantages", "response_mask")
    optional_columns = ("loss_mask",)


class Recording(TrainWorker):
    """Notes the mini-batches that it is given, in place of learning from them."""

    def __init__(self, fails_at: int | None = None) -> None:
        Worker.__init__(self)
        self.fails_at = fails_at
        self.events = []

    @register(Dispatch.DP_COMPUTE_PROTO, collect=Reduction.LIST)
    def forward_backward(self, batch, *, objective, totals, micro_batches=None):
        columns = {name: batch.column(name).tolist() for name in batch.columns}
        self.events.append((columns, totals))
        return {"rows": Metric.sum(len(batch)), "last": Metric.max(max(columns["row"], default=-1))}

    @register(Dispatch.ONE_TO_ALL, collect=Reduction.FIRST)
    def optimizer_step(self):
        self.events.append("step")
        if self.events.count("step") == self.fails_at:
            raise FloatingPointError("the gradient's norm is nan; no step was made")
        return {"lr": float(self.events.count("step"))}

    @register(Dispatch.ONE_TO_ALL)
    def told(self):
        return self.events


def batch_of(samples_of_prompts: list[int]) -> DataProto:
    uid = [f"p{prompt}" for prompt, samples in enumerate(samples_of_prompts) for _ in range(samples)]
    mask_BT = torch.ones(len(uid), NUM_TOKENS).long()
    mask_BT[::3, 1] = 0
    tensors = {
        "row": torch.arange(len(uid)),
        "advantages": torch.randn(len(uid), NUM_TOKENS, generator=torch.Generator().manual_seed(1)),
        "responses": torch.ones_like(mask_BT),
        "response_mask": mask_BT,
        "input_ids": torch.arange(len(uid) * (1 + NUM_TOKENS)).reshape(len(uid), 1 + NUM_TOKENS),
        "attention_mask": torch.cat([torch.ones(len(uid), 1).long(), mask_BT], 1),
    }
    return DataProto.from_dict(tensors, {"uid": uid})


def learned(mode, ranks, batch, plan):
    with LocalBackend(mode) as backend:
        group = backend.worker_group(backend.resource_pool([ranks]), ClassWithInitArgs(Recording))
        result = learn(group, batch, Objective(), plan, role="actor", seed=(1, 2))
        calls = {entry.method: entry.calls for entry in group.stats().methods}
        return metrics_of(result), group.told(), calls


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 4), max_size=6),
    st.integers(1, 3),
    st.builds(
        UpdatePlan,
        epochs=st.integers(1, 2),
        prompts_per_mini_batch=st.integers(1, 4),
        balance=st.booleans(),
        whiten_advantages=st.booleans(),
    ),
)
def test_ranks_learn_the_same_in_one_call_as_in_many(samples_of_prompts, ranks, plan):
    batch = batch_of(samples_of_prompts)
    metrics, told, calls = learned("threads", ranks, batch, plan)
    expected, expected_told, _ = learned("serial", ranks, batch, plan)
    assert calls == ({"update": 1} if samples_of_prompts else {})
    assert told == expected_told
    assert metrics == expected
    num_steps = plan.epochs * -(-len(samples_of_prompts) // plan.prompts_per_mini_batch)
    assert all(events.count("step") == num_steps for events in told)
    seen = [row for events in told for event in events if event != "step" for row in event[0]["row"]]
    assert sorted(seen) == sorted([*range(len(batch))] * plan.epochs)


def test_serial_ranks_get_a_call_for_each_mini_batch_and_step():
    _, told, calls = learned("serial", 2, batch_of([2, 2, 2]), UpdatePlan(prompts_per_mini_batch=2))
    assert calls == {"forward_backward": 2, "optimizer_step": 2}
    assert [event == "step" for event in told[0]] == [False, True, False, True]


@pytest.mark.parametrize("mode", ["serial", "threads"])
def test_an_update_ends_with_the_step_that_fails(mode):
    with LocalBackend(mode) as backend:
        group = backend.worker_group(backend.resource_pool([2]), ClassWithInitArgs(Recording, fails_at=2))
        plan = UpdatePlan(prompts_per_mini_batch=1)
        with pytest.raises(WorkerFailedError, match="no step was made"):
            learn(group, batch_of([2, 2, 2]), Objective(), plan, role="actor", seed=(1,))
        assert [events.count("step") for events in group.told()] == [2, 2]


class Drifting(Recording):
    """Tells after each step how far it has gone."""

    @register(Dispatch.DP_COMPUTE_PROTO, collect=Reduction.LIST)
    def forward_backward(self, batch, *, objective, totals, micro_batches=None):
        moved = 0.1 * self.events.count("step")
        super().forward_backward(batch, objective=objective, totals=totals)
        # Each rank sees another part of it, here twice as much on the one and nothing on the other.
        return {"actor/approx_kl": Metric.mean(moved * (2 if self.rank == 0 else 0), weight=1)}


@pytest.mark.parametrize("mode", ["serial", "threads"])
@pytest.mark.parametrize(
    ("target_kl", "passes"), [(None, 4), (0.05, 1), (0.25, 2), (0.7, 4), (0.8, 4)], ids=lambda value: str(value)
)
def test_no_further_pass_is_made_once_the_policy_has_gone_too_far(mode, target_kl, passes):
    # Two mini-batches a pass: the last ones of the passes see 0.1, 0.3, 0.5 and 0.7 over both ranks.
    plan = UpdatePlan(epochs=4, prompts_per_mini_batch=2, target_kl=target_kl, shuffle=False)
    with LocalBackend(mode) as backend:
        group = backend.worker_group(backend.resource_pool([2]), ClassWithInitArgs(Drifting))
        metrics = metrics_of(learn(group, batch_of([1, 1, 1, 1]), Objective(), plan, role="actor", seed=(1,)))
        assert [events.count("step") for events in group.told()] == [2 * passes] * 2
    assert ("actor/ppo_epochs" in metrics) == (target_kl is not None)
    if target_kl is not None:
        assert metrics["actor/ppo_epochs"].value == passes


def test_an_update_in_separate_passes_sees_the_same_mini_batches_as_one_in_all():
    plan = UpdatePlan(epochs=3, prompts_per_mini_batch=1)
    uid = batch_of([2, 1, 3]).non_tensor_batch["uid"]
    apart = [rows for epoch in range(3) for rows in mini_batches(uid, plan, seed=(1,), epochs=[epoch])]
    assert apart == list(mini_batches(uid, plan, seed=(1,)))
