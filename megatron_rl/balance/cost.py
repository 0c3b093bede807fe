"""The cost of a sample, which is the quantity that a plan balances. The configuration's `kind` chooses it.

Invariants (tests/unit/balance): a longer sample never costs less; a fit to exact timings returns their coefficients.

Shape letters: S samples, N timed micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from megatron_rl.balance.flops import training_flops
from megatron_rl.config.balance import CostConfig, FlopsCost, MeasuredCost
from megatron_rl.types import ModelShape


def sample_costs(
    lengths_S: np.ndarray,
    cost: CostConfig,
    shape: ModelShape,
    recompute: str = "none",
    of_images_S: np.ndarray | float = 0.0,
) -> np.ndarray:
    """The cost of each sample, float64 [S]: the FLOPs of its training step, its tokens, or predicted seconds.

    Args:
        of_images_S: float64 [S], FLOPs that are added to its tokens'.
    """
    lengths_S = np.asarray(lengths_S, np.float64)
    if isinstance(cost, FlopsCost):
        return training_flops(lengths_S, shape, recompute) + of_images_S
    if isinstance(cost, MeasuredCost):
        return cost.seconds_per_token * lengths_S + cost.seconds_per_squared_token * lengths_S**2
    return lengths_S


def fit_cost(lengths: Sequence[Sequence[int]], seconds: Sequence[float]) -> MeasuredCost:
    """A least-squares fit to timed micro-batches with samples of lengths L. The coefficients are not negative:

        seconds = constant + a * sum of L + b * sum of L^2

    The constant is fitted but not returned, because it is the same for all plans with equally many micro-batches.

    Args:
        lengths: the sample lengths of each of the N micro-batches.
        seconds: the duration of each micro-batch, [N].

    Raises:
        ValueError: there are fewer than 3 timings, or they do not grow with the tokens.
    """
    if len(lengths) != len(seconds) or len(seconds) < 3:
        raise ValueError(
            f"there are {len(lengths)} micro-batches and {len(seconds)} timings; a fit needs equally many, at least 3"
        )
    sums_N3 = np.array([[1.0, sum(each), sum(length**2 for length in each)] for each in lengths])
    scale = sums_N3.max(0)  # the columns differ by factors up to 1e9
    target_N = np.asarray(seconds, np.float64)
    best, best_error = np.zeros(3), np.inf
    # The constrained optimum is the unconstrained one over the coefficients that are not 0. Try all subsets of the 3.
    for used in (list(c) for size in (3, 2, 1) for c in combinations(range(3), size)):
        found = np.linalg.lstsq(sums_N3[:, used] / scale[used], target_N, rcond=None)[0]
        error = float(((sums_N3[:, used] / scale[used] @ found - target_N) ** 2).sum())
        if (found >= 0).all() and error < best_error:
            best, best_error = np.zeros(3), error
            best[used] = found / scale[used]
    if not best[1] and not best[2]:
        raise ValueError("the timings do not grow with the tokens; measure micro-batches of different lengths")
    return MeasuredCost(seconds_per_token=best[1], seconds_per_squared_token=best[2])
