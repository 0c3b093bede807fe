"""Losses, aggregation, importance correction, KL and entropy: unions by `kind`.

Each section names its formula and its source, a loss also the aggregation of its paper; `tools/algorithms.py` prints
them as a table. Combinations that mean nothing are refused here, with the reason.

The symbols of the formulas: r = pi / pi_old of a token, w = pi_old / pi_engine, A its advantage, sg stops the gradient,
s is the geometric mean of r over a sample's actions, eps_low and eps_high are the clip ratios, d = log pi - log pi_ref.
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
    """PPO's clipped objective (Schulman et al. 2017) with a bound for A < 0 (Ye et al. 2020)."""

    formula: ClassVar[str] = (
        "max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)); for A < 0 the smaller of that and -A c; c null: without"
    )
    source: ClassVar[str] = "arXiv:1707.06347, arXiv:1912.09729 eq. 5"
    aggregation: ClassVar[Aggregation] = "token-mean"

    kind: Literal["dual_clip"] = "dual_clip"
    clip_ratio_low: LowerClip = 0.2
    clip_ratio_high: PositiveFloat = 0.2
    clip_ratio_c: DualClipBound | None = 3.0
    """For A < 0 no token costs more than c |A|; null is plain PPO, without this bound."""


class GspoLoss(Method):
    """Group sequence policy optimisation (Zheng et al. 2025): one ratio a sample, clipped as a whole."""

    formula: ClassVar[str] = "max(-A q, -A clip(q, 1 - eps_low, 1 + eps_high)), q = sg(s) pi / sg(pi)"
    source: ClassVar[str] = "arXiv:2507.18071 (GSPO-token)"
    aggregation: ClassVar[Aggregation] = "seq-mean-token-mean"

    kind: Literal["gspo"] = "gspo"
    clip_ratio_low: LowerClip = 3e-4
    clip_ratio_high: PositiveFloat = 4e-4


class GmpoLoss(Method):
    """Geometric-mean policy optimisation (Zhao et al. 2025): clipped log-ratios, their mean over the sample."""

    formula: ClassVar[str] = (
        "-A exp(mean over the sample of l), l the one of log r and clip(log r, -eps_low, eps_high) with the smaller A l"
    )
    source: ClassVar[str] = "arXiv:2507.20673"
    aggregation: ClassVar[Aggregation] = "seq-mean-token-mean"

    kind: Literal["gmpo"] = "gmpo"
    clip_ratio_low: PositiveFloat = 0.4
    """The bound of the log-ratio: r is clipped at exp(-clip_ratio_low)."""
    clip_ratio_high: PositiveFloat = 0.4


class CispoLoss(Method):
    """CISPO (MiniMax 2025): importance weights are clipped, and no token loses its gradient."""

    formula: ClassVar[str] = "-sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi"
    source: ClassVar[str] = "arXiv:2506.13585"
    aggregation: ClassVar[Aggregation] = "token-mean"

    kind: Literal["cispo"] = "cispo"
    clip_ratio_low: Annotated[float, Field(gt=0, le=1)] = 1.0
    """At 1 there is no lower clip, as in the paper."""
    clip_ratio_high: PositiveFloat = 0.2


class SapoLoss(Method):
    """Soft adaptive policy optimisation (Gao et al. 2025): a sigmoid gate in place of the clip."""

    formula: ClassVar[str] = "-A (4 / tau) sigmoid(tau (r - 1)), tau = tau_pos for A > 0, else tau_neg"
    source: ClassVar[str] = "arXiv:2511.20347"
    aggregation: ClassVar[Aggregation] = "seq-mean-token-mean"

    kind: Literal["sapo"] = "sapo"
    tau_pos: PositiveFloat = 1.0
    tau_neg: PositiveFloat = 1.05


class ReinforceLoss(Method):
    """The policy gradient without a ratio (Williams 1992). It is right on policy alone: use one update a step."""

    formula: ClassVar[str] = "-A log pi"
    source: ClassVar[str] = "Williams 1992, Machine Learning 8"
    aggregation: ClassVar[Aggregation] = "seq-mean-token-sum"

    kind: Literal["reinforce"] = "reinforce"


class GpgLoss(Method):
    """Group policy gradient (Chu et al. 2025): it has REINFORCE's loss, and is meant for the advantages of `gpg`."""

    formula: ClassVar[str] = "-A log pi"
    source: ClassVar[str] = "arXiv:2504.02546"
    aggregation: ClassVar[Aggregation] = "token-mean"

    kind: Literal["gpg"] = "gpg"


