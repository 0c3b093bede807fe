"""Advantages: one number a sample, from the rewards of its group.

Invariants: advantages see whole groups, before any filter or mask. An abstention (NaN reward) leaves its
group's statistics, gets 0 and is inactive. A group of one, and a group of equal rewards, have advantage
exactly 0.

Shape letters: S samples, G groups of the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_rl.config.advantages import GrpoAdvantage
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.types import Batch, Metrics

STD_EPS = 1e-6
"""Keeps a group with almost equal rewards finite; far below the spread of any real reward."""


def grpo(rewards: np.ndarray, group_of: np.ndarray, std: str) -> np.ndarray:
    """Group-relative advantages (Shao et al. 2024, arXiv:2402.03300, eq. 3).

    Args:
        rewards: float64 [S], NaN for an abstention.
        group_of: int64 [S], the group of each sample.
        std: `group` divides by the group's standard deviation + 1e-6. It is the sample's (divisor n - 1), as
            in the common implementations of GRPO. `none` only subtracts the mean: Dr. GRPO (Liu et al. 2025,
            arXiv:2503.20783).

    Returns:
        advantages, float64 [S].

    Example:
        rewards 1, 0, 0, 0: mean .25, standard deviation .5, advantages 1.5, -.5, -.5, -.5.
    """
    scored = ~np.isnan(rewards)
    mean_G, std_G, spread_G = _group_statistics(rewards, group_of)
    scale_G = std_G + STD_EPS if std == "group" else np.ones_like(std_G)
    # The mean of equal numbers need not equal them in floating point: the spread decides what is exactly 0.
    signal = scored & (spread_G[group_of] > 0)
    advantages = np.zeros(len(rewards))
    advantages[signal] = ((rewards - mean_G[group_of]) / scale_G[group_of])[signal]
    return advantages


def _group_statistics(rewards: np.ndarray, group_of: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, sample standard deviation and spread (largest less smallest) of every group, float64 [G], without
    the abstentions. A group that nobody scored has 0, 0 and -inf."""
    num_groups = int(group_of.max()) + 1 if len(group_of) else 0
    scored = ~np.isnan(rewards)
    values, owner = rewards[scored], group_of[scored]
    count = np.bincount(owner, minlength=num_groups)
    mean = np.bincount(owner, values, num_groups) / np.maximum(count, 1)
    squares = np.bincount(owner, (values - mean[owner]) ** 2, num_groups)
    largest, smallest = np.full(num_groups, -np.inf), np.full(num_groups, np.inf)
    np.maximum.at(largest, owner, values)
    np.minimum.at(smallest, owner, values)
    return mean, np.sqrt(squares / np.maximum(count - 1, 1)), np.where(count > 0, largest - smallest, -np.inf)


ESTIMATORS: dict[type, Callable[[GrpoAdvantage, np.ndarray, np.ndarray], np.ndarray]] = {
    GrpoAdvantage: lambda cfg, rewards, group_of: grpo(rewards, group_of, cfg.std),
}
"""One line an estimator, keyed by its config class: (cfg, rewards [S], group_of [S]) -> advantages [S]."""


def estimate_advantages(batch: Batch, cfg: AlgorithmConfig) -> Metrics:
    """Fill `batch.advantages` and switch off in `batch.active` what carries no gradient.

    Abstentions become inactive; so do zero-signal groups with `cfg.drop_zero_signal`. A sample that was
    inactive before stays so, but counts in its group's baseline.

    Returns:
        reward/mean: over the scored samples, NaN when there is none.
        reward/std: the groups' standard deviation, averaged over the groups with a score.
        groups/zero_signal: groups whose scores are all equal.
        samples/abstained, samples/active: counts.
    """
    rewards, group_of = batch.rewards, batch.group_of
    abstained = np.isnan(rewards)
    _, std_G, spread_G = _group_statistics(rewards, group_of)
    batch.advantages = ESTIMATORS[type(cfg.adv_estimator)](cfg.adv_estimator, rewards, group_of)
    active = batch.active & ~abstained
    if cfg.drop_zero_signal:
        active &= spread_G[group_of] != 0
    batch.active = active
    any_scored = not abstained.all()
    return {
        "reward/mean": float(rewards[~abstained].mean()) if any_scored else float("nan"),
        "reward/std": float(std_G[spread_G >= 0].mean()) if any_scored else float("nan"),
        "groups/zero_signal": float((spread_G == 0).sum()),
        "samples/abstained": float(abstained.sum()),
        "samples/active": float(active.sum()),
    }
