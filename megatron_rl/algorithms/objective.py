"""From log-probs to the loss of one micro-batch, already divided by its step's global denominators.

Invariants: the sum over micro-batches and data-parallel ranks is the step's loss, so its gradient does not
depend on how the samples were split or packed. What stands at a token that is no action, NaN included,
reaches neither loss nor gradient. Where pi equals pi_old the ratio is exactly 1 and ppo_kl exactly 0.

Shape letters: T packed tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_rl.algorithms.correction import truncated_weight
from megatron_rl.algorithms.dual_clip import clipped_shares, dual_clip
from megatron_rl.config.algorithm import AlgorithmConfig, DualClipLoss
from megatron_rl.types import Denominators

MAX_LOG_RATIO = 20.0
"""log(pi / pi_old) is clamped to +-20: exp(20) = 5e8 is finite in fp32 and far outside every clip range, so
the clamp changes no gradient that the clip would not have removed, save those below 2e-9 |A|."""


@dataclass(frozen=True, slots=True)
class PackedColumns:
    """What is known of each token of a packed row, all [T] and aligned to the predicted token: entry t
    belongs to the token that position t predicts, the next one of the same sample."""

    action_mask_T: Tensor
    """bool: the predicted token was sampled by the policy. False at a sample's last position and in
    padding."""
    advantage_T: Tensor
    logp_old_T: Tensor
    logp_rollout_T: Tensor
    sample_T: Tensor
    """int64: index of the sample in the micro-batch."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of one micro-batch, and how those of all micro-batches and data-parallel ranks become one. A
    `sum` is already divided by its denominator: the plain sum is final. An empty micro-batch gives the
    reduction's identity."""

    value: Tensor
    """0-dim, detached."""
    reduction: Literal["sum", "max", "min"]


Objective = Callable[[Tensor, PackedColumns, Denominators], tuple[Tensor, dict[str, Metric]]]
"""(logp_T, columns, denominators) -> (loss, metrics); the loss is this micro-batch's share of the step's."""

TokenLoss = Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(ratio_T, advantage_T) -> (loss_T, indicators [T] whose share of the action tokens is a metric)."""


def _dual_clip(cfg: DualClipLoss) -> TokenLoss:
    bounds = {"low": cfg.clip_ratio_low, "high": cfg.clip_ratio_high, "c": cfg.clip_ratio_c}

    def token_loss(ratio_T: Tensor, advantage_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        clipped_T, bounded_T = clipped_shares(ratio_T, advantage_T, **bounds)
        shares = {"pg_clipfrac": clipped_T, "pg_clipfrac_lower": bounded_T}
        return dual_clip(ratio_T, advantage_T, **bounds), shares

    return token_loss


LOSSES: dict[type, Callable[[DualClipLoss], TokenLoss]] = {DualClipLoss: _dual_clip}
"""One line a loss, keyed by its config class."""


def policy_objective(cfg: AlgorithmConfig) -> Objective:
    """The policy loss, aggregated as `token-mean`: the sum over action tokens over `num_tokens`.

    Metrics, over action tokens:
        loss.
        pg_clipfrac, pg_clipfrac_lower: shares that PPO's clip and the bound c flatten.
        ppo_kl: KL(pi_old || pi), estimated by k3 = r - 1 - log r, which no cancellation brings to 0
            (Schulman 2020, "Approximating KL divergence").
        ratio/mean, ratio/max, ratio/min: pi / pi_old, within exp(+-20).
        correction/mean, correction/capped: the importance weight, and the share of tokens at its cap.

    The objective raises ValueError when a log-prob of an action token is not finite; it names the sample.
    """
    token_loss = LOSSES[type(cfg.loss)](cfg.loss)

    def objective(
        logp_T: Tensor, columns: PackedColumns, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]:
        mask_T = columns.action_mask_T
        _require_finite(columns, logp=logp_T, logp_old=columns.logp_old_T, logp_rollout=columns.logp_rollout_T)
        # Chosen before any arithmetic: a mask multiplied in later turns inf at a padded token into NaN.
        logp_T, logp_old_T, logp_rollout_T, advantage_T = (
            torch.where(mask_T, x_T, 0.0)
            for x_T in (logp_T, columns.logp_old_T, columns.logp_rollout_T, columns.advantage_T)
        )
        log_ratio_T = (logp_T - logp_old_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio_T = log_ratio_T.exp()
        loss_T, shares = token_loss(ratio_T, advantage_T)
        shares["ppo_kl"] = torch.expm1(log_ratio_T) - log_ratio_T
        shares["ratio/mean"] = ratio_T
        if cfg.correction:
            weight_T = truncated_weight(logp_old_T, logp_rollout_T, cfg.correction.cap)
            loss_T = loss_T * weight_T
            shares["correction/mean"] = weight_T
            shares["correction/capped"] = weight_T >= cfg.correction.cap

        def token_mean(x_T: Tensor) -> Tensor:
            return torch.where(mask_T, x_T.to(loss_T.dtype), 0.0).sum() / denominators.num_tokens

        loss = token_mean(loss_T)
        metrics = {name: Metric(token_mean(x_T.detach()), "sum") for name, x_T in shares.items()}
        metrics["loss"] = Metric(loss.detach(), "sum")
        metrics["ratio/max"] = Metric(_largest(ratio_T.detach(), mask_T), "max")
        metrics["ratio/min"] = Metric(-_largest(-ratio_T.detach(), mask_T), "min")
        return loss, metrics

    return objective


def supervised_objective() -> Objective:
    """Negative log-likelihood of the action tokens (a row's completion) over `num_tokens`. Metric: loss."""

    def objective(
        logp_T: Tensor, columns: PackedColumns, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]:
        _require_finite(columns, logp=logp_T)
        loss = -torch.where(columns.action_mask_T, logp_T, 0.0).sum() / denominators.num_tokens
        return loss, {"loss": Metric(loss.detach(), "sum")}

    return objective


def _largest(x_T: Tensor, mask_T: Tensor) -> Tensor:
    """Largest entry under the mask; -inf where there is none."""
    masked_T = torch.where(mask_T, x_T, -torch.inf)
    return masked_T.max() if masked_T.numel() else x_T.new_tensor(-torch.inf)


def _require_finite(columns: PackedColumns, **logps: Tensor) -> None:
    # One test of all columns together: on a GPU each costs a synchronisation.
    bad_T = columns.action_mask_T & ~torch.stack([x_T.detach().isfinite() for x_T in logps.values()]).all(0)
    if not bad_T.any():
        return
    position = int(bad_T.nonzero()[0])
    values = ", ".join(f"{name} {float(x_T[position])}" for name, x_T in logps.items())
    raise ValueError(
        f"sample {int(columns.sample_T[position])} of the micro-batch has a log-prob that is not finite at "
        f"packed position {position} ({values}); {int(bad_T.sum())} action tokens are affected: the weights "
        f"or the engine's answer are broken, so the step is refused"
    )
