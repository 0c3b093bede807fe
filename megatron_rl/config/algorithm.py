"""Losses, aggregation, importance correction, KL and entropy. The key `kind` of a section chooses one of its kinds.

Each section states its formula and its source, and a loss also the aggregation of its paper. `tools/algorithms.py`
prints them as tables. Combinations that make no sense are refused here, and the error says why.

The symbols of the formulas, for one token: r = pi / pi_old, w = pi_old / pi_engine, A is the advantage, sg stops the
gradient, s is the geometric mean of r over the sample's actions, eps_low and eps_high are clip_ratio_low and
clip_ratio_high, d = log pi - log pi_ref.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.advantages import AdvantageConfig, CosineShaping, GrpoAdvantage, ShapingConfig
from megatron_rl.config.section import Method, Section, default_kind

Share = Annotated[float, Field(gt=0, le=1)]
LowerClip = Annotated[float, Field(gt=0, lt=1)]
DualClipBound = Annotated[float, Field(gt=1)]
Aggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"
]


class DualClipLoss(Method):
    """PPO's clipped objective (Schulman et al. 2017), with an upper bound of the loss for A < 0 (Ye et al. 2020)."""

    formula: ClassVar[str] = (
        "max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)); for A < 0 at most -A c; c null: without this bound"
    )
    source: ClassVar[str] = "arXiv:1707.06347, arXiv:1912.09729 eq. 5"
    aggregation: ClassVar[Aggregation] = "token-mean"

    kind: Literal["dual_clip"] = "dual_clip"
    clip_ratio_low: LowerClip = 0.2
    """The ratio r is clipped from below at 1 - clip_ratio_low."""
    clip_ratio_high: PositiveFloat = 0.2
    """The ratio r is clipped from above at 1 + clip_ratio_high."""
    clip_ratio_c: DualClipBound | None = 3.0
    """The constant c: for A < 0 the loss of a token is at most c |A|. null means plain PPO, without this bound."""


class GspoLoss(Method):
    """Group sequence policy optimisation (Zheng et al. 2025): a sample has one ratio, which is clipped as a whole."""

    formula: ClassVar[str] = "max(-A q, -A clip(q, 1 - eps_low, 1 + eps_high)), q = sg(s) pi / sg(pi)"
    source: ClassVar[str] = "arXiv:2507.18071 (GSPO-token)"
    aggregation: ClassVar[Aggregation] = "seq-mean-token-mean"

    kind: Literal["gspo"] = "gspo"
    clip_ratio_low: LowerClip = 3e-4
    """The sample's ratio is clipped from below at 1 - clip_ratio_low."""
    clip_ratio_high: PositiveFloat = 4e-4
    """The sample's ratio is clipped from above at 1 + clip_ratio_high."""


class GmpoLoss(Method):
    """Geometric-mean policy optimisation (Zhao et al. 2025): log-ratios are clipped and averaged over the sample."""

    formula: ClassVar[str] = (
        "-A exp(mean of l over the sample), where l is log r or clip(log r, -eps_low, eps_high), whichever has the "
        "smaller A l"
    )
    source: ClassVar[str] = "arXiv:2507.20673"
    aggregation: ClassVar[Aggregation] = "seq-mean-token-mean"

    kind: Literal["gmpo"] = "gmpo"
    clip_ratio_low: PositiveFloat = 0.4
    """The log-ratio is clipped from below at -clip_ratio_low, that is, r at exp(-clip_ratio_low)."""
    clip_ratio_high: PositiveFloat = 0.4
    """The log-ratio is clipped from above at clip_ratio_high, that is, r at exp(clip_ratio_high)."""


