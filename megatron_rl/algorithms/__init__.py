"""Advantages and losses, as pure functions of arrays. They use no model and no process group."""

from __future__ import annotations

from megatron_rl.algorithms.advantages import estimate_advantages
from megatron_rl.algorithms.aggregation import loss_weights
from megatron_rl.algorithms.coefficients import Coefficients
from megatron_rl.algorithms.columns import PackedColumns
from megatron_rl.algorithms.objective import (
    Metric,
    Objective,
    PolicyObjective,
    SupervisedObjective,
    disagreement,
)

__all__ = [
    "Coefficients",
    "Metric",
    "Objective",
    "PackedColumns",
    "PolicyObjective",
    "SupervisedObjective",
    "disagreement",
    "estimate_advantages",
    "loss_weights",
]
