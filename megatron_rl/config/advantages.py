"""Advantage estimators and reward shaping: one section for each, and the key `kind` chooses one.

A section states its formula, its source, and which inputs it needs besides the rewards of the samples. A recipe refuses
an estimator whose inputs it does not produce. The symbols of the formulas: r is a sample's reward, mean and std are
taken over the rewards of its group, n is the number of its action tokens, N is the number of samples in the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.function import FunctionPath
from megatron_rl.config.section import Method

if TYPE_CHECKING:
    from megatron_rl.config.schema import GrpoRunConfig

Discount = Annotated[float, Field(gt=0, le=1)]
Lambda = Annotated[float, Field(ge=0, le=1)]
Need = Literal["group", "greedy_reward", "pass_rate", "reward_parts", "values", "token_rewards", "thoughts"]
"""What an estimator needs. group: several samples of each prompt. greedy_reward: the reward of the prompt's greedy
answer. pass_rate: the row's column of this name. reward_parts: the separate scores of the reward functions. values: the
values of a critic. token_rewards: rewards at single tokens. thoughts: several items of each thought (`rollout.beams`).
With one of the last three it gives each token its own advantage."""


class GrpoAdvantage(Method):
    """GRPO (Shao et al. 2024, arXiv:2402.03300), and Dr. GRPO (Liu et al. 2025, arXiv:2503.20783) with std none."""

    formula: ClassVar[str] = (
        "(r - mean) / (std + 1e-6), with std (divisor N - 1) of the group or of the batch; std none: r - mean"
    )
    source: ClassVar[str] = "arXiv:2402.03300 section 4.1.2; batch: arXiv:2508.08221; none: arXiv:2503.20783"
    needs: ClassVar[frozenset[Need]] = frozenset({"group"})

    kind: Literal["grpo"] = "grpo"
    std: Literal["group", "batch", "none"] = "group"
    """The standard deviation that divides the advantages: over the rewards of the group, or over all rewards of the
    batch (Lite PPO, Liu et al. 2025, arXiv:2508.08221). none: they are not divided (Dr. GRPO)."""


class RlooAdvantage(Method):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740)."""

    formula: ClassVar[str] = (
        "r - mean of the other samples = N / (N - 1) (r - mean); std others: divided by the others' std + 1e-6 "
        "(divisor N - 2), but not divided where the others are equal"
    )
    source: ClassVar[str] = "arXiv:2402.14740"
    needs: ClassVar[frozenset[Need]] = frozenset({"group"})

    kind: Literal["rloo"] = "rloo"
    std: Literal["others", "none"] = "none"
    """others: each advantage is divided by the standard deviation of the other samples' rewards. If these are all
    equal, as for the only right answer of a group, the advantage is not divided. none: no division."""


class ReinforcePlusPlusAdvantage(Method):
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): whitened over all action tokens of the batch."""

    formula: ClassVar[str] = (
        "(r - m) / (s + 1e-6), with mean m and deviation s over all action tokens of the batch (a sample has weight "
        "n); whiten false: r"
    )
    source: ClassVar[str] = "arXiv:2501.03262"
    needs: ClassVar[frozenset[Need]] = frozenset()

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    whiten: bool = True
    """true: the rewards are whitened over all action tokens of the batch. false: the advantage is the reward itself."""


class ReinforcePlusPlusBaselineAdvantage(Method):
    """REINFORCE++ with the group's mean as baseline (Hu et al. 2025, arXiv:2501.03262)."""

    formula: ClassVar[str] = "reinforce_plus_plus, with r - mean in place of r"
    source: ClassVar[str] = "arXiv:2501.03262"
    needs: ClassVar[frozenset[Need]] = frozenset({"group"})

    kind: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"


class RemaxAdvantage(Method):
    """ReMax (Li et al. 2023, arXiv:2310.10505): the greedy answer's reward is the baseline."""

    formula: ClassVar[str] = "r - reward of the prompt's greedy answer"
    source: ClassVar[str] = "arXiv:2310.10505"
    needs: ClassVar[frozenset[Need]] = frozenset({"greedy_reward"})

    kind: Literal["remax"] = "remax"


