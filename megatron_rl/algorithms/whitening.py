"""Mean, variance and whitening over tokens that are on several ranks.

Invariants: the result does not depend on how the tokens are split over ranks or micro-batches; equal numbers become
exactly 0. Every rank of the batch must call these functions, even if it has no tokens, because each function sums over
the ranks twice.

Shape letters: N tokens of this rank that count.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rl.algorithms.equality import RESOLUTION

SumOverRanks = Callable[[Tensor], Tensor]
"""The elementwise sum of a small float64 tensor over the ranks that share the batch (an all-reduce)."""

STD_EPS = 1e-6
"""This is added to the standard deviation, as in `outcomes.py`. Advantages far below it are noise."""


def one_rank(x: Tensor) -> Tensor:
    """The sum over ranks of a batch that is on one rank."""
    return x


def moments(x_N: Tensor, sum_over_ranks: SumOverRanks) -> tuple[Tensor, Tensor]:
    """The mean and the variance (divisor n) over all ranks, as 0-dim float64; 0 and 0 if no rank has a token.

    The variance is computed in a second pass, because the mean of squares minus the square of the mean would lose its
    digits for numbers far from 0.
    """
    x_N = x_N.double()
    count, total = sum_over_ranks(torch.stack([x_N.new_tensor(x_N.numel()), x_N.sum()])).unbind()
    mean = total / count.clamp(min=1)
    return mean, sum_over_ranks((x_N - mean).square().sum()) / count.clamp(min=1)


def whiten(x_N: Tensor, sum_over_ranks: SumOverRanks = one_rank) -> Tensor:
    """(x - mean) / (std + 1e-6) over all ranks, float64 [N]."""
    mean, variance = moments(x_N, sum_over_ranks)
    std = variance.sqrt()
    return torch.where(std <= RESOLUTION * mean.abs(), 0.0, (x_N.double() - mean) / (std + STD_EPS))
