"""From log-probs to the loss of one micro-batch: its share of the step's loss.

An optimizer step has two passes. `prepare` sees all micro-batches of the mini-batch at once, adds up over the ranks
what a single micro-batch cannot know (importance weights' mean, covariances, quantiles) and writes it into columns.
The objective itself is then a plain sum over tokens. Invariants: the sum over micro-batches and data-parallel ranks
is the step's loss, so neither loss, gradient nor metric depends on how the samples were split or packed; what stands
at a token that is no action, NaN included, reaches neither; where pi equals pi_old the ratio is exactly 1 and ppo_kl
exactly 0.

Shape letters: T packed tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from megatron_rl.algorithms.columns import PackedColumns
from megatron_rl.algorithms.correction import correct, off_policy_mask
from megatron_rl.algorithms.kl import kl_estimate
from megatron_rl.algorithms.losses import LOSSES
from megatron_rl.algorithms.losses.covariance import choose_clip_cov, choose_kl_cov
from megatron_rl.algorithms.losses.terms import Terms, log_ratio
from megatron_rl.algorithms.selection import choose_largest
from megatron_rl.algorithms.whitening import SumOverRanks
from megatron_rl.config.algorithm import AlgorithmConfig, ClipCovLoss, DecoupledLoss, DppoKlLoss, DppoTvLoss, KlCovLoss
from megatron_rl.types import Denominators, Metrics

LOWEST_LOGP = -100.0
"""An engine's log-prob of -inf for a token that it sampled is taken as this: e^-100 is no probability that fp32 could
sample, and its ratio lies beyond every bound."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of one micro-batch, and how those of all micro-batches and data-parallel ranks become one. A
    `sum` is already divided by its denominator: the plain sum is final. An empty micro-batch gives the
    reduction's identity."""

    value: Tensor
    """0-dim, detached."""
    reduction: Literal["sum", "max", "min"]


@dataclass(frozen=True, slots=True)
class Needs:
    """What an objective must be given."""

    logp_old: bool = False
    """`columns.logp_old_T`: a forward pass at the step's start."""
    logp_ref: bool = False
    """`columns.logp_ref_T`: a forward pass of the reference policy."""
    entropy: bool = False
    first_pass: bool = False
    """`prepare` wants log-probs and entropies under the weights that the update begins with."""


@dataclass(frozen=True, slots=True)
class FirstPass:
    """Under the weights that an update begins with; no gradient."""

    logp_T: Tensor
    entropy_T: Tensor


class Objective(Protocol):
    needs: Needs

    def prepare(
        self,
        columns: Sequence[PackedColumns],
        first_pass: Sequence[FirstPass] | None,
        denominators: Denominators,
        sum_over_ranks: SumOverRanks,
    ) -> tuple[list[PackedColumns], Metrics]:
        """A collective over the data-parallel ranks, before the update: the columns of this rank's micro-batches of
        one mini-batch, completed, and metrics of the whole mini-batch (the same on every rank)."""

    def __call__(
        self,
        logp_T: Tensor,
        entropy_T: Tensor | None,
        columns: PackedColumns,
        denominators: Denominators,
        coefficients: Mapping[str, float],
    ) -> tuple[Tensor, dict[str, Metric]]:
        """This micro-batch's share of the step's loss, and its metrics.

        Raises:
            ValueError: a log-prob of an action token is not finite; names the sample.
        """


