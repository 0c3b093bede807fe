"""The estimators that give one advantage for each token, on the trainer ranks.

The driver says which rewards are at which tokens (`Credit.token_rewards`), and packing places them at actions
(`PackedColumns.reward_T`). When a step begins, the ranks compute the advantages of all its tokens together: from these
rewards, and from what only the ranks have, the KL to the reference policy.

Invariants: the result depends neither on the packing nor on how the samples are split over ranks. Every rank of the
batch must call `token_advantages`, even if it has no tokens, because whitening sums over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.algorithms.columns import GroupedColumns, PackedColumns
from megatron_rl.algorithms.correction import importance_weight
from megatron_rl.algorithms.kl import kl_estimate
from megatron_rl.algorithms.returns import gae, returns_to_go
from megatron_rl.algorithms.token_baseline import token_baseline
from megatron_rl.algorithms.whitening import SumOverRanks
from megatron_rl.config.advantages import (
    GaeAdvantage,
    GrpoProcessAdvantage,
    OptimalTokenBaselineAdvantage,
    ReinforcePlusPlusAdvantage,
    TwoStageAdvantage,
)
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.section import Method

ESTIMATORS: dict[type[Method], Callable[..., Tensor]] = {
    GrpoProcessAdvantage: lambda section, reward_T, mask_T, sample_T, total: returns_to_go(
        reward_T, mask_T, sample_T, section.gamma, whitened=False
    ),
    ReinforcePlusPlusAdvantage: lambda section, reward_T, mask_T, sample_T, total: returns_to_go(
        reward_T, mask_T, sample_T, sum_over_ranks=total, whitened=section.whiten
    ),
    TwoStageAdvantage: lambda section, reward_T, mask_T, sample_T, total: returns_to_go(
        reward_T, mask_T, sample_T, whitened=False
    ),
}
"""One line for each estimator without a critic: (its configuration, reward_T, action_mask_T, sample_T, SumOverRanks) ->
advantage_T. The key is the class of its configuration. With a critic it is `gae`, which also gives the returns; and
`token_baseline` takes more columns."""


@torch.no_grad()
def token_advantages(
    columns: Sequence[PackedColumns], cfg: AlgorithmConfig, kl_coefficient: float, sum_over_ranks: SumOverRanks
) -> tuple[list[PackedColumns], Tensor]:
    """The columns of this rank's micro-batches of a whole step, with the advantages of their tokens. The advantage that
    all actions of a sample share (`Credit.advantages`) is added.

    Args:
        columns: they have `reward_T`, and `value_T` for `gae`, or `logp_old_T` and the columns of `GroupedColumns` for
            `optimal_token_baseline`. For a KL in the reward they also have `logp_old_T` and `logp_ref_T`, and each
            action then has the reward -kl_coefficient * KL besides. All of these are finite at actions.

    Returns:
        The columns, with `return_T` for `gae`, and the sum of the KL over this rank's actions, a float64 without
        dimensions; 0 if the KL is not in the reward.
    """
    sizes = [len(c.sample_T) for c in columns]
    first = [sum(sizes[:i]) for i in range(len(sizes))]  # a micro-batch has fewer samples than tokens
    sample_T = torch.cat([c.sample_T + number for c, number in zip(columns, first, strict=True)])
    mask_T, reward_T = _joined(columns, "action_mask_T"), _joined(columns, "reward_T")
    kl = reward_T.new_zeros(())
    if cfg.kl and cfg.kl_in_reward:
        logp_T, logp_ref_T = _joined(columns, "logp_old_T"), _joined(columns, "logp_ref_T")
        kl_T = kl_estimate(logp_T.double(), logp_ref_T.double(), cfg.kl.estimator, cap=cfg.kl.cap)
        kl_T = torch.where(mask_T, kl_T, 0.0)
        reward_T, kl = reward_T - kl_coefficient * kl_T, kl_T.sum()
    section = cfg.adv_estimator
    dtype = columns[0].advantage_T.dtype
    if isinstance(section, GaeAdvantage):
        value_T = _joined(columns, "value_T")
        advantage_T, return_T = gae(reward_T, value_T, mask_T, sample_T, section, sum_over_ranks)
        returns = torch.split(return_T.to(dtype), sizes)
        columns = [replace(c, return_T=part_T) for c, part_T in zip(columns, returns, strict=True)]
    elif isinstance(section, OptimalTokenBaselineAdvantage):
        energy_T = _joined(columns, "energy_T")
        if cfg.correction and (weight := cfg.correction.weight):
            log_w_T = _joined(columns, "logp_old_T") - _joined(columns, "logp_rollout_T")
            energy_T = energy_T * importance_weight(log_w_T, mask_T, sample_T, weight)[0].square()
        entry_T, size = _joined(columns, "entry_T"), _size(columns[0])
        advantage_T = token_baseline(reward_T, energy_T, mask_T, sample_T, entry_T, size, sum_over_ranks)
    else:
        advantage_T = ESTIMATORS[type(section)](section, reward_T, mask_T, sample_T, sum_over_ranks)
    parts = torch.split(advantage_T.to(dtype), sizes)
    return [replace(c, advantage_T=c.advantage_T + part_T) for c, part_T in zip(columns, parts, strict=True)], kl


def _size(columns: PackedColumns) -> int:
    assert isinstance(columns, GroupedColumns) and columns.size is not None, "the estimator has `Credit.sums`"
    return int(columns.size)


def _joined(columns: Sequence[PackedColumns], name: str) -> Tensor:
    return torch.cat([getattr(c, name) for c in columns])
