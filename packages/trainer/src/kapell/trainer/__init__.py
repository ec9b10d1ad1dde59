"""The reference trainer: PPO and GRPO on worker groups.

The parts are modules of their own, imported one by one: `kapell.trainer.algorithms` (kernels), `steps` and `stages`
(the loop's body), `workers` (the roles), `engine` and `sampler` (the model), `data`, `reward`, `trainer` (the run's
life), `config` and `build` (from keys to a run), `cli` (the command ``kapell``). Importing this package loads none.
"""

__all__: list[str] = []