class A2poAdvantage(Method):
    """A*-PO (Brantley et al. 2025, arXiv:2505.20686), for rewards that are 0 or 1. p is the share of right
    answers of the reference policy to the row's prompt, its column `pass_rate`, which `megatron-rl filter-difficulty`
    writes; then V is beta times the log of the mean of exp(r / beta) over these answers."""

    formula: ClassVar[str] = "r - V, V = beta log(p exp(1 / beta) + 1 - p)"
    source: ClassVar[str] = "arXiv:2505.20686"
    needs: ClassVar[frozenset[Need]] = frozenset({"pass_rate"})

    kind: Literal["a2po"] = "a2po"
    beta: PositiveFloat = 0.5
    """The paper's beta_1: V is near 1 for small ones if any answer was right, and near p for large ones."""


class OpoAdvantage(Method):
    """On-policy RL with optimal reward baseline (Hao et al. 2025, arXiv:2505.23585)."""

    formula: ClassVar[str] = "r - sum(n r) / sum(n), with sums over the group"
    source: ClassVar[str] = "arXiv:2505.23585"
    needs: ClassVar[frozenset[Need]] = frozenset({"group"})

    kind: Literal["opo"] = "opo"


class GpgAdvantage(Method):
    """Group policy gradient (Chu et al. 2025, arXiv:2504.02546)."""

    formula: ClassVar[str] = (
        "a (r - mean), a = B / (B - M), where M of the B samples are in groups of equal rewards; a = 1 with "
        "drop_zero_signal, which takes these samples out of the denominator"
    )
    source: ClassVar[str] = "arXiv:2504.02546"
    needs: ClassVar[frozenset[Need]] = frozenset({"group"})

    kind: Literal["gpg"] = "gpg"


class MaxRlAdvantage(Method):
    """Maximum likelihood reinforcement learning (Tajwar et al. 2026, arXiv:2602.02710): a group weighs by the inverse
    of its mean reward, so that hard prompts count more."""

    formula: ClassVar[str] = "(r - mean) / mean; rewards must not be negative"
    source: ClassVar[str] = "arXiv:2602.02710"
    needs: ClassVar[frozenset[Need]] = frozenset({"group"})

    kind: Literal["max_rl"] = "max_rl"


class GrpoPasskAdvantage(Method):
    """Pass@k of the whole group (Tang et al. 2025, arXiv:2503.19595): only the best sample has an advantage."""

    formula: ClassVar[str] = (
        "best sample: (largest r - second largest r) / (std + 1e-6); other samples: 0; std none: not divided"
    )
    source: ClassVar[str] = "arXiv:2503.19595"
    needs: ClassVar[frozenset[Need]] = frozenset({"group"})

    kind: Literal["grpo_passk"] = "grpo_passk"
    std: Literal["group", "none"] = "group"
    """group: the advantages are divided by the standard deviation of the group's rewards. none: they are not
    divided."""


class GdpoAdvantage(Method):
    """Group reward-decoupled normalisation (Liu et al. 2026, arXiv:2601.05242)."""

    formula: ClassVar[str] = (
        "(a - m) / (s + 1e-6), a = sum of weight x grpo of each reward, with mean m and deviation s of a over the batch"
    )
    source: ClassVar[str] = "arXiv:2601.05242"
    needs: ClassVar[frozenset[Need]] = frozenset({"group", "reward_parts"})

    kind: Literal["gdpo"] = "gdpo"


class GaeAdvantage(Method):
    """Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438)."""

    formula: ClassVar[str] = (
        "A_t = d_t + gamma lam A_t+1, d_t = r_t + gamma V_t+1 - V_t; the critic's target is V_t + A_t, with lam_critic "
        "for lam; length-adaptive: lam = 1 - 1 / (alpha n); whiten: (A - m) / (s + 1e-6), with mean m and deviation s "
        "over all action tokens"
    )
    source: ClassVar[str] = "arXiv:1506.02438; VC-PPO, arXiv:2503.01491; VAPO, arXiv:2504.05118"
    needs: ClassVar[frozenset[Need]] = frozenset({"values"})

    kind: Literal["gae"] = "gae"
    gamma: Discount = 1.0
    """The discount for each action token; 1 means no discount."""
    lam: Lambda = 1.0
    """The lambda of the policy's advantages."""
    lam_critic: Lambda | None = None
    """The lambda of the critic's targets (VC-PPO has 1.0 with lam 0.95); null means the same as `lam`."""
    length_adaptive_alpha: PositiveFloat | None = None
    """If it is set, lam is 1 - 1 / (alpha n), but not below 0 (VAPO has alpha 0.05); null means that `lam` is used."""
    whiten: bool = True
    """true: the policy's advantages are whitened over all action tokens of the batch. false: they are not."""
    weights: dict[str, float] = {}
    """The factor of each kind of reward; 1 for others. The kind `outcome` is the reward of the whole answer, at its
    last token. If it is the sum of the turns' rewards (`{kind: environment}`), give it the weight 0, so that these do
    not count twice."""

    @model_validator(mode="after")
    def _one_lambda(self) -> GaeAdvantage:
        if self.length_adaptive_alpha is not None and "lam" in self.model_fields_set:
            raise ValueError("length_adaptive_alpha takes the place of lam: give only one of them")
        if self.length_adaptive_alpha is not None and self.lam_critic is None:
            raise ValueError("length_adaptive_alpha applies to the policy only: give lam_critic too (VAPO has 1.0)")
        return self

    def conflicts(self, run: GrpoRunConfig) -> Iterator[str]:
        sums_turns = any(reward.kind == "environment" for reward in run.rewards)
        if run.critic and sums_turns and self.weights.get("outcome", 1.0) and self.weights.get("environment", 1.0):
            yield (
                "algorithm.adv_estimator gae adds the rewards of turns, and the reward environment is their sum, so "
                "that they would count twice; set adv_estimator.weights to {outcome: 0}, or to {environment: 0}"
            )


