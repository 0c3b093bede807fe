"""Estimates of KL(pi || pi_ref) at each sampled token (Schulman 2020, "Approximating KL divergence").

Invariants: with straight-through, the value is the estimator's, and the gradient is k2's, d grad log pi. On policy the
expectation of this gradient is the gradient of the true KL, which is not so for k1 and k3. Only the exponential of k3
is bounded, so k1, k2 and abs have a gradient at every distance.

Shape letters: T packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.losses.terms import MAX_LOG_RATIO


def kl_estimate(
    logp_T: Tensor, logp_ref_T: Tensor, estimator: str, straight_through: bool = False, cap: float | None = None
) -> Tensor:
    """The estimate at each token, [T], with d = log pi - log pi_ref.

    Args:
        estimator: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, abs = |d|.
        straight_through: the gradient is d, as for k2, even where the value of k3 is bounded.
        cap: the largest value of k3; a token above it has the gradient 0. None means no cap. Even then k3 is constant
            below d = -20, with the gradient 0, because its exponential must be finite in fp32.

    Example: pi = .5 and pi_ref = .25 give d = log 2, and k1 .693, k2 .240, k3 .193, abs .693.
    """
    d_T = logp_T - logp_ref_T
    k2_T = d_T.square() / 2
    match estimator:
        case "k1":
            value_T = d_T
        case "k2":
            value_T = k2_T
        case "k3":
            bounded_T = d_T.clamp(min=-MAX_LOG_RATIO)
            value_T = torch.expm1(-bounded_T) + bounded_T
            value_T = value_T if cap is None else value_T.clamp(max=cap)
        case "abs":
            value_T = d_T.abs()
        case _:
            raise ValueError(f"unknown KL estimator {estimator!r}; there are k1, k2, k3 and abs")
    return value_T.detach() + k2_T - k2_T.detach() if straight_through else value_T
