"""Advantages and losses as pure functions of arrays: no model, no process group, no communication."""

from __future__ import annotations

from megatron_rl.algorithms.advantages import estimate_advantages
from megatron_rl.algorithms.objective import (
    Metric,
    Objective,
    PackedColumns,
    policy_objective,
    supervised_objective,
)

__all__ = [
    "Metric",
    "Objective",
    "PackedColumns",
    "estimate_advantages",
    "policy_objective",
    "supervised_objective",
]
