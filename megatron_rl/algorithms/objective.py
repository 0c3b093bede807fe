"""From log-probs to the loss of one micro-batch: its share of the step's loss.

An optimizer step has two passes. `prepare` sees all micro-batches of the mini-batch at once, adds up over the ranks
what a single micro-batch cannot know (the importance weights' mean, covariances, quantiles) and writes it into columns.
The objective itself is then a plain sum over tokens, and `conclude` judges the metrics of the whole mini-batch before a
weight changes. Invariants: the sum over micro-batches and data-parallel ranks is the step's loss, so neither loss,
gradient nor metric depends on how the samples were split or packed; what stands at a token that is no action, NaN
included, reaches neither; where pi equals pi_old the ratio is exactly 1 and ppo_kl exactly 0; the log-probs of a
step's only update, detached, do in place of logp_old what those of a pass before it do, to the bit.

Shape letters: T packed tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from megatron_rl.algorithms.columns import PackedColumns
from megatron_rl.algorithms.correction import importance_weight, mean_weight, rejected
from megatron_rl.algorithms.kl import kl_estimate
from megatron_rl.algorithms.losses import LOSSES
from megatron_rl.algorithms.losses.covariance import choose_clip_cov, choose_kl_cov
from megatron_rl.algorithms.losses.terms import MAX_LOG_RATIO, Terms
from megatron_rl.algorithms.selection import choose_largest
from megatron_rl.algorithms.whitening import SumOverRanks
from megatron_rl.config.algorithm import (
    AlgorithmConfig,
    ClipCovLoss,
    DecoupledLoss,
    DppoKlLoss,
    DppoTvLoss,
    KlCovLoss,
    WeightConfig,
)
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
    """A detached tensor of no dimensions."""
    reduction: Literal["sum", "max", "min"]


@dataclass(frozen=True, slots=True)
class Needs:
    """What an objective must be given."""

    logp_old: bool = False
    """`columns.logp_old_T`, log-probs under the weights that the step begins with, from a forward pass before the first
    update. A step of one update computes the same log-probs in the update itself. So unless `before_update` is True
    the pass can be left out there: `logp_old_T` is None, and the objective takes its own log-probs, detached."""
    logp_ref: bool = False
    """`columns.logp_ref_T`, from a forward pass of the reference policy."""
    entropy: bool = False
    first_pass: bool = False
    """`prepare` wants log-probs and entropies under the weights that the update begins with."""
    logp_old_in_prepare: bool = False
    """`prepare` reads `columns.logp_old_T`, for statistics of the whole mini-batch."""

    @property
    def before_update(self) -> bool:
        """Whether a mini-batch needs a forward pass of the policy before its update, even if that is the step's only
        one. Statistics of a sample do not: a sample lies whole in one micro-batch."""
        return self.first_pass or self.logp_old_in_prepare


@dataclass(frozen=True, slots=True)
class FirstPass:
    """Log-probs and entropies under the weights that an update begins with; they carry no gradient."""

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
    ) -> list[PackedColumns]:
        """A collective over the data-parallel ranks, before the update: the columns of this rank's micro-batches of
        one mini-batch, with what only the whole mini-batch tells."""

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
            NotFiniteError: a number of an action token is not finite.
        """

    def conclude(self, metrics: Metrics, on_policy: bool) -> Metrics:
        """Judge and complete the metrics of a whole mini-batch, from all micro-batches and ranks. It is called on every
        rank before the update changes a weight.

        Args:
            on_policy: the update begins with the weights that the step begins with.

        Raises:
            ValueError: trainer and engine disagree about the log-probs, and the update must not be made.
        """


class NotFiniteError(ValueError):
    """A number of an action token is not finite."""

    def __init__(self, message: str, sample: int) -> None:
        super().__init__(message)
        self.sample = sample
        """The index of the token's sample in the micro-batch."""


