"""Advantages from outcomes: one number a sample, from the rewards of its group or its batch.

Invariants: advantages see whole groups, before any filter or mask. An abstention (NaN reward) leaves every statistic
and gets 0. For group-relative estimators a group of one, and a group of equal rewards, have advantage exactly 0; for
whitened ones a batch of equal rewards has. Whitening counts each sample once or by its action tokens, over the whole
batch. The order of the samples does not matter, and a number added to every reward moves only `remax` and
`reinforce_plus_plus` without whitening.

Shape letters: S samples, G groups, K reward functions.
"""

from __future__ import annotations

import numpy as np

STD_EPS = 1e-6
"""Added to a standard deviation: keeps almost equal rewards finite; far below the spread of any real reward."""


def grpo(rewards: np.ndarray, group_of: np.ndarray, std: str) -> np.ndarray:
    """Group-relative advantages (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    Args:
        rewards: float64 [S], NaN for an abstention.
        group_of: int64 [S], the group of each sample.
        std: `group` divides by the group's standard deviation + 1e-6. It is the sample's (divisor n - 1), as
            in the common implementations of GRPO. `batch` divides by that of all rewards (Liu et al. 2025,
            arXiv:2508.08221). `none` only subtracts the mean: Dr. GRPO (Liu et al. 2025, arXiv:2503.20783).

    Returns:
        advantages, float64 [S].

    Example:
        rewards 1, 0, 0, 0: mean .25, standard deviation .5, advantages 1.5, -.5, -.5, -.5.
    """
    mean_G, std_G, spread_G = group_statistics(rewards, group_of)
    advantages, signal = np.zeros(len(rewards)), _signal(rewards, group_of, spread_G)
    scale_S = np.ones(len(rewards))
    if std == "group":
        scale_S = std_G[group_of] + STD_EPS
    elif std == "batch" and signal.any():
        scale_S = np.full(len(rewards), np.nanstd(rewards, ddof=1) + STD_EPS)
    advantages[signal] = ((rewards - mean_G[group_of]) / scale_S)[signal]
    return advantages


def rloo(rewards: np.ndarray, group_of: np.ndarray, std: str) -> np.ndarray:
    """Leave-one-out advantages (Ahmadian et al. 2024, arXiv:2402.14740): the baseline of a sample is the mean of the
    others, r - (sum - r) / (N - 1) = N / (N - 1) (r - mean).

    Args:
        std: `others` divides by the standard deviation of the others' rewards + 1e-6 (divisor N - 2), and not at all
            where the others are equal or there is one: they have no scale, and the sample that alone differs from
            them must not lose its advantage. `none` never divides.

    Example:
        rewards 1, 0, 0: baselines 0, .5, .5, advantages 1, -.5, -.5; others: 1, -.5 / sqrt(.5), -.5 / sqrt(.5).
    """
    count_G = np.bincount(group_of[~np.isnan(rewards)], minlength=_num_groups(group_of))
    advantages: np.ndarray = grpo(rewards, group_of, "none") * (count_G / np.maximum(count_G - 1, 1))[group_of]
    return advantages / _deviation_of_others(rewards, group_of) if std == "others" else advantages


