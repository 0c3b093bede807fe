"""Advantages from outcome rewards: one number for each sample, from the rewards of its group or its batch.

Invariants: advantages are computed from whole groups, before any filter or mask. An abstention (a NaN reward) is left
out of all statistics, and its advantage is 0. Group-relative estimators give exactly 0 to a group of one and to a group
of equal rewards, and whitened estimators give exactly 0 to a batch of equal rewards. Rewards that differ by rounding
alone are equal (`equality.py`). Whitening is over the whole batch, and weighs each sample by 1 or by its action tokens.
The order of the samples does not matter. A number that is added to every reward changes only `remax`, `max_rl`
and `reinforce_plus_plus` without whitening.

Shape letters: S samples, G groups, K reward functions.
"""

from __future__ import annotations

import numpy as np

from megatron_rl.algorithms.equality import all_equal, differ

STD_EPS = 1e-6
"""This is added to a standard deviation, so that almost equal rewards give finite advantages. It is far below the
standard deviation of any real rewards."""
SMALLEST_SHARE = 0.1
"""`rloo` with `std: others` does not divide by a standard deviation below this share of the group's. So no
advantage of N samples that is divided is above 10 sqrt(N): no reward is farther from the mean than (N - 1) / sqrt(N)
standard deviations."""


def grpo(rewards: np.ndarray, group_of: np.ndarray, std: str) -> np.ndarray:
    """Group-relative advantages (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    Args:
        rewards: float64 [S], NaN for an abstention.
        group_of: int64 [S], the group of each sample.
        std: `group` divides by the group's standard deviation + 1e-6, with the divisor n - 1 as in the common
            implementations of GRPO. `batch` divides by the standard deviation of all rewards (Liu et al. 2025,
            arXiv:2508.08221). `none` only subtracts the mean: Dr. GRPO (Liu et al. 2025, arXiv:2503.20783).

    Returns:
        advantages, float64 [S].

    Example:
        The rewards 1, 0, 0, 0 have mean .25 and standard deviation .5; the advantages are 1.5, -.5, -.5, -.5.
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
    """Leave-one-out advantages (Ahmadian et al. 2024, arXiv:2402.14740): the baseline of a sample is the mean reward of
    the other samples, r - (sum - r) / (N - 1) = N / (N - 1) (r - mean).

    Args:
        std: `others` divides by the standard deviation of the other samples' rewards + 1e-6 (divisor N - 2). It does
            not divide if this is below a tenth of the group's, or if there is only one other sample: the sample
            that alone differs from the others must keep its advantage, and rounding, also of float16, must not grow
            into one. `none` never divides.

    Example:
        The rewards 1, 0, 0 have the baselines 0, .5, .5, and the advantages 1, -.5, -.5. With std others they are
        1, -.5 / sqrt(.5), -.5 / sqrt(.5).
    """
    count_G = np.bincount(group_of[~np.isnan(rewards)], minlength=_num_groups(group_of))
    advantages: np.ndarray = grpo(rewards, group_of, "none") * (count_G / np.maximum(count_G - 1, 1))[group_of]
    return advantages / _deviation_of_others(rewards, group_of) if std == "others" else advantages


def _deviation_of_others(rewards: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    """float64 [S]: the standard deviation + 1e-6 of the other rewards in each sample's group; 1 where it is too small
    to divide by. It is computed from these rewards themselves, because the rounding of a difference of sums grows with
    the rewards."""
    divisors = np.ones(len(rewards))
    for group in range(_num_groups(group_of)):
        members = np.flatnonzero((group_of == group) & ~np.isnan(rewards))
        if len(members) < 3:
            continue
        apart = ~np.eye(len(members), dtype=bool)
        others = np.broadcast_to(rewards[members], apart.shape)[apart].reshape(len(members), -1).std(1, ddof=1)
        divisors[members] = np.where(others > SMALLEST_SHARE * rewards[members].std(ddof=1), others + STD_EPS, 1.0)
    return divisors


def opo(rewards: np.ndarray, group_of: np.ndarray, num_actions: np.ndarray) -> np.ndarray:
    """Advantages with the optimal reward baseline (Hao et al. 2025, arXiv:2505.23585): b = sum(n r) / sum(n). It
    minimises the variance of the gradient if the squared norm of a sample's gradient grows with its number n of
    tokens.

    Example:
        The rewards 1, 0 of samples with 1 and 3 actions have the baseline .25; the advantages are .75, -.25.
    """
    *_, spread_G = group_statistics(rewards, group_of)
    scored = ~np.isnan(rewards)
    owner, weights, size = group_of[scored], num_actions[scored], _num_groups(group_of)
    tokens_G = np.bincount(owner, weights, size)
    baseline_G = np.bincount(owner, weights * rewards[scored], size) / np.maximum(tokens_G, 1)
    # A group without any action has no baseline and no gradient.
    signal = _signal(rewards, group_of, spread_G) & (tokens_G > 0)[group_of]
    return np.where(signal, rewards - baseline_G[group_of], 0.0)


def gpg(rewards: np.ndarray, group_of: np.ndarray, zero_signal_dropped: bool) -> np.ndarray:
    """Group policy gradient (Chu et al. 2025, arXiv:2504.02546): a (r - mean) with a = B / (B - M). Of the B scored
    samples, M are in groups of equal rewards: they have no gradient but count in the denominator, and a compensates for
    that.

    Args:
        zero_signal_dropped: whether groups of equal rewards leave the step before its denominators are counted; then
            a is 1.

    Example:
        The groups of rewards (1, 0) and (1, 1) have a = 4 / 2; the advantages are 1, -1, 0, 0.
    """
    advantages = grpo(rewards, group_of, "none")
    *_, spread_G = group_statistics(rewards, group_of)
    num_signal = np.count_nonzero(_signal(rewards, group_of, spread_G))
    if zero_signal_dropped or num_signal == 0:
        return advantages
    return advantages * (np.count_nonzero(~np.isnan(rewards)) / num_signal)


def max_rl(rewards: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    """Maximum likelihood reinforcement learning (Tajwar et al. 2026, arXiv:2602.02710): (r - mean) / mean. For rewards
    of 0 and 1 the gradient of a prompt is the mean of its right answers' gradients, however few they are.

    Example:
        The rewards 1, 0, 0, 0 have the advantages 3, -1, -1, -1, and 1, 1, 1, 0 have 1/3, 1/3, 1/3, -1.

    Raises:
        ValueError: a reward is negative, so that a mean may be 0 or negative.
    """
    if (lowest := np.nanmin(rewards, initial=0.0)) < 0:
        raise ValueError(
            f"algorithm.adv_estimator max_rl divides by the mean reward of a group, but a reward is {lowest:g}; give "
            "rewards of at least 0 (see also algorithm.shaping), or choose grpo"
        )
    mean_G, *_ = group_statistics(rewards, group_of)
    advantages = grpo(rewards, group_of, "none")
    advantages[advantages != 0] /= mean_G[group_of][advantages != 0]
    return advantages


def grpo_passk(rewards: np.ndarray, group_of: np.ndarray, std: str) -> np.ndarray:
    """Advantages for the best reward of the group (Tang et al. 2025, arXiv:2503.19595). Without a sample, the objective
    max(r) would change only if the sample was the best one, by the largest minus the second largest reward. All other
    samples, and the best ones of a tie, have advantage 0.

    Args:
        std: `group` divides by the group's standard deviation (divisor n - 1) + 1e-6; `none` does not divide.

    Example:
        The rewards 3, 1, 0 with std none have the advantages 2, 0, 0.
    """
    _, std_G, _ = group_statistics(rewards, group_of)
    scored = np.flatnonzero(~np.isnan(rewards))
    best_first = scored[np.lexsort((-rewards[scored], group_of[scored]))]
    owner = group_of[best_first]
    opens = np.ones(len(owner), bool)
    opens[1:] = owner[1:] != owner[:-1]
    rank = np.flatnonzero(opens[:-1] & ~opens[1:])  # the best of each group of two or more; the second best is next
    best, second = best_first[rank], best_first[rank + 1]
    advantages = np.zeros(len(rewards))
    first = differ(rewards[best], rewards[second])
    advantages[best[first]] = (rewards[best] - rewards[second])[first]
    if std == "group":
        advantages /= std_G[group_of] + STD_EPS
    return advantages


def gdpo(parts: np.ndarray, weights: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    """Group reward-decoupled normalisation (Liu et al. 2026, arXiv:2601.05242): the scores of each reward function are
    normalised separately in the group, so that a function with a large scale does not hide the others. Their weighted
    sum is whitened over the samples of the batch.

    Args:
        parts: float64 [S, K], NaN where a function abstained; it then adds 0 to the sum of that sample. A sample on
            which all functions abstained is left out of the statistics.
        weights: float64 [K].

    Returns:
        advantages, float64 [S]; exactly 0 for a sample in whose group every function gives equal scores.

    Raises:
        ValueError: the number of weights is not the number of functions.
    """
    if len(parts) and parts.shape[1] != len(weights):
        raise ValueError(
            f"gdpo got scores of {parts.shape[1]} reward functions, but {len(weights)} weights; give each function one"
        )
    total, signal = np.zeros(len(parts)), np.zeros(len(parts), bool)
    for part, weight in zip(parts.T, weights, strict=True):
        total += weight * grpo(part, group_of, "group")
        *_, spread_G = group_statistics(part, group_of)
        signal |= _signal(part, group_of, spread_G)
    total[np.isnan(parts).all(axis=-1)] = np.nan
    return np.where(signal, _whitened(total, np.ones(len(parts))), 0.0)


def reinforce_plus_plus(rewards: np.ndarray, num_actions: np.ndarray, whiten: bool) -> np.ndarray:
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262) for outcome rewards: all action tokens of a sample have its
    reward, whitened over all action tokens of the batch. `returns.returns_to_go` is the form for rewards at tokens.

    Args:
        rewards: float64 [S], NaN for an abstention.
        num_actions: int64 [S], the action tokens of each sample, which are its weight in mean and standard deviation
            (divisor n).
        whiten: False returns the rewards themselves.

    Example:
        The rewards 1, 0 of samples with 1 and 3 actions have mean .25 and standard deviation sqrt(3) / 4; the
        advantages are sqrt(3), -1 / sqrt(3). A sample without actions has weight 0 and advantage 0.
    """
    return _whitened(rewards, num_actions) if whiten else np.nan_to_num(rewards, nan=0.0)


