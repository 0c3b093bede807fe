"""Gives each answer a verdict: a score, or an abstention with its reason."""

from __future__ import annotations

from megatron_rl.verifiers.function_calls import TrainerState
from megatron_rl.verifiers.reward_set import RewardSet, Scored, answers_of, weighted_sum

__all__ = ["RewardSet", "Scored", "TrainerState", "answers_of", "weighted_sum"]
