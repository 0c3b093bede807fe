"""REINFORCE: the policy gradient without a ratio.

Shape letters: T packed tokens.
"""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.losses.terms import Terms, TokenLoss
from megatron_rl.config.losses import GpgLoss, ReinforceLoss


def reinforce_loss(cfg: ReinforceLoss | GpgLoss) -> TokenLoss:
    """-A log pi (Williams 1992). GPG (Chu et al. 2025, arXiv:2504.02546) has the same loss, and its own advantages."""

    def loss(terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
        return -terms.advantage_T * terms.logp_T, {}

    return loss
