"""Advantages and losses, as pure functions of arrays. They use no model and no process group.

A name's module is imported when the name is first used. Some of the modules need torch, whose import takes a second and
a half, and others do not, such as `shaping` and `utilities`: the processes of the verifiers, a dry run and an error in
a configuration do without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rl.algorithms.advantages import estimate_advantages
    from megatron_rl.algorithms.aggregation import loss_weights
    from megatron_rl.algorithms.coefficients import Coefficients
    from megatron_rl.algorithms.columns import PackedColumns
    from megatron_rl.algorithms.objective import (
        Metric,
        Objective,
        PolicyObjective,
        disagreement,
    )
    from megatron_rl.algorithms.preference_objective import PreferenceObjective
    from megatron_rl.algorithms.supervised_objective import SupervisedObjective

__all__ = [
    "Coefficients",
    "Metric",
    "Objective",
    "PackedColumns",
    "PolicyObjective",
    "PreferenceObjective",
    "SupervisedObjective",
    "disagreement",
    "estimate_advantages",
    "loss_weights",
]

if not TYPE_CHECKING:  # a type checker would take every misspelt name for one of these
    _MODULES = {
        "Coefficients": "coefficients",
        "Metric": "objective",
        "Objective": "objective",
        "PackedColumns": "columns",
        "PolicyObjective": "objective",
        "PreferenceObjective": "preference_objective",
        "SupervisedObjective": "supervised_objective",
        "disagreement": "objective",
        "estimate_advantages": "advantages",
        "loss_weights": "aggregation",
    }

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__} has no attribute {name}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
