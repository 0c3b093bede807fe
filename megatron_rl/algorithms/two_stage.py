"""Advantages of answers in two stages: a thought, and the items that beam search finds after it.

The beams of a thought share its tokens. If each of them had the advantage of its item against the thought's other
items, these would add up to 0 at the thought, which would learn nothing. So a thought is compared with the other
thoughts of its group, and an item with the other items of its thought.

Invariants: an abstention (a NaN reward) is left out of all statistics; the advantages of a thought's items add up to 0,
and so do the advantages of a group's thoughts; only the best beam's sample has the thought's part.

Shape letters: S samples, T thoughts.
"""

from __future__ import annotations

from math import fsum

import numpy as np

from megatron_rl.algorithms.outcomes import grpo
from megatron_rl.config.advantages import TwoStageAdvantage
from megatron_rl.types import StepBatch, TokenRewards


def two_stage(batch: StepBatch, section: TwoStageAdvantage) -> TokenRewards:
    """The rewards at tokens whose sum from a token on is its advantage: its item's advantage at an item's tokens, and
    the thought's advantage at all actions before.

    Args:
        batch: a thought's samples are adjacent, the best beam first, which has the thought's actions.

    Example: a thought of advantage 1.5, and two items of advantages .5 and -.5, give the best beam .5 at its last token
    and 1 at the last token before the item, and the other beam -.5 at its last token.
    """
    thought_of, num_item_tokens = batch.thought_of, batch.num_item_tokens
    assert thought_of is not None and num_item_tokens is not None, "the estimator needs thoughts"
    first = np.flatnonzero(np.diff(thought_of, prepend=-1))
    thought_T, item_S = stage_advantages(batch.rewards, batch.group_of, thought_of, section.thought, section.std)
    before_T = batch.lengths[first] - num_item_tokens[first] - 1
    sample = np.concatenate([np.arange(len(item_S)), first])
    position = np.concatenate([batch.lengths - 1, before_T])
    value = np.concatenate([item_S, thought_T - item_S[first]])
    kept = value != 0
    return TokenRewards(sample[kept], position[kept], value[kept])


def stage_advantages(
    rewards: np.ndarray, group_of: np.ndarray, thought_of: np.ndarray, thought: str, std: str
) -> tuple[np.ndarray, np.ndarray]:
    """The advantages of thoughts and of items.

    Args:
        rewards: float64 [S], NaN for an abstention.
        group_of: int64 [S], the group of each sample.
        thought_of: int64 [S], the thought of each sample, 0 to T - 1 in this order.
        thought: what a thought is worth: the `mean` or the `max` of its items' rewards.
        std: `group` divides by the standard deviation + 1e-6 of what is compared, with the divisor n - 1. `none` does
            not divide.

    Returns:
        float64 [T] and float64 [S]; 0 where there is no reward, and nothing to compare with.

    Example: without std, two thoughts of a group with the rewards (1, 0) and (0, 0) have the advantages .25 and -.25,
    and their items .5, -.5, 0, 0. With `max` the thoughts have .5 and -.5.
    """
    first = np.flatnonzero(np.diff(thought_of, prepend=-1))
    worth_T = np.full(len(first), np.nan)
    for number, own in enumerate(np.split(rewards, first[1:]) if len(first) else []):
        scored = own[~np.isnan(own)]
        if len(scored):  # equal rewards in another order must give the same mean, to the last bit
            worth_T[number] = fsum(scored) / len(scored) if thought == "mean" else scored.max()
    return grpo(worth_T, group_of[first], std), grpo(rewards, thought_of, std)