class CispoLoss(Method):
    """CISPO (MiniMax 2025): importance weights are clipped, and every token keeps its gradient."""

    formula: ClassVar[str] = "-sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi"
    source: ClassVar[str] = "arXiv:2506.13585"
    aggregation: ClassVar[Aggregation] = "token-mean"

    kind: Literal["cispo"] = "cispo"
    clip_ratio_low: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The weight is clipped from below at 1 - clip_ratio_low; 1 means no lower clip, as in the paper."""
    clip_ratio_high: PositiveFloat = 0.2
    """The weight is clipped from above at 1 + clip_ratio_high."""


class SapoLoss(Method):
    """Soft adaptive policy optimisation (Gao et al. 2025): a sigmoid gate in place of the clip."""

    formula: ClassVar[str] = "-A (4 / tau) sigmoid(tau (r - 1)), with tau = tau_pos for A > 0, else tau = tau_neg"
    source: ClassVar[str] = "arXiv:2511.20347"
    aggregation: ClassVar[Aggregation] = "seq-mean-token-mean"

    kind: Literal["sapo"] = "sapo"
    tau_pos: PositiveFloat = 1.0
    """The steepness of the gate for A > 0."""
    tau_neg: PositiveFloat = 1.05
    """The steepness of the gate for A <= 0. With a larger value the gradient vanishes closer to r = 1."""


class ReinforceLoss(Method):
    """The policy gradient without a ratio (Williams 1992). It is correct only on policy, so use one update per step."""

    formula: ClassVar[str] = "-A log pi"
    source: ClassVar[str] = "Williams 1992, Machine Learning 8"
    aggregation: ClassVar[Aggregation] = "seq-mean-token-sum"

    kind: Literal["reinforce"] = "reinforce"


class GpgLoss(Method):
    """Group policy gradient (Chu et al. 2025): REINFORCE's loss, to be used with the advantage estimator `gpg`."""

    formula: ClassVar[str] = "-A log pi"
    source: ClassVar[str] = "arXiv:2504.02546"
    aggregation: ClassVar[Aggregation] = "token-mean"

    kind: Literal["gpg"] = "gpg"


