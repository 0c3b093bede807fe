"""PPO's clipped loss with a bound for negative advantages.

Invariant: a token's loss is never below -A (1 + high) for A > 0, and never above c |A| for A < 0.

Shape letters: T packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dual_clip(ratio_T: Tensor, advantage_T: Tensor, *, low: float, high: float, c: float) -> Tensor:
    """Dual-clip PPO loss per token (Ye et al. 2020, arXiv:1912.09729, eq. 5).

    Args:
        ratio_T: pi / pi_old of each action token, positive.
        advantage_T: advantage of each action token.
        low, high: the ratio is clipped to [1 - low, 1 + high].
        c: for A < 0 no token costs more than c |A|; must exceed 1 (3.0 is usual).

    Returns:
        loss_T, to be summed and divided by the step's global denominator.

    Raises:
        ValueError: c <= 1.

    Example:
        ratio 5.0, A = -1, c = 3: the plain loss is 5.0, the dual clip bounds it at 3.0.
    """
    if c <= 1:
        raise ValueError(f"dual clip needs c > 1, got {c}: it would bound the loss of an unchanged policy")
    plain_T = -advantage_T * ratio_T
    clipped_T = torch.maximum(plain_T, -advantage_T * ratio_T.clamp(1 - low, 1 + high))
    return torch.where(advantage_T < 0, torch.minimum(clipped_T, -advantage_T * c), clipped_T)


def clipped_shares(ratio_T: Tensor, advantage_T: Tensor, *, low: float, high: float, c: float) -> tuple[Tensor, Tensor]:
    """Where the loss is flat, as bool [T] twice: by the clip of PPO, and by the bound c of dual clip.
    A token counts in one of them at most."""
    bounded_T = (advantage_T < 0) & (ratio_T > c)
    too_high_T = (advantage_T > 0) & (ratio_T > 1 + high)
    too_low_T = (advantage_T < 0) & (ratio_T < 1 - low)
    return too_high_T | too_low_T, bounded_T