class PolicyObjective:
    """Policy loss, KL to the reference and entropy bonus, each token's sum times its aggregation weight.

    Metrics, over action tokens:
        loss; pg_loss, its policy part, without KL and entropy.
        pg_clipfrac, pg_clipfrac_lower: shares whose loss is flat, by the clip and by the bound c.
        ppo_kl: KL(anchor || pi), estimated by k3 = r - 1 - log r, which no cancellation brings to 0.
        ratio/mean, ratio/max, ratio/min: pi over the anchor, within exp(+-20). The anchor is pi_old, or the engine's
            policy where the loss needs no pi_old.
        entropy; kl: to the reference.
        correction/...: see correction.py. masked: share of the tokens without a policy loss, for whatever reason.
        mismatch/mean_abs, mismatch/max_abs: of |log pi - log pi_engine|, where no pi_old was computed.
    """

    def __init__(self, cfg: AlgorithmConfig) -> None:
        self.cfg = cfg
        self._token_loss = LOSSES[type(cfg.loss)](cfg.loss)
        self._around_engine = isinstance(cfg.loss, DppoTvLoss | DppoKlLoss) or (
            isinstance(cfg.loss, DecoupledLoss) and cfg.loss.proximal == "interpolated"
        )
        self.needs = Needs(
            logp_old=not self._around_engine,
            logp_ref=cfg.kl is not None,
            entropy=True,
            first_pass=isinstance(cfg.loss, ClipCovLoss | KlCovLoss) or cfg.top_entropy_share < 1,
        )

    def prepare(
        self,
        columns: Sequence[PackedColumns],
        first_pass: Sequence[FirstPass] | None,
        denominators: Denominators,
        sum_over_ranks: SumOverRanks,
    ) -> tuple[list[PackedColumns], Metrics]:
        cfg, num_tokens, metrics = self.cfg, denominators.num_tokens, {}
        columns = [replace(c, logp_rollout_T=_floored(c.logp_rollout_T)) for c in columns]
        if cfg.correction:
            weights, metrics = correct(columns, num_tokens, cfg.correction, sum_over_ranks)
            columns = [replace(c, correction_T=weight_T) for c, weight_T in zip(columns, weights, strict=True)]
        if isinstance(cfg.loss, ClipCovLoss | KlCovLoss):
            choose = choose_clip_cov if isinstance(cfg.loss, ClipCovLoss) else choose_kl_cov
            logps = [p.logp_T for p in first_pass]
            chosen = choose(cfg.loss, columns, logps, num_tokens, sum_over_ranks)
            columns = [replace(c, selected_T=chosen_T) for c, chosen_T in zip(columns, chosen, strict=True)]
        if cfg.top_entropy_share < 1:
            count = max(1, int(cfg.top_entropy_share * num_tokens))
            masks, entropies = [c.action_mask_T for c in columns], [p.entropy_T for p in first_pass]
            chosen = choose_largest(entropies, masks, count, sum_over_ranks)
            columns = [replace(c, high_entropy_T=chosen_T) for c, chosen_T in zip(columns, chosen, strict=True)]
        return columns, metrics

    def __call__(
        self,
        logp_T: Tensor,
        entropy_T: Tensor | None,
        columns: PackedColumns,
        denominators: Denominators,
        coefficients: Mapping[str, float],
    ) -> tuple[Tensor, dict[str, Metric]]:
        cfg, mask_T = self.cfg, columns.action_mask_T
        anchor_T = columns.logp_rollout_T if self._around_engine else columns.logp_old_T
        given = {"logp": logp_T, "logp_rollout": columns.logp_rollout_T, "advantage": columns.advantage_T}
        given |= {} if self._around_engine else {"logp_old": anchor_T}
        given |= {"logp_ref": columns.logp_ref_T} if cfg.kl else {}
        require_finite(columns, given)

        def actions(x_T: Tensor) -> Tensor:
            """Chosen before any arithmetic: a mask multiplied in later turns inf at a padded token into NaN."""
            return torch.where(mask_T, x_T, 0.0)

        terms = Terms(
            mask_T=mask_T,
            sample_T=columns.sample_T,
            advantage_T=actions(columns.advantage_T),
            logp_T=actions(logp_T),
            anchor_T=actions(anchor_T),
            logp_rollout_T=actions(columns.logp_rollout_T),
            lag_T=columns.lag_T,
            selected_T=columns.selected_T,
        )
        loss_T, shares = self._token_loss(terms)
        kept_T, correction_T = self._kept(terms, columns)
        policy_T = torch.where(kept_T, loss_T * correction_T, 0.0)
        total_T = policy_T
        shares["masked"] = ~kept_T
        if cfg.kl:
            kl_T = kl_estimate(terms.logp_T, actions(columns.logp_ref_T), cfg.kl.estimator, cfg.kl.straight_through)
            total_T = total_T + coefficients["kl"] * kl_T
            shares["kl"] = kl_T
        if entropy_T is not None:
            shares["entropy"] = actions(entropy_T)
        if cfg.entropy:
            total_T = total_T - coefficients["entropy"] * actions(entropy_T)

        weight_T = torch.where(mask_T, columns.weight_T, 0.0)
        loss, policy_loss = (weight_T * total_T).sum(), (weight_T * policy_T.detach()).sum()
        metrics = {
            "loss": Metric(loss.detach(), "sum"),
            "pg_loss": Metric(policy_loss, "sum"),
            **self._describe(terms, shares, denominators.num_tokens),
        }
        return loss, metrics

    def _kept(self, terms: Terms, columns: PackedColumns) -> tuple[Tensor, Tensor]:
        """Where the policy has a loss, and the importance weight (1 without correction)."""
        kept_T, correction_T = terms.mask_T, torch.ones_like(terms.advantage_T)
        if columns.high_entropy_T is not None:
            kept_T = kept_T & columns.high_entropy_T
        if self.cfg.correction:
            correction_T = columns.correction_T
            kept_T = kept_T & (correction_T > 0)
            if self.cfg.correction.off_policy_kl is not None:
                kept_T = kept_T & off_policy_mask(
                    terms.logp_T,
                    terms.logp_rollout_T,
                    terms.advantage_T,
                    terms.mask_T,
                    terms.sample_T,
                    self.cfg.correction.off_policy_kl,
                )
        return kept_T, correction_T

    def _describe(self, terms: Terms, shares: dict[str, Tensor], num_tokens: int) -> dict[str, Metric]:
        mask_T, log_ratio_T = terms.mask_T, terms.log_ratio_T.detach()
        ratio_T = log_ratio_T.exp()
        shares |= {"ppo_kl": torch.expm1(log_ratio_T) - log_ratio_T, "ratio/mean": ratio_T}
        largest = {"ratio/max": ratio_T}
        if self._around_engine:
            drift_T = log_ratio(terms.logp_T.detach(), terms.logp_rollout_T).abs()
            shares["mismatch/mean_abs"] = largest["mismatch/max_abs"] = drift_T
        # Rows of one tensor: each sum alone would be a kernel of its own.
        rows = torch.stack([x_T.detach().to(ratio_T.dtype) for x_T in shares.values()])
        means = torch.where(mask_T, rows, 0.0).sum(1) / num_tokens
        metrics = {name: Metric(mean, "sum") for name, mean in zip(shares, means, strict=True)}
        metrics |= {name: Metric(_largest(x_T, mask_T), "max") for name, x_T in largest.items()}
        return metrics | {"ratio/min": Metric(-_largest(-ratio_T, mask_T), "min")}