class PolicyObjective:
    """Policy loss, KL to the reference and entropy bonus, each token's sum times its aggregation weight.

    Metrics, over action tokens:
        loss; pg_loss, its policy part, without KL and entropy.
        pg_clipfrac, pg_clipfrac_lower: shares whose loss is flat, by the clip and by the bound c.
        ppo_kl: KL(anchor || pi), estimated by k3 = r - 1 - log r, which no cancellation brings to 0.
        ratio/mean, ratio/max, ratio/min: pi over the anchor, within exp(+-20). The anchor is pi_old, or the engine's
            policy where the loss needs no pi_old.
        entropy; kl: to the reference.
        correction/mean, /bounded, /ess: of the importance weights before normalisation and rejection: their mean, the
            share that the bounds changed, and the effective share of the tokens, (sum w)^2 / sum w^2 / N (Kish 1965).
        rejected/...: share that each rule of algorithm.correction.reject takes out.
        masked: share of the tokens without a policy loss, for whatever reason.
        mismatch/...: see `mismatch`; reported here if pi_old was not computed before the update.
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
            logp_old_in_prepare=isinstance(cfg.loss, ClipCovLoss) or self._normalised_weight is not None,
        )

    @property
    def _normalised_weight(self) -> WeightConfig | None:
        """The importance weight if it is divided by its mean over the mini-batch, else None."""
        weight = self.cfg.correction.weight if self.cfg.correction else None
        return weight if weight and weight.normalise else None

    def prepare(
        self,
        columns: Sequence[PackedColumns],
        first_pass: Sequence[FirstPass] | None,
        denominators: Denominators,
        sum_over_ranks: SumOverRanks,
    ) -> list[PackedColumns]:
        cfg, num_tokens = self.cfg, denominators.num_tokens
        columns = [replace(c, logp_rollout_T=_floored(c.logp_rollout_T)) for c in columns]
        if self._normalised_weight:
            mean = mean_weight(columns, num_tokens, self._normalised_weight, sum_over_ranks)
            columns = [replace(c, mean_weight_T=torch.full_like(c.weight_T, mean)) for c in columns]
        if isinstance(cfg.loss, ClipCovLoss | KlCovLoss):
            assert first_pass is not None  # `needs.first_pass` asks for it
            logps = [p.logp_T for p in first_pass]
            if isinstance(cfg.loss, ClipCovLoss):
                chosen = choose_clip_cov(cfg.loss, columns, logps, num_tokens, sum_over_ranks)
            else:
                chosen = choose_kl_cov(cfg.loss, columns, logps, num_tokens, sum_over_ranks)
            columns = [replace(c, selected_T=chosen_T) for c, chosen_T in zip(columns, chosen, strict=True)]
        if cfg.top_entropy_share < 1:
            assert first_pass is not None  # `needs.first_pass` asks for it
            count = max(1, int(cfg.top_entropy_share * num_tokens))
            masks, entropies = [c.action_mask_T for c in columns], [p.entropy_T for p in first_pass]
            chosen = choose_largest(entropies, masks, count, sum_over_ranks)
            columns = [replace(c, high_entropy_T=chosen_T) for c, chosen_T in zip(columns, chosen, strict=True)]
        return columns

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
        if anchor_T is None:
            anchor_T = logp_T.detach()
        given = {"logp": logp_T, "logp_rollout": columns.logp_rollout_T, "advantage": columns.advantage_T}
        if not self._around_engine:
            given["logp_old"] = anchor_T
        if cfg.kl:
            assert columns.logp_ref_T is not None  # `needs.logp_ref` asks for it
            given["logp_ref"] = columns.logp_ref_T
        if cfg.entropy or cfg.top_entropy_share < 1:
            assert entropy_T is not None  # `needs.entropy` asks for it
            given["entropy"] = entropy_T
        require_finite(columns, given)

        def actions(x_T: Tensor) -> Tensor:
            """Entries that are no action become 0 before any arithmetic: a mask multiplied in later turns inf at a
            padded token into NaN."""
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
        kept_T, factor_T, described = self._corrected(terms, columns)
        shares |= described
        policy_T = torch.where(kept_T, loss_T * factor_T, 0.0)
        total_T = policy_T
        shares["masked"] = ~kept_T
        if cfg.kl:
            logp_ref_T = actions(given["logp_ref"])
            kl_T = kl_estimate(terms.logp_T, logp_ref_T, cfg.kl.estimator, cfg.kl.straight_through, cfg.kl.cap)
            total_T = total_T + coefficients["kl"] * kl_T
            shares["kl"] = kl_T
        if entropy_T is not None:
            shares["entropy"] = actions(entropy_T)
        if cfg.entropy:
            total_T = total_T - coefficients["entropy"] * actions(given["entropy"])

        weight_T = torch.where(mask_T, columns.weight_T, 0.0)
        loss, policy_loss = (weight_T * total_T).sum(), (weight_T * policy_T.detach()).sum()
        metrics = {
            "loss": Metric(loss.detach(), "sum"),
            "pg_loss": Metric(policy_loss, "sum"),
            **self._describe(terms, shares, denominators.num_tokens),
        }
        if columns.logp_old_T is None:
            metrics |= mismatch(logp_T.detach(), columns, denominators.num_tokens)
        return loss, metrics

    def conclude(self, metrics: Metrics, on_policy: bool) -> Metrics:
        problem = disagreement(metrics, self.cfg.max_mismatch) if on_policy else None
        if problem:
            raise ValueError(problem)
        squares = metrics.get("correction/mean_square")
        if squares is None:
            return metrics
        rest = {name: value for name, value in metrics.items() if name != "correction/mean_square"}
        return rest | {"correction/ess": metrics["correction/mean"] ** 2 / squares if squares else 0.0}

    def _corrected(self, terms: Terms, columns: PackedColumns) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Where the policy has a loss, the importance weight that multiplies it, and what the metrics say of both."""
        kept_T, factor_T = terms.mask_T, torch.ones_like(terms.advantage_T)
        shares: dict[str, Tensor] = {}
        if columns.high_entropy_T is not None:
            kept_T = kept_T & columns.high_entropy_T
        if not self.cfg.correction:
            return kept_T, factor_T, shares
        if self.cfg.correction.weight:
            log_w_T = terms.anchor_T - terms.logp_rollout_T
            weight_T, bounded_T = importance_weight(log_w_T, terms.mask_T, terms.sample_T, self.cfg.correction.weight)
            shares = {
                "correction/mean": weight_T,
                "correction/mean_square": weight_T.square(),
                "correction/bounded": bounded_T,
            }
            kept_T = kept_T & (weight_T > 0)
            factor_T = weight_T if columns.mean_weight_T is None else weight_T / columns.mean_weight_T
        for rule in self.cfg.correction.reject:
            shares[f"rejected/{rule.name}"] = rejected_T = rejected(terms, rule)
            kept_T = kept_T & ~rejected_T
        return kept_T, factor_T, shares

    def _describe(self, terms: Terms, shares: dict[str, Tensor], num_tokens: int) -> dict[str, Metric]:
        mask_T, log_ratio_T, ratio_T = terms.mask_T, terms.log_ratio_T.detach(), terms.ratio_T.detach()
        shares |= {"ppo_kl": _k3(log_ratio_T), "ratio/mean": ratio_T}
        # Rows of one tensor: each sum alone would be a kernel of its own.
        rows = torch.stack([x_T.detach().to(ratio_T.dtype) for x_T in shares.values()])
        means = torch.where(mask_T, rows, 0.0).sum(1) / num_tokens
        metrics = {name: Metric(mean, "sum") for name, mean in zip(shares, means, strict=True)}
        largest, smallest = _largest(ratio_T, mask_T), -_largest(-ratio_T, mask_T)
        return metrics | {"ratio/max": Metric(largest, "max"), "ratio/min": Metric(smallest, "min")}


