"""Direct reward optimisation: a quadratic pull to pi_old takes the place of the clip.

Shape letters: T packed tokens.
"""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.losses.terms import Terms, TokenLoss
from megatron_rl.config.losses import DroLoss


def dro_loss(cfg: DroLoss) -> TokenLoss:
    """DRO (Richemond et al. 2024, arXiv:2405.19107) for single tokens: -(A log pi - beta (log r)^2 / 2). Its slope in
    log pi is beta log r - A, so with A = 0.5 and beta = 0.05 a token is pushed until r = e^10."""

    def loss(terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
        pull_T = 0.5 * cfg.beta * terms.log_ratio_T.square()
        return pull_T - terms.advantage_T * terms.logp_T, {}

    return loss
