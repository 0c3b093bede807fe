"""Importance correction between the engine that sampled and the trainer that learns.

Invariant: weights lie in (0, cap], carry no gradient, and are 1 where both agree.

Shape letters: T packed tokens.
"""

from __future__ import annotations

from torch import Tensor


def truncated_weight(logp_old_T: Tensor, logp_rollout_T: Tensor, cap: float) -> Tensor:
    """Token-level truncated importance sampling: min(pi_old / pi_rollout, cap) (Ionides 2008).

    It scales a token's loss, never the denominator. An exponential that overflows is the cap too.

    Returns:
        weight_T, detached.
    """
    return (logp_old_T - logp_rollout_T).detach().exp().clamp(max=cap)