class SupervisedObjective:
    """Negative log-likelihood of the action tokens (a row's completion). Metric: loss."""

    needs = Needs()

    def prepare(
        self,
        columns: Sequence[PackedColumns],
        first_pass: Sequence[FirstPass] | None,
        denominators: Denominators,
        sum_over_ranks: SumOverRanks,
    ) -> list[PackedColumns]:
        return list(columns)

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

    def conclude(self, metrics: Metrics, on_policy: bool) -> Metrics:
        return metrics


def require_finite(columns: PackedColumns, given: Mapping[str, Tensor]) -> None:
    # One test of all columns together: on a GPU each costs a synchronisation.
    finite_T = torch.stack([x_T.detach().isfinite() for x_T in given.values()]).all(0)
    bad_T = columns.action_mask_T & ~finite_T
    if not bad_T.any():
        return
    position = int(bad_T.nonzero()[0])
    values = ", ".join(f"{name} {float(x_T[position])}" for name, x_T in given.items())
    sample = int(columns.sample_T[position])
    raise NotFiniteError(
        f"sample {sample} of the micro-batch has a number that is not finite at packed position {position} ({values}); "
        f"{int(bad_T.sum())} action tokens are affected: the weights or the engine's answer are broken, so the step "
        f"is refused",
        sample,
    )


