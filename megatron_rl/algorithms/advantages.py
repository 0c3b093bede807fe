"""The registry of the estimators that give one advantage for each sample, and their use on a batch.

Invariants: a sample without a reward is inactive. A group in which every advantage is 0 is a zero-signal group, for
every estimator. If the batch lacks what an estimator needs, an error names it.

Shape letters: S samples, G groups of the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_rl.algorithms.outcomes import (
    gdpo,
    gpg,
    group_statistics,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from megatron_rl.config.advantages import (
    AdvantageConfig,
    GdpoAdvantage,
    GpgAdvantage,
    GrpoAdvantage,
    GrpoPasskAdvantage,
    OpoAdvantage,
    ReinforcePlusPlusAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    RemaxAdvantage,
    RlooAdvantage,
)
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.section import Method
from megatron_rl.types import Batch, Metrics

ESTIMATORS: dict[type[Method], Callable[..., np.ndarray]] = {
    GrpoAdvantage: lambda section, b, cfg: grpo(b.rewards, b.group_of, section.std),
    RlooAdvantage: lambda section, b, cfg: rloo(b.rewards, b.group_of, section.std),
    ReinforcePlusPlusAdvantage: lambda section, b, cfg: reinforce_plus_plus(b.rewards, b.num_actions, section.whiten),
    ReinforcePlusPlusBaselineAdvantage: lambda section, b, cfg: reinforce_plus_plus_baseline(
        b.rewards, b.group_of, b.num_actions
    ),
    RemaxAdvantage: lambda section, b, cfg: remax(b.rewards, b.greedy_rewards),
    OpoAdvantage: lambda section, b, cfg: opo(b.rewards, b.group_of, b.num_actions),
    GpgAdvantage: lambda section, b, cfg: gpg(b.rewards, b.group_of, cfg.drop_zero_signal),
    GrpoPasskAdvantage: lambda section, b, cfg: grpo_passk(b.rewards, b.group_of, section.std),
    GdpoAdvantage: lambda section, b, cfg: gdpo(b.reward_parts, b.reward_weights, b.group_of),
}
"""One line for each estimator: (its configuration, batch, AlgorithmConfig) -> advantages [S]. The key is the class of
its configuration. `gae` and `grpo_process` give one number for each token: see `returns.py` and
`process_rewards.py`."""

BATCH_FIELDS = {"greedy_reward": ("greedy_rewards",), "reward_parts": ("reward_parts", "reward_weights")}
"""The fields of a batch that hold what an estimator needs besides the rewards."""


def estimate_advantages(batch: Batch, cfg: AlgorithmConfig) -> Metrics:
    """Fill `batch.advantages`, and set `batch.active` to False for samples that have no gradient.

    Abstentions become inactive. With `cfg.drop_zero_signal` zero-signal groups do, and with `cfg.overlong_filter`
    answers that the length budget cut. The rewards of all inactive samples but the abstentions still count in the
    statistics of their groups.

    Returns:
        reward/mean: the mean reward of the scored samples; NaN if there is none.
        reward/std: the standard deviation in a group, averaged over the groups with a score.
        groups/zero_signal: the number of groups with a score in which all advantages are 0. For a group-relative
            estimator these are the groups with equal scores.
        samples/abstained: the number of samples without a reward, or without the greedy reward that the estimator
            needs.
        samples/overlong: the number of scored samples that the overlong filter removes; 0 without the filter.
        samples/active: the number of samples that have a gradient.

    Raises:
        ValueError: the batch lacks what the estimator needs.
    """
    estimator = cfg.adv_estimator
    _require_inputs(batch, estimator)
    rewards, group_of, num_groups = batch.rewards, batch.group_of, len(batch.groups)
    scored = ~np.isnan(rewards)
    if "greedy_reward" in estimator.needs:
        assert batch.greedy_rewards is not None  # `_require_inputs` has checked it
        scored &= ~np.isnan(batch.greedy_rewards)
    batch.advantages = ESTIMATORS[type(estimator)](estimator, batch, cfg)
    has_score_G = np.bincount(group_of[scored], minlength=num_groups) > 0
    has_signal_G = np.bincount(group_of[batch.advantages != 0], minlength=num_groups) > 0
    active = batch.active & scored
    if cfg.drop_zero_signal:
        active &= has_signal_G[group_of]
    overlong = np.zeros(len(rewards), bool)
    if cfg.overlong_filter:
        overlong = scored & np.array([s.finish == "length" for group in batch.groups for s in group.samples], bool)
    batch.active = active & ~overlong
    _, std_G, spread_G = group_statistics(rewards, group_of)
    any_reward = bool((spread_G >= 0).any())
    return {
        "reward/mean": float(np.nanmean(rewards)) if any_reward else float("nan"),
        "reward/std": float(std_G[spread_G >= 0].mean()) if any_reward else float("nan"),
        "groups/zero_signal": float((has_score_G & ~has_signal_G).sum()),
        "samples/abstained": float((~scored).sum()),
        "samples/overlong": float(overlong.sum()),
        "samples/active": float(batch.active.sum()),
    }


def _require_inputs(batch: Batch, estimator: AdvantageConfig) -> None:
    if type(estimator) not in ESTIMATORS:
        raise ValueError(
            f"adv_estimator {estimator.kind} gives one number for each token and needs "
            f"{', '.join(sorted(estimator.needs))}, but this recipe estimates one number for each sample; choose one "
            f"of {', '.join(cls.model_fields['kind'].default for cls in ESTIMATORS)}"
        )
    for need in sorted(estimator.needs & BATCH_FIELDS.keys()):
        missing = [name for name in BATCH_FIELDS[need] if getattr(batch, name) is None]
        if missing:
            raise ValueError(
                f"adv_estimator {estimator.kind} needs {need}, but the batch holds no {' and no '.join(missing)}, "
                f"because this recipe does not collect it; choose another estimator"
            )
