"""Losses, aggregation, importance correction, KL and entropy: unions by `kind`.

Each section names its formula and its source; `tools/algorithms.py` prints them as a table. Combinations that mean
nothing are refused here, with the reason.

Symbols of the formulas: r = pi / pi_old of a token, w = pi_old / pi_engine, A its advantage, sg stops the gradient,
s the geometric mean of r over a sample's actions, eps_low and eps_high the clip ratios, d = log pi - log pi_ref.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.advantages import AdvantageConfig, CosineShaping, GrpoAdvantage, ShapingConfig
from megatron_rl.config.section import Section, default_kind

Share = Annotated[float, Field(gt=0, le=1)]
LowerClip = Annotated[float, Field(gt=0, lt=1)]


class DualClipLoss(Section):
    """PPO's clipped objective (Schulman et al. 2017) with a bound for A < 0 (Ye et al. 2020)."""

    formula: ClassVar[str] = "max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)); for A < 0 the smaller of that and -A c"
    source: ClassVar[str] = "arXiv:1707.06347, arXiv:1912.09729 eq. 5"

    kind: Literal["dual_clip"] = "dual_clip"
    clip_ratio_low: LowerClip = 0.2
    clip_ratio_high: PositiveFloat = 0.2
    clip_ratio_c: Annotated[float, Field(gt=1)] = 3.0
    """For A < 0 no token costs more than c |A|."""


class GspoLoss(Section):
    """Group sequence policy optimisation (Zheng et al. 2025): one ratio a sample, clipped as a whole."""

    formula: ClassVar[str] = "max(-A q, -A clip(q, 1 - eps_low, 1 + eps_high)), q = sg(s) pi / sg(pi)"
    source: ClassVar[str] = "arXiv:2507.18071 (GSPO-token)"

    kind: Literal["gspo"] = "gspo"
    clip_ratio_low: LowerClip = 3e-4
    clip_ratio_high: PositiveFloat = 4e-4


class GmpoLoss(Section):
    """Geometric-mean policy optimisation (Zhao et al. 2025): clipped log-ratios, their mean over the sample."""

    formula: ClassVar[str] = (
        "-A exp(mean over the sample of l), l the one of log r and clip(log r, -eps_low, eps_high) with the smaller A l"
    )
    source: ClassVar[str] = "arXiv:2507.20673"

    kind: Literal["gmpo"] = "gmpo"
    clip_ratio_low: PositiveFloat = 0.4
    """Of the log-ratio: r is clipped at exp(-clip_ratio_low)."""
    clip_ratio_high: PositiveFloat = 0.4


class CispoLoss(Section):
    """Clipped importance weights, unclipped gradients (MiniMax 2025)."""

    formula: ClassVar[str] = "-sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi"
    source: ClassVar[str] = "arXiv:2506.13585"

    kind: Literal["cispo"] = "cispo"
    clip_ratio_low: Annotated[float, Field(gt=0, le=1)] = 1.0
    """1 is no lower clip, as the paper has it."""
    clip_ratio_high: PositiveFloat = 0.2


class SapoLoss(Section):
    """Soft adaptive policy optimisation (Gao et al. 2025): a sigmoid gate in place of the clip."""

    formula: ClassVar[str] = "-A (4 / tau) sigmoid(tau (r - 1)), tau = tau_pos for A > 0, else tau_neg"
    source: ClassVar[str] = "arXiv:2511.20347"

    kind: Literal["sapo"] = "sapo"
    tau_pos: PositiveFloat = 1.0
    tau_neg: PositiveFloat = 1.05


class ReinforceLoss(Section):
    """Policy gradient without ratio (Williams 1992): on policy only, so one update a step."""

    formula: ClassVar[str] = "-A log pi"
    source: ClassVar[str] = "Williams 1992, Machine Learning 8"

    kind: Literal["reinforce"] = "reinforce"


