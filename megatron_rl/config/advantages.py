"""Advantage estimators and reward shaping: one section each, unions by `kind`.

A section names its formula, its source and what it needs beside a reward a sample; a recipe refuses what it cannot
feed. Symbols: r a sample's reward, mean and std those of its group, n its action tokens, N samples of the group.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.section import Method

Discount = Annotated[float, Field(gt=0, le=1)]
Lambda = Annotated[float, Field(ge=0, le=1)]
Need = Literal["group", "greedy_reward", "reward_parts", "values", "step_rewards"]
"""group: several samples of a prompt. greedy_reward: that of the prompt's greedy answer. reward_parts: the scores of
the reward functions, apart. values: a critic. step_rewards: rewards at tokens."""


class GrpoAdvantage(Method):
    """GRPO (Shao et al. 2024, arXiv:2402.03300); without the deviation Dr. GRPO (Liu et al. 2025, arXiv:2503.20783)."""

    formula: ClassVar[str] = (
        "(r - mean) / (std + 1e-6), std (divisor N - 1) of the group or of the batch; none: r - mean"
    )
    source: ClassVar[str] = "arXiv:2402.03300 section 4.1.2; batch: arXiv:2508.08221; none: arXiv:2503.20783"
    needs: ClassVar[frozenset[Need]] = frozenset({"group"})

    kind: Literal["grpo"] = "grpo"
    std: Literal["group", "batch", "none"] = "group"
    """batch: one deviation of all rewards (Lite PPO, Liu et al. 2025, arXiv:2508.08221); none: Dr. GRPO."""


class RlooAdvantage(Method):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740)."""

    formula: ClassVar[str] = (
        "r - mean of the other samples = N / (N - 1) (r - mean); others: divided by the others' std + 1e-6 (divisor "
        "N - 2), undivided where the others are equal"
    )
    source: ClassVar[str] = "arXiv:2402.14740"
    needs: ClassVar[frozenset[Need]] = frozenset({"group"})

    kind: Literal["rloo"] = "rloo"
    std: Literal["others", "none"] = "none"
    """others: each advantage is divided by the standard deviation of the other samples' rewards. Where these are all
    equal (the one right answer of a group) they have no scale, and the advantage stays undivided: 0 would throw away
    the sample that tells most."""


class ReinforcePlusPlusAdvantage(Method):
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): whitened over all action tokens of the batch."""

    formula: ClassVar[str] = (
        "(r - m) / (s + 1e-6), m and s over all action tokens of the batch: weights n; whiten false: r"
    )
    source: ClassVar[str] = "arXiv:2501.03262"
    needs: ClassVar[frozenset[Need]] = frozenset()

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    whiten: bool = True
    """false: the advantage is the reward as it is."""


class ReinforcePlusPlusBaselineAdvantage(Method):
    """REINFORCE++ with the group's mean as baseline (Hu et al. 2025, arXiv:2501.03262)."""

    formula: ClassVar[str] = "reinforce_plus_plus of r - mean"
    source: ClassVar[str] = "arXiv:2501.03262"
    needs: ClassVar[frozenset[Need]] = frozenset({"group"})

    kind: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"


class RemaxAdvantage(Method):
    """ReMax (Li et al. 2023, arXiv:2310.10505): the greedy answer's reward is the baseline."""

    formula: ClassVar[str] = "r - r of the prompt's greedy answer"
    source: ClassVar[str] = "arXiv:2310.10505"
    needs: ClassVar[frozenset[Need]] = frozenset({"greedy_reward"})

    kind: Literal["remax"] = "remax"


class OpoAdvantage(Method):
    """On-policy RL with optimal reward baseline (Hao et al. 2025, arXiv:2505.23585)."""

    formula: ClassVar[str] = "r - sum(n r) / sum(n), sums over the group"
    source: ClassVar[str] = "arXiv:2505.23585"
    needs: ClassVar[frozenset[Need]] = frozenset({"group"})

    kind: Literal["opo"] = "opo"


class GpgAdvantage(Method):
    """Group policy gradient (Chu et al. 2025, arXiv:2504.02546)."""

    formula: ClassVar[str] = (
        "a (r - mean), a = B / (B - M), M of B samples in groups of equal rewards; a = 1 with drop_zero_signal, "
        "which takes them out of the denominator"
    )
    source: ClassVar[str] = "arXiv:2504.02546"
    needs: ClassVar[frozenset[Need]] = frozenset({"group"})

    kind: Literal["gpg"] = "gpg"


class GrpoPasskAdvantage(Method):
    """Pass@k of the whole group (Tang et al. 2025, arXiv:2503.19595): only the best sample learns."""

    formula: ClassVar[str] = "best sample: (largest r - second largest r) / (std + 1e-6); others 0; none: undivided"
    source: ClassVar[str] = "arXiv:2503.19595"
    needs: ClassVar[frozenset[Need]] = frozenset({"group"})

    kind: Literal["grpo_passk"] = "grpo_passk"
    std: Literal["group", "none"] = "group"


class GdpoAdvantage(Method):
    """Group reward-decoupled normalisation (Liu et al. 2026, arXiv:2601.05242)."""

    formula: ClassVar[str] = "(a - m) / (s + 1e-6), a = sum of weight x grpo of each reward, m and s over the batch"
    source: ClassVar[str] = "arXiv:2601.05242"
    needs: ClassVar[frozenset[Need]] = frozenset({"group", "reward_parts"})

    kind: Literal["gdpo"] = "gdpo"