class ClipCovLoss(Method):
    """PPO's clipped loss without a few random tokens of high covariance (Cui et al. 2025)."""

    formula: ClassVar[str] = (
        "max(-A r, -A clip(r)), but 0 for `share` of all tokens, drawn from those with cov_low < cov < cov_high; "
        "cov = (log pi - mean)(A - mean), with means over the mini-batch"
    )
    source: ClassVar[str] = "arXiv:2505.22617 (Clip-Cov)"
    aggregation: ClassVar[Aggregation] = "token-mean"

    kind: Literal["clip_cov"] = "clip_cov"
    clip_ratio_low: LowerClip = 0.2
    """The ratio r is clipped from below at 1 - clip_ratio_low."""
    clip_ratio_high: PositiveFloat = 0.2
    """The ratio r is clipped from above at 1 + clip_ratio_high."""
    share: Share = 2e-4
    """The share of the mini-batch's action tokens that are chosen and have no loss. At least one token is chosen, if
    there is a candidate."""
    cov_low: float = 1.0
    """Only tokens with a covariance above this bound are candidates."""
    cov_high: float = 5.0
    """Only tokens with a covariance below this bound are candidates."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.cov_low >= self.cov_high:
            raise ValueError(f"cov_low ({self.cov_low}) must be below cov_high ({self.cov_high})")
        return self


class KlCovLoss(Method):
    """The loss without a clip, plus a KL penalty for the tokens of highest covariance (Cui et al. 2025)."""

    formula: ClassVar[str] = "-A r, plus coef |log r| for the `share` of tokens with the largest cov (see clip_cov)"
    source: ClassVar[str] = "arXiv:2505.22617 (KL-Cov)"
    aggregation: ClassVar[Aggregation] = "token-mean"

    kind: Literal["kl_cov"] = "kl_cov"
    share: Share = 2e-4
    """The share of the mini-batch's action tokens that are chosen and have the penalty. At least one token is
    chosen."""
    coef: PositiveFloat = 1.0
    """The factor of the penalty."""


class DppoTvLoss(Method):
    """Divergence PPO (Qi et al. 2026): the trust region around the sampling policy bounds probabilities instead of
    ratios."""

    formula: ClassVar[str] = (
        "-sg(min(pi / mu, c)) A log pi, where mu is the engine's policy; 0 where A > 0 and pi - mu > high, or where "
        "A < 0 and mu - pi > low"
    )
    source: ClassVar[str] = "arXiv:2602.04879"
    aggregation: ClassVar[Aggregation] = "token-mean"

    kind: Literal["dppo_tv"] = "dppo_tv"
    low: LowerClip = 0.15
    """A token with A < 0 has no gradient if its probability has fallen by more than this."""
    high: LowerClip = 0.15
    """A token with A > 0 has no gradient if its probability has risen by more than this."""
    c: PositiveFloat = 20.0
    """The upper bound of the weight pi / mu."""


class DppoKlLoss(Method):
    """Like dppo_tv, but the trust region bounds the KL divergence of the binary distributions (this token, any other
    token)."""

    formula: ClassVar[str] = (
        "as dppo_tv, but 0 where the binary KL(mu || pi) exceeds the bound and the update would increase it"
    )
    source: ClassVar[str] = "arXiv:2602.04879"
    aggregation: ClassVar[Aggregation] = "token-mean"

    kind: Literal["dppo_kl"] = "dppo_kl"
    low: PositiveFloat = 0.05
    """A token with A < 0 whose probability has fallen has no gradient if its KL divergence exceeds this, in nats."""
    high: PositiveFloat = 0.05
    """A token with A > 0 whose probability has risen has no gradient if its KL divergence exceeds this, in nats."""
    c: PositiveFloat = 20.0
    """The upper bound of the weight pi / mu."""


class DecoupledLoss(Method):
    """Decoupled PPO (Hilton et al. 2022): the ratio is clipped around a proximal policy p, and the loss is weighted by
    p over the behaviour policy mu, which is the engine's."""

    formula: ClassVar[str] = "dual_clip with r = pi / p, times sg(min(p / mu, cap)), where mu is the engine's policy"
    source: ClassVar[str] = "arXiv:2110.00641, arXiv:2505.24298"
    aggregation: ClassVar[Aggregation] = "token-mean"

    kind: Literal["decoupled"] = "decoupled"
    clip_ratio_low: LowerClip = 0.2
    """The ratio pi / p is clipped from below at 1 - clip_ratio_low."""
    clip_ratio_high: PositiveFloat = 0.2
    """The ratio pi / p is clipped from above at 1 + clip_ratio_high."""
    clip_ratio_c: DualClipBound | None = 3.0
    """The constant c: for A < 0 the loss of a token is at most c |A|. null means without this bound."""
    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    """The proximal policy p. recomputed: the policy at the step's start. interpolated: log p = log mu + a (log pi -
    log mu) with a = lag / (lag + 1), where lag is the number of versions between the weights that sampled the token and
    those at the step's start; this saves the forward pass for log pi_old (AReaL's proximal approximation)."""
    cap: Annotated[float, Field(ge=1)] = 5.0
    """The upper bound of the weight p / mu."""


LossConfig = Annotated[
    DualClipLoss
    | GspoLoss
    | GmpoLoss
    | CispoLoss
    | SapoLoss
    | ReinforceLoss
    | GpgLoss
    | ClipCovLoss
    | KlCovLoss
    | DppoTvLoss
    | DppoKlLoss
    | DecoupledLoss,
    Field(discriminator="kind"),
]
SEQUENCE_LOSSES = (GspoLoss, GmpoLoss)
"""Losses with one ratio for each sample."""
BEHAVIOUR_LOSSES = (DppoTvLoss, DppoKlLoss, DecoupledLoss)
"""Losses that contain the importance weight of the engine's policy, so that no correction may be added."""

AGGREGATIONS: dict[Aggregation, tuple[str, str]] = {
    "token-mean": ("1 / N, where N is the number of all action tokens", "DAPO, arXiv:2503.14476"),
    "seq-mean-token-sum": ("1 / S, where S is the number of all samples", "REINFORCE on sequences"),
    "seq-mean-token-mean": (
        "1 / (S n), where n is the number of the sample's action tokens",
        "GRPO, arXiv:2402.03300",
    ),
    "seq-mean-token-sum-norm": ("1 / (S L), where L is loss_agg_tokens", "Dr. GRPO, arXiv:2503.20783"),
    "prompt-mean": (
        "1 / (P n), where P is the number of all prompts and n that of the prompt's action tokens",
        "ScaleRL, arXiv:2510.13786",
    ),
}
"""The weight of an action token's loss, and its source."""