class GpgLoss(Section):
    """Group policy gradient (Chu et al. 2025): REINFORCE's loss, meant for the advantages of `gpg`."""

    formula: ClassVar[str] = "-A log pi"
    source: ClassVar[str] = "arXiv:2504.02546"

    kind: Literal["gpg"] = "gpg"


class ClipCovLoss(Section):
    """PPO's clip, and no gradient for a few random tokens of high covariance (Cui et al. 2025)."""

    formula: ClassVar[str] = (
        "max(-A r, -A clip(r)), 0 for `share` of all tokens drawn from cov_low < cov < cov_high, "
        "cov = (log pi - mean)(A - mean) over the mini-batch"
    )
    source: ClassVar[str] = "arXiv:2505.22617 (Clip-Cov)"

    kind: Literal["clip_cov"] = "clip_cov"
    clip_ratio_low: LowerClip = 0.2
    clip_ratio_high: PositiveFloat = 0.2
    share: Share = 2e-4
    """Of the mini-batch's action tokens, at least one."""
    cov_low: float = 1.0
    cov_high: float = 5.0

    @model_validator(mode="after")
    def _bounds(self):
        if self.cov_low >= self.cov_high:
            raise ValueError(f"cov_low ({self.cov_low}) must be below cov_high ({self.cov_high})")
        return self


class KlCovLoss(Section):
    """The plain ratio, and a KL penalty for the tokens of highest covariance (Cui et al. 2025)."""

    formula: ClassVar[str] = "-A r, plus coef |log r| for the `share` of tokens with the largest cov (see clip_cov)"
    source: ClassVar[str] = "arXiv:2505.22617 (KL-Cov)"

    kind: Literal["kl_cov"] = "kl_cov"
    share: Share = 2e-4
    """Of the mini-batch's action tokens, at least one."""
    coef: PositiveFloat = 1.0


class DppoTvLoss(Section):
    """Divergence PPO (Qi et al. 2026): a trust region in probability, not in ratio, around the sampling policy."""

    formula: ClassVar[str] = (
        "-sg(min(pi / mu, c)) A log pi, mu the engine's; 0 where A > 0 and pi - mu > high, or A < 0 and mu - pi > low"
    )
    source: ClassVar[str] = "arXiv:2602.04879"

    kind: Literal["dppo_tv"] = "dppo_tv"
    low: LowerClip = 0.15
    high: LowerClip = 0.15
    c: PositiveFloat = 20.0


class DppoKlLoss(Section):
    """As dppo_tv, with the KL divergence of the two-outcome distributions (this token, any other)."""

    formula: ClassVar[str] = "as dppo_tv; 0 where the binary KL(mu || pi) exceeds the bound and r moves further away"
    source: ClassVar[str] = "arXiv:2602.04879"

    kind: Literal["dppo_kl"] = "dppo_kl"
    low: PositiveFloat = 0.05
    high: PositiveFloat = 0.05
    c: PositiveFloat = 20.0


class DecoupledLoss(Section):
    """Decoupled PPO (Hilton et al. 2022): clip around a proximal policy p, weigh by p over the behaviour policy mu.

    interpolated: log p = log mu + a (log pi - log mu), a = lag / (lag + 1), from the versions of the tokens; saves
    the forward pass of log pi_old (AReaL's proximal approximation)."""

    formula: ClassVar[str] = "dual_clip with r = pi / p, times sg(min(p / mu, cap)); mu the engine's policy"
    source: ClassVar[str] = "arXiv:2110.00641, arXiv:2505.24298"

    kind: Literal["decoupled"] = "decoupled"
    clip_ratio_low: LowerClip = 0.2
    clip_ratio_high: PositiveFloat = 0.2
    clip_ratio_c: Annotated[float, Field(gt=1)] = 3.0
    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    """recomputed: p is the policy at the step's start."""
    cap: Annotated[float, Field(ge=1)] = 5.0
    """Bound of the weight p / mu."""


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
"""One ratio a sample."""
BEHAVIOUR_LOSSES = (DppoTvLoss, DppoKlLoss, DecoupledLoss)
"""Their own weights correct from the engine's policy."""

Aggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"
]
AGGREGATIONS: dict[Aggregation, tuple[str, str]] = {
    "token-mean": ("1 / N, N all action tokens", "DAPO, arXiv:2503.14476"),
    "seq-mean-token-sum": ("1 / S, S all samples", "REINFORCE on sequences"),
    "seq-mean-token-mean": ("1 / (S n), n the sample's action tokens", "GRPO, arXiv:2402.03300"),
    "seq-mean-token-sum-norm": ("1 / (S L), L = loss_agg_tokens", "Dr. GRPO, arXiv:2503.20783"),
    "prompt-mean": ("1 / (P n), P all prompts, n the prompt's action tokens", "ScaleRL, arXiv:2510.13786"),
}
"""Weight of an action token's loss, and source."""


class _Correction(Section):
    level: Literal["token", "segment", "sequence"] = "token"
    """What shares one ratio: a token; a run of actions between forced tokens (a turn, a thought, an answer); a
    sample. Beyond the token it is the geometric mean, so that long answers do not collapse."""
    veto: Share | None = None
    """A sample with any token ratio below it leaves the loss: the engine sampled what the trainer thinks
    impossible. null is no veto."""
    off_policy_kl: PositiveFloat | None = None
    """A sample with A < 0 whose mean log(pi_engine / pi) exceeds it leaves the loss (DeepSeek-V3.2)."""
    normalise: bool = False
    """Divide the weights by their mean over the mini-batch's action tokens."""


class TruncatedCorrection(_Correction):
    """Truncated importance sampling (Ionides 2008; Yao et al. 2025)."""

    formula: ClassVar[str] = "min(w, cap)"
    source: ClassVar[str] = "Ionides 2008, JCGS 17"

    kind: Literal["truncate"] = "truncate"
    cap: Annotated[float, Field(ge=1)] = 2.0


class MaskedCorrection(_Correction):
    """IcePop (Ling team 2025): tokens whose ratio leaves the band leave the loss."""

    formula: ClassVar[str] = "w if low <= w <= high, else 0"
    source: ClassVar[str] = "IcePop, arXiv:2510.18855"

    kind: Literal["mask"] = "mask"
    low: Annotated[float, Field(gt=0, lt=1)] = 0.5
    high: Annotated[float, Field(gt=1)] = 5.0


class ClippedCorrection(_Correction):
    """Importance weights clipped on both sides."""

    formula: ClassVar[str] = "clip(w, low, high)"
    source: ClassVar[str] = "both-sided form of truncated importance sampling"

    kind: Literal["clip"] = "clip"
    low: Annotated[float, Field(gt=0, lt=1)] = 0.5
    high: Annotated[float, Field(gt=1)] = 2.0


CorrectionConfig = Annotated[TruncatedCorrection | MaskedCorrection | ClippedCorrection, Field(discriminator="kind")]


class FixedCoefficient(Section):
    formula: ClassVar[str] = "value"
    source: ClassVar[str] = ""

    kind: Literal["fixed"] = "fixed"
    value: Annotated[float, Field(ge=0)]


class AdaptiveKlCoefficient(Section):
    """Proportional controller towards a target KL (Ziegler et al. 2019)."""

    formula: ClassVar[str] = "coef <- coef (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon)"
    source: ClassVar[str] = "arXiv:1909.08593 section 2.2"

    kind: Literal["adaptive"] = "adaptive"
    initial: PositiveFloat = 0.05
    target: PositiveFloat
    """Mean KL of an action token."""
    horizon: PositiveInt = 10_000
    """In samples."""


class AdaptiveEntropyCoefficient(Section):
    """Raised while the entropy is below its target, lowered above it, where it has no effect (He et al. 2025)."""

    formula: ClassVar[str] = (
        "c <- c + delta if entropy < target, else max(c - delta, 0); coef = c while entropy <= target"
    )
    source: ClassVar[str] = "Skywork-OR1, arXiv:2505.22312"

    kind: Literal["adaptive"] = "adaptive"
    initial: Annotated[float, Field(ge=0)] = 0.0
    target: PositiveFloat = 0.2
    """In nats, mean of an action token."""
    delta: PositiveFloat = 5e-3
    maximum: PositiveFloat = 0.1


