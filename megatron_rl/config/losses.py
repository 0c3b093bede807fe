"""The policy losses of a token, and the aggregations of tokens to one number.

Each loss states its formula, its source, and the aggregation of its paper. The symbols, for one token: r = pi / pi_old,
A is the advantage, sg stops the gradient, s is the geometric mean of r over the sample's actions, eps_low and eps_high
are clip_ratio_low and clip_ratio_high.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from megatron_rl.config.function import FunctionPath
from megatron_rl.config.section import Method

Share = Annotated[float, Field(gt=0, le=1)]
LowerClip = Annotated[float, Field(gt=0, lt=1)]
DualClipBound = Annotated[float, Field(gt=1)]
Aggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"
]


class PolicyLoss(Method):
    """The base class of the losses. What the rest of the code must know about a loss stands here."""

    aggregation: ClassVar[Aggregation]
    """The aggregation of the loss's paper."""
    level: ClassVar[Literal["token", "sequence"]] = "token"
    """sequence: a sample has one ratio, so only whole samples may be masked."""
    chooses_tokens: ClassVar[bool] = False
    """Whether some tokens, chosen from the whole mini-batch, are treated differently (`algorithms.losses.SELECTIONS`).
    """
    clips_ratio: ClassVar[bool] = False
    """Whether the loss bounds pi / pi_old and nothing else, so that `algorithm.anchor` may choose another policy."""
    has_ratio: ClassVar[bool] = True
    """Whether the loss has a ratio to the policy that sampled or to pi_old, so that a sample may be trained on again
    after an update."""
    needs_reference: ClassVar[bool] = False
    """Whether the loss compares with the reference policy, even without `algorithm.kl`."""
    corrects: ClassVar[bool] = False
    """Whether the loss contains the importance weight of the engine's policy, so that no correction may be added."""

    @property
    def anchor(self) -> Literal["old", "engine"]:
        """The policy in the denominator of the ratio: pi_old, or the engine's policy, which needs no forward pass."""
        return "old"


class DualClipLoss(PolicyLoss):
    """PPO's clipped objective (Schulman et al. 2017), with an upper bound of the loss for A < 0 (Ye et al. 2020)."""

    formula: ClassVar[str] = (
        "max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)); for A < 0 at most -A c; c null: without this bound"
    )
    source: ClassVar[str] = "arXiv:1707.06347, arXiv:1912.09729 eq. 5"
    aggregation: ClassVar[Aggregation] = "token-mean"
    clips_ratio: ClassVar[bool] = True

    kind: Literal["dual_clip"] = "dual_clip"
    clip_ratio_low: LowerClip = 0.2
    """The ratio r is clipped from below at 1 - clip_ratio_low."""
    clip_ratio_high: PositiveFloat = 0.2
    """The ratio r is clipped from above at 1 + clip_ratio_high."""
    clip_ratio_c: DualClipBound | None = 3.0
    """The constant c: for A < 0 the loss of a token is at most c |A|. null means plain PPO, without this bound."""


class GspoLoss(PolicyLoss):
    """Group sequence policy optimisation (Zheng et al. 2025): a sample has one ratio, which is clipped as a whole."""

    formula: ClassVar[str] = "max(-A q, -A clip(q, 1 - eps_low, 1 + eps_high)), q = sg(s) pi / sg(pi)"
    source: ClassVar[str] = "arXiv:2507.18071 (GSPO-token)"
    aggregation: ClassVar[Aggregation] = "seq-mean-token-mean"
    clips_ratio: ClassVar[bool] = True
    level: ClassVar[Literal["token", "sequence"]] = "sequence"

    kind: Literal["gspo"] = "gspo"
    clip_ratio_low: LowerClip = 3e-4
    """The sample's ratio is clipped from below at 1 - clip_ratio_low."""
    clip_ratio_high: PositiveFloat = 4e-4
    """The sample's ratio is clipped from above at 1 + clip_ratio_high."""


class GmpoLoss(PolicyLoss):
    """Geometric-mean policy optimisation (Zhao et al. 2025): log-ratios are clipped and averaged over the sample."""

    formula: ClassVar[str] = (
        "-A exp(mean of l over the sample), where l is log r or clip(log r, -eps_low, eps_high), whichever has the "
        "smaller A l"
    )
    source: ClassVar[str] = "arXiv:2507.20673"
    aggregation: ClassVar[Aggregation] = "seq-mean-token-mean"
    clips_ratio: ClassVar[bool] = True
    level: ClassVar[Literal["token", "sequence"]] = "sequence"

    kind: Literal["gmpo"] = "gmpo"
    clip_ratio_low: PositiveFloat = 0.4
    """The log-ratio is clipped from below at -clip_ratio_low, that is, r at exp(-clip_ratio_low)."""
    clip_ratio_high: PositiveFloat = 0.4
    """The log-ratio is clipped from above at clip_ratio_high, that is, r at exp(clip_ratio_high)."""