Level = Literal["token", "segment", "sequence"]
"""The unit that has one weight, or that is kept or rejected as a whole. A segment is a run of actions between forced
tokens (a turn, a thought, an answer). A sequence is a sample."""


class _Weight(Method):
    level: Level = "token"
    """The unit that has one ratio w. The ratio of a segment or a sequence is the geometric mean over its actions,
    because the product would go to 0 or infinity for a long answer."""
    normalise: bool = False
    """true: the weights are divided by their mean over the mini-batch's action tokens, before any rejection. The mean
    needs the log-probs of the whole mini-batch before the update, so it costs a forward pass even if there is only one
    update per step."""


class TruncatedWeight(_Weight):
    """Truncated importance sampling (Ionides 2008; Yao et al. 2025): weights have an upper bound."""

    formula: ClassVar[str] = "min(w, cap)"
    source: ClassVar[str] = "Ionides 2008, JCGS 17"

    kind: Literal["truncate"] = "truncate"
    cap: Annotated[float, Field(ge=1)] = 2.0
    """The largest weight."""


class MaskedWeight(_Weight):
    """IcePop (Ling team 2025): the weight is 0 where the ratio is out of bounds."""

    formula: ClassVar[str] = "w if low <= w <= high, else 0"
    source: ClassVar[str] = "IcePop, arXiv:2510.18855"

    kind: Literal["mask"] = "mask"
    low: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The weight is 0 if the ratio is below this."""
    high: Annotated[float, Field(gt=1)] = 5.0
    """The weight is 0 if the ratio is above this."""


class ClippedWeight(_Weight):
    """Importance weights that are clipped on both sides."""

    formula: ClassVar[str] = "clip(w, low, high)"
    source: ClassVar[str] = "truncated importance sampling with a lower bound too"

    kind: Literal["clip"] = "clip"
    low: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The smallest weight."""
    high: Annotated[float, Field(gt=1)] = 2.0
    """The largest weight."""


WeightConfig = Annotated[TruncatedWeight | MaskedWeight | ClippedWeight, Field(discriminator="kind")]

SCHULMAN = 'Schulman 2020, "Approximating KL divergence"'
STATISTICS = {
    "k1": ("-log w; low and high are bounds of w (of the product of w for a sum)", SCHULMAN),
    "k2": ("(log w)^2 / 2", SCHULMAN),
    "k3": ("w - 1 - log w", SCHULMAN),
    "binary_kl": (
        "max(KL(mu || pi), KL(pi || mu)) of the binary distributions (this token, any other token)",
        "arXiv:2602.04879",
    ),
}
"""Statistics of a token by which the token, its segment or its sample is rejected: formula and source."""


class Rejection(Section):
    """A rule by which tokens, segments or samples are rejected: they then have no policy loss (Liu et al. 2025, "When
    Speed Kills Stability").

    Example: {level: sequence, statistic: k1, over: mean, low: 0.99, high: 1.01} rejects samples by the geometric mean
    of w; {level: sequence, statistic: k1, over: max, low: 1.0e-4} rejects samples with any w below 1e-4."""

    level: Level
    """The unit that is rejected: a token, a segment or a sequence (a sample)."""
    statistic: Literal["k1", "k2", "k3", "binary_kl"]
    """The distance, for each token, between the trainer's policy and the engine's."""
    over: Literal["sum", "mean", "max"] | None = None
    """How the statistics of the tokens of a segment or a sequence become one number; leave it out for level token. With
    max, one token beyond either bound is enough."""
    low: PositiveFloat | None = None
    """For k1 only: the smallest w that is kept; null means no lower bound. With over sum, w is the product of the
    tokens' ratios; with over mean, it is their geometric mean."""
    high: PositiveFloat | None = None
    """The largest statistic that is kept, or for k1 the largest w that is kept; null means no upper bound."""
    policy: Literal["old", "current"] = "old"
    """The policy of the trainer that is compared with the engine's: the one at the step's start, or the one that is
    being updated."""
    only_negative: bool = False
    """true: only tokens with A < 0 are rejected. Together with level sequence, statistic k1, over mean, policy current
    and low exp(-delta) it is the off-policy sequence masking of DeepSeek-V3.2. false: the sign of A does not matter."""

    @property
    def name(self) -> str:
        """The last part of the name of the rule's metric, `rejected/<name>`."""
        extra = ["current"] * (self.policy == "current") + ["negative"] * self.only_negative
        return "_".join([self.level, *([self.over] if self.over else []), self.statistic, *extra])

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.level == "token" and self.over:
            raise ValueError(f"over: {self.over} is for a segment or a sequence, but the level is token; leave it out")
        if self.level != "token" and not self.over:
            raise ValueError(f"over is missing: choose the sum, mean or max over the tokens of a {self.level}")
        if self.low is None and self.high is None:
            raise ValueError("a rejection needs a bound: give high, or for k1 low or both")
        if self.statistic == "k1":
            if (self.low or 0) > 1 or (self.high or 1) < 1:
                raise ValueError(
                    f"the bounds of k1 are ratios w, and w is 1 where engine and trainer agree: low ({self.low}) must "
                    f"not be above 1, and high ({self.high}) must not be below 1"
                )
        elif self.low is not None:
            raise ValueError(
                f"low is for k1 only: {self.statistic} has no lower bound, because it is 0 where engine and trainer "
                "agree; give high"
            )
        return self


