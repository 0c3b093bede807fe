"""The registry of the estimators, and their use on a step's batch. Estimators of one number for each token get the
rewards at tokens here, and the ranks compute the advantages (token_advantages.py).

Invariants: a sample without a reward is inactive. A group whose advantages are all 0 is a zero-signal group, for every
estimator. An agent's answer counts once in the statistics, however many conversations it has. An error names an input
that an estimator needs and does not get.

Shape letters: S samples, G groups of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from megatron_rl.algorithms.outcomes import (
    a2po,
    gdpo,
    gpg,
    group_statistics,
    grpo,
    grpo_passk,
    max_rl,
    opo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from megatron_rl.algorithms.process_rewards import grpo_process, outcome_rewards, summed_rewards
from megatron_rl.algorithms.token_baseline import compared_outcomes, group_sums
from megatron_rl.algorithms.two_stage import two_stage
from megatron_rl.config.advantages import (
    A2poAdvantage,
    FunctionAdvantage,
    GaeAdvantage,
    GdpoAdvantage,
    GpgAdvantage,
    GrpoAdvantage,
    GrpoPasskAdvantage,
    GrpoProcessAdvantage,
    MaxRlAdvantage,
    OpoAdvantage,
    OptimalTokenBaselineAdvantage,
    ReinforcePlusPlusAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    RemaxAdvantage,
    RlooAdvantage,
    TwoStageAdvantage,
)
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.exception_text import place, said
from megatron_rl.config.function import load_function, short_path
from megatron_rl.config.section import Method
from megatron_rl.types import AnnotatedBatch, Credit, Metrics, StepBatch, TokenRewards

ESTIMATORS: dict[type[Method], Callable[..., np.ndarray]] = {
    GrpoAdvantage: lambda section, s, cfg: grpo(s.rewards, s.group_of, section.std),
    RlooAdvantage: lambda section, s, cfg: rloo(s.rewards, s.group_of, section.std),
    ReinforcePlusPlusAdvantage: lambda section, s, cfg: reinforce_plus_plus(s.rewards, s.num_actions, section.whiten),
    ReinforcePlusPlusBaselineAdvantage: lambda section, s, cfg: reinforce_plus_plus_baseline(
        s.rewards, s.group_of, s.num_actions
    ),
    RemaxAdvantage: lambda section, s, cfg: remax(s.rewards, s.greedy_rewards),
    A2poAdvantage: lambda section, s, cfg: a2po(s.rewards, s.pass_rates, section.beta),
    OpoAdvantage: lambda section, s, cfg: opo(s.rewards, s.group_of, s.num_actions),
    GpgAdvantage: lambda section, s, cfg: gpg(s.rewards, s.group_of, cfg.drop_zero_signal),
    MaxRlAdvantage: lambda section, s, cfg: max_rl(s.rewards, s.group_of),
    GrpoPasskAdvantage: lambda section, s, cfg: grpo_passk(s.rewards, s.group_of, section.std),
    GdpoAdvantage: lambda section, s, cfg: gdpo(s.reward_parts, s.reward_weights, s.group_of),
    FunctionAdvantage: lambda section, s, cfg: _by_function(section.path, s),
}
"""One line for each estimator: (its configuration, StepBatch, AlgorithmConfig) -> advantages [S]. The key is the class
of its configuration."""

TOKEN_ESTIMATORS: dict[type[Method], Callable[..., TokenRewards]] = {
    GaeAdvantage: lambda section, s: summed_rewards(s, section.weights),
    GrpoProcessAdvantage: lambda section, s: grpo_process(s, section),
    OptimalTokenBaselineAdvantage: lambda section, s: compared_outcomes(s),
    ReinforcePlusPlusAdvantage: lambda section, s: outcome_rewards(s),
    TwoStageAdvantage: lambda section, s: two_stage(s, section),
}
"""One line for each estimator that gives one number for each token: (its configuration, StepBatch) -> the rewards at
tokens. Its other part is in `token_advantages.ESTIMATORS`."""

SCORE_FIELDS = {
    "greedy_reward": ("greedy_rewards",),
    "pass_rate": ("pass_rates",),
    "reward_parts": ("reward_parts", "reward_weights"),
    "token_rewards": ("token_rewards",),
    "thoughts": ("thought_of", "num_item_tokens"),
}
"""The fields of `StepBatch` that hold what an estimator needs besides the rewards."""


def estimate_advantages(batch: StepBatch, cfg: AlgorithmConfig) -> tuple[Credit, Metrics]:
    """The advantages of a batch's samples, and which of them have a gradient.

    Abstentions have none. With `cfg.drop_zero_signal` zero-signal groups have none, and with `cfg.overlong_filter`
    answers that the length budget cut. The rewards of all inactive samples but the abstentions still count in the
    statistics of their groups.

    Returns:
        The credit, and these metrics:
        reward/mean: the mean reward of the scored samples; NaN if there is none.
        reward/std: the standard deviation in a group, averaged over the groups with a score.
        groups/zero_signal: the number of groups with a score whose advantages are all 0. For a group-relative
            estimator these are the groups with equal rewards.
        samples/abstained: the number of samples without a reward, or without the greedy reward that the estimator
            needs.
        samples/overlong: the number of scored samples that the overlong filter removes; 0 without the filter.
        samples/active: the number of samples that have a gradient.

    Raises:
        ValueError: what the estimator needs is missing.
    """
    estimator = cfg.adv_estimator
    _require_inputs(batch, cfg)
    rewards, group_of = batch.rewards, batch.group_of
    num_groups = int(group_of.max(initial=-1)) + 1
    scored = ~np.isnan(rewards)
    if "greedy_reward" in estimator.needs:
        assert batch.greedy_rewards is not None  # `_require_inputs` has checked it
        scored &= ~np.isnan(batch.greedy_rewards)
    has_score_G = np.bincount(group_of[scored], minlength=num_groups) > 0
    token_rewards = None
    if cfg.is_per_token:
        advantages, token_rewards = np.zeros(len(rewards)), TOKEN_ESTIMATORS[type(estimator)](estimator, batch)
        signals = group_of[token_rewards.sample[token_rewards.value != 0]]
    else:
        advantages = _of_samples(batch, cfg)
        signals = group_of[advantages != 0]
    # A KL in the reward gives every group a signal, and so does a critic: what it expected need not be the reward.
    always = cfg.kl_in_reward or "values" in estimator.needs
    has_signal_G = has_score_G if always else np.bincount(signals, minlength=num_groups) > 0
    active = scored & has_signal_G[group_of] if cfg.drop_zero_signal else scored
    overlong = scored & batch.is_cut & cfg.overlong_filter
    active = active & ~overlong
    if cfg.distillation is not None:
        assert isinstance(batch, AnnotatedBatch) and batch.teacher_weights is not None, "distillation has teachers"
        # A teacher gives a gradient to samples whose outcome gives none.
        active = active & cfg.distillation.outcome
        advantages = np.where(active, advantages, 0.0)
        active = active | ((batch.teacher_weights > 0) & ~(batch.is_cut & cfg.overlong_filter))
    answers = of_answers(batch)
    _, std_G, spread_G = group_statistics(answers.rewards, answers.group_of)
    any_reward = bool((spread_G >= 0).any())
    metrics = {
        "reward/mean": float(np.nanmean(answers.rewards)) if any_reward else float("nan"),
        "reward/std": float(std_G[spread_G >= 0].mean()) if any_reward else float("nan"),
        "groups/zero_signal": float((has_score_G & ~has_signal_G).sum()),
        "samples/abstained": float((~scored).sum()),
        "samples/overlong": float(overlong.sum()),
        "samples/active": float(active.sum()),
    }
    sums = group_sums(group_of, batch.num_actions, active) if "energy" in estimator.needs else None
    return Credit(advantages, active, token_rewards, sums), metrics


def why_untrained(metrics: Mapping[str, float]) -> str:
    """Why a step has trained nothing, from what `estimate_advantages` said of it."""
    reasons = []
    if overlong := int(metrics.get("samples/overlong", 0)):
        reasons.append(
            f"algorithm.overlong_filter leaves out the {overlong:,} answers that rollout.max_response_tokens cut"
        )
    if groups := int(metrics.get("groups/zero_signal", 0)):
        reasons.append(
            f"in {groups:,} groups of answers to one prompt all rewards are equal, so that every advantage is 0"
        )
    if abstained := int(metrics.get("samples/abstained", 0)):
        reasons.append(f"{abstained:,} answers have no score")
    return "; ".join(reasons) or "no answer was left"


def _of_samples(batch: StepBatch, cfg: AlgorithmConfig) -> np.ndarray:
    """The advantages [S]; the conversations of an answer have the answer's."""
    estimator = cfg.adv_estimator
    estimate, answer_of = ESTIMATORS[type(estimator)], batch.answer_of
    if answer_of is None or isinstance(estimator, FunctionAdvantage):
        return np.asarray(estimate(estimator, batch, cfg))
    advantages: np.ndarray = np.asarray(estimate(estimator, of_answers(batch), cfg))[answer_of]
    return advantages