class KlConfig(Section):
    """Penalty for the distance to the reference policy: the weights that the run began with."""

    estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Schulman 2020. k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, abs = |d|, d = log pi - log pi_ref."""
    straight_through: bool = False
    """The estimator's value with k2's gradient, which is that of the true KL on policy."""
    place: Literal["loss", "reward"] = "loss"
    coefficient: Annotated[FixedCoefficient | AdaptiveKlCoefficient, Field(discriminator="kind")] = FixedCoefficient(
        value=1e-3
    )

    @model_validator(mode="after")
    def _gradients(self):
        if self.place == "loss" and self.estimator == "k1" and not self.straight_through:
            raise ValueError(
                "k1 in the loss pulls nowhere: the expectation of its gradient, grad log pi, is zero; use k2 or k3, or "
                "set straight_through to true"
            )
        if self.place == "reward" and self.straight_through:
            raise ValueError("straight_through is about a gradient, and a KL in the reward has none; set it to false")
        if self.estimator == "k2" and self.straight_through:
            raise ValueError("straight_through replaces a gradient by that of k2, which k2 has; set it to false")
        return self


KL_ESTIMATORS = {
    "k1": "d",
    "k2": "d^2 / 2",
    "k3": "exp(-d) - 1 + d",
    "abs": "|d|",
}


class EntropyConfig(Section):
    """Bonus for the entropy of the policy's next-token distribution."""

    coefficient: Annotated[FixedCoefficient | AdaptiveEntropyCoefficient, Field(discriminator="kind")]


class AlgorithmConfig(Section):
    shaping: tuple[ShapingConfig, ...] = ()
    """What the reward becomes in training, in this order; evaluations see the plain reward."""
    adv_estimator: Annotated[AdvantageConfig, default_kind("grpo")] = GrpoAdvantage()
    loss: Annotated[LossConfig, default_kind("dual_clip")] = DualClipLoss()
    loss_agg_mode: Aggregation = "token-mean"
    """How token losses become one number; the denominators are those of the whole mini-batch."""
    loss_agg_tokens: PositiveInt | None = None
    """The constant length L of seq-mean-token-sum-norm, for example the longest response."""
    correction: Annotated[CorrectionConfig | None, default_kind("truncate")] = TruncatedCorrection()
    """Importance correction between engine and trainer; null for none."""
    kl: KlConfig | None = None
    entropy: EntropyConfig | None = None
    top_entropy_share: Share = 1.0
    """Only this share of the mini-batch's action tokens, those of highest entropy, has a policy loss (Wang et al.
    2025, arXiv:2506.01939: 0.2). 1 is all."""
    drop_zero_signal: bool = True
    """Groups whose advantages are all 0 leave the step (counted): for most estimators, those with equal rewards."""
    updates_per_step: PositiveInt = 1
    """Mini-batches, one optimizer step each, that a step's samples are split into."""
    max_mismatch: Annotated[float, Field(gt=0)] = 1e-2
    """The run stops when mean |logp_old - logp_rollout| exceeds it: the engine does not hold the
    trainer's weights. Seen with tiny models: 2e-7 in fp32, 8e-3 in bf16 (one run): a bf16 run may need more."""

    @model_validator(mode="after")
    def _combinations(self):
        loss, correction = self.loss, self.correction
        if (self.loss_agg_mode == "seq-mean-token-sum-norm") != (self.loss_agg_tokens is not None):
            raise ValueError(
                "loss_agg_tokens is the constant length of loss_agg_mode seq-mean-token-sum-norm: give both or neither"
            )
        if isinstance(loss, SEQUENCE_LOSSES):
            if correction and correction.kind == "mask" and correction.level == "token":
                raise ValueError(
                    f"loss {loss.kind} has one ratio a sample, a correction that masks single tokens contradicts it; "
                    "set correction.level to sequence"
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