class CorrectionConfig(Section):
    """Importance correction between engine and trainer: weights, rejection, or both. The denominators of the loss are
    counted before it, so rejected tokens leave the numerators only."""

    weight: Annotated[WeightConfig | None, default_kind("truncate")] = TruncatedWeight()
    """The importance weight by which the policy loss of a token is multiplied; null means the weight 1."""
    reject: tuple[Rejection, ...] = ()
    """The rules of rejection. A token that any of them rejects has no policy loss."""

    @model_validator(mode="before")
    @classmethod
    def _one_form(cls, value: Any) -> Any:
        old = {"kind", "level", "cap", "low", "high", "normalise", "veto", "off_policy_kl"}
        if isinstance(value, Mapping) and value.keys() & old:
            raise ValueError(
                f"the keys {', '.join(sorted(value.keys() & old))} are directly under correction, which has two parts, "
                f"weight and reject; write correction: {_two_parts(value)}"
            )
        return value

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.weight is None and not self.reject:
            raise ValueError("there is neither a weight nor a rejection; set algorithm.correction to null")
        names = [rule.name for rule in self.reject]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise ValueError(f"reject has two rules {twice}; put their bounds, low and high, into one rule")
        return self


def _two_parts(value: Mapping[str, Any]) -> str:
    """The YAML with `weight` and `reject` that has the meaning of the keys directly under correction."""
    reject = []
    if value.get("veto") is not None:
        reject.append(f"{{level: sequence, statistic: k1, over: max, low: {value['veto']}}}")
    bound = value.get("off_policy_kl")
    if bound is not None:
        low = f"{math.exp(-bound):.3g}" if isinstance(bound, int | float) else "exp(-off_policy_kl)"
        reject.append(
            f"{{level: sequence, statistic: k1, over: mean, low: {low}, policy: current, only_negative: true}}"
        )
    inside = [f"{key}: {value[key]}" for key in ("kind", "level", "cap", "low", "high") if key in value]
    inside += [f"normalise: {str(value['normalise']).lower()}"] if "normalise" in value else []
    parts = [f"weight: {{{', '.join(inside)}}}"] if inside else []
    parts += [f"reject: [{', '.join(reject)}]"] if reject else []
    return f"{{{', '.join(parts)}}}"


class FixedCoefficient(Method):
    """A coefficient that does not change."""

    formula: ClassVar[str] = "value"
    source: ClassVar[str] = ""

    kind: Literal["fixed"] = "fixed"
    value: Annotated[float, Field(ge=0)]
    """The coefficient."""


