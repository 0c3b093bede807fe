"""PPO's clipped loss, with or without an upper bound for negative advantages.

Invariant: for A > 0 a token's loss is never below -A (1 + high); for A < 0 it is never above c |A| if there is a c.

Shape letters: T packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.losses.terms import Terms, TokenLoss
from megatron_rl.config.losses import DualClipLoss


def dual_clip(ratio_T: Tensor, advantage_T: Tensor, *, low: float, high: float, c: float | None) -> Tensor:
    """Dual-clip PPO loss per token (Ye et al. 2020, arXiv:1912.09729, eq. 5).

    Args:
        ratio_T: pi / pi_old of each action token, positive.
        advantage_T: advantage of each action token.
        low, high: the ratio is clipped to [1 - low, 1 + high].
        c: for A < 0 the loss is at most c |A|. It must exceed 1 (3.0 is usual). None means plain PPO.

    Returns:
        loss_T, to be multiplied by the aggregation's weights and summed.

    Raises:
        ValueError: c <= 1.

    Example:
        For the ratio 5.0 and A = -1 the plain loss is 5.0, and c = 3 bounds it at 3.0.
    """
    clipped_T = clip(ratio_T, advantage_T, low=low, high=high)
    if c is None:
        return clipped_T
    if c <= 1:
        raise ValueError(f"dual clip needs c > 1, but c is {c}, which would bound the loss of an unchanged policy")
    return torch.where(advantage_T < 0, torch.minimum(clipped_T, -advantage_T * c), clipped_T)


def clip(ratio_T: Tensor, advantage_T: Tensor, *, low: float, high: float) -> Tensor:
    """PPO's clipped loss per token (Schulman et al. 2017, arXiv:1707.06347, eq. 7)."""
    return torch.maximum(-advantage_T * ratio_T, -advantage_T * ratio_T.clamp(1 - low, 1 + high))


def clipped(ratio_T: Tensor, advantage_T: Tensor, *, low: float, high: float) -> Tensor:
    """bool [T]: where the clip makes the loss constant."""
    return ((advantage_T > 0) & (ratio_T > 1 + high)) | ((advantage_T < 0) & (ratio_T < 1 - low))


def bounded(ratio_T: Tensor, advantage_T: Tensor, *, c: float | None) -> Tensor:
    """bool [T]: where the bound c makes the loss constant. It is never True where `clipped` is, nor if c is None."""
    if c is None:
        return torch.zeros_like(ratio_T, dtype=torch.bool)
    return (advantage_T < 0) & (ratio_T > c)


def dual_clip_loss(cfg: DualClipLoss) -> TokenLoss:
    """PPO's clipped loss with the bound c (Ye et al. 2020, arXiv:1912.09729), or without it (Schulman et al. 2017)."""
    low, high, c = cfg.clip_ratio_low, cfg.clip_ratio_high, cfg.clip_ratio_c

    def loss(terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
        ratio_T, advantage_T = terms.ratio_T, terms.advantage_T
        shares = {
            "pg_clipfrac": clipped(ratio_T, advantage_T, low=low, high=high),
            "pg_clipfrac_lower": bounded(ratio_T, advantage_T, c=c),
        }
        return dual_clip(ratio_T, advantage_T, low=low, high=high, c=c), shares

    return loss
