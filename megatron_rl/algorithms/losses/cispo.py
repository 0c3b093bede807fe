"""CISPO: importance weights are clipped, and every token keeps its gradient.

Shape letters: T packed tokens.
"""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.losses.terms import Terms, TokenLoss
from megatron_rl.config.losses import CispoLoss


def cispo_loss(cfg: CispoLoss) -> TokenLoss:
    """CISPO (MiniMax 2025, arXiv:2506.13585): -sg(clip(r, 1 - low, 1 + high)) A log pi."""

    def loss(terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
        ratio_T = terms.ratio_T.detach()
        weight_T = ratio_T.clamp(1 - cfg.clip_ratio_low, 1 + cfg.clip_ratio_high)
        return -weight_T * terms.advantage_T * terms.logp_T, {"pg_clipfrac": weight_T != ratio_T}

    return loss
