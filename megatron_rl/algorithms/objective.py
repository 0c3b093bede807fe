"""The objective turns log-probs into the loss of one micro-batch, which is its share of the step's loss.

An optimizer step has two passes. First, `prepare` sees all micro-batches of the mini-batch, computes the statistics
that need all of them and all ranks (the mean of the importance weights, covariances, quantiles), and writes them into
columns. Then the objective itself is a plain sum over tokens, micro-batch by micro-batch, and `conclude` checks the
metrics of the whole mini-batch before any weight changes.

Invariants: the sum over micro-batches and data-parallel ranks is the step's loss, so loss, gradient and metrics do not
depend on how the samples were split or packed. The numbers at a token that is no action, even NaN, have no effect.
Where pi equals pi_old, the ratio is exactly 1 and ppo_kl is exactly 0. If a step has only one update, its own log-probs
(detached) give bitwise the same results as a logp_old from a separate forward pass before it.

Shape letters: T packed tokens of one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from megatron_rl.algorithms.columns import FirstPass, PackedColumns
from megatron_rl.algorithms.correction import importance_weight, interpolated, mean_weight, rejected
from megatron_rl.algorithms.distillation import over_scored, teacher_term
from megatron_rl.algorithms.kl import kl_estimate
from megatron_rl.algorithms.losses import LOSSES, SELECTIONS
from megatron_rl.algorithms.losses.terms import LOWEST_LOGP, MAX_LOG_RATIO, Terms
from megatron_rl.algorithms.passes import Needs
from megatron_rl.algorithms.selection import choose_largest
from megatron_rl.algorithms.token_advantages import token_advantages
from megatron_rl.algorithms.whitening import SumOverRanks
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.correction import WeightConfig
from megatron_rl.types import Denominators, Metrics


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of one micro-batch, and how the values of all micro-batches and data-parallel ranks are reduced to one.
    A `sum` is already divided by its denominator, so the plain sum is the result. An empty micro-batch gives the
    identity of the reduction."""

    value: Tensor
    """A detached tensor without dimensions."""
    reduction: Literal["sum", "max", "min"]


class Objective(Protocol):
    needs: Needs

    def credit(
        self, columns: Sequence[PackedColumns], kl_coefficient: float, sum_over_ranks: SumOverRanks
    ) -> tuple[list[PackedColumns], Tensor]:
        """What `token_advantages` returns. It runs when a step begins, unless `needs.credit` is empty. All
        data-parallel ranks must call it (a collective)."""

    def prepare(
        self,
        columns: Sequence[PackedColumns],
        first_pass: Sequence[FirstPass] | None,
        denominators: Denominators,
        sum_over_ranks: SumOverRanks,
    ) -> list[PackedColumns]:
        """Returns the columns of this rank's micro-batches of one mini-batch, completed by the statistics of the whole
        mini-batch. It runs before the update. All data-parallel ranks must call it (a collective)."""

    def __call__(
        self,
        logp_T: Tensor,
        /,
        entropy_T: Tensor | None,
        columns: PackedColumns,
        denominators: Denominators,
        coefficients: Mapping[str, float],
    ) -> tuple[Tensor, dict[str, Metric]]:
        """This micro-batch's share of the step's loss, and its metrics.

        Raises:
            NotFiniteError: a number of an action token is not finite.
        """

    def conclude(self, metrics: Metrics, max_mismatch: float | None) -> Metrics:
        """Check and complete the metrics of a whole mini-batch, over all its micro-batches and ranks. Every
        rank calls it before the update changes a weight.

        Args:
            max_mismatch: the bound of the mean mismatch; None: an earlier update of the step has changed the weights,
                so that `mismatch/...` would tell of the policy's own changes and is left out.

        Raises:
            ValueError: trainer and engine disagree about the log-probs, so the update must not be made.
        """

    def stops(self, metrics: Metrics) -> bool:
        """Whether the step ends before an update of a later epoch, with these metrics of its mini-batch."""


class NotFiniteError(ValueError):
    """A number of an action token is not finite."""

    def __init__(self, message: str, sample: int) -> None:
        super().__init__(message)
        self.sample = sample
        """The index of the token's sample in the micro-batch."""


