"""Muon for the matrices inside the layers, and Adam for all other parameters (Jordan et al. 2024,
kellerjordan.github.io/posts/muon; Moonlight, arXiv:2502.16982).

An update with the gradient G, the learning rate a and the decay w changes a matrix P and its momentum M into

    M' = b M + G
    P' = P - a (w P + s O(D))  with  D = G + b M' (Nesterov), or D = M'.

O is the orthogonalisation, and the scale s depends on rows and columns alone. The momentum is split over the
data-parallel ranks like Adam's moments, and a whole matrix exists only while it is orthogonalised (matrices.py).
Everything is computed in fp32. Megatron-Core's own Muon (core/optimizer/muon.py of version 0.16.1) gives the same
parameters to Adam; it needs a package that it does not install, and refuses the distributed optimizer.

Invariants (tests/unit/actor, tests/ranks): an update equals a plain loop over whole matrices in float64, in every
layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_rl.actor.optimizer.adam import AdamOptimizer
from megatron_rl.actor.optimizer.intervals import Interval
from megatron_rl.actor.optimizer.matrices import Place, SplitParameter, split_parameters, transformed
from megatron_rl.actor.optimizer.norms import Norms, sum_of_squares
from megatron_rl.actor.optimizer.rounding import Dither
from megatron_rl.config.optimizer import MUON_MOMENTS, MuonConfig
from megatron_rl.config.policy import PolicyConfig

(MOMENTUM,) = MUON_MOMENTS

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The coefficients of Jordan et al. (2024), chosen for a steep slope at 0: five iterations bring most singular values
to between 0.7 and 1.2."""
EPSILON = 1e-7
"""This is added to the norm of a matrix before the division, so that zeros stay zeros."""


def orthogonalise(matrix_RC: Tensor, num_iterations: int) -> Tensor:
    """The orthogonal matrix next to a matrix, nearly: from X = matrix / |matrix|, each Newton-Schulz iteration makes
    a X + b (X X') X + c (X X')^2 X, which acts on each singular value alone (Jordan et al. 2024).

    Args:
        matrix_RC: float32 or float64, contiguous.

    Returns:
        [R, C], like the argument.
    """
    a, b, c = COEFFICIENTS
    norm = sum_of_squares([matrix_RC]).sqrt().to(matrix_RC.dtype)
    x = matrix_RC / (norm + EPSILON)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x  # the product of X with itself has the shorter side
    for _ in range(num_iterations):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if is_tall else x


def scale(kind: str, rows: int, columns: int) -> float:
    """The factor of an orthogonalised matrix; see `MuonConfig.scale`."""
    if kind == "moonlight":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def accumulate(gradient: Tensor, momentum: Tensor, cfg: MuonConfig) -> Tensor:
    """Add a gradient to its momentum, which is changed, and return what is orthogonalised. All have one shape."""
    momentum.mul_(cfg.momentum).add_(gradient)
    return gradient.add(momentum, alpha=cfg.momentum) if cfg.nesterov else momentum.clone()


def scaled(direction_RC: Tensor, cfg: MuonConfig) -> Tensor:
    """[R, C]: s O(D)."""
    return orthogonalise(direction_RC, cfg.num_iterations).mul(scale(cfg.scale, *direction_RC.shape))


class MuonOptimizer(AdamOptimizer):
    """Muon, whose state is on the rank's device, in fp32."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        policy: PolicyConfig,
        total_steps: int,
        place: Place,
        dither: Dither | None = None,
    ) -> None:
        super().__init__(chunks, policy, total_steps, dither)
        assert isinstance(policy.optimizer, MuonConfig)
        self._settings, self._rank = policy.optimizer, place.rank
        self._matrices = split_parameters(self.megatron.chained_optimizers, self._names, place)
        self._in_matrices = {id(split.interval.parameter) for split in self._matrices}

    def _apply(self, norms: Mapping[int, Norms]) -> None:
        for split, step in transformed(
            self._matrices, self._rank, self._direction, lambda direction_RC: scaled(direction_RC, self._settings)
        ):
            main = split.interval.main
            group = split.inner.optimizer.param_groups[split.interval.group]
            step = step.add(main.view(-1), alpha=group["weight_decay"]).mul_(group["lr"])
            main.view(-1).sub_(step)
            main.grad = None  # so that Megatron's Adam leaves it as it is
            if norms[id(split.inner)].counts(split.interval):
                norms[id(split.inner)].add(main, step)
        super()._apply(norms)

    def _direction(self, split: SplitParameter) -> Tensor:
        gradient = split.interval.main.grad
        assert gradient is not None, "the gradients have been taken"
        return accumulate(gradient.view(-1), self._moments(split.inner, split.interval)[MOMENTUM], self._settings)

    def _moments(self, inner: MegatronOptimizer, interval: Interval) -> dict[str, Tensor]:
        if id(interval.parameter) not in self._in_matrices:
            return super()._moments(inner, interval)
        state = inner.optimizer.state[interval.main]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(interval.main)
        return {MOMENTUM: state[MOMENTUM].view(-1)}

    def _resume_at(self, inner: MegatronOptimizer, interval: Interval, num_updates: int) -> None:
        if id(interval.parameter) not in self._in_matrices:
            super()._resume_at(inner, interval, num_updates)