def _deviation_of_others(rewards: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    """float64 [S]: standard deviation + 1e-6 of the other scored rewards of each sample's group; 1 where they are
    equal. It is computed from the others themselves: a difference of sums would leave rounding where 0 belongs."""
    divisors = np.ones(len(rewards))
    for group in range(_num_groups(group_of)):
        members = np.flatnonzero((group_of == group) & ~np.isnan(rewards))
        if len(members) < 3:
            continue
        apart = ~np.eye(len(members), dtype=bool)
        others = np.broadcast_to(rewards[members], apart.shape)[apart].reshape(len(members), -1)
        divisors[members] = np.where(np.ptp(others, 1) > 0, others.std(1, ddof=1) + STD_EPS, 1.0)
    return divisors


def opo(rewards: np.ndarray, group_of: np.ndarray, num_actions: np.ndarray) -> np.ndarray:
    """Optimal reward baseline (Hao et al. 2025, arXiv:2505.23585): b = sum(n r) / sum(n), the minimiser of the
    gradient's variance if each of a sample's n tokens adds the same to its gradient's squared norm.

    Example:
        rewards 1, 0 of 1 and 3 actions: baseline .25, advantages .75, -.25.
    """
    *_, spread_G = group_statistics(rewards, group_of)
    scored = ~np.isnan(rewards)
    owner, weights, size = group_of[scored], num_actions[scored], _num_groups(group_of)
    tokens_G = np.bincount(owner, weights, size)
    baseline_G = np.bincount(owner, weights * rewards[scored], size) / np.maximum(tokens_G, 1)
    # Without an action in the group there is neither a baseline nor a gradient.
    signal = _signal(rewards, group_of, spread_G) & (tokens_G > 0)[group_of]
    return np.where(signal, rewards - baseline_G[group_of], 0.0)


def gpg(rewards: np.ndarray, group_of: np.ndarray, zero_signal_dropped: bool) -> np.ndarray:
    """Group policy gradient (Chu et al. 2025, arXiv:2504.02546): a (r - mean), where a = B / (B - M) makes up for
    the M of B scored samples whose groups have equal rewards and no gradient, but count in the denominator.

    Args:
        zero_signal_dropped: such groups leave the step before its denominators are counted: a is 1.

    Example:
        rewards (1, 0), (1, 1): a = 4 / 2, advantages 1, -1, 0, 0.
    """
    advantages = grpo(rewards, group_of, "none")
    *_, spread_G = group_statistics(rewards, group_of)
    num_signal = np.count_nonzero(_signal(rewards, group_of, spread_G))
    if zero_signal_dropped or num_signal == 0:
        return advantages
    return advantages * (np.count_nonzero(~np.isnan(rewards)) / num_signal)


def grpo_passk(rewards: np.ndarray, group_of: np.ndarray, std: str) -> np.ndarray:
    """Advantages of the group's best reward (Tang et al. 2025, arXiv:2503.19595): without a sample the objective
    max(r) only changes if it was the best, by max - second max. All others, and ties, get 0.

    Args:
        std: `group` divides by the group's standard deviation (divisor n - 1) + 1e-6; `none` does not.

    Example:
        rewards 3, 1, 0, std none: advantages 2, 0, 0.
    """
    _, std_G, _ = group_statistics(rewards, group_of)
    scored = np.flatnonzero(~np.isnan(rewards))
    best_first = scored[np.lexsort((-rewards[scored], group_of[scored]))]
    owner = group_of[best_first]
    opens = np.ones(len(owner), bool)
    opens[1:] = owner[1:] != owner[:-1]
    rank = np.flatnonzero(opens[:-1] & ~opens[1:])  # the best of each group of two or more; the second follows it
    best, second = best_first[rank], best_first[rank + 1]
    advantages = np.zeros(len(rewards))
    advantages[best] = rewards[best] - rewards[second]
    if std == "group":
        advantages /= std_G[group_of] + STD_EPS
    return advantages


def gdpo(parts: np.ndarray, weights: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    """Group reward-decoupled normalisation (Liu et al. 2026, arXiv:2601.05242): each reward function is normalised
    in the group on its own, so that none is drowned by another's scale; their weighted sum is whitened over the
    batch's samples.

    Args:
        parts: float64 [S, K], NaN where a function abstained: it then adds 0 to that sample's sum. A sample on which
            all abstained leaves the statistics.
        weights: float64 [K].

    Returns:
        advantages, float64 [S]; exactly 0 where no function tells the sample from its group.

    Raises:
        ValueError: not one weight a function.
    """
    if len(parts) and parts.shape[1] != len(weights):
        raise ValueError(f"gdpo has scores of {parts.shape[1]} reward functions, {len(weights)} weights: give one each")
    total, signal = np.zeros(len(parts)), np.zeros(len(parts), bool)
    for part, weight in zip(parts.T, weights):
        total += weight * grpo(part, group_of, "group")
        *_, spread_G = group_statistics(part, group_of)
        signal |= _signal(part, group_of, spread_G)
    total[np.isnan(parts).all(axis=-1)] = np.nan
    return np.where(signal, _whitened(total, np.ones(len(parts))), 0.0)


def reinforce_plus_plus(rewards: np.ndarray, num_actions: np.ndarray, whiten: bool) -> np.ndarray:
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262) for outcome rewards: the reward, which each action token of its
    sample shares, whitened over all action tokens of the batch. `returns.returns_to_go` is its form for rewards at
    tokens.

    Args:
        rewards: float64 [S], NaN for an abstention.
        num_actions: int64 [S], action tokens of each sample: its weight in mean and standard deviation (divisor n).
        whiten: False leaves the rewards as they are.

    Example:
        rewards 1, 0 of 1 and 3 actions: mean .25, standard deviation sqrt(3) / 4, advantages sqrt(3), -1 / sqrt(3).
        A sample without actions has nothing to weigh and gets 0.
    """
    return _whitened(rewards, num_actions) if whiten else np.nan_to_num(rewards, nan=0.0)


def reinforce_plus_plus_baseline(rewards: np.ndarray, group_of: np.ndarray, num_actions: np.ndarray) -> np.ndarray:
    """REINFORCE++ with baseline (Hu et al. 2025, arXiv:2501.03262): the group's mean is subtracted, then all is
    whitened over the batch's action tokens. Groups of equal rewards count in mean and deviation, as in the paper,
    but get exactly 0: the mean's shift is no signal of theirs."""
    *_, spread_G = group_statistics(rewards, group_of)
    centred = np.where(np.isnan(rewards), np.nan, grpo(rewards, group_of, "none"))
    return np.where(_signal(rewards, group_of, spread_G), _whitened(centred, num_actions), 0.0)


def remax(rewards: np.ndarray, greedy_rewards: np.ndarray) -> np.ndarray:
    """ReMax (Li et al. 2023, arXiv:2310.10505): r less the reward of the prompt's greedy answer.

    Args:
        rewards, greedy_rewards: float64 [S]; where one is NaN the advantage is 0.
    """
    return np.where(np.isnan(rewards) | np.isnan(greedy_rewards), 0.0, rewards - greedy_rewards)


def group_statistics(rewards: np.ndarray, group_of: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, sample standard deviation and spread (largest less smallest) of every group, float64 [G], without
    the abstentions. A group that nobody scored has 0, 0 and -inf."""
    num_groups = _num_groups(group_of)
    scored = ~np.isnan(rewards)
    values, owner = rewards[scored], group_of[scored]
    count = np.bincount(owner, minlength=num_groups)
    mean = np.bincount(owner, values, num_groups) / np.maximum(count, 1)
    squares = np.bincount(owner, (values - mean[owner]) ** 2, num_groups)
    largest, smallest = np.full(num_groups, -np.inf), np.full(num_groups, np.inf)
    np.maximum.at(largest, owner, values)
    np.minimum.at(smallest, owner, values)
    return mean, np.sqrt(squares / np.maximum(count - 1, 1)), np.where(count > 0, largest - smallest, -np.inf)


def _num_groups(group_of: np.ndarray) -> int:
    return int(group_of.max()) + 1 if len(group_of) else 0


def _signal(rewards: np.ndarray, group_of: np.ndarray, spread_G: np.ndarray) -> np.ndarray:
    """bool [S]: scored, in a group whose rewards differ. The mean of equal numbers need not equal them in floating
    point: the spread decides what is exactly 0."""
    has_signal: np.ndarray = ~np.isnan(rewards) & (spread_G[group_of] > 0)
    return has_signal


def _whitened(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(x - mean) / (std + 1e-6), weighted, divisor n; 0 for NaN and for weight 0, and for all where the weighted
    values are equal."""
    counted = ~np.isnan(values) & (weights > 0)
    if not counted.any() or np.ptp(values[counted]) == 0:
        return np.zeros(len(values))
    mean = np.average(values[counted], weights=weights[counted])
    std = np.sqrt(np.average((values[counted] - mean) ** 2, weights=weights[counted]))
    return np.where(counted, (values - mean) / (std + STD_EPS), 0.0)
