"""Decoupled PPO: the clip is around a proximal policy, which differs from the policy that sampled the tokens.

Shape letters: T packed tokens.
"""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.losses.dual_clip import bounded, clipped, dual_clip
from megatron_rl.algorithms.losses.terms import Terms, TokenLoss, bounded_exp
from megatron_rl.config.losses import DecoupledLoss


def interpolated_proximal(logp_T: Tensor, logp_rollout_T: Tensor, lag_T: Tensor) -> Tensor:
    """log p of the proximal policy, interpolated between the sampling policy mu, which is `lag` versions older than the
    step's start, and the current policy pi, which counts as one version newer:
    log mu + lag / (lag + 1) (log pi - log mu). It has no gradient.

    Example: log mu = -2, log pi = -1 and lag 3 give three quarters of the way, -1.25.
    """
    lag_T = lag_T.to(logp_T.dtype)
    return logp_rollout_T + lag_T / (lag_T + 1) * (logp_T.detach() - logp_rollout_T)


def decoupled_loss(cfg: DecoupledLoss) -> TokenLoss:
    """min(p / mu, cap) times the dual-clip loss of pi / p (Hilton et al. 2022, arXiv:2110.00641; for language models
    Fu et al. 2025, arXiv:2505.24298)."""
    low, high, c = cfg.clip_ratio_low, cfg.clip_ratio_high, cfg.clip_ratio_c

    def loss(terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
        proximal_T = terms.anchor_T
        if cfg.proximal == "interpolated":
            proximal_T = interpolated_proximal(terms.logp_T, terms.logp_rollout_T, terms.lag_T)
        ratio_T, advantage_T = bounded_exp(terms.logp_T - proximal_T), terms.advantage_T
        behaviour_T = bounded_exp(proximal_T - terms.logp_rollout_T)
        shares = {
            "pg_clipfrac": clipped(ratio_T, advantage_T, low=low, high=high),
            "pg_clipfrac_lower": bounded(ratio_T, advantage_T, c=c),
            "behaviour/mean": behaviour_T,
            "behaviour/capped": behaviour_T > cfg.cap,
        }
        return behaviour_T.clamp(max=cfg.cap) * dual_clip(ratio_T, advantage_T, low=low, high=high, c=c), shares

    return loss
