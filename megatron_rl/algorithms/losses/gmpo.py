"""Geometric-mean policy optimisation: a sample's ratio is the geometric mean of its clipped token ratios.

Shape letters: T packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.losses.terms import Terms, TokenLoss, bounded_exp
from megatron_rl.config.losses import GmpoLoss


def gmpo_loss(cfg: GmpoLoss) -> TokenLoss:
    """GMPO (Zhao et al. 2025, arXiv:2507.20673). The clip acts on log-ratios and takes the smaller gain, as in PPO.
    Each token has the loss of its sample, so the aggregation seq-mean-token-mean gives the loss of the paper."""

    def loss(terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio_T, advantage_T = terms.log_ratio_T, terms.advantage_T
        bounded_T = log_ratio_T.clamp(-cfg.clip_ratio_low, cfg.clip_ratio_high)
        pessimistic_T = torch.where(
            advantage_T > 0, torch.minimum(log_ratio_T, bounded_T), torch.maximum(log_ratio_T, bounded_T)
        )
        ratio_T = bounded_exp(terms.sample_mean(pessimistic_T))
        return -advantage_T * ratio_T, {"pg_clipfrac": pessimistic_T != log_ratio_T}

    return loss
