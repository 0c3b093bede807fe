"""Gives each answer a verdict: a score, or an abstention with its reason."""

from __future__ import annotations

from megatron_rl.verifiers.compose import RewardSet, answers_of, weighted_sum

__all__ = ["RewardSet", "answers_of", "weighted_sum"]
