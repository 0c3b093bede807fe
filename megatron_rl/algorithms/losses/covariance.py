"""Clip-Cov and KL-Cov, which limit the update of the few tokens that make the entropy collapse.

These are tokens whose log-prob and advantage are both far above their means over the whole mini-batch.
`choose_clip_cov` and `choose_kl_cov` choose them from all micro-batches of all ranks before the update, with log-probs
from a first pass. The losses only read the choice. Invariant: the choice does not depend on how the samples are packed
or split.

Shape letters: T packed tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.algorithms.columns import PackedColumns
from megatron_rl.algorithms.losses.dual_clip import clip, clipped
from megatron_rl.algorithms.losses.terms import Terms, TokenLoss, bounded_exp
from megatron_rl.algorithms.selection import choose_largest, choose_random
from megatron_rl.algorithms.whitening import SumOverRanks
from megatron_rl.config.losses import ClipCovLoss, KlCovLoss


def covariances(
    columns: Sequence[PackedColumns], logps: Sequence[Tensor], num_tokens: int, sum_over_ranks: SumOverRanks
) -> list[Tensor]:
    """(log pi - mean)(A - mean) of every token, with means over the mini-batch's action tokens."""
    pairs = [torch.stack((logp_T, c.advantage_T)) for c, logp_T in zip(columns, logps, strict=True)]
    totals = sum(
        (torch.where(c.action_mask_T, pair, 0.0).double().sum(1) for c, pair in zip(columns, pairs, strict=True)),
        torch.zeros(2, dtype=torch.float64, device=pairs[0].device),
    )
    mean_2 = sum_over_ranks(totals) / num_tokens
    return [(pair.double() - mean_2[:, None]).prod(0) for pair in pairs]


def choose_clip_cov(
    cfg: ClipCovLoss,
    columns: Sequence[PackedColumns],
    logps: Sequence[Tensor],
    num_tokens: int,
    sum_over_ranks: SumOverRanks,
) -> list[Tensor]:
    """The chosen tokens: `share` of all tokens, drawn at random from those between the bounds whose loss is not
    constant because of PPO's clip."""
    candidates = []
    for c, logp_T, cov_T in zip(columns, logps, covariances(columns, logps, num_tokens, sum_over_ranks), strict=True):
        assert c.logp_old_T is not None  # `Needs.statistics` asks for it
        ratio_T = bounded_exp(logp_T - c.logp_old_T)
        flat_T = clipped(ratio_T, c.advantage_T, low=cfg.clip_ratio_low, high=cfg.clip_ratio_high)
        candidates.append(c.action_mask_T & ~flat_T & (cov_T > cfg.cov_low) & (cov_T < cfg.cov_high))
    count = max(1, int(cfg.share * num_tokens))
    return choose_random([c.token_T for c in columns], candidates, count, sum_over_ranks)


def choose_kl_cov(
    cfg: KlCovLoss,
    columns: Sequence[PackedColumns],
    logps: Sequence[Tensor],
    num_tokens: int,
    sum_over_ranks: SumOverRanks,
) -> list[Tensor]:
    """The `share` of the tokens with the largest covariance."""
    values = covariances(columns, logps, num_tokens, sum_over_ranks)
    count = max(1, int(cfg.share * num_tokens))
    return choose_largest(values, [c.action_mask_T for c in columns], count, sum_over_ranks)


def clip_cov_loss(cfg: ClipCovLoss) -> TokenLoss:
    """Clip-Cov (Cui et al. 2025, arXiv:2505.22617): PPO's clipped loss, which is 0 for the chosen tokens."""
    bounds = {"low": cfg.clip_ratio_low, "high": cfg.clip_ratio_high}

    def loss(terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
        assert terms.selected_T is not None  # `choose_clip_cov` made it in `prepare`
        ratio_T, advantage_T = terms.ratio_T, terms.advantage_T
        shares = {"pg_clipfrac": clipped(ratio_T, advantage_T, **bounds), "cov/chosen": terms.selected_T}
        return torch.where(terms.selected_T, 0.0, clip(ratio_T, advantage_T, **bounds)), shares

    return loss


def kl_cov_loss(cfg: KlCovLoss) -> TokenLoss:
    """KL-Cov (Cui et al. 2025, arXiv:2505.22617): -A r, plus coef |log r| for the chosen tokens."""

    def loss(terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
        assert terms.selected_T is not None  # `choose_kl_cov` made it in `prepare`
        penalty_T = torch.where(terms.selected_T, cfg.coef * terms.log_ratio_T.abs(), 0.0)
        return -terms.advantage_T * terms.ratio_T + penalty_T, {"cov/chosen": terms.selected_T}

    return loss