class CispoLoss(PolicyLoss):
    """CISPO (MiniMax 2025): importance weights are clipped, and every token keeps its gradient."""

    formula: ClassVar[str] = "-sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi"
    source: ClassVar[str] = "arXiv:2506.13585"
    aggregation: ClassVar[Aggregation] = "token-mean"
    clips_ratio: ClassVar[bool] = True

    kind: Literal["cispo"] = "cispo"
    clip_ratio_low: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The weight is clipped from below at 1 - clip_ratio_low; 1 means no lower clip, as in the paper."""
    clip_ratio_high: Annotated[float, Field(gt=-1)] = 0.2
    """The weight is clipped from above at 1 + clip_ratio_high, which may be below 1."""


class SapoLoss(PolicyLoss):
    """Soft adaptive policy optimisation (Gao et al. 2025): a sigmoid gate in place of the clip."""

    formula: ClassVar[str] = "-A (4 / tau) sigmoid(tau (r - 1)), with tau = tau_pos for A > 0, else tau = tau_neg"
    source: ClassVar[str] = "arXiv:2511.20347"
    aggregation: ClassVar[Aggregation] = "seq-mean-token-mean"
    clips_ratio: ClassVar[bool] = True

    kind: Literal["sapo"] = "sapo"
    tau_pos: PositiveFloat = 1.0
    """The steepness of the gate for A > 0."""
    tau_neg: PositiveFloat = 1.05
    """The steepness of the gate for A <= 0. With a larger value the gradient vanishes closer to r = 1."""


class DroLoss(PolicyLoss):
    """The token form of direct reward optimisation (Richemond et al. 2024): the policy gradient with a quadratic pull
    to pi_old in place of a clip."""

    formula: ClassVar[str] = "-(A log pi - beta (log r)^2 / 2)"
    source: ClassVar[str] = "arXiv:2405.19107, for single tokens"
    aggregation: ClassVar[Aggregation] = "token-mean"
    clips_ratio: ClassVar[bool] = True

    kind: Literal["dro"] = "dro"
    beta: PositiveFloat = 1.0
    """The strength of the pull. The gradient of a token is 0 where log r = A / beta."""


class A2poLoss(PolicyLoss):
    """Optimal advantage regression, A*-PO (Brantley et al. 2025), with the estimator `a2po`: the log-ratio of a whole
    sample to the reference policy is fitted to its advantage."""

    formula: ClassVar[str] = "(beta L - A)^2, where L is the sum of log pi - log pi_ref over the sample"
    source: ClassVar[str] = "arXiv:2505.20686"
    aggregation: ClassVar[Aggregation] = "seq-mean-token-mean"
    level: ClassVar[Literal["token", "sequence"]] = "sequence"
    has_ratio: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = True

    kind: Literal["a2po"] = "a2po"
    beta: PositiveFloat = 1e-3
    """The paper's beta_2: the larger it is, the nearer the policy stays to the reference."""


class VespoLoss(PolicyLoss):
    """Variational sequence-level soft policy optimisation (Shen et al. 2026): a smooth weight of the whole sample's
    importance ratio, which is not normalised by the length."""

    formula: ClassVar[str] = (
        "-sg(e^lam w^k e^(-lam w)) A log pi, where w is the product over the sample of r min(pi_old / mu, cap), mu is "
        "the engine's policy, and k, lam are k_pos, lambda_pos for A >= 0, else k_neg, lambda_neg"
    )
    source: ClassVar[str] = "arXiv:2602.10693"
    aggregation: ClassVar[Aggregation] = "token-mean"
    level: ClassVar[Literal["token", "sequence"]] = "sequence"
    corrects: ClassVar[bool] = True

    kind: Literal["vespo"] = "vespo"
    k_pos: PositiveFloat = 2.0
    """The exponent k for A >= 0: with a larger one, samples that have become less likely weigh less."""
    lambda_pos: PositiveFloat = 3.0
    """The rate lam for A >= 0: with a larger one, samples that have become more likely weigh less."""
    k_neg: PositiveFloat = 3.0
    """The exponent k for A < 0."""
    lambda_neg: PositiveFloat = 2.0
    """The rate lam for A < 0."""
    cap: Annotated[float, Field(ge=1)] | None = None
    """The upper bound of pi_old / mu of a token. null: without a bound, so w is the ratio to mu, and pi_old is not
    computed."""

    @property
    def anchor(self) -> Literal["old", "engine"]:
        return "engine" if self.cap is None else "old"


class ReinforceLoss(PolicyLoss):
    """The policy gradient without a ratio (Williams 1992). It is correct only on policy, so use one update per step."""

    formula: ClassVar[str] = "-A log pi"
    source: ClassVar[str] = "Williams 1992, Machine Learning 8"
    aggregation: ClassVar[Aggregation] = "seq-mean-token-sum"

    has_ratio: ClassVar[bool] = False

    kind: Literal["reinforce"] = "reinforce"


