"""What a plan is worth, in numbers that need no run.

Shape letters: S samples, P positions (micro-batches of a rank), R ranks.
"""

from __future__ import annotations

import numpy as np


def imbalance(cost_PR: np.ndarray) -> float:
    """The relative excess of the costliest rank: (max - mean) / mean of the ranks' costs."""
    cost_R = cost_PR.sum(0)
    return float(cost_R.max() / cost_R.mean() - 1)


def lockstep(cost_PR: np.ndarray) -> float:
    """The cost of a step whose ranks wait for each other after every micro-batch: the sum over positions of the
    costliest rank there."""
    return float(cost_PR.max(1).sum())


def lockstep_floor(sizes_S: np.ndarray, costs_S: np.ndarray, cap: int, num_ranks: int) -> float:
    """A lockstep cost that no plan under the cap beats: the mean rank's, or what the largest samples force.

    Samples longer than half the cap stand in micro-batches of their own. With these sorted by cost, R of them fit a
    position, so some position costs at least the first, another the (R + 1)-th, another the (2 R + 1)-th, and so on.
    """
    costs_S = np.asarray(costs_S, np.float64)
    if not len(costs_S):
        return 0.0
    alone = -np.sort(-costs_S[np.asarray(sizes_S) > cap / 2])
    return float(max(costs_S.sum() / num_ranks, costs_S.max(), alone[::num_ranks].sum()))


def bubble(cost_P: np.ndarray, pipeline: int, virtual: int = 1) -> float:
    """Share of a step that the last pipeline stage idles, estimated: it waits for the first micro-batch to come
    through the other stages and, at the end, for the last one's backward to go back, each 1 / virtual as long with
    virtual stages (interleaved 1F1B, Narayanan et al. 2021, arXiv:2104.04473). Backward is twice forward.

    Exact for equal micro-batches: (PP - 1) / (VPP * P + PP - 1). Unequal ones stall between stages too.
    """
    if not len(cost_P) or not cost_P.sum():
        return 0.0
    idle = (pipeline - 1) / virtual * (cost_P[0] / 3 + cost_P[-1] * 2 / 3)
    return float(idle / (cost_P.sum() + idle))