class ClipCovLoss(Method):
    """PPO's clip, and no gradient for a few random tokens of high covariance (Cui et al. 2025)."""

    formula: ClassVar[str] = (
        "max(-A r, -A clip(r)), 0 for `share` of all tokens drawn from cov_low < cov < cov_high, "
        "cov = (log pi - mean)(A - mean) over the mini-batch"
    )
    source: ClassVar[str] = "arXiv:2505.22617 (Clip-Cov)"
    aggregation: ClassVar[Aggregation] = "token-mean"

    kind: Literal["clip_cov"] = "clip_cov"
    clip_ratio_low: LowerClip = 0.2
    clip_ratio_high: PositiveFloat = 0.2
    share: Share = 2e-4
    """Which share of the mini-batch's action tokens is chosen; at least one token is."""
    cov_low: float = 1.0
    cov_high: float = 5.0

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.cov_low >= self.cov_high:
            raise ValueError(f"cov_low ({self.cov_low}) must be below cov_high ({self.cov_high})")
        return self


class KlCovLoss(Method):
    """The plain ratio, and a KL penalty for the tokens of highest covariance (Cui et al. 2025)."""

    formula: ClassVar[str] = "-A r, plus coef |log r| for the `share` of tokens with the largest cov (see clip_cov)"
    source: ClassVar[str] = "arXiv:2505.22617 (KL-Cov)"
    aggregation: ClassVar[Aggregation] = "token-mean"

    kind: Literal["kl_cov"] = "kl_cov"
    share: Share = 2e-4
    """Which share of the mini-batch's action tokens is chosen; at least one token is."""
    coef: PositiveFloat = 1.0


class DppoTvLoss(Method):
    """Divergence PPO (Qi et al. 2026): a trust region in probability, not in ratio, around the sampling policy."""

    formula: ClassVar[str] = (
        "-sg(min(pi / mu, c)) A log pi, mu the engine's; 0 where A > 0 and pi - mu > high, or A < 0 and mu - pi > low"
    )
    source: ClassVar[str] = "arXiv:2602.04879"
    aggregation: ClassVar[Aggregation] = "token-mean"

    kind: Literal["dppo_tv"] = "dppo_tv"
    low: LowerClip = 0.15
    high: LowerClip = 0.15
    c: PositiveFloat = 20.0


class DppoKlLoss(Method):
    """As dppo_tv, with the KL divergence of the two-outcome distributions (this token, any other)."""

    formula: ClassVar[str] = "as dppo_tv; 0 where the binary KL(mu || pi) exceeds the bound and r moves further away"
    source: ClassVar[str] = "arXiv:2602.04879"
    aggregation: ClassVar[Aggregation] = "token-mean"

    kind: Literal["dppo_kl"] = "dppo_kl"
    low: PositiveFloat = 0.05
    high: PositiveFloat = 0.05
    c: PositiveFloat = 20.0


class DecoupledLoss(Method):
    """Decoupled PPO (Hilton et al. 2022): clip around a proximal policy p, weigh by p over the behaviour policy mu.

    interpolated: log p = log mu + a (log pi - log mu) with a = lag / (lag + 1), from the versions of the tokens. It
    saves the forward pass for log pi_old (AReaL's proximal approximation)."""

    formula: ClassVar[str] = "dual_clip with r = pi / p, times sg(min(p / mu, cap)); mu the engine's policy"
    source: ClassVar[str] = "arXiv:2110.00641, arXiv:2505.24298"
    aggregation: ClassVar[Aggregation] = "token-mean"

    kind: Literal["decoupled"] = "decoupled"
    clip_ratio_low: LowerClip = 0.2
    clip_ratio_high: PositiveFloat = 0.2
    clip_ratio_c: DualClipBound | None = 3.0
    """As for dual_clip; null is without this bound."""
    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    """recomputed: p is the policy at the step's start. interpolated: see above."""
    cap: Annotated[float, Field(ge=1)] = 5.0
    """The bound of the weight p / mu."""


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
"""Losses that weigh by the engine's policy themselves, so that no correction may be added."""

AGGREGATIONS: dict[Aggregation, tuple[str, str]] = {
    "token-mean": ("1 / N, N all action tokens", "DAPO, arXiv:2503.14476"),
    "seq-mean-token-sum": ("1 / S, S all samples", "REINFORCE on sequences"),
    "seq-mean-token-mean": ("1 / (S n), n the sample's action tokens", "GRPO, arXiv:2402.03300"),
    "seq-mean-token-sum-norm": ("1 / (S L), L = loss_agg_tokens", "Dr. GRPO, arXiv:2503.20783"),
    "prompt-mean": ("1 / (P n), P all prompts, n the prompt's action tokens", "ScaleRL, arXiv:2510.13786"),
}
"""The weight of an action token's loss, and its source."""


