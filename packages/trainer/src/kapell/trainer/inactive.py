"""Keys that have no effect in a configuration, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from .algorithms import get_advantage_estimator, get_policy_loss, options_of
from .config import Config
from .config_load import ResolvedConfig
from .optimizers import optimizer_options

__all__ = ["InactiveKey", "inactive_keys", "inactive_settings"]

_ALGORITHMS = {
    "algorithm.adv_estimator": get_advantage_estimator,
    "actor_rollout_ref.actor.policy_loss.loss_mode": get_policy_loss,
}


@dataclass(frozen=True)
class InactiveKey:
    """A key that was set and does nothing."""

    key: str
    """Its dotted name."""
    value: Any
    """What it was set to."""
    origin: str
    """The file or "command line" that set it."""
    reason: str
    """What would have to be for it to have an effect."""


def inactive_keys(config: Config) -> dict[str, str]:
    """Each key that has no effect, set or not, with the reason."""
    return dict(_inactive(config, config, ""))


def inactive_settings(resolved: ResolvedConfig) -> list[InactiveKey]:
    """The keys that someone set to other than the default, or on the command line, and that have no effect."""
    reasons = inactive_keys(resolved.config)
    defaults = Config()
    return [
        InactiveKey(key, value, origin, reasons[key])
        for key, value, origin in resolved.leaves()
        if key in reasons
        and origin != "default"
        and (origin == "command line" or _value(resolved.config, key) != _value(defaults, key))
    ]


@dataclass(frozen=True)
class _Around:
    """The configuration as conditions of one group see it."""

    config: Config
    prefix: str

    def full(self, key: str) -> str:
        return f"{self.prefix}{key[1:]}" if key.startswith(".") else key

    def value(self, key: str) -> Any:
        return _value(self.config, self.full(key))

    def options(self, key: str) -> Collection[str]:
        name = self.full(key)
        if name in _ALGORITHMS:
            return options_of(_ALGORITHMS[name](self.value(key)))
        return optimizer_options(_value(self.config, name.rpartition(".")[0]))


def _inactive(config: Config, group: Any, prefix: str, outer: str | None = None) -> Iterator[tuple[str, str]]:
    around = _Around(config, prefix)
    for field in fields(group):
        condition = getattr(group, "active_if", {}).get(field.name)
        reason = outer or (condition and condition.unmet(around))
        value = getattr(group, field.name)
        if is_dataclass(value):
            yield from _inactive(config, value, f"{prefix}{field.name}.", reason)
        elif reason:
            yield f"{prefix}{field.name}", reason


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
