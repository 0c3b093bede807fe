"""Importance correction between the engine's policy and the trainer's: weights and rejection.

The symbol of the formulas, for one token: w = pi_old / pi_engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from megatron_rl.config.section import Method, Section, default_kind

Level = Literal["token", "segment", "sequence"]
"""The unit that has one weight, or that is kept or rejected as a whole. A segment is a run of actions between forced
tokens (a turn, the reasoning, the answer). A sequence is a sample."""


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
    """The smallest w that is kept, for k1 only; null means no lower bound. With over sum, w is the product of the
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