class GaeAdvantage(Method):
    """Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438)."""

    formula: ClassVar[str] = (
        "A_t = d_t + gamma lam A_t+1, d_t = r_t + gamma V_t+1 - V_t; target V_t + the same with lam_critic; "
        "length-adaptive: lam = 1 - 1 / (alpha n); whiten: (A - m) / (s + 1e-6), m and s over all action tokens"
    )
    source: ClassVar[str] = "arXiv:1506.02438; VC-PPO, arXiv:2503.01491; VAPO, arXiv:2504.05118"
    needs: ClassVar[frozenset[Need]] = frozenset({"values"})

    kind: Literal["gae"] = "gae"
    gamma: Discount = 1.0
    lam: Lambda = 1.0
    """The lambda of the policy's advantages."""
    lam_critic: Lambda | None = None
    """The lambda of the critic's targets (VC-PPO: 1.0 beside lam 0.95); null: the same as lam."""
    length_adaptive_alpha: PositiveFloat | None = None
    """Replaces lam by 1 - 1 / (alpha n), not below 0 (VAPO: alpha 0.05); null: lam is used as it is."""
    whiten: bool = True
    """The policy's advantages are whitened over all action tokens of the batch; false: as the equation gives them."""

    @model_validator(mode="after")
    def _one_lambda(self) -> GaeAdvantage:
        if self.length_adaptive_alpha is not None and "lam" in self.model_fields_set:
            raise ValueError("length_adaptive_alpha takes the place of lam: give one of them")
        if self.length_adaptive_alpha is not None and self.lam_critic is None:
            raise ValueError("length_adaptive_alpha is of the policy alone: give lam_critic too (VAPO: 1.0)")
        return self


class GrpoProcessAdvantage(Method):
    """GRPO with process supervision (Shao et al. 2024, arXiv:2402.03300): rewards stay at their tokens."""

    formula: ClassVar[str] = (
        "A_t = sum over steps j at or after t of gamma^(actions between) (r_j - mean) / (std + 1e-6), mean and std of "
        "all rewards of that kind in the group"
    )
    source: ClassVar[str] = "arXiv:2402.03300 section 4.1.3"
    needs: ClassVar[frozenset[Need]] = frozenset({"group", "step_rewards"})

    kind: Literal["grpo_process"] = "grpo_process"
    gamma: Discount = 1.0
    std: Literal["group", "none"] = "group"


AdvantageConfig = Annotated[
    GrpoAdvantage
    | RlooAdvantage
    | ReinforcePlusPlusAdvantage
    | ReinforcePlusPlusBaselineAdvantage
    | RemaxAdvantage
    | OpoAdvantage
    | GpgAdvantage
    | GrpoPasskAdvantage
    | GdpoAdvantage
    | GaeAdvantage
    | GrpoProcessAdvantage,
    Field(discriminator="kind"),
]


class SoftOverlongShaping(Method):
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476)."""

    formula: ClassVar[str] = "r + p, p = 0 up to max - cache, then ((max - cache) - length) / cache, -1 beyond max"
    source: ClassVar[str] = "arXiv:2503.14476 eq. 13"

    kind: Literal["soft_overlong"] = "soft_overlong"
    max_tokens: PositiveInt
    """Response tokens from which the penalty is -1: usually rollout.max_response_tokens."""
    cache_tokens: PositiveInt
    """The last tokens before max_tokens, over which the penalty grows."""

    @model_validator(mode="after")
    def _cache_fits(self) -> SoftOverlongShaping:
        if self.cache_tokens >= self.max_tokens:
            raise ValueError(
                f"cache_tokens ({self.cache_tokens}) must be below max_tokens ({self.max_tokens}): every answer would "
                f"be penalised"
            )
        return self


class LengthNormalisedShaping(Method):
    """Kimi k1.5's length reward (Kimi team 2025, arXiv:2501.12599): short among its group is better."""

    formula: ClassVar[str] = (
        "r + weight x l, l = 0.5 - (length - shortest) / (longest - shortest) of the group; wrong answers min(0, l)"
    )
    source: ClassVar[str] = "arXiv:2501.12599 section 2.3.3"

    kind: Literal["length_normalised"] = "length_normalised"
    weight: PositiveFloat = 1.0
    correct_threshold: float = 0.5
    """An answer is correct if its verified reward is at least this."""


class CosineShaping(Method):
    """Cosine-scaled reward (Yeo et al. 2025, arXiv:2502.03373): takes the place of the reward."""

    formula: ClassVar[str] = (
        "at_max + (at_zero - at_max) (1 + cos(pi length / max)) / 2, of the correct or the wrong pair; "
        "exceeding from max on"
    )
    source: ClassVar[str] = "arXiv:2502.03373"

    kind: Literal["cosine"] = "cosine"
    max_tokens: PositiveInt
    correct_at_zero: float = 2.0
    correct_at_max: float = 1.0
    wrong_at_zero: float = -10.0
    wrong_at_max: float = 0.0
    exceeding: float = -10.0
    """The reward of an answer of max_tokens or more, right or wrong."""
    correct_threshold: float = 0.5
    """An answer is correct if its verified reward is at least this."""


class RepetitionShaping(Method):
    """Penalty for repeated n-grams of token ids (Yeo et al. 2025, arXiv:2502.03373; Open-R1)."""

    formula: ClassVar[str] = "r + max_penalty (1 - distinct n-grams / n-grams)"
    source: ClassVar[str] = "arXiv:2502.03373; sum form: Open-R1"

    kind: Literal["repetition"] = "repetition"
    ngram_size: PositiveInt = 40
    """The length of an n-gram, in tokens."""
    max_penalty: Annotated[float, Field(lt=0)] = -1.0


ShapingConfig = Annotated[
    SoftOverlongShaping | LengthNormalisedShaping | CosineShaping | RepetitionShaping, Field(discriminator="kind")
]