def reinforce_plus_plus_baseline(rewards: np.ndarray, group_of: np.ndarray, num_actions: np.ndarray) -> np.ndarray:
    """REINFORCE++ with baseline (Hu et al. 2025, arXiv:2501.03262): the mean of the group is subtracted, and the result
    is whitened over the action tokens of the batch. Groups of equal rewards count in mean and deviation, as in the
    paper, but their advantage is exactly 0, because the subtracted mean of the batch tells nothing about them."""
    *_, spread_G = group_statistics(rewards, group_of)
    centred = np.where(np.isnan(rewards), np.nan, grpo(rewards, group_of, "none"))
    return np.where(_signal(rewards, group_of, spread_G), _whitened(centred, num_actions), 0.0)


def remax(rewards: np.ndarray, greedy_rewards: np.ndarray) -> np.ndarray:
    """ReMax (Li et al. 2023, arXiv:2310.10505): r minus the reward of the prompt's greedy answer.

    Args:
        rewards, greedy_rewards: float64 [S]; where one of them is NaN, the advantage is 0.
    """
    return np.where(differ(rewards, greedy_rewards), rewards - greedy_rewards, 0.0)  # a comparison with NaN is false


def a2po(rewards: np.ndarray, pass_rates: np.ndarray, beta: float) -> np.ndarray:
    """A*-PO (Brantley et al. 2025, arXiv:2505.20686): r minus the optimal value of the prompt, beta log mean exp(r /
    beta) over answers of the reference policy, whose rewards are 0 or 1.

    Args:
        rewards: float64 [S]; where it is NaN, the advantage is 0.
        pass_rates: float64 [S], the share of these answers that are right, from 0 to 1.

    Raises:
        ValueError: a row has no such share.

    Example: with beta 0.5 and a half of the answers right, V is 0.5 log((e^2 + 1) / 2) = 0.717.
    """
    if not ((pass_rates >= 0) & (pass_rates <= 1)).all():
        raise ValueError("a row has no `pass_rate` from 0 to 1, which adv_estimator a2po needs in each")
    # log(p e^x + 1 - p) = x + log(p + (1 - p) e^-x), in which nothing overflows; p may be 0.
    terms = np.stack([1 / beta + np.log(np.maximum(pass_rates, 1e-300)), np.log(np.maximum(1 - pass_rates, 1e-300))])
    values = beta * np.logaddexp(*terms)
    return np.where(np.isnan(rewards), 0.0, rewards - values)


