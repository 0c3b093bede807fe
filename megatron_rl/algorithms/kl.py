"""Estimates of KL(pi || pi_ref) from one sampled token each (Schulman 2020, "Approximating KL divergence").

Invariant: with straight-through, the value is the estimator's and the gradient is k2's, d grad log pi: on policy
its expectation is the gradient of the true KL, which neither k1's nor k3's is.

Shape letters: T packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.losses.terms import log_ratio


def kl_estimate(logp_T: Tensor, logp_ref_T: Tensor, estimator: str, straight_through: bool = False) -> Tensor:
    """Per token, d = log pi - log pi_ref, clamped to +-20.

    Args:
        estimator: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, abs = |d|.

    Example: pi = .5, pi_ref = .25, d = log 2: k1 .693, k2 .240, k3 .193, abs .693.
    """
    d_T = log_ratio(logp_T, logp_ref_T)
    k2_T = d_T.square() / 2
    match estimator:
        case "k1":
            value_T = d_T
        case "k2":
            value_T = k2_T
        case "k3":
            value_T = torch.expm1(-d_T) + d_T
        case "abs":
            value_T = d_T.abs()
        case _:
            raise ValueError(f"unknown KL estimator {estimator!r}; there are k1, k2, k3 and abs")
    return value_T.detach() + k2_T - k2_T.detach() if straight_through else value_T


def kl_in_reward(reward_T: Tensor, logp_T: Tensor, logp_ref_T: Tensor, estimator: str, coefficient: float) -> Tensor:
    """Token rewards less the penalty: r - coefficient * KL (Ziegler et al. 2019, arXiv:1909.08593). No gradient."""
    return reward_T - coefficient * kl_estimate(logp_T, logp_ref_T, estimator).detach()
