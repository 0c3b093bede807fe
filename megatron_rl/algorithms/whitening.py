"""Mean, variance and whitening over tokens that lie on several ranks.

Invariants: the result does not depend on how the tokens were split over ranks or micro-batches; equal numbers become
exactly 0. Every rank of the batch must call, one without tokens too: each function sums over ranks twice.

Shape letters: N tokens that count, those of this rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SumOverRanks = Callable[[Tensor], Tensor]
"""The elementwise sum of a small float64 tensor over the ranks that share the batch (an all-reduce)."""

STD_EPS = 1e-6
"""Added to the standard deviation, as in `outcomes.py`: advantages far below it are noise."""
ROUNDING = 1e-12
"""A deviation below this share of the mean is rounding of equal numbers: a float64 sum errs by 1e-16 a term at most."""


def one_rank(x: Tensor) -> Tensor:
    """The sum over ranks of a batch that lies on one."""
    return x


def moments(x_N: Tensor, sum_over_ranks: SumOverRanks) -> tuple[Tensor, Tensor]:
    """Mean and variance (divisor n) over all ranks, 0-dim float64; 0 and 0 where no rank has a token.

    Two passes: the sum of squares less the square of the sum would cancel for advantages far from 0.
    """
    x_N = x_N.double()
    count, total = sum_over_ranks(torch.stack([x_N.new_tensor(x_N.numel()), x_N.sum()])).unbind()
    mean = total / count.clamp(min=1)
    return mean, sum_over_ranks((x_N - mean).square().sum()) / count.clamp(min=1)


def whiten(x_N: Tensor, sum_over_ranks: SumOverRanks = one_rank) -> Tensor:
    """(x - mean) / (std + 1e-6) over all ranks, float64 [N]."""
    mean, variance = moments(x_N, sum_over_ranks)
    std = variance.sqrt()
    return torch.where(std <= ROUNDING * mean.abs(), 0.0, (x_N.double() - mean) / (std + STD_EPS))
