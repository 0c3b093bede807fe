"""Gives each answer a verdict: a score, or an abstention with its reason."""

from __future__ import annotations

from megatron_rl.verifiers.compose import RewardSet, Scored, answers_of, weighted_sum
from megatron_rl.verifiers.imported import TrainerState

__all__ = ["RewardSet", "Scored", "TrainerState", "answers_of", "weighted_sum"]
