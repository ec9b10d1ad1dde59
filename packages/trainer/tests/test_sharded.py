"""Two processes that hold one model in parts (FSDP2 over gloo), beside one that holds it whole."""

import copy
import importlib.util
import multiprocessing
import socket
from functools import partial

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from kapell.trainer.algorithms import BatchTotals, metric_values, position_ids
from kapell.trainer.collective import join_collective, join_process_group
from kapell.trainer.config import OptimConfig
from kapell.trainer.engine import TrainEngine
from kapell.trainer.forward import policy_forward
from kapell.trainer.lora import Adapter, build_with_adapter
from kapell.trainer.micro_batches import MicroBatches
from kapell.trainer.models import build_policy, new_model_config
from kapell.trainer.objectives import PolicyObjective
from kapell.trainer.rollout_engine import RolloutRequest, SamplerEngine
from kapell.trainer.sampler import Sampling
from kapell.trainer.tokenizer import build_character_tokenizer

ROWS, PROMPT, LENGTH = 5, 3, 4
SHARES = (slice(0, 4), slice(4, 5))  # so that one rank has more micro-batches than the other
OBJECTIVE = PolicyObjective(options={"clip_ratio": 0.2}, entropy_coeff=0.01)
MODEL = new_model_config(build_character_tokenizer("0123456789"), hidden_size=32, max_length=24)
OPTIM = OptimConfig(lr=1e-2, eps=1e-3)


def adapted_policy():
    return build_with_adapter(partial(build_policy, MODEL, seed=3), Adapter(rank=2), seed=1)


def columns_of():
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(LENGTH) < torch.tensor([4, 1, 3, 2, 4])[:, None]).long()
    attention = torch.cat([torch.ones((ROWS, PROMPT), dtype=torch.long), mask], dim=1)
    ids = torch.randint(3, 13, attention.shape, generator=generator) * attention
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": position_ids(attention),
        "responses": ids[:, PROMPT:],
        "response_mask": mask,
        "old_log_probs": torch.full((ROWS, LENGTH), -2.5),
        "advantages": torch.randn((ROWS, LENGTH), generator=generator),
    }


def learn(engine, rows, ranks, steps=2):
    columns = columns_of()
    totals = BatchTotals.combined([BatchTotals.of(columns["response_mask"])], dp_size=ranks)
    share = {name: column[rows] for name, column in columns.items()}
    reports = []
    for _ in range(steps):
        metrics = engine.forward_backward(
            share,
            lambda micro: OBJECTIVE(engine.model, micro, totals),
            micro_batches=MicroBatches(max_rows=1),
        )
        reports.append((metrics, engine.step()))
    return reports


def log_probs_of(engine, rows, model=None):
    share = {name: column[rows] for name, column in columns_of().items()}
    return engine.evaluate(
        share,
        lambda model, micro: policy_forward(model, micro, temperature=1.0)._asdict(),
        names=("log_probs",),
        micro_batches=MicroBatches(max_rows=1),
        model=model,
    )["log_probs"]


def sample_of(engine, rank):
    prompts = torch.tensor([[3, 4, 2]] * 2)
    request = RolloutRequest(
        prompts=prompts,
        prompt_mask=torch.ones_like(prompts),
        sample_ids=[rank, 7],
        sampling=Sampling(),
        max_new_tokens=6 - 3 * rank,  # so that the ranks run the model a different number of times
        seed=1,
        step=1,
    )
    with engine.sampling():
        return SamplerEngine(engine.model, [], 0).generate(request).responses