Level = Literal["token", "segment", "sequence"]
"""What is weighed or judged as one. segment: a run of actions between forced tokens (a turn, a thought, an answer).
sequence: a sample."""


class _Weight(Method):
    level: Level = "token"
    """What shares one ratio w. Beyond the token it is the geometric mean over the actions, so that the ratio of a long
    answer does not collapse."""
    normalise: bool = False
    """The weights are divided by their mean over the mini-batch's action tokens, before any rejection. The mean needs
    the log-probs of the whole mini-batch before the update, and so a forward pass even if there is one update a
    step."""


class TruncatedWeight(_Weight):
    """Truncated importance sampling (Ionides 2008; Yao et al. 2025)."""

    formula: ClassVar[str] = "min(w, cap)"
    source: ClassVar[str] = "Ionides 2008, JCGS 17"

    kind: Literal["truncate"] = "truncate"
    cap: Annotated[float, Field(ge=1)] = 2.0


class MaskedWeight(_Weight):
    """IcePop (Ling team 2025): a ratio that leaves the band has the weight 0."""

    formula: ClassVar[str] = "w if low <= w <= high, else 0"
    source: ClassVar[str] = "IcePop, arXiv:2510.18855"

    kind: Literal["mask"] = "mask"
    low: Annotated[float, Field(gt=0, lt=1)] = 0.5
    high: Annotated[float, Field(gt=1)] = 5.0


class ClippedWeight(_Weight):
    """Importance weights that are clipped on both sides."""

    formula: ClassVar[str] = "clip(w, low, high)"
    source: ClassVar[str] = "both-sided form of truncated importance sampling"

    kind: Literal["clip"] = "clip"
    low: Annotated[float, Field(gt=0, lt=1)] = 0.5
    high: Annotated[float, Field(gt=1)] = 2.0


WeightConfig = Annotated[TruncatedWeight | MaskedWeight | ClippedWeight, Field(discriminator="kind")]

SCHULMAN = 'Schulman 2020, "Approximating KL divergence"'
STATISTICS = {
    "k1": ("-log w; its bounds are ratios: low <= w <= high (a sum is a product of w)", SCHULMAN),
    "k2": ("(log w)^2 / 2", SCHULMAN),
    "k3": ("w - 1 - log w", SCHULMAN),
    "binary_kl": ("max(KL(mu || pi), KL(pi || mu)) of the outcomes this token, any other", "arXiv:2602.04879"),
}
"""Statistics of a token by which it, its segment or its sample is rejected: formula and source."""


class Rejection(Section):
    """What is out of bounds has no policy loss (Liu et al. 2025, "When Speed Kills Stability"): a token; or the whole
    segment or sample, judged by the sum, the mean or the largest of its tokens' statistics.

    Example: {level: sequence, statistic: k1, over: mean, low: 0.99, high: 1.01} rejects samples by the geometric mean
    of w; {level: sequence, statistic: k1, over: max, low: 1.0e-4} rejects samples with any w below 1e-4."""

    level: Level
    statistic: Literal["k1", "k2", "k3", "binary_kl"]
    over: Literal["sum", "mean", "max"] | None = None
    """How the statistics of a segment's or sample's tokens become one number; it is left out for level token. max: one
    token out of bounds is enough, on either side."""
    low: PositiveFloat | None = None
    """For k1 alone: the lowest w that stays. Over a sum w is the product, over a mean the geometric mean of its
    tokens'."""
    high: PositiveFloat | None = None
    """The highest statistic that stays; for k1 the highest w."""
    policy: Literal["old", "current"] = "old"
    """The policy of the trainer that is compared with the engine's: the one at the step's start, or the one that is
    being updated."""
    only_negative: bool = False
    """Only tokens with A < 0 are rejected. Together with level sequence, statistic k1, over mean, policy current and
    low exp(-delta) it is the off-policy sequence masking of DeepSeek-V3.2."""

    @property
    def name(self) -> str:
        """The end of its metric's name, rejected/..."""
        extra = ["current"] * (self.policy == "current") + ["negative"] * self.only_negative
        return "_".join([self.level, *([self.over] if self.over else []), self.statistic, *extra])

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.level == "token" and self.over:
            raise ValueError(f"over: {self.over} is of a segment or a sequence, and the level is token; leave it out")
        if self.level != "token" and not self.over:
            raise ValueError(f"over is missing: a {self.level} is judged by the sum, mean or max of its tokens")
        if self.low is None and self.high is None:
            raise ValueError("a rejection needs a bound: give high, or for k1 low or both")
        if self.statistic == "k1":
            if (self.low or 0) > 1 or (self.high or 1) < 1:
                raise ValueError(
                    f"k1 has bounds of the ratio w, which is 1 where engine and trainer agree: low ({self.low}) must "
                    f"not be above 1, and high ({self.high}) not below"
                )
        elif self.low is not None:
            raise ValueError(f"low is of k1 alone: {self.statistic} is 0 where engine and trainer agree; give high")
        return self