class AdaptiveKlCoefficient(Method):
    """A proportional controller that brings the KL to a target (Ziegler et al. 2019)."""

    formula: ClassVar[str] = "coef <- coef (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon)"
    source: ClassVar[str] = "arXiv:1909.08593 section 2.2"

    kind: Literal["adaptive"] = "adaptive"
    initial: PositiveFloat = 0.05
    """The coefficient at the beginning of the run."""
    target: PositiveFloat
    """The target KL in nats, as a mean over action tokens."""
    horizon: PositiveInt = 10_000
    """The number of samples in which the coefficient can change by about 20 % at most."""


class AdaptiveEntropyCoefficient(Method):
    """A controller whose coefficient rises while the entropy is below its target. Above the target it falls, and the
    bonus is switched off (He et al. 2025)."""

    formula: ClassVar[str] = (
        "c <- min(c + delta, maximum) if entropy < target, else max(c - delta, 0); coef = c while entropy <= target, "
        "else 0"
    )
    source: ClassVar[str] = "Skywork-OR1, arXiv:2505.22312"

    kind: Literal["adaptive"] = "adaptive"
    initial: Annotated[float, Field(ge=0)] = 0.0
    """The coefficient at the beginning of the run."""
    target: PositiveFloat = 0.2
    """The target entropy in nats, as a mean over action tokens."""
    delta: PositiveFloat = 5e-3
    """The change of the coefficient in each step."""
    maximum: PositiveFloat = 0.1
    """The largest coefficient."""


class KlConfig(Section):
    """A penalty for the KL divergence from the reference policy, which has the weights that the run began with."""

    estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """The estimate of the KL from one sampled token (Schulman 2020): k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d,
    abs = |d|, with d = log pi - log pi_ref."""
    cap: PositiveFloat | None = 10.0
    """The largest value of k3, because one token could otherwise outweigh all others; null means no cap. A token whose
    k3 exceeds the cap counts with the cap and has the gradient 0. At the cap 10 these are tokens with d < -2.61 (14
    times less probable than under the reference) or d > 11, and the gradient of the others, 1 - exp(-d), is never below
    -12.6. With straight_through the gradient is d, whatever the cap is. k1, k2 and abs grow slowly and have no cap."""
    straight_through: bool = False
    """true: the value is the estimator's, but the gradient is that of k2, whose expectation on policy is the gradient
    of the true KL. false: value and gradient are the estimator's."""
    place: Literal["loss", "reward"] = "loss"
    """Whether the KL is added to the loss or subtracted from the reward."""
    coefficient: Annotated[FixedCoefficient | AdaptiveKlCoefficient, Field(discriminator="kind")] = FixedCoefficient(
        value=1e-3
    )
    """The factor of the KL: a fixed one, or one that adapts to a target KL."""

    @model_validator(mode="after")
    def _gradients(self) -> Self:
        if self.place == "loss" and self.estimator == "k1" and not self.straight_through:
            raise ValueError(
                "k1 in the loss has no effect: the expectation of its gradient, grad log pi, is zero; use k2 or k3, or "
                "set straight_through to true"
            )
        if "cap" in self.model_fields_set and self.cap is not None and self.estimator != "k3":
            raise ValueError(f"cap is for k3 only, but the estimator is {self.estimator}; leave cap out")
        if self.place == "reward" and self.straight_through:
            raise ValueError("straight_through changes a gradient, but a KL in the reward has none; set it to false")
        if self.estimator == "k2" and self.straight_through:
            raise ValueError("straight_through replaces the gradient by that of k2, which k2 has; set it to false")
        return self


KL_ESTIMATORS = {
    "k1": "d",
    "k2": "d^2 / 2",
    "k3": "min(exp(-d) - 1 + d, cap)",
    "abs": "|d|",
}


class EntropyConfig(Section):
    """A bonus for the entropy of the policy's next-token distribution."""

    coefficient: Annotated[FixedCoefficient | AdaptiveEntropyCoefficient, Field(discriminator="kind")]
    """The factor of the entropy: a fixed one, or one that adapts to a target entropy."""


