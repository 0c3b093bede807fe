"""Advantage estimators: one section for each, and the key `kind` chooses one.

A section states its formula, its source, and which inputs it needs besides the rewards of the samples. A recipe refuses
an estimator whose inputs it does not produce. The symbols of the formulas: r is a sample's reward, mean and std are
taken over the rewards of its group, n is the number of its action tokens, N is the number of samples in the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, model_validator

from megatron_rl.config.function import FunctionPath
from megatron_rl.config.section import Method

if TYPE_CHECKING:
    from megatron_rl.config.schema import GrpoRunConfig

Discount = Annotated[float, Field(gt=0, le=1)]
Lambda = Annotated[float, Field(ge=0, le=1)]
Need = Literal["group", "greedy_reward", "pass_rate", "reward_parts", "values", "token_rewards", "thoughts", "energy"]
"""What an estimator needs. group: several samples of each prompt. greedy_reward: the reward of the prompt's greedy
answer. pass_rate: the row's column of this name. reward_parts: the separate scores of the reward functions. values: the
values of a critic. token_rewards: rewards at single tokens. thoughts: several items after the same reasoning
(`rollout.beams`). energy: the squared norm of each log-prob's gradient with respect to the logits. With one of the last
four it gives each token its own advantage."""


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


class OptimalTokenBaselineAdvantage(Method):
    """The optimal token baseline (2026, arXiv:2602.07078), which minimises the variance of the gradient of
    each token, if the squared norms of gradients grow with W. An answer counts with W_t at its t-th action: with how
    much its tokens up to t could have been others. A conversation of an agent counts as an answer."""

    formula: ClassVar[str] = (
        "r - B_t at the t-th action, B_t = sum(r W_t) / sum(W_t) over the answers of the group with t or more actions, "
        "W_t = sum of w^2 (1 - 2 p + sum of p_v^2 over the vocabulary) over the actions up to t, with the weight w of "
        "the correction; B_t = 0 if only one answer has t actions; 0 in groups of equal rewards"
    )
    source: ClassVar[str] = "arXiv:2602.07078"
    needs: ClassVar[frozenset[Need]] = frozenset({"group", "energy"})

    kind: Literal["optimal_token_baseline"] = "optimal_token_baseline"

    def conflicts(self, run: GrpoRunConfig) -> Iterator[str]:
        if run.algorithm.overlong_filter:
            yield (
                "algorithm.overlong_filter takes answers out of the step, and adv_estimator optimal_token_baseline "
                "computes on the trainer's ranks with all answers of a group; set overlong_filter to false"
            )
        if run.teachers:
            yield (
                "algorithm.adv_estimator optimal_token_baseline is not defined together with teachers; choose grpo, or "
                "remove teachers"
            )


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
    """The estimator for two-stage answers as in OpenOneRec (arXiv:2512.24762). Reasoning traces are
    compared within their group. The items that beam search found after one of them are compared with each other."""

    formula: ClassVar[str] = (
        "at an item: (r - mean) / (std + 1e-6) after the same reasoning; in reasoning: the same of R over the "
        "reasoning traces of the group, with R the mean or the max of its items' r; std none: not divided"
    )
    source: ClassVar[str] = "for answers as in OpenOneRec, arXiv:2512.24762; the formula is this package's"
    needs: ClassVar[frozenset[Need]] = frozenset({"thoughts"})

    kind: Literal["two_stage"] = "two_stage"
    thought: Literal["mean", "max"] = "mean"
    """The reward of a reasoning trace: the mean or the maximum of its items' rewards."""
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
    """The place of the function: `package.module:function`, or `folder/file.py:function`. The advantage of a sample
    whose reward is NaN is not used."""


AdvantageConfig = Annotated[
    GrpoAdvantage
    | RlooAdvantage
    | ReinforcePlusPlusAdvantage
    | ReinforcePlusPlusBaselineAdvantage
    | RemaxAdvantage
    | A2poAdvantage
    | OpoAdvantage
    | OptimalTokenBaselineAdvantage
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