class CorrectionConfig(Section):
    """Importance correction between engine and trainer: weights, rejection, or both. Denominators are counted
    before it: what is rejected leaves numerators only."""

    weight: Annotated[WeightConfig | None, default_kind("truncate")] = TruncatedWeight()
    """What the policy loss of a token is multiplied by; null is 1."""
    reject: tuple[Rejection, ...] = ()
    """A token stays if all of these let it stay."""

    @model_validator(mode="before")
    @classmethod
    def _one_form(cls, value: Any) -> Any:
        old = {"kind", "level", "cap", "low", "high", "normalise", "veto", "off_policy_kl"}
        if isinstance(value, Mapping) and value.keys() & old:
            raise ValueError(
                f"{', '.join(sorted(value.keys() & old))} stand directly under correction, which has two parts, weight "
                f"and reject; write correction: {_two_parts(value)}"
            )
        return value

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.weight is None and not self.reject:
            raise ValueError("there is neither a weight nor a rejection; set algorithm.correction to null")
        names = [rule.name for rule in self.reject]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise ValueError(f"reject has two rules {twice}; put their bounds, low and high, into one")
        return self


def _two_parts(value: Mapping[str, Any]) -> str:
    """The YAML that says by `weight` and `reject` what keys directly under correction would mean."""
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
    formula: ClassVar[str] = "value"
    source: ClassVar[str] = ""

    kind: Literal["fixed"] = "fixed"
    value: Annotated[float, Field(ge=0)]


class AdaptiveKlCoefficient(Method):
    """Proportional controller towards a target KL (Ziegler et al. 2019)."""

    formula: ClassVar[str] = "coef <- coef (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon)"
    source: ClassVar[str] = "arXiv:1909.08593 section 2.2"

    kind: Literal["adaptive"] = "adaptive"
    initial: PositiveFloat = 0.05
    target: PositiveFloat
    """The mean KL of an action token that is aimed at."""
    horizon: PositiveInt = 10_000
    """The number of samples over which the coefficient adapts."""


class AdaptiveEntropyCoefficient(Method):
    """The coefficient rises while the entropy is below its target. Above the target it falls, and has no effect (He et
    al. 2025)."""

    formula: ClassVar[str] = (
        "c <- c + delta if entropy < target, else max(c - delta, 0); coef = c while entropy <= target"
    )
    source: ClassVar[str] = "Skywork-OR1, arXiv:2505.22312"

    kind: Literal["adaptive"] = "adaptive"
    initial: Annotated[float, Field(ge=0)] = 0.0
    target: PositiveFloat = 0.2
    """The mean entropy of an action token that is aimed at, in nats."""
    delta: PositiveFloat = 5e-3
    maximum: PositiveFloat = 0.1


