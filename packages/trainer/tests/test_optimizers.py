import json
from collections import Counter

import pytest
import torch

from kapell.trainer.build import train
from kapell.trainer.config import OptimConfig
from kapell.trainer.config_load import ConfigError, load_config
from kapell.trainer.inactive import inactive_keys
from kapell.trainer.optimizers import build_optimizer, build_schedule, check_optimizer, learning_rate_factor
from kapell.trainer.prepare import prepare


def moved(config, steps=3, gradient=2.0):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = build_optimizer([parameter], config)
    for _ in range(steps):
        parameter.grad = torch.full((2,), gradient)
        optimizer.step()
    return optimizer, parameter.detach()


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        (
            OptimConfig(lr=0.1, betas=(0.5, 0.9), eps=1e-4, weight_decay=0.3),
            lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.5, 0.9), eps=1e-4, weight_decay=0.3, fused=True),
        ),
        (
            OptimConfig(optimizer="SGD", lr=0.1, weight_decay=0.3, override_optimizer_config={"momentum": 0.9}),
            lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.3, momentum=0.9, fused=True),
        ),
        (
            OptimConfig(optimizer="RMSprop", lr=0.1, weight_decay=0.0, eps=1e-3),
            lambda p: torch.optim.RMSprop(p, lr=0.1, eps=1e-3),
        ),
    ],
)
def test_any_optimizer_of_torch_moves_as_it_does_by_hand(config, plain):
    optimizer, result = moved(config)
    parameter = torch.nn.Parameter(torch.ones(2))
    other = plain([parameter])
    assert type(optimizer) is type(other)
    for _ in range(3):
        parameter.grad = torch.full((2,), 2.0)
        other.step()
    assert torch.equal(result, parameter.detach())


@pytest.mark.parametrize(("override", "fused"), [({}, True), ({"fused": False}, False), ({"foreach": True}, None)])
def test_a_step_is_one_operation_unless_another_way_is_asked_for(override, fused):
    optimizer, _ = moved(OptimConfig(override_optimizer_config=override))
    assert optimizer.defaults["fused"] is fused


def test_on_other_devices_torch_chooses_how_to_step():
    optimizer = build_optimizer([torch.nn.Parameter(torch.ones(2, device="meta"))], OptimConfig())
    assert not optimizer.defaults["fused"]


def test_an_optimizer_of_ones_own_is_found_by_its_module(tmp_path, monkeypatch):
    (tmp_path / "own_optimizers.py").write_text(
        "import torch\n"
        "class Signs(torch.optim.Optimizer):\n"
        "    def __init__(self, params, lr, *, twice=False):\n"
        "        super().__init__(params, {'lr': 2 * lr if twice else lr})\n"
        "    @torch.no_grad()\n"
        "    def step(self):\n"
        "        for group in self.param_groups:\n"
        "            for p in group['params']: p -= group['lr'] * p.grad.sign()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    options = {"optimizer": "Signs", "optimizer_impl": "own_optimizers", "lr": 0.125}
    assert moved(OptimConfig(**options))[1].tolist() == [0.625, 0.625]
    twice = OptimConfig(**options, override_optimizer_config={"twice": True})
    assert moved(twice)[1].tolist() == [0.25, 0.25]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "Adam_W"}, "did you mean 'AdamW'"),
        ({"optimizer_impl": "nowhere.optim"}, "optimizer_impl=nowhere.optim cannot be imported"),
        ({"override_optimizer_config": {"momentum": 0.9}}, "AdamW takes no 'momentum'; it takes: lr"),
        ({"lr_scheduler_type": "cosin"}, "lr_scheduler_type=cosin"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "follows a metric"),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"force": 2}}, "lr_scheduler_type=polynomial"),
    ],
)
def test_what_cannot_be_built_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        check_optimizer(OptimConfig(**options))


