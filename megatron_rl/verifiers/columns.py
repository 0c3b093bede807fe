"""The columns that rewards need of a row, and what is wrong with a row for them, found without answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.config.rewards import (
    ComputeScoreReward,
    GroundTruthReward,
    JudgeReward,
    LengthReward,
    RewardConfig,
)
from megatron_rl.verifiers.compute_score import NO_TRUTH
from megatron_rl.verifiers.form import fault_of_target
from megatron_rl.verifiers.ground_truth import fault_of_ground_truth
from megatron_rl.verifiers.truth import is_missing


def required_columns(configs: Sequence[RewardConfig]) -> tuple[str, ...]:
    """The columns that every row must have for these rewards."""
    needed: dict[str, None] = {}
    for cfg in configs:
        if isinstance(cfg, GroundTruthReward) and cfg.datasets is None:
            needed["ground_truth"] = None
        elif isinstance(cfg, LengthReward) and isinstance(cfg.target, str) and cfg.datasets is None:
            needed[cfg.target] = None
    return tuple(needed)


def fault_of_row(cfg: RewardConfig, columns: Mapping[str, Any]) -> str | None:
    """Why a reward could not score answers to a row with these columns; None if there is no reason that is quickly
    found, or if the reward does not score the row."""
    if not cfg.scores(columns):
        return None
    if isinstance(cfg, GroundTruthReward):
        return fault_of_ground_truth(cfg, cfg.ground_truth(columns))
    if isinstance(cfg, ComputeScoreReward):
        return NO_TRUTH.reason if is_missing(cfg.ground_truth(columns)) else None
    if isinstance(cfg, LengthReward):
        return fault_of_target(cfg, columns)
    if isinstance(cfg, JudgeReward):
        try:
            cfg.rubrics_of(columns)
        except ValueError as error:
            return str(error)
    return None