class KlConfig(Section):
    """Penalty for the distance to the reference policy: the weights that the run began with."""

    estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Schulman 2020. k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, abs = |d|, d = log pi - log pi_ref."""
    cap: PositiveFloat | None = 10.0
    """The largest value of k3, whose exponential lets one token outweigh all others; null is none. A token whose k3
    exceeds it counts with the cap and has the gradient 0: at 10 that is d < -2.61 (a token that has become 14 times
    rarer than under the reference) or d > 11; within the cap the gradient 1 - exp(-d) is never below -12.6. With
    straight_through the gradient is d, whatever the cap. k1, k2 and abs grow slowly and have no cap."""
    straight_through: bool = False
    """The estimator's value with k2's gradient, which is that of the true KL on policy."""
    place: Literal["loss", "reward"] = "loss"
    coefficient: Annotated[FixedCoefficient | AdaptiveKlCoefficient, Field(discriminator="kind")] = FixedCoefficient(
        value=1e-3
    )

    @model_validator(mode="after")
    def _gradients(self) -> Self:
        if self.place == "loss" and self.estimator == "k1" and not self.straight_through:
            raise ValueError(
                "k1 in the loss pulls nowhere: the expectation of its gradient, grad log pi, is zero; use k2 or k3, or "
                "set straight_through to true"
            )
        if "cap" in self.model_fields_set and self.cap is not None and self.estimator != "k3":
            raise ValueError(f"cap bounds the value of k3, and the estimator is {self.estimator}; leave cap out")
        if self.place == "reward" and self.straight_through:
            raise ValueError("straight_through is about a gradient, and a KL in the reward has none; set it to false")
        if self.estimator == "k2" and self.straight_through:
            raise ValueError("straight_through replaces a gradient by that of k2, which k2 has; set it to false")
        return self


KL_ESTIMATORS = {
    "k1": "d",
    "k2": "d^2 / 2",
    "k3": "min(exp(-d) - 1 + d, cap)",
    "abs": "|d|",
}


class EntropyConfig(Section):
    """Bonus for the entropy of the policy's next-token distribution."""

    coefficient: Annotated[FixedCoefficient | AdaptiveEntropyCoefficient, Field(discriminator="kind")]


class AlgorithmConfig(Section):
    shaping: tuple[ShapingConfig, ...] = ()
    """How the reward is changed for training, in this order; evaluations see the plain reward."""
    adv_estimator: Annotated[AdvantageConfig, default_kind("grpo")] = GrpoAdvantage()
    loss: Annotated[LossConfig, default_kind("dual_clip")] = DualClipLoss()
    loss_agg_mode: Aggregation | None = None
    """How token losses become one number; the denominators are those of the whole mini-batch. null: the one of
    the loss's paper (`aggregation` in the table of losses)."""
    loss_agg_tokens: PositiveInt | None = None
    """The constant length L of seq-mean-token-sum-norm, for example the longest response."""
    correction: CorrectionConfig | None = CorrectionConfig()
    """Importance correction between engine and trainer; null for none."""
    kl: KlConfig | None = None
    entropy: EntropyConfig | None = None
    top_entropy_share: Share = 1.0
    """Only this share of the mini-batch's action tokens, those of highest entropy, has a policy loss (Wang et al.
    2025, arXiv:2506.01939: 0.2). 1 is all."""
    drop_zero_signal: bool = True
    """Groups whose advantages are all 0 leave the step, and are counted: for most estimators, those with equal
    rewards."""
    overlong_filter: bool = False
    """Answers that the length budget cut leave the step, and are counted; their rewards stay in the statistics of their
    groups (DAPO, arXiv:2503.14476, section 3.4: overlong filtering). They leave before the denominators are counted, as
    in the implementations that mask their tokens: the others weigh what they would weigh without them. A thought that
    the thinking budget cut is not overlong if the answer after it ended by itself."""
    updates_per_step: PositiveInt = 1
    """The number of mini-batches, one optimizer step each, that a step's samples are split into. With one update no
    forward pass is made before it, unless the loss needs statistics of the whole mini-batch."""
    max_mismatch: Annotated[float, Field(gt=0)] = 1e-2
    """The run stops when mean |logp_old - logp_rollout| exceeds it: the engine does not hold the
    trainer's weights. Seen with tiny models: 2e-7 in fp32, 8e-3 in bf16 (one run): a bf16 run may need more."""

    @property
    def aggregation(self) -> Aggregation:
        """`loss_agg_mode` where it is given, else that of the loss's paper."""
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
                    f"loss {loss.kind} has one ratio a sample, a correction that masks parts of it contradicts it; "
                    "set the level of correction.weight of kind mask, and of every rule of correction.reject, to "
                    "sequence"
                )
            if self.top_entropy_share < 1:
                raise ValueError(
                    f"top_entropy_share masks single tokens, loss {loss.kind} is of whole samples; set it to 1"
                )
        if any(isinstance(shaping, CosineShaping) for shaping in self.shaping[1:]):
            raise ValueError(
                "shaping cosine takes the place of the reward and would undo what stands before it: put it first"
            )
        if self.shaping and "reward_parts" in self.adv_estimator.needs:
            raise ValueError(
                f"shaping acts on the sum of the rewards, adv_estimator {self.adv_estimator.kind} takes them apart; "
                "drop one of the two"
            )
        if isinstance(loss, BEHAVIOUR_LOSSES) and correction:
            raise ValueError(
                f"loss {loss.kind} weighs by the engine's policy itself, a correction would do it twice; set "
                "algorithm.correction to null"
            )
        return self
