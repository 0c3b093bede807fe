"""The section `algorithm` of a configuration, with KL and entropy.

The key `kind` of a section chooses one of its kinds. Each kind states its formula and its source, and `megatron-rl
algorithms` prints them as tables. Combinations that make no sense are refused here, and the error says why.

The symbol of the formulas, for one token: d = log pi - log pi_ref.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.advantages import AdvantageConfig, GaeAdvantage, GrpoAdvantage, ReinforcePlusPlusAdvantage
from megatron_rl.config.correction import CorrectionConfig, MaskedWeight, Rejection
from megatron_rl.config.losses import Aggregation, DualClipLoss, LossConfig, Share
from megatron_rl.config.section import Method, Section, default_kind
from megatron_rl.config.shaping import CosineShaping, ShapingConfig, SoftOverlongShaping
from megatron_rl.config.teachers import DistillationConfig

if TYPE_CHECKING:
    from megatron_rl.config.schema import GrpoRunConfig


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
    """The coefficient changes by at most about 20 % within this number of samples."""


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
    """The largest value of k3, because one token could otherwise outweigh all others; null means no cap. A token above
    the cap counts with the cap and has the gradient 0: at the cap 10, tokens with d < -2.61 or d > 11. With
    straight_through the gradient is d for every cap. k1, k2 and abs have no cap."""
    straight_through: bool = False
    """true: the value comes from the estimator, and the gradient from k2, whose expected gradient on policy is the
    gradient of the true KL. false: value and gradient come from the estimator."""
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
            raise ValueError("straight_through takes k2's gradient, which k2 has already; set it to false")
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
    aggregation: Literal["loss", "token-mean"] = "loss"
    """How the entropies of tokens become one number. `loss`: like the token losses (`algorithm.loss_agg_mode`), as in
    verl. `token-mean`: their mean over the mini-batch for every `loss_agg_mode`, as in TRL."""


class StopEpochsConfig(Section):
    """Bounds of the distance from pi_old, from the second epoch on. They are compared with the numbers of a mini-batch
    over all ranks. An update that would begin beyond a bound is not made, and the step ends."""

    kl: PositiveFloat | None = None
    """The largest KL(pi_old || pi) in nats, as the mean of k3 over action tokens (the metric `ppo_kl`)."""
    ratio: Annotated[float, Field(gt=1)] | None = None
    """The largest ratio of a token, pi / pi_old or its inverse (the metrics `ratio/max` and `ratio/min`)."""

    @model_validator(mode="after")
    def _given(self) -> Self:
        if self.kl is None and self.ratio is None:
            raise ValueError("stop_epochs has no bound; give kl, ratio or both, or set stop_epochs to null")
        return self


class AlgorithmConfig(Section):
    shaping: tuple[ShapingConfig, ...] = ()
    """The changes that are made to the rewards for training, in this order. Evaluations see the original rewards."""
    adv_estimator: Annotated[AdvantageConfig, default_kind("grpo")] = GrpoAdvantage()
    """How advantages are computed from rewards."""
    loss: Annotated[LossConfig, default_kind("dual_clip")] = DualClipLoss()
    """The policy loss of a token."""
    loss_agg_mode: Aggregation | None = None
    """How the token losses become one number. The denominators are counted over the whole mini-batch. null means
    the aggregation of the loss's paper (`aggregation` in the table of losses)."""
    loss_agg_tokens: PositiveInt | None = None
    """The constant length L, in tokens, of seq-mean-token-sum-norm, for example rollout.max_response_tokens. null is
    right for every other aggregation."""
    anchor: Literal["old", "engine", "interpolated"] = "old"
    """The policy in the denominator of the ratio. `old`: the weights at the step's start; with `updates_per_step: 1`
    the ratio is 1 and no clip acts. `engine`: the weights that sampled the token; the clip bounds the distance from
    them, and the ratio is also the importance weight. `interpolated`: the policy p between them and the current ones,
    log p = log mu + lag / (lag + 1) (log pi - log mu), so that the clip bounds the last of lag + 1 steps of equal
    length, and the correction's weight is p / mu (decoupled PPO, arXiv:2110.00641, with the approximation of AReaL,
    arXiv:2505.24298). If neither this key nor `correction` is given, a run with `rollout.max_lag` from 2 to 4 has
    `interpolated`, and with a larger one `engine`, unless its loss clips no ratio to pi_old."""
    correction: CorrectionConfig | None = CorrectionConfig()
    """The importance correction between engine and trainer; null means none, the default of losses that contain the
    weight (`dppo_tv`, `dppo_kl`, `anchor: engine`)."""
    kl: KlConfig | None = None
    """The penalty for the KL divergence from the reference policy; null means none, and no reference policy is kept,
    unless the loss compares with it (`a2po`)."""
    distillation: DistillationConfig | None = None
    """How the policy learns from `teachers`; null means that there are none."""
    entropy: EntropyConfig | None = None
    """The entropy bonus; null means none."""
    top_entropy_share: Share = 1.0
    """The share of the mini-batch's action tokens, by highest entropy, that have a policy loss (Wang et al. 2025,
    arXiv:2506.01939, use 0.2): the tokens at or above the quantile `1 - share` of all, as in TRL. 1 means all
    tokens."""
    drop_zero_signal: bool = True
    """true: groups whose advantages are all 0 leave the step, and a metric counts them. For most estimators these are
    the groups with equal rewards. false: they stay in the denominators."""
    overlong_filter: bool = False
    """true: answers that the length budget cut leave the step before its denominators are counted, and a metric counts
    them. Their rewards stay in the statistics of their groups (DAPO, arXiv:2503.14476, section 3.4). An answer whose
    reasoning was cut, but which itself ended within its budget, stays. false: such answers stay."""
    updates_per_step: PositiveInt = 1
    """The number of mini-batches of an epoch; each gives one optimizer step. With one update in a step there is no
    forward pass before it, unless the loss needs statistics of the whole mini-batch."""
    epochs: PositiveInt = 1
    """The number of times that a step trains on each of its samples. The log-probs of pi_old, the values, the
    advantages and the importance weights are computed once, before the first update."""
    reshuffle: bool = True
    """Whether each epoch after the first one has mini-batches of its own: its groups in another order, with their own
    denominators. The run's seed, the step and the epoch determine the order. false: the same mini-batches again."""
    stop_epochs: StopEpochsConfig | None = None
    """When a step trains no further, although it has epochs left; null: it trains for all its epochs."""
    max_mismatch: Annotated[float, Field(gt=0)] | None = None
    """The run stops if the mean of |logp_old - logp_rollout| over the action tokens, in nats, exceeds this bound,
    because the engine then does not hold the trainer's weights. null: 1e-3 for a float32 model; for other models 0.2
    in the first step, and later four times the first step's value, but at least 0.02. Tiny models showed 2e-7 in fp32
    and 8e-3 in bf16 (one run)."""

    @property
    def num_updates(self) -> int:
        """The largest number of optimizer steps in a training step."""
        return self.updates_per_step * self.epochs

    @property
    def kl_in_reward(self) -> bool:
        return self.kl is not None and self.kl.place == "reward"

    @property
    def is_around_engine(self) -> bool:
        """Whether the ratio is taken to the engine's policy, or to one that follows from it, and not to pi_old, which
        may need a forward pass."""
        return self.anchor != "old" or self.loss.anchor == "engine"

    @property
    def is_bounded(self) -> bool:
        """Whether something bounds how far the policy moves away from weights of earlier steps that sampled."""
        return self.is_around_engine or (self.correction is not None and bool(self.correction.reject))

    @property
    def learns_from_rewards(self) -> bool:
        """Whether rewards change the policy; without it, a run learns from its teachers alone."""
        return self.distillation is None or self.distillation.outcome

    @property
    def is_per_token(self) -> bool:
        """Whether each token has an advantage of its own."""
        of_tokens = {"values", "token_rewards", "thoughts", "energy"}
        return self.kl_in_reward or not self.adv_estimator.needs.isdisjoint(of_tokens)

    @property
    def aggregation(self) -> Aggregation:
        """`loss_agg_mode` if it is given, else the aggregation of the loss's paper."""
        return self.loss_agg_mode or self.loss.aggregation

    @property
    def _has_weight(self) -> bool:
        """Whether the loss contains the importance weight of the engine's policy."""
        return self.loss.corrects or self.anchor == "engine"

    @model_validator(mode="after")
    def _no_second_weight(self) -> Self:
        if self._has_weight and "correction" not in self.model_fields_set:
            self.__dict__["correction"] = None  # the object is frozen, and stays as given for `model_fields_set`
        return self

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        loss, correction = self.loss, self.correction
        if (self.loss_agg_mode == "seq-mean-token-sum-norm") != (self.loss_agg_tokens is not None):
            raise ValueError(
                "loss_agg_tokens is the constant length of loss_agg_mode seq-mean-token-sum-norm: give both or neither"
            )
        if loss.level == "sequence":
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
        if self.kl_in_reward and not isinstance(self.adv_estimator, ReinforcePlusPlusAdvantage | GaeAdvantage):
            raise ValueError(
                f"kl.place: reward gives each token a reward, which adv_estimator {self.adv_estimator.kind} ignores; "
                "choose reinforce_plus_plus or gae, or set kl.place to loss"
            )
        if self.anchor != "old" and not loss.clips_ratio:
            raise ValueError(
                f"anchor {self.anchor} is for losses that clip the ratio to pi_old, and {loss.kind} does not, or has "
                "its own policy there; remove anchor, or choose dual_clip, gspo, gmpo, cispo, sapo or dro"
            )
        if self.epochs > 1 and not loss.has_ratio:
            raise ValueError(
                f"epochs is {self.epochs}, but loss {loss.kind} has no ratio to pi_old: after the first update its "
                "gradient is not the policy gradient of the weights that it changes; choose a loss with a ratio, such "
                "as dual_clip, or set epochs to 1"
            )
        if self.stop_epochs and self.epochs == 1:
            raise ValueError("stop_epochs is for the second epoch and later ones, but epochs is 1; raise epochs")
        if self.stop_epochs and self.is_around_engine:
            raise ValueError(
                "stop_epochs compares pi with pi_old, but the ratio here is to another policy (of anchor, or of the "
                "loss); remove stop_epochs, or choose anchor old and a loss with it"
            )
        if self.anchor == "interpolated" and correction and correction.weight and correction.weight.normalise:
            raise ValueError(
                "correction.weight.normalise needs the mean of the weights before the update, and with anchor "
                "interpolated they follow from the update's own log-probs; set normalise to false"
            )
        if self._has_weight and correction:
            which = f"loss {loss.kind}" if loss.corrects else "the ratio of anchor engine"
            raise ValueError(
                f"{which} contains the importance weight of the engine's policy, and a correction would apply "
                "it twice, or compare this policy with itself; remove algorithm.correction"
            )
        return self

    def conflicts(self, run: GrpoRunConfig) -> Iterator[str]:
        estimator, rollout = self.adv_estimator, run.rollout
        if "group" in estimator.needs and rollout.samples_per_prompt == 1 and self.learns_from_rewards:
            yield f"rollout.samples_per_prompt is 1, so every {estimator.kind} advantage would be 0; use 2 or more"
        environment = rollout.environment
        has_rewards = environment and (environment.kind != "tools" or environment.objects)
        gives_rewards = rollout.prefix_values or has_rewards
        if "token_rewards" in estimator.needs and not gives_rewards:
            yield (
                f"algorithm.adv_estimator {estimator.kind} needs rewards at single tokens, which "
                "rollout.prefix_values gives for passages of reasoning, and rollout.environment of kind class for "
                "turns; set one of them, or choose another estimator"
            )
        if "thoughts" in estimator.needs and rollout.beams is None:
            yield (
                f"algorithm.adv_estimator {estimator.kind} compares the items after the same reasoning, and without "
                "rollout.beams there are none; set it, or choose another estimator"
            )
        for shaping in self.shaping:
            if isinstance(shaping, SoftOverlongShaping) and shaping.first_penalised > rollout.max_response_tokens:
                yield (
                    f"algorithm.shaping soft_overlong penalises answers from {shaping.first_penalised} tokens on, and "
                    f"rollout.max_response_tokens is {rollout.max_response_tokens}: it would penalise none; "
                    "max_tokens is usually rollout.max_response_tokens"
                )
        if "values" in estimator.needs and run.critic is None:
            yield (
                f"algorithm.adv_estimator {estimator.kind} needs a critic; add the section critic (`megatron-rl ppo` "
                "has one), or choose another estimator"
            )
        if rollout.prompts_per_step < self.updates_per_step:
            yield (
                f"algorithm.updates_per_step exceeds rollout.prompts_per_step ({self.updates_per_step} > "
                f"{rollout.prompts_per_step}): a mini-batch has whole groups, so some would be empty; lower it"
            )
