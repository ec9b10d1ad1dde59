"""What a pool asks of Ray: the bundle of one process, and the share of it that each group on the pool takes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ProcessResources", "share_of"]

_GRAIN = 10_000  # Ray keeps resources in ten-thousandths
_TYPE_PREFIX = "accelerator_type:"
_TYPE_MARK = 1 / _GRAIN  # the least amount: it only pins the bundle to nodes that carry the mark


def share_of(count: int) -> float:
    """The largest share of 1 that fits ``count`` times, at Ray's granularity of 1e-4.

    >>> share_of(3)
    0.3333
    """
    if not 1 <= count <= _GRAIN:
        raise ValueError(
            f"cannot share one device among {count} worker groups; Ray splits it into 1 to {_GRAIN} shares"
        )
    return (_GRAIN // count) / _GRAIN


@dataclass(frozen=True)
class ProcessResources:
    """What one worker process holds of its node, and how many groups share it."""

    cpus: float = 1.0
    """CPUs of one process. They do not grow with ``colocate_count``: groups on a pool take turns."""
    accelerator: str = ""
    """Ray's resource name of the device, such as ``GPU``, ``NPU`` or ``TPU``; empty without one."""
    accelerators: int = 1
    """Devices of one process, if there is an accelerator."""
    accelerator_type: str = ""
    """Kind of device, as in ``ray.util.accelerators``, such as ``H100``; empty for any."""
    colocate_count: int = 10
    """How many groups can live in one bundle at the same time."""

    def __post_init__(self) -> None:
        if self.cpus < 0:
            raise ValueError(f"a process cannot ask for {self.cpus} CPUs; give 0 or more")
        if self.accelerators < 1:
            raise ValueError(f"a process cannot ask for {self.accelerators} devices; give 1 or more, or no accelerator")
        share_of(self.colocate_count)

    @property
    def bundle(self) -> dict[str, float]:
        """The placement group bundle of one process.

        >>> ProcessResources(accelerator="GPU", accelerator_type="H100").bundle
        {'CPU': 1.0, 'GPU': 1.0, 'accelerator_type:H100': 0.0001}
        """
        bundle = {"CPU": float(self.cpus)} if self.cpus else {}
        if self.accelerator:
            bundle[self.accelerator] = float(self.accelerators)
        if self.accelerator_type:
            name = self.accelerator_type
            bundle[name if name.startswith(_TYPE_PREFIX) else _TYPE_PREFIX + name] = _TYPE_MARK
        if not bundle:
            raise ValueError("a process must ask for something of its node: cpus above 0 or an accelerator")
        return bundle

    def actor_options(self, *, use_accelerator: bool) -> dict[str, Any]:
        """Ray's options of one group's actor in the bundle: its share of each resource.

        >>> ProcessResources(accelerator="NPU", colocate_count=2).actor_options(use_accelerator=True)
        {'num_cpus': 0.5, 'resources': {'NPU': 0.5}}
        """
        options: dict[str, Any] = {"num_cpus": _share(self.cpus, self.colocate_count)}
        if use_accelerator and self.accelerator:
            amount = _share(self.accelerators, self.colocate_count)
            options |= {"num_gpus": amount} if self.accelerator == "GPU" else {"resources": {self.accelerator: amount}}
        return options


def _share(amount: float, count: int) -> float:
    """The largest amount that fits ``count`` times into ``amount``; above 1 a whole one, as Ray wants it."""
    share = int(round(amount * _GRAIN) // count) / _GRAIN
    return float(int(share)) if share > 1 else share


def fits(bundle: Mapping[str, float], free: Mapping[str, float]) -> bool:
    """Whether a node with ``free`` resources holds the bundle."""
    return all(free.get(name, 0.0) + _TYPE_MARK / 2 >= amount for name, amount in bundle.items())
