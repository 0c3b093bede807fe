"""Importance correction between the engine, which sampled the tokens, and the trainer: weights and rejection.

w = pi_old / pi_engine of a token, or p / pi_engine with `algorithm.anchor: interpolated`. Invariants: weights have no
gradient, and are 1 where both policies agree; the weight of a sample or segment comes from the geometric mean of w,
which does not shrink or grow with the length; rejected tokens leave only the numerators. A sample is whole in one
micro-batch, so all of this is computed there. Only the mean of the weights over the mini-batch (`normalise`) needs all
its micro-batches.

Shape letters: T packed tokens of one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.algorithms.columns import PackedColumns, max_by, mean_by, segments, sum_by
from megatron_rl.algorithms.losses.dppo import binary_kl
from megatron_rl.algorithms.losses.terms import Terms, bounded_exp
from megatron_rl.algorithms.whitening import SumOverRanks
from megatron_rl.config.correction import ClippedWeight, Rejection, TruncatedWeight, WeightConfig


def interpolated(logp_T: Tensor, logp_rollout_T: Tensor, lag_T: Tensor) -> Tensor:
    """log p of the policy between the sampling policy mu, which is `lag` versions older than the step's start, and the
    current policy pi, which counts as one version newer: log mu + lag / (lag + 1) (log pi - log mu). It has no
    gradient.

    Example: log mu = -2, log pi = -1 and lag 3 give three quarters of the way, -1.25.
    """
    lag_T = lag_T.to(logp_T.dtype)
    return logp_rollout_T + lag_T / (lag_T + 1) * (logp_T.detach() - logp_rollout_T)


def importance_weight(log_w_T: Tensor, mask_T: Tensor, sample_T: Tensor, cfg: WeightConfig) -> tuple[Tensor, Tensor]:
    """The weight of each action token before normalisation.

    Args:
        log_w_T: log pi_old - log pi_engine, finite where the mask is True.

    Returns:
        weight_T: detached, 0 where the mask is False.
        bounded_T: bool, the action tokens whose weights were changed by the bounds.
    """
    log_w_T = log_w_T.detach()
    if cfg.level != "token":
        log_w_T = mean_by(_owner(cfg.level, mask_T, sample_T), mask_T, log_w_T)
    ratio_T = bounded_exp(log_w_T)
    if isinstance(cfg, TruncatedWeight):
        weight_T, bounded_T = ratio_T.clamp(max=cfg.cap), ratio_T > cfg.cap
    else:
        bounded_T = (ratio_T < cfg.low) | (ratio_T > cfg.high)
        clips = isinstance(cfg, ClippedWeight)
        weight_T = ratio_T.clamp(cfg.low, cfg.high) if clips else torch.where(bounded_T, 0.0, ratio_T)
    return torch.where(mask_T, weight_T, 0.0), mask_T & bounded_T


def mean_weight(
    columns: Sequence[PackedColumns], num_tokens: int, cfg: WeightConfig, sum_over_ranks: SumOverRanks
) -> float:
    """The mean weight of a mini-batch's action tokens before any rejection; 1 if all weights are 0.

    Args:
        columns: the micro-batches of this rank.
        num_tokens: the number of action tokens on all ranks.
    """
    total = torch.zeros((), dtype=torch.float64, device=columns[0].action_mask_T.device)
    for c in columns:
        assert c.logp_old_T is not None  # `Needs.statistics` asks for it
        log_w_T = torch.where(c.action_mask_T, c.logp_old_T - c.logp_rollout_T, 0.0)
        weight_T, _ = importance_weight(log_w_T, c.action_mask_T, c.sample_T, cfg)
        total += weight_T.double().sum()
    return float(sum_over_ranks(total)) / max(num_tokens, 1) or 1.0


def rejected(terms: Terms, rule: Rejection) -> Tensor:
    """bool [T]: the action tokens that a rule removes from the policy loss. `terms.anchor_T` is log pi_old or log p."""
    logp_T = terms.anchor_T if rule.policy == "old" else terms.logp_T.detach()
    exceeds_T = torch.zeros_like(terms.mask_T)
    for statistic_T, bound in _bounded_statistics(rule, logp_T, terms.logp_rollout_T):
        exceeds_T |= _over(rule, statistic_T, terms.mask_T, terms.sample_T) > bound
    if rule.only_negative:
        exceeds_T &= terms.advantage_T < 0
    return terms.mask_T & exceeds_T


def _bounded_statistics(rule: Rejection, logp_T: Tensor, logp_rollout_T: Tensor) -> list[tuple[Tensor, float]]:
    """Pairs of a statistic of each token and the largest value of it that is kept. k1 has a pair for each bound."""
    log_w_T = logp_T - logp_rollout_T
    match rule.statistic:
        case "k1":
            below = [] if rule.low is None else [(-log_w_T, -math.log(rule.low))]
            above = [] if rule.high is None else [(log_w_T, math.log(rule.high))]
            return below + above
        case "k2":
            statistic_T = log_w_T.square() / 2
        case "k3":
            statistic_T = bounded_exp(log_w_T) - 1 - log_w_T
        case "binary_kl":
            statistic_T = torch.maximum(binary_kl(logp_T, logp_rollout_T), binary_kl(logp_rollout_T, logp_T))
    assert rule.high is not None  # `Rejection` gives only k1 the choice of a bound
    return [(statistic_T, rule.high)]


def _over(rule: Rejection, statistic_T: Tensor, mask_T: Tensor, sample_T: Tensor) -> Tensor:
    """The statistic of each token's unit: the token itself, its segment or its sample."""
    if rule.level == "token":
        return statistic_T
    owner_T = _owner(rule.level, mask_T, sample_T)
    assert rule.over is not None  # `Rejection` demands it for every level but the token
    match rule.over:
        case "sum":
            return sum_by(owner_T, torch.where(mask_T, statistic_T, 0.0))
        case "mean":
            return mean_by(owner_T, mask_T, statistic_T)
        case "max":
            return max_by(owner_T, mask_T, statistic_T)


def _owner(level: str, mask_T: Tensor, sample_T: Tensor) -> Tensor:
    """int64 [T]: the index of each token's sample or segment."""
    return sample_T if level == "sequence" else segments(mask_T, sample_T)
