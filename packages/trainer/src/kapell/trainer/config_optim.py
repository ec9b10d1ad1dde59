"""The configuration of an optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from .config_checks import require_positive, require_range
from .config_conditions import Conditions, Lacks, Needs, OptionOf

__all__ = ["OptimConfig"]


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """An optimizer and its learning-rate schedule, which moves once per optimizer step."""

    optimizer: str = "AdamW"
    """The optimizer's class."""
    optimizer_impl: str = "torch.optim"
    """The module that has it."""
    lr: float = 2e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Weight decay, decoupled from the gradient by AdamW."""
    override_optimizer_config: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the class by name, such as ``momentum`` of ``SGD``."""
    lr_scheduler_type: str = "constant"
    """Shape of the schedule after warm-up: ``constant``, ``cosine``, ``linear``, or another name that
    ``transformers.get_scheduler`` knows."""
    lr_scheduler_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of such another one, such as ``power`` of ``polynomial``."""
    lr_warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises from 0. 0 or -1: ``lr_warmup_steps_ratio`` says."""
    lr_warmup_steps_ratio: float = 0.0
    """The same as a share of all optimizer steps."""
    min_lr_ratio: float = 0.0
    """Last learning rate of ``cosine`` and ``linear``, as a share of ``lr``."""

    active_if: ClassVar[Conditions] = {
        **{name: OptionOf(".optimizer", name) for name in ("betas", "eps", "weight_decay")},
        "lr_scheduler_kwargs": Lacks(".lr_scheduler_type", ("constant", "cosine", "linear")),
        "lr_warmup_steps_ratio": Needs(".lr_warmup_steps", (0, -1)),
        "min_lr_ratio": Needs(".lr_scheduler_type", ("cosine", "linear")),
    }

    def __post_init__(self) -> None:
        require_positive(self, "lr", "eps")
        require_range(self, 0.0, 1.0, "min_lr_ratio", "lr_warmup_steps_ratio")
        if self.lr_warmup_steps < -1:
            raise ValueError(f"lr_warmup_steps must be -1 or more, got {self.lr_warmup_steps}")