class GpgLoss(PolicyLoss):
    """Group policy gradient (Chu et al. 2025): REINFORCE's loss, to be used with the advantage estimator `gpg`."""

    formula: ClassVar[str] = "-A log pi"
    source: ClassVar[str] = "arXiv:2504.02546"
    aggregation: ClassVar[Aggregation] = "token-mean"

    has_ratio: ClassVar[bool] = False

    kind: Literal["gpg"] = "gpg"


class ClipCovLoss(PolicyLoss):
    """PPO's clipped loss without a few random tokens of high covariance (Cui et al. 2025)."""

    formula: ClassVar[str] = (
        "max(-A r, -A clip(r)), but 0 for `share` of all tokens, drawn from those with cov_low < cov < cov_high; "
        "cov = (log pi - mean)(A - mean), with means over the mini-batch"
    )
    source: ClassVar[str] = "arXiv:2505.22617 (Clip-Cov)"
    aggregation: ClassVar[Aggregation] = "token-mean"
    chooses_tokens: ClassVar[bool] = True

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


class KlCovLoss(PolicyLoss):
    """The loss without a clip, plus a KL penalty for the tokens of highest covariance (Cui et al. 2025)."""

    formula: ClassVar[str] = "-A r, plus coef |log r| for the `share` of tokens with the largest cov (see clip_cov)"
    source: ClassVar[str] = "arXiv:2505.22617 (KL-Cov)"
    aggregation: ClassVar[Aggregation] = "token-mean"
    chooses_tokens: ClassVar[bool] = True

    kind: Literal["kl_cov"] = "kl_cov"
    share: Share = 2e-4
    """The share of the mini-batch's action tokens that are chosen and have the penalty. At least one token is
    chosen."""
    coef: PositiveFloat = 1.0
    """The factor of the penalty."""


class DppoTvLoss(PolicyLoss):
    """Divergence PPO (Qi et al. 2026): the trust region around the sampling policy bounds probabilities instead of
    ratios."""

    formula: ClassVar[str] = (
        "-sg(min(pi / mu, c)) A log pi, where mu is the engine's policy; 0 where A > 0 and pi - mu > high, or where "
        "A < 0 and mu - pi > low"
    )
    source: ClassVar[str] = "arXiv:2602.04879"
    aggregation: ClassVar[Aggregation] = "token-mean"
    corrects: ClassVar[bool] = True

    kind: Literal["dppo_tv"] = "dppo_tv"
    low: LowerClip = 0.15
    """A token with A < 0 has no gradient if its probability has fallen by more than this."""
    high: LowerClip = 0.15
    """A token with A > 0 has no gradient if its probability has risen by more than this."""
    c: PositiveFloat = 20.0
    """The upper bound of the weight pi / mu."""

    @property
    def anchor(self) -> Literal["old", "engine"]:
        return "engine"


class DppoKlLoss(PolicyLoss):
    """Like dppo_tv, but the trust region bounds the KL divergence of the binary distributions (this token, any other
    token)."""

    formula: ClassVar[str] = (
        "as dppo_tv, but 0 where the binary KL(mu || pi) exceeds the bound and the update would increase it"
    )
    source: ClassVar[str] = "arXiv:2602.04879"
    aggregation: ClassVar[Aggregation] = "token-mean"
    corrects: ClassVar[bool] = True

    kind: Literal["dppo_kl"] = "dppo_kl"
    low: PositiveFloat = 0.05
    """A token with A < 0 whose probability has fallen has no gradient if its KL divergence exceeds this, in nats."""
    high: PositiveFloat = 0.05
    """A token with A > 0 whose probability has risen has no gradient if its KL divergence exceeds this, in nats."""
    c: PositiveFloat = 20.0
    """The upper bound of the weight pi / mu."""

    @property
    def anchor(self) -> Literal["old", "engine"]:
        return "engine"


class FunctionLoss(PolicyLoss):
    """A loss of your own: any Python function with the form of `algorithms.losses.TokenLoss`."""

    formula: ClassVar[str] = "f(terms), with the inputs of `algorithms/losses/terms.py`; the ratio is pi / pi_old"
    source: ClassVar[str] = "yours"
    aggregation: ClassVar[Aggregation] = "token-mean"

    kind: Literal["function"] = "function"
    path: FunctionPath
    """The place of the function: `package.module:function`, or `folder/file.py:function`."""


LossConfig = Annotated[
    DualClipLoss
    | GspoLoss
    | GmpoLoss
    | CispoLoss
    | SapoLoss
    | DroLoss
    | A2poLoss
    | VespoLoss
    | ReinforceLoss
    | GpgLoss
    | ClipCovLoss
    | KlCovLoss
    | DppoTvLoss
    | DppoKlLoss
    | FunctionLoss,
    Field(discriminator="kind"),
]

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