def mismatch(logp_T: Tensor, columns: PackedColumns, num_tokens: int) -> dict[str, Metric]:
    """How far the engine's policy lies from the trainer's, over the actions of one micro-batch: mean and largest
    |log pi - log pi_engine|, and the mean of k3 = r - 1 - log r with r = pi / pi_engine.

    Args:
        logp_T: log-probs of the trainer under the weights that the engine should have.
        num_tokens: action tokens of all micro-batches and ranks.
    """
    log_ratio_T = (logp_T - _floored(columns.logp_rollout_T))[columns.action_mask_T].double()
    distance_T, num_tokens = log_ratio_T.abs(), max(num_tokens, 1)
    largest = distance_T.max() if len(distance_T) else distance_T.new_zeros(())
    return {
        "mismatch/mean_abs": Metric(distance_T.sum() / num_tokens, "sum"),
        "mismatch/max_abs": Metric(largest, "max"),
        "mismatch/k3": Metric(_k3(log_ratio_T).sum() / num_tokens, "sum"),
    }


def disagreement(metrics: Metrics, bound: float) -> str | None:
    """The error message if the mean mismatch exceeds `algorithm.max_mismatch`, else None; also None if the metrics
    hold no mismatch. Engine and trainer hold the same weights, so they must give the same tokens the same
    log-probs."""
    seen = metrics.get("mismatch/mean_abs")
    if seen is None or seen <= bound:
        return None
    return (
        f"trainer and engine disagree: mean |logp_old - logp_rollout| is {seen:.2e}, above algorithm.max_mismatch = "
        f"{bound:g}. The engine does not compute what the trainer trains (weights, temperature or precision); raise "
        f"the bound only if you know why"
    )


def _k3(log_ratio_T: Tensor) -> Tensor:
    """r - 1 - log r, with r within exp(+-20)."""
    return torch.expm1(log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) - log_ratio_T


def _floored(logp_rollout_T: Tensor) -> Tensor:
    return torch.where(logp_rollout_T < LOWEST_LOGP, LOWEST_LOGP, logp_rollout_T)  # NaN stays NaN


def _largest(x_T: Tensor, mask_T: Tensor) -> Tensor:
    """Largest entry under the mask; -inf where there is none."""
    masked_T = torch.where(mask_T, x_T, -torch.inf)
    return masked_T.max() if masked_T.numel() else x_T.new_tensor(-torch.inf)
