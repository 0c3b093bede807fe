"""Optimal advantage regression: a sample's log-ratio to the reference policy is fitted to its advantage.

Shape letters: T packed tokens.
"""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.losses.terms import Terms, TokenLoss
from megatron_rl.config.losses import A2poLoss


def a2po_loss(cfg: A2poLoss) -> TokenLoss:
    """A*-PO (Brantley et al. 2025, arXiv:2505.20686): (beta L - A)^2 at each token of a sample, where L is the sum of
    its log-ratios, so that their mean over the sample is the paper's loss."""

    def loss(terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
        assert terms.logp_ref_T is not None, "`needs_reference` asks for it"
        fitted_T = cfg.beta * terms.sample_sum(terms.logp_T - terms.logp_ref_T)
        return (fitted_T - terms.advantage_T).square(), {}

    return loss
