"""Measures the quality of a plan without running it.

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
    """A lower bound of the lockstep cost of every plan under the cap. It is the largest of three numbers: the mean cost
    of a rank, the largest cost of a sample, and a bound from the long samples.

    Two samples longer than half the cap cannot share a micro-batch, so a position holds at most R of them. If they are
    sorted by cost, some position costs at least as much as the first, another as the (R + 1)-th, and so on.
    """
    costs_S = np.asarray(costs_S, np.float64)
    if not len(costs_S):
        return 0.0
    alone = -np.sort(-costs_S[np.asarray(sizes_S) > cap / 2])
    return float(max(costs_S.sum() / num_ranks, costs_S.max(), alone[::num_ranks].sum()))


def bubble(cost_P: np.ndarray, pipeline: int, virtual: int = 1) -> float:
    """An estimate of the share of a step that a pipeline stage is idle. The last stage waits until the first
    micro-batch has passed the other stages, and at the end until the last micro-batch's backward pass has gone back
    through them. With virtual stages both times are divided by `virtual` (interleaved 1F1B, Narayanan et al. 2021,
    arXiv:2104.04473). A backward pass takes twice as long as a forward pass.

    The estimate is exact for equal micro-batches: (PP - 1) / (VPP * P + PP - 1). Unequal ones also wait between stages.
    """
    if not len(cost_P) or not cost_P.sum():
        return 0.0
    idle = (pipeline - 1) / virtual * (cost_P[0] / 3 + cost_P[-1] * 2 / 3)
    return float(idle / (cost_P.sum() + idle))
