"""Soft adaptive policy optimisation: a smooth gate takes the place of the clip.

Shape letters: T packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.losses.terms import Terms, TokenLoss
from megatron_rl.config.losses import SapoLoss


def sapo_loss(cfg: SapoLoss) -> TokenLoss:
    """SAPO (Gao et al. 2025, arXiv:2511.20347): the gate (4 / tau) sigmoid(tau (r - 1)) has slope 1 at r = 1 and
    becomes flat on both sides. With a larger tau, as for A < 0, it becomes flat closer to r = 1."""

    def loss(terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
        tau_T = torch.where(terms.advantage_T > 0, torch.full_like(terms.advantage_T, cfg.tau_pos), cfg.tau_neg)
        gate_T = 4 / tau_T * torch.sigmoid(tau_T * (terms.ratio_T - 1))
        return -terms.advantage_T * gate_T, {}

    return loss
