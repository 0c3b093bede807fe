"""Importance correction between the engine that sampled and the trainer that learns.

Invariants: weights carry no gradient and are 1 where both agree; a sample's or segment's ratio is a geometric mean,
so it does not collapse with length; what is masked leaves numerators only.

Shape letters: T packed tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.algorithms.columns import PackedColumns, mean_by, segments, sum_by
from megatron_rl.algorithms.losses.terms import log_ratio
from megatron_rl.algorithms.whitening import SumOverRanks
from megatron_rl.config.algorithm import ClippedCorrection, CorrectionConfig, TruncatedCorrection
from megatron_rl.types import Metrics


def shared_log_ratio(log_ratio_T: Tensor, level: str, mask_T: Tensor, sample_T: Tensor) -> Tensor:
    """The log-ratio that each token is weighed by: its own, or the mean over the actions of its segment or sample."""
    if level == "token":
        return log_ratio_T
    owner_T = sample_T if level == "sequence" else segments(mask_T, sample_T)
    return mean_by(owner_T, mask_T, log_ratio_T)


def bounded_weight(ratio_T: Tensor, cfg: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """The weight of each ratio by the config's mode, and where the mode changed it (bool)."""
    if isinstance(cfg, TruncatedCorrection):
        return ratio_T.clamp(max=cfg.cap), ratio_T > cfg.cap
    outside_T = (ratio_T < cfg.low) | (ratio_T > cfg.high)
    if isinstance(cfg, ClippedCorrection):
        return ratio_T.clamp(cfg.low, cfg.high), outside_T
    return torch.where(outside_T, 0.0, ratio_T), outside_T


def correction_weight(
    logp_old_T: Tensor, logp_rollout_T: Tensor, mask_T: Tensor, sample_T: Tensor, cfg: CorrectionConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Weight of each action token before normalisation.

    Args:
        logp_old_T, logp_rollout_T: finite where the mask is True.

    Returns:
        weight_T, detached, 0 where the mask is False; where the mode bounded it; where the veto removed its sample.
    """
    log_ratio_T = torch.where(mask_T, log_ratio(logp_old_T.detach(), logp_rollout_T), 0.0)
    shared_T = shared_log_ratio(log_ratio_T, cfg.level, mask_T, sample_T)
    weight_T, bounded_T = bounded_weight(shared_T.exp(), cfg)
    vetoed_T = torch.zeros_like(mask_T)
    if cfg.veto is not None:
        impossible_T = mask_T & (log_ratio_T.exp() < cfg.veto)
        vetoed_T = mask_T & (sum_by(sample_T, impossible_T.long()) > 0)
    return torch.where(mask_T & ~vetoed_T, weight_T, 0.0), mask_T & bounded_T, vetoed_T


def correct(
    columns: Sequence[PackedColumns], num_tokens: int, cfg: CorrectionConfig, sum_over_ranks: SumOverRanks
) -> tuple[list[Tensor], Metrics]:
    """Weights of a mini-batch: normalised over all its micro-batches on all ranks when the config says so.

    Args:
        num_tokens: the mini-batch's action tokens, on all ranks.

    Returns:
        correction_T of each micro-batch; correction/mean, /bounded, /masked (shares and means of the action
        tokens, before normalisation) and /ess, Kish's effective sample size (sum w)^2 / sum w^2 over num_tokens.
    """
    weights, totals = [], torch.zeros(4, dtype=torch.float64, device=columns[0].action_mask_T.device)
    for c in columns:
        weight_T, bounded_T, _ = correction_weight(c.logp_old_T, c.logp_rollout_T, c.action_mask_T, c.sample_T, cfg)
        masked_T = c.action_mask_T & (weight_T == 0)
        sums = (weight_T.double().sum(), weight_T.double().square().sum(), bounded_T.sum(), masked_T.sum())
        totals += torch.stack([x.double() for x in sums])
        weights.append(weight_T)
    total, squares, bounded, masked = sum_over_ranks(totals).tolist()
    if cfg.normalise and total > 0:
        weights = [weight_T * (num_tokens / total) for weight_T in weights]
    return weights, {
        "correction/mean": total / num_tokens,
        "correction/bounded": bounded / num_tokens,
        "correction/masked": masked / num_tokens,
        "correction/ess": total**2 / squares / num_tokens if squares else 0.0,
    }


def off_policy_mask(
    logp_T: Tensor, logp_rollout_T: Tensor, advantage_T: Tensor, mask_T: Tensor, sample_T: Tensor, bound: float
) -> Tensor:
    """True where a token stays: not in a sample with A < 0 whose mean log(pi_engine / pi) over its actions exceeds the
    bound (DeepSeek-AI 2025, DeepSeek-V3.2: off-policy sequence masking). Such an answer is one that today's policy
    would hardly give: pushing it down further teaches nothing and destabilises."""
    drift_T = mean_by(sample_T, mask_T, log_ratio(logp_rollout_T, logp_T.detach()))
    return ~((advantage_T < 0) & (drift_T > bound))
