"""Dropout acts in the passes of an update and nowhere else, and what it drops follows from seed, rank and step."""

import pytest
import torch

from kapell.trainer.algorithms import BatchTotals, position_ids
from kapell.trainer.config import OptimConfig
from kapell.trainer.engine import TrainEngine
from kapell.trainer.forward import policy_forward
from kapell.trainer.models import build_policy, build_value_model, has_dropout, load_config_of, new_model_config
from kapell.trainer.objectives import PolicyObjective
from kapell.trainer.rollout_engine import RolloutRequest, SamplerEngine
from kapell.trainer.sampler import Sampling

DROPOUT = {"embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1}
NONE = dict.fromkeys(DROPOUT, 0.0)
ROWS, PROMPT, LENGTH = 6, 3, 5


@pytest.fixture
def columns():
    ids = torch.randint(3, 13, (ROWS, PROMPT + LENGTH), generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": position_ids(torch.ones_like(ids)),
        "responses": ids[:, PROMPT:],
        "response_mask": torch.ones((ROWS, LENGTH), dtype=torch.long),
        "old_log_probs": torch.full((ROWS, LENGTH), -2.5),
        "advantages": torch.ones((ROWS, LENGTH)),
    }


@pytest.fixture
def engine_of(tokenizer):
    def build(dropout, **options):
        config = new_model_config(tokenizer, hidden_size=32, max_length=24, override_config=dropout)
        return TrainEngine(
            build_policy(config, seed=3), OptimConfig(lr=1e-30), **options
        )  # too little to move a weight

    return build


def gradient_of(engine, columns):
    objective, totals = PolicyObjective(options={"clip_ratio": 0.2}), BatchTotals.of(columns["response_mask"])
    engine.forward_backward(columns, lambda rows: objective(engine.model, rows, totals))
    gradient = torch.cat([p.grad.flatten() for p in engine.model.parameters()])
    engine.step()
    return gradient


def log_probs_of(engine, columns):
    def forward(model, rows):
        return {"log_probs": policy_forward(model, rows, temperature=1.0).log_probs}

    return engine.evaluate(columns, forward, names=("log_probs",))["log_probs"]


def samples_of(engine):
    prompts = torch.tensor([[3, 4, 5]] * 4)
    request = RolloutRequest(
        prompts=prompts,
        prompt_mask=torch.ones_like(prompts),
        sample_ids=range(4),
        sampling=Sampling(),
        max_new_tokens=LENGTH,
        seed=1,
        step=1,
    )
    with engine.sampling():
        rollout = SamplerEngine(engine.model, [], 0).generate(request)
    return rollout.rollout_log_probs


def test_the_update_drops_out_and_sampling_and_log_probabilities_do_not(engine_of, columns):
    plain, dropping = engine_of(NONE), engine_of(DROPOUT)
    for _ in range(2):  # before and after an update
        assert torch.equal(log_probs_of(dropping, columns), log_probs_of(plain, columns))
        assert torch.equal(samples_of(dropping), samples_of(plain))
        assert not torch.allclose(gradient_of(dropping, columns), gradient_of(plain, columns), rtol=0.05)


def test_what_is_dropped_follows_from_seed_rank_and_step_and_moves_no_other_random_numbers(engine_of, columns):
    engine = engine_of(DROPOUT, seed=(1, 0))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = gradient_of(engine, columns), gradient_of(engine, columns)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, second), "each step drops others"
    torch.manual_seed(6)
    again = engine_of(DROPOUT, seed=(1, 0))
    assert torch.equal(gradient_of(again, columns), first)
    assert torch.equal(gradient_of(again, columns), second)
    for other in ((2, 0), (1, 1)):
        assert not torch.equal(gradient_of(engine_of(DROPOUT, seed=other), columns), first)


def test_without_dropout_the_update_is_bit_for_bit_that_of_evaluation_mode(engine_of, columns, monkeypatch):
    gradient = gradient_of(engine_of(NONE), columns)
    monkeypatch.setattr(torch.nn.Module, "train", lambda module, mode=True: module)
    assert torch.equal(gradient_of(engine_of(NONE), columns), gradient)


def test_activations_that_are_computed_again_drop_the_same(engine_of, columns):
    kept, again = engine_of(DROPOUT), engine_of(DROPOUT, gradient_checkpointing=True)
    assert torch.allclose(gradient_of(kept, columns), gradient_of(again, columns), atol=1e-7)
    assert not any(module.training for module in again.model.modules())


def test_a_saved_model_brings_its_own_dropout_which_the_configuration_can_switch_off(tokenizer, tmp_path):
    build_policy(new_model_config(tokenizer, hidden_size=16, max_length=8, override_config=DROPOUT)).save_pretrained(
        tmp_path
    )
    assert has_dropout(build_policy(load_config_of(tmp_path), folder=tmp_path))
    assert not has_dropout(build_policy(load_config_of(tmp_path, NONE), folder=tmp_path))
    llama = new_model_config(tokenizer, model_type="llama", max_length=8, override_config={"attention_dropout": 0.1})
    assert has_dropout(build_policy(llama))
    value_model = build_value_model(load_config_of(tmp_path), folder=tmp_path)
    rates = {name: module.p for name, module in value_model.named_modules() if isinstance(module, torch.nn.Dropout)}
    assert rates.pop("dropout") == 0.0, "the new head has none"
    assert set(rates.values()) == {0.1}