def of_answers(batch: StepBatch) -> StepBatch:
    """What estimators read of a batch, with one row for each answer in the place of its conversations.

    Example: the second answer of a group had two conversations: answer_of [0 1 1], rewards [0 1 1] and num_actions
    [5 2 4] become rewards [0 1] and num_actions [5 6]. An answer whose conversations are scored differently has the
    mean of the scores.
    """
    answer_of = batch.answer_of
    if answer_of is None or not len(answer_of) or answer_of[-1] == len(answer_of) - 1:
        return batch
    first = np.flatnonzero(np.diff(answer_of, prepend=-1))
    parts, greedy = batch.reward_parts, batch.greedy_rewards
    reduced = replace(
        batch,
        names=[batch.names[i] for i in first],
        group_of=batch.group_of[first],
        num_actions=np.add.reduceat(batch.num_actions, first),
        rewards=_means(batch.rewards, first),
        reward_parts=None if parts is None else _means(parts, first),
        greedy_rewards=None if greedy is None else greedy[first],
        answer_of=None,
    )
    if isinstance(reduced, AnnotatedBatch) and reduced.pass_rates is not None:
        return replace(reduced, pass_rates=reduced.pass_rates[first])
    return reduced


def _means(scores: np.ndarray, first: np.ndarray) -> np.ndarray:
    """The means of the scores from each index to the next one, without NaN. Equal scores stay what they are."""
    known = ~np.isnan(scores)
    count = np.add.reduceat(known, first, axis=0, dtype=np.int64)
    mean = np.add.reduceat(np.where(known, scores, 0.0), first, axis=0) / np.maximum(count, 1)
    low = np.minimum.reduceat(np.where(known, scores, np.inf), first, axis=0)
    high = np.maximum.reduceat(np.where(known, scores, -np.inf), first, axis=0)
    return np.where(count == 0, np.nan, np.where(low == high, low, mean))