class SupervisedObjective:
    """Negative log-likelihood of the action tokens (a row's completion). Metric: loss."""

    needs = Needs()

    def prepare(
        self,
        columns: Sequence[PackedColumns],
        first_pass: Sequence[FirstPass] | None,
        denominators: Denominators,
        sum_over_ranks: SumOverRanks,
    ) -> tuple[list[PackedColumns], Metrics]:
        return list(columns), {}

    def __call__(
        self,
        logp_T: Tensor,
        entropy_T: Tensor | None,
        columns: PackedColumns,
        denominators: Denominators,
        coefficients: Mapping[str, float],
    ) -> tuple[Tensor, dict[str, Metric]]:
        require_finite(columns, {"logp": logp_T})
        mask_T = columns.action_mask_T
        loss = -(torch.where(mask_T, columns.weight_T, 0.0) * torch.where(mask_T, logp_T, 0.0)).sum()
        return loss, {"loss": Metric(loss.detach(), "sum")}


def require_finite(columns: PackedColumns, given: Mapping[str, Tensor]) -> None:
    # One test of all columns together: on a GPU each costs a synchronisation.
    finite_T = torch.stack([x_T.detach().isfinite() for x_T in given.values()]).all(0)
    bad_T = columns.action_mask_T & ~finite_T
    if not bad_T.any():
        return
    position = int(bad_T.nonzero()[0])
    values = ", ".join(f"{name} {float(x_T[position])}" for name, x_T in given.items())
    raise ValueError(
        f"sample {int(columns.sample_T[position])} of the micro-batch has a number that is not finite at "
        f"packed position {position} ({values}); {int(bad_T.sum())} action tokens are affected: the weights "
        f"or the engine's answer are broken, so the step is refused"
    )


def _floored(logp_rollout_T: Tensor) -> Tensor:
    return torch.where(logp_rollout_T < LOWEST_LOGP, LOWEST_LOGP, logp_rollout_T)  # NaN stays NaN


def _largest(x_T: Tensor, mask_T: Tensor) -> Tensor:
    """Largest entry under the mask; -inf where there is none."""
    masked_T = torch.where(mask_T, x_T, -torch.inf)
    return masked_T.max() if masked_T.numel() else x_T.new_tensor(-torch.inf)
