"""The optimal token baseline (arXiv:2602.07078): each number of an action has a baseline of its own in each group.

The baseline that minimises the variance of E[grad log pi (R - B)] is E[|grad log pi|^2 R] / E[|grad log pi|^2]. The
squared norm up to the t-th action is taken as W_t, the sum of the energies of the actions up to t, where an energy is
the squared norm of the gradient of a token's log-prob with respect to the logits. The driver knows which answers have a
t-th action (`group_sums`), and the ranks have the energies.

Invariants (tests/unit/actor, tests/ranks): the result depends neither on the packing nor on how the samples are split
over ranks; groups of equal rewards have exactly 0. Every rank of the batch must call `token_baseline`.

Shape letters: S samples, T packed tokens, N their actions in order, E entries of the sums of all groups.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.outcomes import group_statistics
from megatron_rl.algorithms.process_rewards import outcome_rewards
from megatron_rl.algorithms.returns import Actions, reverse_scan
from megatron_rl.algorithms.whitening import SumOverRanks
from megatron_rl.types import GroupSums, StepBatch, TokenRewards


def compared_outcomes(batch: StepBatch) -> TokenRewards:
    """The rewards of the answers in groups whose rewards differ, each at its last token."""
    outcomes = outcome_rewards(batch)
    *_, spread_G = group_statistics(batch.rewards, batch.group_of)
    differs = spread_G[batch.group_of[outcomes.sample]] > 0
    return TokenRewards(outcomes.sample[differs], outcomes.position[differs], outcomes.value[differs])


def group_sums(group_of: np.ndarray, num_actions: np.ndarray, active: np.ndarray) -> GroupSums:
    """
    Args:
        group_of, num_actions: int64 [S], the group of each sample and the number of its actions.
        active: bool [S], the samples that the ranks get.
    """
    num_G = np.zeros(int(group_of.max(initial=-1)) + 1, np.int64)
    for group in np.unique(group_of[active]):
        lengths = np.sort(num_actions[active & (group_of == group)])
        num_G[group] = lengths[-2] if len(lengths) > 1 else 0
    stop_G = num_G.cumsum()
    return GroupSums((stop_G - num_G)[group_of], stop_G[group_of], int(num_G.sum()))


@torch.no_grad()
def token_baseline(
    reward_T: Tensor,
    energy_T: Tensor,
    mask_T: Tensor,
    sample_T: Tensor,
    entry_T: Tensor,
    size: int,
    sum_over_ranks: SumOverRanks,
) -> Tensor:
    """A_t = R - B_t, B_t = sum(R W_t) / sum(W_t) over the answers of the group that have a t-th action.

    Args:
        reward_T: float64 [T], `compared_outcomes` at the last actions.
        energy_T: [T], the energies of the actions, multiplied by the squares of importance weights.
        entry_T, size: see `GroupedColumns`.

    Returns:
        advantage_T, in the dtype of reward_T; 0 where there is no action.

    Example: two answers of two actions have the rewards 1 and 0, and the energies .5, .5 and .25, .75. The baselines
    are .5 / .75 and 1 / 2, and the advantages .333, .5 and -.667, -.5.
    """
    actions = Actions.of(mask_T, sample_T)
    reward_N = reverse_scan(actions.pick(reward_T, "the reward"), actions.continues_N)
    follows_N = actions.continues_N.roll(1)
    path_N = reverse_scan(actions.pick(energy_T, "the energy").flip(0), follows_N.flip(0)).flip(0)
    entry_N = entry_T[actions.position_N]
    sums_2E = path_N.new_zeros(2, size + 1).index_add_(1, entry_N, torch.stack([reward_N * path_N, path_N]))
    sums_2E[:, size] = 0  # the actions without an entry
    rewarded_E, total_E = sum_over_ranks(sums_2E).unbind()
    baseline_E = rewarded_E / total_E.clamp(min=torch.finfo(total_E.dtype).tiny)
    return actions.place(reward_N - baseline_E[entry_N], reward_T)