class PolicyObjective:
    """The sum over tokens of policy loss, KL penalty and entropy bonus, each token with its aggregation weight.

    Metrics, over action tokens:
        loss: the whole loss.
        pg_loss: the policy loss, without KL and entropy.
        pg_clipfrac, pg_clipfrac_lower: the share of the tokens whose loss is constant because of the clip, or because
            of the bound c.
        ppo_kl: KL(anchor || pi), estimated by k3 = r - 1 - log r, whose terms are never negative and cannot cancel.
        ratio/mean, ratio/max, ratio/min: the ratio of pi to the anchor, within exp(+-20). The anchor is pi_old, or the
            one of `algorithm.anchor`, or the loss's own.
        entropy: the mean entropy of the policy, in nats.
        logp/mean: the mean log-prob of the actions. On policy its negative estimates the entropy.
        kl: the mean KL to the reference policy, in nats.
        correction/mean, correction/bounded, correction/ess: the importance weights before normalisation and rejection:
            their mean, the share of them that the bounds changed, and the effective share of the tokens,
            (sum w)^2 / sum w^2 / N (Kish 1965).
        rejected/...: the share of the tokens that each rule of algorithm.correction.reject rejects.
        masked: the share of the tokens without a policy loss, for any reason.
        mismatch/...: see `mismatch`. It is reported here if pi_old was not computed before the update.
    """

    def __init__(self, cfg: AlgorithmConfig) -> None:
        self.cfg = cfg
        self._token_loss = LOSSES[type(cfg.loss)](cfg.loss)
        self._select = SELECTIONS.get(type(cfg.loss))
        self._around_engine = cfg.is_around_engine
        self.needs = Needs.of(cfg)
        self._kl = None if cfg.kl_in_reward else cfg.kl

    def __reduce__(self) -> tuple[type[PolicyObjective], tuple[AlgorithmConfig]]:
        """Another process makes it again from its configuration, because it cannot import the function of a file."""
        return PolicyObjective, (self.cfg,)

    @property
    def _normalised_weight(self) -> WeightConfig | None:
        """The importance weight if it is divided by its mean over the mini-batch, else None."""
        weight = self.cfg.correction.weight if self.cfg.correction else None
        return weight if weight and weight.normalise else None

    def credit(
        self, columns: Sequence[PackedColumns], kl_coefficient: float, sum_over_ranks: SumOverRanks
    ) -> tuple[list[PackedColumns], Tensor]:
        return token_advantages(columns, self.cfg, kl_coefficient, sum_over_ranks)

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
        if self._select:
            assert first_pass is not None  # `needs.statistics` asks for it
            chosen = self._select(cfg.loss, columns, [p.logp_T for p in first_pass], num_tokens, sum_over_ranks)
            columns = [replace(c, selected_T=chosen_T) for c, chosen_T in zip(columns, chosen, strict=True)]
        if cfg.top_entropy_share < 1:
            assert first_pass is not None  # `needs.statistics` asks for it
            # The tokens at or above the inclusive quantile; rounded, because 0.8 x 5 may be 4.000000000000001.
            count = num_tokens - math.ceil(round((num_tokens - 1) * (1 - cfg.top_entropy_share), 6))
            masks = [c.action_mask_T for c in columns]
            entropies = [p.entropy_T for p in first_pass if p.entropy_T is not None]  # all: `needs` asks for it
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
        if cfg.anchor == "interpolated":
            anchor_T = interpolated(logp_T, columns.logp_rollout_T, columns.lag_T)
        if anchor_T is None:
            anchor_T = logp_T.detach()
        given = {"logp": logp_T, "logp_rollout": columns.logp_rollout_T, "advantage": columns.advantage_T}
        if not self._around_engine:
            given["logp_old"] = anchor_T
        if columns.logp_ref_T is not None and "logp_ref" in self.needs.loss:
            given["logp_ref"] = columns.logp_ref_T
        if cfg.entropy or cfg.top_entropy_share < 1:
            assert entropy_T is not None  # `needs.loss` asks for it
            given["entropy"] = entropy_T
        require_finite(columns, given)

        def actions(x_T: Tensor) -> Tensor:
            """Set the entries that are no action to 0. This must come before any arithmetic, because inf or NaN at a
            padded token, multiplied by a mask later, gives NaN."""
            return torch.where(mask_T, x_T, 0.0)

        advantage_T, shares = actions(columns.advantage_T), dict[str, Tensor]()
        if cfg.distillation:
            taught_T, shares = teacher_term(cfg.distillation, columns, actions(anchor_T))
            advantage_T = advantage_T if cfg.distillation.in_loss else advantage_T + taught_T
        terms = Terms(
            mask_T=mask_T,
            sample_T=columns.sample_T,
            advantage_T=advantage_T,
            logp_T=actions(logp_T),
            anchor_T=actions(anchor_T),
            logp_rollout_T=actions(columns.logp_rollout_T),
            lag_T=columns.lag_T,
            selected_T=columns.selected_T,
            logp_ref_T=actions(given["logp_ref"]) if cfg.loss.needs_reference else None,
        )
        loss_T, of_loss = self._token_loss(terms)
        kept_T, factor_T, described = self._corrected(terms, columns)
        shares |= of_loss | described
        policy_T = torch.where(kept_T, loss_T * factor_T, 0.0)
        total_T = policy_T + taught_T if cfg.distillation and cfg.distillation.in_loss else policy_T
        shares["masked"] = ~kept_T
        if self._kl:
            kl, logp_ref_T = self._kl, actions(given["logp_ref"])
            kl_T = kl_estimate(terms.logp_T, logp_ref_T, kl.estimator, kl.straight_through, kl.cap)
            total_T = total_T + coefficients["kl"] * kl_T
            shares["kl"] = kl_T
        if entropy_T is not None:
            shares["entropy"] = actions(entropy_T)
        if cfg.entropy:
            bonus_T = coefficients["entropy"] * actions(given["entropy"])
            if cfg.entropy.aggregation == "token-mean":  # without the weight that it gets with the loss below
                bonus_T = bonus_T / (columns.weight_T.detach() * denominators.num_tokens)
            total_T = total_T - torch.where(mask_T & (columns.weight_T > 0), bonus_T, 0.0)

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

    def conclude(self, metrics: Metrics, max_mismatch: float | None) -> Metrics:
        metrics = over_scored(over_judged(metrics))
        if max_mismatch is None:
            metrics = {name: value for name, value in metrics.items() if not name.startswith("mismatch/")}
        elif problem := disagreement(metrics, max_mismatch):
            raise ValueError(problem)
        squares = metrics.get("correction/mean_square")
        if squares is None:
            return metrics
        rest = {name: value for name, value in metrics.items() if name != "correction/mean_square"}
        return rest | {"correction/ess": metrics["correction/mean"] ** 2 / squares if squares else 0.0}

    def stops(self, metrics: Metrics) -> bool:
        if (bounds := self.cfg.stop_epochs) is None:
            return False
        farthest = max(metrics["ratio/max"], 1 / max(metrics["ratio/min"], 1e-9))
        return metrics["ppo_kl"] > (bounds.kl or math.inf) or farthest > (bounds.ratio or math.inf)

    def _corrected(self, terms: Terms, columns: PackedColumns) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Returns the mask of the tokens that have a policy loss, the importance weights that multiply it, and the
        columns for the metrics of both."""
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
        shares |= {"ppo_kl": _k3(log_ratio_T), "ratio/mean": ratio_T, "logp/mean": terms.logp_T}
        # The columns are stacked, so that one kernel computes all means.
        rows = torch.stack([x_T.detach().to(ratio_T.dtype) for x_T in shares.values()])
        means = torch.where(mask_T, rows, 0.0).sum(1) / num_tokens
        metrics = {name: Metric(mean, "sum") for name, mean in zip(shares, means, strict=True)}
        metrics["ratio/max"] = Metric(_largest(ratio_T, mask_T), "max")
        return metrics | {"ratio/min": Metric(-_largest(-ratio_T, mask_T), "min")}


def require_finite(columns: PackedColumns, given: Mapping[str, Tensor]) -> None:
    """
    Raises:
        NotFiniteError: an entry of `given` at an action token is not finite.
    """
    # All columns are tested at once, because each test makes a GPU wait.
    finite_T = torch.stack([x_T.detach().isfinite() for x_T in given.values()]).all(0)
    bad_T = columns.action_mask_T & ~finite_T
    if not bad_T.any():
        return
    position = int(bad_T.nonzero()[0])
    values = ", ".join(f"{name} {float(x_T[position])}" for name, x_T in given.items())
    sample = int(columns.sample_T[position])
    raise NotFiniteError(
        f"sample {sample} of the micro-batch has a number that is not finite at packed position {position} ({values}); "
        f"{int(bad_T.sum())} action tokens are affected. The weights or the engine's log-probs are broken, so the step "
        f"is refused",
        sample,
    )


DISTANCES = ("mismatch/mean_abs", "mismatch/max_abs", "mismatch/k3")


def mismatch(logp_T: Tensor, columns: PackedColumns, num_tokens: int) -> dict[str, Metric]:
    """The distance between the engine's policy and the trainer's over the actions of one micro-batch: the mean and the
    largest |log pi - log pi_engine|, and the mean of k3 = r - 1 - log r with r = pi / pi_engine.

    Only actions of lag 0 are judged, because the engine sampled the others with other weights. The means are over all
    actions until `over_judged` has corrected them.

    Args:
        logp_T: the trainer's log-probs under the weights that the engine should have.
        num_tokens: the number of action tokens of all micro-batches and ranks.
    """
    judged_T = columns.action_mask_T & (columns.lag_T == 0)
    log_ratio_T = (logp_T - _floored(columns.logp_rollout_T))[judged_T].double()
    distance_T, num_tokens = log_ratio_T.abs(), max(num_tokens, 1)
    largest = distance_T.max() if len(distance_T) else distance_T.new_zeros(())
    return {
        "mismatch/num_judged": Metric(judged_T.sum(), "sum"),
        "mismatch/num_actions": Metric(columns.action_mask_T.sum(), "sum"),
        "mismatch/mean_abs": Metric(distance_T.sum() / num_tokens, "sum"),
        "mismatch/max_abs": Metric(largest, "max"),
        "mismatch/k3": Metric(_k3(log_ratio_T).sum() / num_tokens, "sum"),
    }


def over_judged(metrics: Metrics) -> Metrics:
    """The metrics with the means of `mismatch` over the judged actions. If some actions were not judged,
    `mismatch/judged` is the share of judged ones. If none was, no distance is known."""
    rest = dict(metrics)
    judged, actions = rest.pop("mismatch/num_judged", 0.0), rest.pop("mismatch/num_actions", 0.0)
    if judged == actions:
        return rest
    rest["mismatch/judged"] = judged / actions
    if not judged:
        return {name: x for name, x in rest.items() if name not in DISTANCES}
    means = {name: rest[name] * actions / judged for name in DISTANCES if not name.endswith("/max_abs")}
    return rest | means


def disagreement(metrics: Metrics, bound: float) -> str | None:
    """The error message if the mean mismatch exceeds the bound `algorithm.max_mismatch`, else None. It is also None if
    the metrics contain no mismatch. Engine and trainer have the same weights, so they must give the same log-probs to
    the same tokens."""
    seen = metrics.get("mismatch/mean_abs")
    if seen is None or seen <= bound:
        return None
    return (
        f"trainer and engine disagree: the mean of |logp_old - logp_rollout| is {seen:.2e}, above "
        f"algorithm.max_mismatch = {bound:g}. The engine differs from the trainer in weights, temperature or "
        f"precision; raise the bound only if you know why"
    )


def _k3(log_ratio_T: Tensor) -> Tensor:
    """r - 1 - log r, with r within exp(+-20)."""
    return torch.expm1(log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) - log_ratio_T


def _floored(logp_rollout_T: Tensor) -> Tensor:
    return torch.where(logp_rollout_T < LOWEST_LOGP, LOWEST_LOGP, logp_rollout_T)  # NaN stays NaN


def _largest(x_T: Tensor, mask_T: Tensor) -> Tensor:
    """The largest entry where the mask is True; -inf if there is none."""
    return torch.where(mask_T, x_T, -torch.inf).max() if len(x_T) else x_T.new_tensor(-torch.inf)