def group_statistics(rewards: np.ndarray, group_of: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The mean, the standard deviation (divisor n - 1) and the spread (largest minus smallest, 0 if they are equal) of
    the rewards of every group without the abstentions, float64 [G]. A group without any score has 0, 0 and -inf."""
    num_groups = _num_groups(group_of)
    scored = ~np.isnan(rewards)
    values, owner = rewards[scored], group_of[scored]
    count = np.bincount(owner, minlength=num_groups)
    mean = np.bincount(owner, values, num_groups) / np.maximum(count, 1)
    squares = np.bincount(owner, (values - mean[owner]) ** 2, num_groups)
    largest, smallest = np.full(num_groups, -np.inf), np.full(num_groups, np.inf)
    np.maximum.at(largest, owner, values)
    np.minimum.at(smallest, owner, values)
    spread = np.full(num_groups, -np.inf)
    has_score = count > 0
    low, high = smallest[has_score], largest[has_score]
    spread[has_score] = np.where(differ(low, high), high - low, 0.0)
    return mean, np.sqrt(squares / np.maximum(count - 1, 1)), spread


def _num_groups(group_of: np.ndarray) -> int:
    return int(group_of.max()) + 1 if len(group_of) else 0


def _signal(rewards: np.ndarray, group_of: np.ndarray, spread_G: np.ndarray) -> np.ndarray:
    """bool [S]: whether the sample has a reward and is in a group whose rewards differ. The spread decides it, because
    in floating point the mean of equal numbers can differ from them."""
    has_signal: np.ndarray = ~np.isnan(rewards) & (spread_G[group_of] > 0)
    return has_signal


def _whitened(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(x - mean) / (std + 1e-6), with weighted mean and std (divisor n). It is 0 for NaN and for weight 0, and for all
    if the values with a weight are equal."""
    counted = ~np.isnan(values) & (weights > 0)
    if all_equal(values[counted]):
        return np.zeros(len(values))
    mean = np.average(values[counted], weights=weights[counted])
    std = np.sqrt(np.average((values[counted] - mean) ** 2, weights=weights[counted]))
    return np.where(counted, (values - mean) / (std + STD_EPS), 0.0)