def be_rank(rank, port, folder):
    torch.set_num_threads(1)
    place = {"rank": rank, "world_size": 2, "address": ("127.0.0.1", str(port)), "device": torch.device("cpu")}
    join_process_group(**place)
    engine = TrainEngine(build_policy(MODEL, seed=3), OPTIM, strategy="fsdp2")
    reference = engine.place(build_policy(MODEL, seed=3).requires_grad_(False))
    answer = {"before": log_probs_of(engine, SHARES[rank]), "reports": learn(engine, SHARES[rank], 2)}
    answer["sample"] = sample_of(engine, rank)
    answer["after"] = log_probs_of(engine, SHARES[rank])
    answer["reference"] = log_probs_of(engine, SHARES[rank], model=reference)
    moments = [state["exp_avg"] for state in engine.optimizer.state.values()]
    answer["sharded"] = all(isinstance(x, DTensor) for x in [*engine.model.parameters(), *moments])
    answer["held"] = sum(moment.to_local().numel() for moment in moments)
    state = engine.state_dict()
    saved = copy.deepcopy(state)  # the state of an optimizer is alive
    weights = engine.model_state()
    other = TrainEngine(build_policy(MODEL, seed=4), OPTIM, strategy="fsdp2")
    other.load_weights(weights)
    answer["loaded"] = torch.equal(log_probs_of(other, SHARES[rank]), answer["after"])
    if rank == 0:
        engine.model.save_pretrained(folder, state_dict=weights)
    resumed = TrainEngine(build_policy(MODEL, seed=4), OPTIM, strategy="fsdp2")
    resumed.load_state_dict(copy.deepcopy(saved))
    learn(engine, SHARES[rank], 2)
    learn(resumed, SHARES[rank], 2)
    answer["resumed"] = all(
        torch.equal(a.to_local(), b.to_local())
        for a, b in zip(engine.model.parameters(), resumed.model.parameters(), strict=True)
    )
    copies = TrainEngine(build_policy(MODEL, seed=4), OPTIM, collective=join_collective("actor", **place))
    copies.load_state_dict(copy.deepcopy(saved))
    learn(copies, SHARES[rank], 2)
    if importlib.util.find_spec("peft"):
        adapted = TrainEngine(adapted_policy(), OPTIM, strategy="fsdp2", gradient_checkpointing=True)
        answer["adapter_reports"] = learn(adapted, SHARES[rank], 2)
        answer["adapter"] = adapted.model_state()
    whole = engine.state_dict()["model"]
    answer["as_copies"] = max((whole[name] - value).abs().max() for name, value in copies.model.state_dict().items())
    torch.save({**answer, "state": saved["model"]}, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=be_rank, args=(rank, port, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(timeout=240)
    finally:
        for process in processes:
            process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)], folder


@pytest.fixture(scope="module")
def alone():
    torch.set_num_threads(1)
    engine = TrainEngine(build_policy(MODEL, seed=3), OPTIM)
    before = log_probs_of(engine, slice(None))
    reports = learn(engine, slice(None), 1)
    return engine, before, reports


def test_passes_give_the_numbers_of_a_whole_model(ranks, alone):
    (first, second), _ = ranks
    engine, before, _ = alone
    for name, expected in (("before", before), ("after", log_probs_of(engine, slice(None))), ("reference", before)):
        assert torch.allclose(torch.cat([first[name], second[name]]), expected, atol=1e-5), name


def test_updates_report_the_norm_and_loss_of_a_whole_model(ranks, alone):
    (first, second), _ = ranks
    for (mine, moved), (other, _), (expected, wanted) in zip(
        first["reports"], second["reports"], alone[2], strict=True
    ):
        joint = metric_values({name: mine[name] + other[name] for name in mine})
        assert joint == pytest.approx(metric_values(expected), abs=1e-5)
        assert moved == pytest.approx(wanted, abs=1e-5)


def test_the_weights_become_those_of_a_whole_model(ranks, alone):
    (first, second), _ = ranks
    for name, value in alone[0].model.state_dict().items():
        assert torch.allclose(first["state"][name], value, atol=1e-5), name
        assert torch.equal(first["state"][name], second["state"][name])


def test_each_rank_holds_a_part_of_weights_and_moments(ranks, alone):
    (first, second), _ = ranks
    assert first["sharded"]
    assert second["sharded"]
    total = sum(parameter.numel() for parameter in alone[0].model.parameters())
    assert first["held"] + second["held"] == total
    assert abs(first["held"] - second["held"]) < 0.1 * total


def test_each_rank_samples_by_itself_from_the_whole_model(ranks, alone):
    for rank, answer in enumerate(ranks[0]):
        assert torch.equal(answer["sample"], sample_of(alone[0], rank))


def test_a_saved_state_continues_bit_for_bit_and_in_copies_too(ranks):
    for answer in ranks[0]:
        assert answer["resumed"]
        assert answer["loaded"], "weights that were made whole are taken over in parts"
        assert answer["as_copies"] < 1e-5


def test_the_saved_model_loads_whole(ranks, alone):
    loaded = AutoModelForCausalLM.from_pretrained(ranks[1], dtype=torch.float32)
    assert loaded.config.architectures == ["GPT2LMHeadModel"]
    for name, value in alone[0].model.state_dict().items():
        assert torch.allclose(loaded.state_dict()[name], value, atol=1e-5)


def test_adapters_and_activations_computed_again_work_in_parts(ranks):
    pytest.importorskip("peft")
    (first, second), _ = ranks
    engine = TrainEngine(adapted_policy(), OPTIM)
    for (_, moved), (_, expected) in zip(first["adapter_reports"], learn(engine, slice(None), 1), strict=True):
        assert moved == pytest.approx(expected, abs=1e-5)
    for name, value in engine.model.state_dict().items():
        assert torch.allclose(first["adapter"][name], value, atol=1e-5), name
        assert torch.equal(first["adapter"][name], second["adapter"][name])