class GrpoProcessAdvantage(Method):
    """GRPO with process supervision (Shao et al. 2024, arXiv:2402.03300): rewards stay at their tokens."""

    formula: ClassVar[str] = (
        "A_t = sum over rewards j at or after t of gamma^(actions between) w_k (r_j - mean) / (std + 1e-6), where w_k "
        "is the weight of j's kind k, with mean and std of this kind in the group or the batch; std false: not "
        "divided; a kind of `uncentred` has the mean 0"
    )
    source: ClassVar[str] = "arXiv:2402.03300 section 4.1.3"
    needs: ClassVar[frozenset[Need]] = frozenset({"group", "token_rewards"})

    kind: Literal["grpo_process"] = "grpo_process"
    gamma: Discount = 1.0
    """The discount for each action token between a token and a later reward; 1 means no discount."""
    over: Literal["group", "batch"] = "group"
    """The set of rewards of one kind whose mean and deviation normalise them: the rewards of a group, or of the
    batch."""
    std: bool = True
    """true: rewards are divided by the standard deviation of their kind. false: they are not."""
    uncentred: tuple[str, ...] = ()
    """The kinds whose mean is not subtracted. They are divided by their root mean square. Use it for rewards that are
    already gains, such as `utility`: with the mean subtracted, a passage that helps less than others would be
    punished."""
    weights: dict[str, float] = {}
    """The factor of each kind of reward after the normalisation; 1 for others. The kind `outcome` is the reward of the
    whole answer, at its last token. If it is the sum of the turns' rewards (`{kind: environment}`), give it the weight
    0, so that these do not count twice."""


class TwoStageAdvantage(Method):
    """For two-stage answers as in OpenOneRec (arXiv:2512.24762). Thoughts are compared within their group. The items
    that beam search found for a thought are compared with each other."""

    formula: ClassVar[str] = (
        "at an item: (r - mean) / (std + 1e-6) over the items of its thought; at a thought: the same of R over the "
        "thoughts of the group, with R the mean or the max of its items' r; std none: not divided"
    )
    source: ClassVar[str] = "for answers as in OpenOneRec, arXiv:2512.24762; the formula is this package's"
    needs: ClassVar[frozenset[Need]] = frozenset({"thoughts"})

    kind: Literal["two_stage"] = "two_stage"
    thought: Literal["mean", "max"] = "mean"
    """The reward of a thought: the mean or the maximum of its items' rewards."""
    std: Literal["group", "none"] = "group"
    """group: advantages are divided by the standard deviation of the rewards that are compared. none: they are not
    divided."""


class FunctionAdvantage(Method):
    """An estimator of your own: any Python function of `types.StepBatch` that returns one advantage for each sample."""

    formula: ClassVar[str] = "f(batch), with the fields of `types.StepBatch`"
    source: ClassVar[str] = "yours"
    needs: ClassVar[frozenset[Need]] = frozenset()

    kind: Literal["function"] = "function"
    path: FunctionPath
    """Where the function is: `package.module:function`, or `folder/file.py:function`. The advantage of a sample
    whose reward is NaN is not used."""


