"""Whole training steps beside TRL, and the speed of sampling and training."""

from __future__ import annotations

from typing import Any

from ..harness import Benchmark, Budget, Contender

__all__ = ["BENCHMARKS"]

_PACED = "benchmarks.contenders.paced:PacedContender"
_KAPELL = "benchmarks.contenders.kapell_training:run"
_SPEED = "benchmarks.contenders.model_speed"
_UNITS = {
    "step": "s",
    "controller: processor time": "s",
    "controller: peak memory": "B",
    "controller: bytes through it": "B",
}
_BUNDLED = {"prompts": 64}
_BYPASS = "kapell, Ray, bypass_mode"  # the sampler's log-probabilities are the old ones


def _kapell(name: str, algorithm: str, backend: str, workers: int, **more: Any) -> Contender:
    options = {"loop": _KAPELL, "algorithm": algorithm, "backend": backend, "workers": workers, "threads": 1, **more}
    return Contender(name, _PACED, options)


def _trl(name: str, module: str, threads: int, site: str) -> Contender:
    return Contender(name, _PACED, {"loop": f"benchmarks.contenders.{module}:run", "threads": threads}, site)


GRPO = Benchmark(
    name="grpo",
    title="A GRPO step of the bundled task: 8 responses of up to 6 tokens a prompt, 4 optimizer steps, 2 cores",
    contenders=(
        _kapell("kapell, Ray, 2 workers", "grpo", "ray", 2),
        _kapell(_BYPASS, "grpo", "ray", 2, bypass=True),
        _kapell("kapell, local, 1 worker", "grpo", "local", 1),
        _trl("TRL, 2 threads", "trl_grpo", 2, "trl"),
        _trl("TRL, 1 thread", "trl_grpo", 1, "trl"),
    ),
    sizes=tuple({"prompts": prompts} for prompts in (16, 32, 64, 128)),
    quick_sizes=({"prompts": 16},),
    units=_UNITS,
    axis="prompts",
    rounds=9,
    warmups=3,
    uses_ray=True,
    budgets=(
        Budget(
            text="one GRPO step of the bundled task on Ray, 2 workers: at most half of TRL's with 2 threads",
            metric="step",
            size=_BUNDLED,
            kind="faster",
            peer="TRL, 2 threads",
            limit=2,
        ),
        Budget(
            text="the same with the sampler's log-probabilities as the old ones (`bypass_mode=true`)",
            metric="step",
            size=_BUNDLED,
            ours=_BYPASS,
            kind="faster",
            peer="TRL, 2 threads",
            limit=2,
        ),
        Budget(
            text="the same beside TRL with 1 thread",
            metric="step",
            size=_BUNDLED,
            kind="faster",
            peer="TRL, 1 thread",
            limit=2,
        ),
    ),
    bound="at this size, the number of small torch operations, not arithmetic; on Ray also what the controller does "
    "between its calls.",
)
PPO = Benchmark(
    name="ppo",
    title="A PPO step of the bundled task, with critic and reference: 1 response a prompt, 4 optimizer steps, 2 cores",
    contenders=(
        _kapell("kapell, Ray, 2 workers", "ppo", "ray", 2),
        _kapell("kapell, local, 1 worker", "ppo", "local", 1),
        _trl("TRL 1.12, 2 threads", "trl_ppo", 2, "trl_ppo"),
        _trl("TRL 1.12, 1 thread", "trl_ppo", 1, "trl_ppo"),
    ),
    sizes=tuple({"prompts": prompts} for prompts in (64, 128, 256, 512)),
    quick_sizes=({"prompts": 64},),
    units=_UNITS,
    axis="prompts",
    rounds=9,
    warmups=3,
    uses_ray=True,
    bound="as for GRPO; TRL updates policy and value model in one pass, Kapell in two.",
)
_LONG = {"prompts": 64, "tokens": 512}
PLANE = Benchmark(
    name="plane",
    title="A PPO step on 2 Ray workers as rows grow longer: columns by value and by reference (`trainer.data_plane`)",
    contenders=(
        _kapell("kapell, by reference", "ppo", "ray", 2, data_plane="reference"),
        _kapell("kapell, by value", "ppo", "ray", 2, data_plane="value"),
    ),
    sizes=tuple({"prompts": 64, "tokens": tokens} for tokens in (8, 32, 128, 512)),
    quick_sizes=({"prompts": 16, "tokens": 8},),
    units={**_UNITS, "controller: bytes beside columns of its own": "B"},
    axis="tokens",
    rounds=5,
    warmups=2,
    uses_ray=True,
    budgets=(
        Budget(
            text="bytes through the controller in a PPO step by reference, without the columns that it reads or makes: "
            "at most 20 kB, however long rows are",
            metric="controller: bytes beside columns of its own",
            size=_LONG,
            kind="absolute",
            limit=20_000,
        ),
    ),
    bound="eight bytes a row to say which rows unless they are a range; references are not counted.",
)
SAMPLING = Benchmark(
    name="sampling",
    title="Sampling with log-probabilities, 8 responses a prompt, one thread",
    contenders=(
        Contender("kapell", f"{_SPEED}:KapellSampling"),
        Contender("transformers.generate", f"{_SPEED}:TransformersSampling"),
    ),
    sizes=tuple({"rows": rows, "response": 32} for rows in (8, 32, 128, 512)),
    quick_sizes=({"rows": 8, "response": 8}, {"rows": 32, "response": 8}),
    units={"sampling, tiny model": "tokens/s", "sampling, small model": "tokens/s"},
    axis="rows",
    rounds=5,
    warmups=1,
    bound="operations a token at few rows, matrix products and the softmax over the vocabulary at many.",
)
TRAINING = Benchmark(
    name="training",
    title="Training (forward, backward, optimizer step), one thread",
    contenders=(
        Contender("kapell", f"{_SPEED}:KapellTraining"),
        Contender("plain torch", f"{_SPEED}:PlainTraining"),
    ),
    sizes=tuple({"rows": rows, "response": 32} for rows in (8, 32, 128)),
    quick_sizes=({"rows": 8, "response": 8}, {"rows": 16, "response": 8}),
    units={"training, tiny model": "tokens/s", "training, small model": "tokens/s"},
    axis="rows",
    rounds=5,
    warmups=1,
    bound="matrix products, and for a large vocabulary the softmax and its gradient.",
)

BENCHMARKS = (GRPO, PPO, PLANE, SAMPLING, TRAINING)