class AlgorithmConfig(Section):
    shaping: tuple[ShapingConfig, ...] = ()
    """The changes that are made to the rewards for training, in this order. Evaluations see the original rewards."""
    adv_estimator: Annotated[AdvantageConfig, default_kind("grpo")] = GrpoAdvantage()
    """How advantages are computed from rewards."""
    loss: Annotated[LossConfig, default_kind("dual_clip")] = DualClipLoss()
    """The policy loss of a token."""
    loss_agg_mode: Aggregation | None = None
    """How the losses of the tokens become one number. The denominators are those of the whole mini-batch. null means
    the aggregation of the loss's paper (`aggregation` in the table of losses)."""
    loss_agg_tokens: PositiveInt | None = None
    """The constant length L, in tokens, of seq-mean-token-sum-norm, for example rollout.max_response_tokens. null is
    right for every other aggregation."""
    correction: CorrectionConfig | None = CorrectionConfig()
    """The importance correction between engine and trainer; null means none."""
    kl: KlConfig | None = None
    """The penalty for the KL divergence from the reference policy; null means none, and no reference policy is kept."""
    entropy: EntropyConfig | None = None
    """The entropy bonus; null means none."""
    top_entropy_share: Share = 1.0
    """The share of the mini-batch's action tokens that have a policy loss: those of highest entropy (Wang et al. 2025,
    arXiv:2506.01939, has 0.2). 1 means all tokens."""
    drop_zero_signal: bool = True
    """true: groups whose advantages are all 0 leave the step, and a metric counts them. For most estimators these are
    the groups with equal rewards. false: they stay in the denominators."""
    overlong_filter: bool = False
    """true: answers that the length budget cut leave the step, and a metric counts them. Their rewards stay in the
    statistics of their groups (DAPO, arXiv:2503.14476, section 3.4). They leave before the denominators are counted, so
    the other answers weigh as much as they would without them. An answer whose thought the thinking budget cut stays,
    if the answer itself ended within its budget. false: such answers stay."""
    updates_per_step: PositiveInt = 1
    """The number of mini-batches into which a step's samples are split; each gives one optimizer step. With one update
    there is no forward pass before it, unless the loss needs statistics of the whole mini-batch."""
    max_mismatch: Annotated[float, Field(gt=0)] = 1e-2
    """The run stops if the mean of |logp_old - logp_rollout| over the action tokens, in nats, exceeds this bound,
    because the engine then does not hold the trainer's weights. Tiny models showed 2e-7 in fp32 and 8e-3 in bf16 (one
    run), so a bf16 run may need a larger bound."""

    @property
    def aggregation(self) -> Aggregation:
        """`loss_agg_mode` if it is given, else the aggregation of the loss's paper."""
        return self.loss_agg_mode or self.loss.aggregation

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        loss, correction = self.loss, self.correction
        if (self.loss_agg_mode == "seq-mean-token-sum-norm") != (self.loss_agg_tokens is not None):
            raise ValueError(
                "loss_agg_tokens is the constant length of loss_agg_mode seq-mean-token-sum-norm: give both or neither"
            )
        if isinstance(loss, SEQUENCE_LOSSES):
            masks: list[MaskedWeight | Rejection] = list(correction.reject) if correction else []
            if correction and isinstance(correction.weight, MaskedWeight):
                masks.append(correction.weight)
            if any(mask.level != "sequence" for mask in masks):
                raise ValueError(
                    f"loss {loss.kind} has one ratio for each sample, and a correction that masks parts of a sample "
                    "contradicts it; set the level of correction.weight of kind mask, and of every rule of "
                    "correction.reject, to sequence"
                )
            if self.top_entropy_share < 1:
                raise ValueError(
                    f"top_entropy_share masks single tokens, but loss {loss.kind} applies to whole samples; set it to 1"
                )
        if any(isinstance(shaping, CosineShaping) for shaping in self.shaping[1:]):
            raise ValueError("shaping cosine replaces the reward and would undo the shaping before it; put it first")
        if self.shaping and "reward_parts" in self.adv_estimator.needs:
            raise ValueError(
                f"shaping changes the sum of the rewards, but adv_estimator {self.adv_estimator.kind} uses the "
                "separate rewards; remove one of the two"
            )
        if isinstance(loss, BEHAVIOUR_LOSSES) and correction:
            raise ValueError(
                f"loss {loss.kind} contains the importance weight of the engine's policy, and a correction would apply "
                "it twice; set algorithm.correction to null"
            )
        return self
