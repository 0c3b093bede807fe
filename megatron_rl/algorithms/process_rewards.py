"""Rewards at single tokens (process supervision): how they are normalised, and at which actions they count.

Invariants: rewards are normalised before they are summed. Each kind of reward has its own mean and deviation, so that a
kind with a large scale does not hide the others. A kind that only one sample has, or a kind with equal rewards, adds
exactly 0; the exceptions are kinds that are not centred, whose rewards keep their signs. The statistics contain every
reward, for any action mask.

The driver normalises, because it has whole groups, and these are a few numbers for each sample. The trainer ranks place
the results at actions and sum them (token_advantages.py).

Shape letters: N rewards, S samples, L the length of one sample, C cells, which are the pairs of a group and a kind.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from megatron_rl.algorithms.equality import differ
from megatron_rl.algorithms.outcomes import STD_EPS
from megatron_rl.config.advantages import GrpoProcessAdvantage
from megatron_rl.types import StepBatch, TokenRewards

OUTCOME = "outcome"
"""The kind of the reward of a whole answer, which is at its last token."""


def grpo_process(batch: StepBatch, section: GrpoProcessAdvantage) -> TokenRewards:
    """GRPO with process supervision (Shao et al. 2024, arXiv:2402.03300, section 4.1.3).

    The rewards of one kind in a group are normalised together, (r - mean) / (std + 1e-6), and multiplied by the weight
    of their kind. The advantage of an action is the sum of these at its token or later.

    Args:
        batch: the rewards at single tokens and, as the kind `outcome`, the rewards of whole answers.

    Returns:
        The normalised rewards that are not 0.
    """
    outcomes, given = outcome_rewards(batch), batch.token_rewards
    assert given is not None, "the estimator needs token_rewards"
    kinds = [*given.kind, *[OUTCOME] * len(outcomes.value)]
    sample_N = np.concatenate([given.sample, outcomes.sample])
    position_N = np.concatenate([given.position, outcomes.position])
    group_N = batch.group_of[sample_N] if section.over == "group" else np.zeros(len(kinds), np.int64)
    value_N = np.concatenate([given.value, outcomes.value])
    value_N = normalised(value_N, kinds, sample_N, group_N, section.std, section.uncentred)
    value_N *= np.array([section.weights.get(kind, 1.0) for kind in kinds])
    kept = value_N != 0
    return TokenRewards(sample_N[kept], position_N[kept], value_N[kept])


def summed_rewards(batch: StepBatch, weights: Mapping[str, float]) -> TokenRewards:
    """The rewards at single tokens and of whole answers, each multiplied by the weight of its kind, as they are.

    Args:
        weights: the weight of a kind that is not named here is 1.
    """
    outcomes, given = outcome_rewards(batch), batch.token_rewards
    outcomes = replace(outcomes, value=outcomes.value * weights.get(OUTCOME, 1.0))
    if given is None:
        return outcomes
    value_N = given.value * np.array([weights.get(kind, 1.0) for kind in given.kind])
    kept = ~np.isnan(value_N) & (value_N != 0)
    return TokenRewards(
        np.concatenate([given.sample[kept], outcomes.sample]),
        np.concatenate([given.position[kept], outcomes.position]),
        np.concatenate([value_N[kept], outcomes.value]),
    )


def outcome_rewards(batch: StepBatch) -> TokenRewards:
    """The reward of each scored answer, at its last token."""
    scored = np.flatnonzero(~np.isnan(batch.rewards))
    return TokenRewards(scored, batch.lengths[scored] - 1, batch.rewards[scored])


def normalised(
    value_N: np.ndarray,
    kinds: Sequence[str],
    sample_N: np.ndarray,
    group_N: np.ndarray,
    std: bool,
    uncentred: Collection[str] = (),
) -> np.ndarray:
    """Every reward normalised by its kind and group, float64 [N]. It is 0 for an abstention (NaN), for a kind that only
    one sample of the group has, and for equal rewards. The standard deviation has the divisor n - 1, as in `grpo`.
    Rewards of the kinds `uncentred` are only divided, by their root mean square over the cell.

    Args:
        value_N, kinds, sample_N, group_N: each reward, its kind, its sample, and the group of the sample.
        std: whether to divide by the standard deviation.
    """
    result_N, scored_N = np.zeros(len(value_N)), ~np.isnan(value_N)
    if not scored_N.any():
        return result_N
    x_N = value_N[scored_N]
    _, kind_N = np.unique(np.array(kinds)[scored_N], return_inverse=True)
    _, cell_N = np.unique(np.stack([group_N[scored_N], kind_N]), axis=1, return_inverse=True)
    count_C = np.bincount(cell_N)
    is_gain_N = np.isin(np.array(kinds)[scored_N], list(uncentred))
    is_gain_C = np.bincount(cell_N, is_gain_N) > 0
    mean_C = np.where(is_gain_C, 0.0, np.bincount(cell_N, x_N) / count_C)
    squares_C = np.bincount(cell_N, (x_N - mean_C[cell_N]) ** 2)
    freedom_C = np.where(is_gain_C, count_C, np.maximum(count_C - 1, 1))
    scale_C = np.sqrt(squares_C / freedom_C) + STD_EPS if std else np.ones(len(count_C))
    largest_C, smallest_C = np.full(len(count_C), -np.inf), np.full(len(count_C), np.inf)
    np.maximum.at(largest_C, cell_N, x_N)
    np.minimum.at(smallest_C, cell_N, x_N)
    contributors_C = np.bincount(np.unique(np.stack([cell_N, sample_N[scored_N]]), axis=1)[0])
    has_signal_C = is_gain_C | differ(smallest_C, largest_C) & (contributors_C > 1)
    result_N[scored_N] = np.where(has_signal_C[cell_N], (x_N - mean_C[cell_N]) / scale_C[cell_N], 0.0)
    return result_N


def at_actions(position_N: np.ndarray, value_N: np.ndarray, action_mask: np.ndarray) -> np.ndarray:
    """The rewards of one sample, added up at its actions, float64 [L]; 0 where there is no action.

    A reward at a token that is no action (an observation, a forced delimiter) counts for the last action before it. One
    before the first action counts nowhere, because nothing that the policy did led to it.

    Args:
        position_N: the index of each reward's token.
        action_mask: bool [L].

    Raises:
        ValueError: a reward lies outside the sample.

    Example: the mask 0 1 0 1 1 and the rewards 3 at token 2 and 5 at token 0 give 0 3 0 0 0.
    """
    size = len(action_mask)
    outside = position_N[(position_N < 0) | (position_N >= size)]
    if len(outside):
        raise ValueError(f"there is a reward at token {outside[0]}, but the sample has {size} tokens")
    actions = np.flatnonzero(action_mask)
    last_N = np.searchsorted(actions, position_N, side="right") - 1
    counts_N = last_N >= 0
    reward_L = np.zeros(size)
    np.add.at(reward_L, actions[last_N[counts_N]], value_N[counts_N])
    return reward_L