AdvantageConfig = Annotated[
    GrpoAdvantage
    | RlooAdvantage
    | ReinforcePlusPlusAdvantage
    | ReinforcePlusPlusBaselineAdvantage
    | RemaxAdvantage
    | A2poAdvantage
    | OpoAdvantage
    | GpgAdvantage
    | MaxRlAdvantage
    | GrpoPasskAdvantage
    | GdpoAdvantage
    | FunctionAdvantage
    | GaeAdvantage
    | GrpoProcessAdvantage
    | TwoStageAdvantage,
    Field(discriminator="kind"),
]


class SoftOverlongShaping(Method):
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476)."""

    formula: ClassVar[str] = (
        "r + p, with p = 0 up to length max - cache, then p = ((max - cache) - length) / cache, and p = -1 beyond max"
    )
    source: ClassVar[str] = "arXiv:2503.14476 eq. 13"

    kind: Literal["soft_overlong"] = "soft_overlong"
    max_tokens: PositiveInt
    """The response length, in tokens, at and above which the penalty is -1; usually rollout.max_response_tokens."""
    cache_tokens: PositiveInt
    """The number of tokens below max_tokens where the penalty grows from 0 to -1."""

    @model_validator(mode="after")
    def _cache_fits(self) -> SoftOverlongShaping:
        if self.cache_tokens >= self.max_tokens:
            raise ValueError(
                f"cache_tokens ({self.cache_tokens}) must be below max_tokens ({self.max_tokens}), because otherwise "
                f"every answer would be penalised"
            )
        return self

    @property
    def first_penalised(self) -> int:
        """The length, in tokens, of the shortest answer with a penalty."""
        return self.max_tokens - self.cache_tokens + 1


class LengthNormalisedShaping(Method):
    """Kimi k1.5's length reward (Kimi team 2025, arXiv:2501.12599): it prefers the shorter answers of a group."""

    formula: ClassVar[str] = (
        "r + weight x l, l = 0.5 - (length - shortest) / (longest - shortest) in the group; min(0, l) for wrong answers"
    )
    source: ClassVar[str] = "arXiv:2501.12599 section 2.3.3"

    kind: Literal["length_normalised"] = "length_normalised"
    weight: PositiveFloat = 1.0
    """The factor of the length reward."""
    correct_threshold: float = 0.5
    """An answer is correct if its verified reward is at least this."""


class CosineShaping(Method):
    """Cosine-scaled reward (Yeo et al. 2025, arXiv:2502.03373), which replaces the verified reward.

    The reward depends on the length of the answer: along half a cosine it goes from one value at length 0 to another
    value at max_tokens. Correct and wrong answers have different pairs of values."""

    formula: ClassVar[str] = (
        "at_max + (at_zero - at_max) (1 + cos(pi length / max)) / 2, with the values for correct or for wrong answers; "
        "`exceeding` from length max on"
    )
    source: ClassVar[str] = "arXiv:2502.03373"

    kind: Literal["cosine"] = "cosine"
    max_tokens: PositiveInt
    """The length of a response, in tokens, at which the cosine ends; usually rollout.max_response_tokens."""
    correct_at_zero: float = 2.0
    """The reward of a correct answer at length 0."""
    correct_at_max: float = 1.0
    """The reward of a correct answer just below max_tokens."""
    wrong_at_zero: float = -10.0
    """The reward of a wrong answer at length 0."""
    wrong_at_max: float = 0.0
    """The reward of a wrong answer just below max_tokens."""
    exceeding: float = -10.0
    """The reward of an answer of max_tokens or more, whether it is correct or wrong."""
    correct_threshold: float = 0.5
    """An answer is correct if its verified reward is at least this."""


class RepetitionShaping(Method):
    """A penalty for repeated n-grams of token ids (Yeo et al. 2025, arXiv:2502.03373; Open-R1)."""

    formula: ClassVar[str] = "r + max_penalty (1 - distinct n-grams / n-grams)"
    source: ClassVar[str] = "arXiv:2502.03373; the form as a sum is Open-R1's"

    kind: Literal["repetition"] = "repetition"
    ngram_size: PositiveInt = 40
    """The length of an n-gram, in tokens."""
    max_penalty: Annotated[float, Field(lt=0)] = -1.0
    """The penalty, below 0, of a response whose n-grams are (almost) all repeated."""


ShapingConfig = Annotated[
    SoftOverlongShaping | LengthNormalisedShaping | CosineShaping | RepetitionShaping, Field(discriminator="kind")
]
