"""Divergence PPO: the trust region around the sampling policy bounds a divergence instead of the ratio.

A ratio of 3 that moves a probability from 0.001 to 0.003 hardly changes the distribution, but a ratio of 1.2 that moves
it from 0.5 to 0.6 does. Therefore the mask uses the divergence of the two binary distributions (this token, any other
token).

Shape letters: T packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.losses.terms import Terms, TokenLoss
from megatron_rl.config.losses import DppoKlLoss, DppoTvLoss


def total_variation(logp_T: Tensor, anchor_T: Tensor) -> Tensor:
    """The total variation |p - q| of two Bernoulli distributions with these log-probs."""
    return (logp_T.exp() - anchor_T.exp()).abs()


def binary_kl(logp_T: Tensor, anchor_T: Tensor) -> Tensor:
    """KL(q || p) of the Bernoulli distributions with log q = anchor and log p = logp."""
    # Near x = 0, log(1 - exp(x)) needs a floor, because fp32 has no probability between 1 - 6e-8 and 1.
    log_other_T, log_anchor_other_T = (torch.log1p(-x_T.exp().clamp(max=1 - 1e-7)) for x_T in (logp_T, anchor_T))
    q_T = anchor_T.exp()
    return q_T * (anchor_T - logp_T) + (1 - q_T) * (log_anchor_other_T - log_other_T)


def dppo_loss(cfg: DppoTvLoss | DppoKlLoss) -> TokenLoss:
    """DPPO with a binary divergence (Qi et al. 2026, arXiv:2602.04879). The anchor is the engine's policy."""
    divergence = total_variation if isinstance(cfg, DppoTvLoss) else binary_kl

    def loss(terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
        logp_T, ratio_T = terms.logp_T.detach(), terms.ratio_T.detach()
        distance_T = divergence(logp_T, terms.anchor_T)
        rising_T, falling_T = logp_T > terms.anchor_T, logp_T < terms.anchor_T
        outside_T = ((terms.advantage_T > 0) & rising_T & (distance_T > cfg.high)) | (
            (terms.advantage_T < 0) & falling_T & (distance_T > cfg.low)
        )
        weight_T = torch.where(outside_T, 0.0, ratio_T.clamp(max=cfg.c))
        shares = {"pg_clipfrac": outside_T, "pg_clipfrac_lower": ~outside_T & (ratio_T > cfg.c)}
        return -weight_T * terms.advantage_T * terms.logp_T, shares

    return loss