def _by_function(path: str, batch: StepBatch) -> np.ndarray:
    """The advantages that a function of the user's own gives.

    Raises:
        ValueError: there is no such function, it raised, or its result is not a finite number for each scored sample.
    """
    function, key = load_function(path), f"algorithm.adv_estimator {short_path(path)}"
    try:
        advantages = np.asarray(function(batch), np.float64)
    except BaseException as error:
        raise ValueError(f"{key} raised {said(error)}{place(error)}") from error
    scored = ~np.isnan(batch.rewards)
    if advantages.shape != scored.shape or not np.isfinite(advantages[scored]).all():
        raise ValueError(
            f"{key} must return one finite number for each of the {len(scored)} samples, but it returned "
            f"{advantages.shape} numbers, of which {int((~np.isfinite(advantages)).sum())} are not finite"
        )
    return np.where(scored, advantages, 0.0)


def _require_inputs(batch: StepBatch, cfg: AlgorithmConfig) -> None:
    estimator = cfg.adv_estimator
    for need in sorted(estimator.needs & SCORE_FIELDS.keys()):
        missing = [name for name in SCORE_FIELDS[need] if getattr(batch, name, None) is None]
        if missing:
            raise ValueError(
                f"adv_estimator {estimator.kind} needs {need}, but there are no {' and no '.join(missing)}, "
                f"because this recipe does not collect it; choose another estimator"
            )
