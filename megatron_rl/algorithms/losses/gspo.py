"""Group sequence policy optimisation: a sample has one ratio, which is clipped as a whole.

Shape letters: T packed tokens.
"""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.losses.dual_clip import clip, clipped
from megatron_rl.algorithms.losses.terms import Terms, TokenLoss, bounded_exp
from megatron_rl.config.losses import GspoLoss


def gspo_loss(cfg: GspoLoss) -> TokenLoss:
    """GSPO-token (Zheng et al. 2025, arXiv:2507.18071). If all tokens of a sample have the same advantage, and the
    aggregation is seq-mean-token-mean, then value and gradient equal GSPO's. Tokens may also have different
    advantages."""
    bounds = {"low": cfg.clip_ratio_low, "high": cfg.clip_ratio_high}

    def loss(terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
        sequence_ratio_T = bounded_exp(terms.sample_mean(terms.log_ratio_T).detach())
        ratio_T = sequence_ratio_T * (terms.logp_T - terms.logp_T.detach()).exp()
        shares = {"pg_clipfrac": clipped(ratio_T, terms.advantage_T, **bounds)}
        return clip(ratio_T, terms.advantage_T, **bounds), shares

    return loss