def test_a_run_refuses_it_before_anything_is_loaded(tmp_path):
    config = load_config(overrides=["critic.optim.optimizer=Adamm"]).config
    with pytest.raises(ValueError, match=r"critic\.optim: torch\.optim has no optimizer 'Adamm'"):
        prepare(config, tmp_path)
    with pytest.raises(ConfigError, match="lr_warmup_steps_ratio must lie between 0 and 1"):
        load_config(overrides=["critic.optim.lr_warmup_steps_ratio=2"])


def rates(config, total_steps=8):
    optimizer, _ = moved(config, steps=0)
    schedule = build_schedule(optimizer, config, total_steps=total_steps)
    found = []
    for _ in range(total_steps):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


def test_other_schedules_are_those_of_transformers():
    polynomial = OptimConfig(lr=1.0, lr_scheduler_type="polynomial", lr_scheduler_kwargs={"power": 2.0, "lr_end": 0.0})
    assert rates(polynomial) == pytest.approx([(1 - step / 8) ** 2 for step in range(8)])
    inverse = OptimConfig(lr=1.0, lr_scheduler_type="inverse_sqrt", lr_warmup_steps=2)
    assert rates(inverse)[:4] == pytest.approx([0.0, 0.5, 1.0, (2 / 3) ** 0.5])


def test_warm_up_is_a_number_of_steps_or_a_share_of_all():
    expected = [learning_rate_factor(s, shape="linear", warmup_steps=4, total_steps=8, min_ratio=0.0) for s in range(8)]
    assert rates(OptimConfig(lr=1.0, lr_scheduler_type="linear", lr_warmup_steps=4)) == expected
    for steps in (0, -1):
        share = OptimConfig(lr=1.0, lr_scheduler_type="linear", lr_warmup_steps=steps, lr_warmup_steps_ratio=0.5)
        assert rates(share) == expected
    assert rates(OptimConfig(lr=1.0, lr_scheduler_type="linear")) != expected


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=3"],
        ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=2"],
        ["data.train_batch_size=2", "trainer.critic_warmup=2", "critic.ppo_epochs=2"],
        ["data.train_batch_size=2", "trainer.critic_warmup=2", "algorithm.adv_estimator=grpo"],
        ["data.train_batch_size=2", "trainer.critic_warmup=9"],
    ],
)
def test_a_schedule_plans_for_as_many_steps_as_a_run_makes(tmp_path, one_small_step, monkeypatch, overrides):
    planned, made = Counter(), Counter()

    def watched(optimizer, config, *, total_steps):
        schedule = build_schedule(optimizer, config, total_steps=total_steps)
        planned[config.lr] = total_steps
        step = schedule.step
        monkeypatch.setattr(schedule, "step", lambda: (made.update([config.lr]), step()))
        return schedule

    monkeypatch.setattr("kapell.trainer.engine.build_schedule", watched)
    row = {"data_source": "reverse_digits", "prompt": "12", "reward_model": {"ground_truth": "21"}}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 7)
    actor, critic = (f"{role}.optim.lr_scheduler_type=linear" for role in ("actor_rollout_ref.actor", "critic"))
    rates = ["actor_rollout_ref.actor.optim.lr=0.01", "critic.optim.lr=0.02"]
    own = [actor, critic, *rates, f"data.train_files={tmp_path / 'rows.jsonl'}", "trainer.total_training_steps=5"]
    config = load_config(overrides=[*one_small_step, "algorithm.adv_estimator=gae", *own, *overrides]).config
    train(prepare(config, tmp_path), tmp_path / "run")
    assert planned == made


def test_values_that_an_optimizer_does_not_take_have_no_effect_and_say_so():
    reasons = inactive_keys(load_config(overrides=["actor_rollout_ref.actor.optim.optimizer=SGD"]).config)
    prefix = "actor_rollout_ref.actor.optim"
    assert {f"{prefix}.betas", f"{prefix}.eps"} <= reasons.keys()
    assert f"{prefix}.weight_decay" not in reasons
