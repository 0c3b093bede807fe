"""Variational sequence-level soft policy optimisation: a smooth weight of a sample's whole importance ratio.

Shape letters: T packed tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_rl.algorithms.losses.terms import Terms, TokenLoss, bounded_exp
from megatron_rl.config.losses import VespoLoss


def vespo_loss(cfg: VespoLoss) -> TokenLoss:
    """VESPO (Shen et al. 2026, arXiv:2602.10693): -sg(phi(w)) A log pi with phi(w) = e^lam w^k e^(-lam w).

    phi(1) = 1, and phi is largest at w = k / lam. With the defaults a sample with A > 0 and w = 2 has the weight
    2^2 e^-3 = 0.20, and one with A < 0 and w = 2 the weight 2^3 e^-2 = 1.08.
    """

    def loss(terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio_T = terms.log_ratio_T.detach()
        if cfg.cap is not None:
            log_ratio_T = log_ratio_T + (terms.anchor_T - terms.logp_rollout_T).clamp(max=math.log(cfg.cap))
        log_w_T = terms.sample_sum(log_ratio_T)
        rises_T = terms.advantage_T >= 0
        k_T = torch.where(rises_T, cfg.k_pos, cfg.k_neg)
        lam_T = torch.where(rises_T, cfg.lambda_pos, cfg.lambda_neg)
        weight_T = (lam_T + k_T * log_w_T - lam_T * bounded_exp(log_w_T)).exp()
        return -weight_T * terms.advantage_T * terms.logp_T, {"vespo/weight": weight_T}

    return loss
