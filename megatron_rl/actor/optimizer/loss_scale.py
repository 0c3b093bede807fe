"""The dynamic loss scale of a model in float16 (arXiv:1710.03740), by the rule of Megatron-Core's `DynamicGradScaler`.

A number of float16 is at most 65,504, and one below 6e-8 is 0, so small gradients of activations would be lost. The
backward pass begins with the loss times the scale, and the summed gradients, which are float32, are divided by it. The
scale is a power of two, so neither rounds. If a gradient overflows all the same, it is computed again with half of the
scale, then with a quarter of that, a sixteenth and so on: Megatron-Core skips such an update, but the answers of a step
cost far more than another pass. It also has a scale for each of its optimizers, and the scales of experts and other
layers may drift apart; a rank has one here. The norm of the gradient is equal on all ranks, so the scales are, too.

Invariants (tests/unit/actor): the scale equals Megatron-Core's after every sequence of passes; its state continues it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

INITIAL = 2.0**16
"""The first scale. Megatron-Core's, 2^32, overflows in the first passes of a run."""


@dataclass(slots=True)
class LossScale:
    value: float
    lowest: float
    window: int
    """After this number of updates without an overflow the scale is doubled."""
    num_finite: int = 0
    """The number of updates since the last overflow, or since the scale was doubled."""

    @classmethod
    def of(cls, config: MegatronOptimizerConfig) -> LossScale:
        """The scale that a run begins with."""
        first, lowest = float(config.initial_loss_scale), float(config.min_loss_scale)
        return cls(first, lowest, int(config.loss_scale_window))

    def scaled(self, loss: Tensor) -> Tensor:
        """Megatron-Core's schedules call it with the loss of a micro-batch before its backward pass, and with 1 for the
        auxiliary losses."""
        return loss * self.value

    @property
    def is_lowest(self) -> bool:
        return self.value <= self.lowest

    def halve(self) -> None:
        """A gradient has overflowed."""
        self.num_finite = 0
        self.value = max(self.value / 2, self.lowest)

    def count(self) -> None:
        """An update is made."""
        self.num_finite += 1
        if self.num_finite >= self.window:
            self.num_finite = 0
            self.value *= 2

    def state(self) -> dict[str, float]:
        """What the scale of later updates depends on, apart from the settings."""
        return {"value": self.value, "num_finite": self.num_finite}

    def restore(self, state: Mapping[str, float]) -> None:
        self.value, self.num_finite = state["value"], int(state["num_finite"])
