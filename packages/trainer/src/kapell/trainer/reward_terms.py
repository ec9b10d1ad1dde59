"""The entries of ``reward.terms``: several rewards by name, each of a type with its own options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, get_type_hints

from .code_reward import CodeReward
from .config import RewardConfig
from .remote_reward import RemoteReward
from .reward import builtin_reward, load_reward_function
from .reward_functions import FunctionReward, Reward, ThreadedReward
from .reward_model import ModelReward
from .reward_sum import RewardSum, RewardTerm
from .sandbox import SandboxLimits, SandboxStartError, SandboxUnavailableError, run_python

__all__ = ["FunctionTerm", "RemoteTerm", "SandboxTerm", "build_reward"]


@dataclass(frozen=True, kw_only=True)
class FunctionTerm:
    """``type: function``: a Python function, plain or async."""

    path: str | None = None
    """The file. Null: the reward that belongs to the rows' data source."""
    name: str = "compute_score"
    """The function in it."""

    def build(self, config: RewardConfig, data_sources: Sequence[str]) -> Reward:
        """The reward."""
        function = builtin_reward(data_sources) if self.path is None else load_reward_function(self.path, self.name)
        return FunctionReward(function=function, timeout=config.timeout, concurrency=config.concurrency)


@dataclass(frozen=True, kw_only=True)
class SandboxTerm:
    """``type: sandbox``: the share of the row's tests that the response's Python code passes."""

    seconds: float = 5.0
    """Time of one run of the code."""
    memory_mb: int = 512
    """Memory of one run, in MiB."""
    concurrency: int = 4
    """Responses at once."""
    allow_weaker: bool = False
    """Run even where the system cannot keep the code from network, files and processes."""

    def build(self, config: RewardConfig, data_sources: Sequence[str]) -> Reward:
        """The reward."""
        limits = SandboxLimits(seconds=self.seconds, memory=self.memory_mb * 2**20, allow_weaker=self.allow_weaker)
        try:
            run_python("", limits=limits)  # a system that cannot do it should say so before the first step
        except (SandboxUnavailableError, SandboxStartError) as error:
            raise ValueError(str(error)) from error
        return ThreadedReward(function=CodeReward(limits=limits), concurrency=self.concurrency)


@dataclass(frozen=True, kw_only=True)
class RemoteTerm(RemoteReward):
    """``type: remote``: a service over HTTP; the fields of `kapell.trainer.remote_reward.RemoteReward`."""

    def build(self, config: RewardConfig, data_sources: Sequence[str]) -> Reward:
        """The reward."""
        return self


_TYPES = {"function": FunctionTerm, "sandbox": SandboxTerm, "remote": RemoteTerm}


def build_reward(config: RewardConfig, data_sources: Sequence[str]) -> RewardSum:
    """The reward of a run: ``reward.terms`` or the one function that the other keys name, and the reward model.

    Raises ``ValueError`` for a term that is not right, with its key.
    """
    custom, model = config.custom_reward_function, config.reward_model
    terms = [_term(name, values, config, data_sources) for name, values in config.terms.items()]
    if custom.path is not None or not (terms or model.enable):
        function = FunctionTerm(path=custom.path, name=custom.name)
        terms.append(RewardTerm("reward", function.build(config, data_sources)))
    if model.enable:
        terms.append(RewardTerm("reward_model", ModelReward(), model.weight))
    return RewardSum(terms, config.fallback_score if config.on_error == "fallback" else None)


def _term(name: str, values: Any, config: RewardConfig, data_sources: Sequence[str]) -> RewardTerm:
    key = f"reward.terms.{name}"
    if not isinstance(values, Mapping) or "type" not in values:
        raise ValueError(f"{key} needs a type ({', '.join(_TYPES)}) and its options, got {values!r}")
    options = dict(values)
    kind = _known(options.pop("type"), list(_TYPES), f"{key}.type")
    cls = _TYPES[kind]
    weight = _typed(options.pop("weight", 1.0), float, f"{key}.weight")
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    checked = {
        option: _typed(value, hints[_known(option, names, key)], f"{key}.{option}") for option, value in options.items()
    }
    try:
        return RewardTerm(name, cls(**checked).build(config, data_sources), weight)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{key}: {error}") from error


def _known(name: Any, known: Sequence[str], key: str) -> str:
    if name not in known:
        near = get_close_matches(str(name), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise ValueError(f"{key}: unknown {name!r}; {hint}")
    return name


def _typed(value: Any, kind: Any, key: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool) or value != value:  # NaN
        name = kind.__name__ if isinstance(kind, type) else str(kind)
        raise ValueError(f"{key}: expected {name}, got {value!r}")
    return value
