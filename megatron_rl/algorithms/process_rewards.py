"""Group-relative advantages from rewards at single tokens (process supervision).

Invariants: rewards are normalised before they are summed. Each kind of reward has its own mean and deviation in a
group, so that a kind with a large scale does not hide the others. A kind that fewer than two samples of a group have
adds exactly 0, and so does a kind with equal rewards. The statistics contain every reward, whatever the action mask is.

All samples of a group must be in one packed row, so this runs before groups are split over ranks.

Shape letters: T packed tokens, N rewards, S samples, K reward kinds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms.returns import Actions, reverse_scan
from megatron_rl.algorithms.whitening import STD_EPS
from megatron_rl.config.advantages import GrpoProcessAdvantage


@dataclass(frozen=True, slots=True)
class StepRewards:
    """Sparse rewards at tokens, with one entry for each reward."""

    sample_N: Tensor
    """int64: the sample of the reward."""
    position_N: Tensor
    """int64: the position of the reward's token, counted from the first token of its sample in the packed row."""
    kind_N: Tensor
    """int64: the index of the reward function. Each kind is normalised separately. An outcome reward is a kind with one
    reward for each sample."""
    value_N: Tensor
    """float: the reward. NaN means an abstention, which is left out of the statistics and adds nothing."""


@torch.no_grad()
def grpo_process(
    steps: StepRewards, group_of: Tensor, action_mask_T: Tensor, sample_T: Tensor, cfg: GrpoProcessAdvantage
) -> Tensor:
    """GRPO with process supervision (Shao et al. 2024, arXiv:2402.03300, section 4.1.3).

    The rewards of one kind in a group are normalised together, (r - mean) / (std + 1e-6). The advantage of an action is
    the sum of the normalised rewards at its token or later, each discounted by gamma for every action between. A reward
    at a token that is no action (an observation, a forced delimiter) counts for the last action before it.

    Args:
        steps: the rewards in any order; several may be at one token.
        group_of: int64 [S], the group of each sample that sample_T names.
        action_mask_T: bool [T].
        sample_T: int64 [T]; a sample's tokens are adjacent.

    Returns:
        advantage_T: float64 [T], 0 where there is no action.

    Raises:
        ValueError: a reward lies outside its sample's tokens.
    """
    actions = Actions.of(action_mask_T, sample_T)
    index_N = _packed_index(steps, sample_T)
    # The last action at or before each reward; a sample may have none up to there.
    action_N = action_mask_T.cumsum(0)[index_N] - 1
    owned_N = (action_N >= 0) & (_take(actions.sample_N, action_N) == steps.sample_N)
    value_N = normalised(steps, group_of, cfg.std)[owned_N]
    reward_A = torch.zeros_like(actions.continues_N).index_add_(0, action_N[owned_N], value_N)
    advantage_A = reverse_scan(reward_A, cfg.gamma * actions.continues_N)
    return actions.place(advantage_A, torch.zeros(sample_T.shape, dtype=torch.float64, device=sample_T.device))


def normalised(steps: StepRewards, group_of: Tensor, std: str) -> Tensor:
    """Every reward normalised by its kind and group, float64 [N]. It is 0 for an abstention, for a kind that only one
    sample of the group has, and for equal rewards. The standard deviation has the divisor n - 1, as in `grpo`."""
    value_N, scored_N = steps.value_N.double(), ~steps.value_N.isnan()
    # A cell is a pair of group and kind; `cell_N` is the index of the cell of each scored reward.
    pair_N = torch.stack([group_of[steps.sample_N], steps.kind_N], dim=1)[scored_N]
    _, cell_N = torch.unique(pair_N, dim=0, return_inverse=True)
    x_N, size = value_N[scored_N], pair_N.shape[0]
    count = torch.bincount(cell_N, minlength=size)
    mean = torch.bincount(cell_N, x_N, size) / count.clamp(min=1)
    squares = torch.bincount(cell_N, (x_N - mean[cell_N]).square(), size)
    scale = (squares / (count - 1).clamp(min=1)).sqrt() + STD_EPS if std == "group" else torch.ones_like(squares)
    largest = x_N.new_full((size,), -torch.inf).scatter_reduce_(0, cell_N, x_N, "amax")
    smallest = x_N.new_full((size,), torch.inf).scatter_reduce_(0, cell_N, x_N, "amin")
    contributors = torch.unique(torch.stack([cell_N, steps.sample_N[scored_N]], dim=1), dim=0)[:, 0]
    signal = (largest > smallest) & (torch.bincount(contributors, minlength=size) > 1)
    result_N = torch.zeros_like(value_N)
    result_N[scored_N] = torch.where(signal[cell_N], (x_N - mean[cell_N]) / scale[cell_N], 0.0)
    return result_N


def _packed_index(steps: StepRewards, sample_T: Tensor) -> Tensor:
    """The index of each reward's token in the packed row, int64 [N]."""
    samples, length = torch.unique_consecutive(sample_T, return_counts=True)
    order = samples.argsort()
    slot_N = torch.searchsorted(samples[order], steps.sample_N)
    known_N = _take(samples[order], slot_N) == steps.sample_N
    run_N = _take(order, slot_N)
    start_N, length_N = _take(length.cumsum(0) - length, run_N), _take(length, run_N)
    bad_N = ~known_N | (steps.position_N < 0) | (steps.position_N >= length_N)
    if bad_N.any():
        first = int(bad_N.nonzero()[0])
        sample, position = int(steps.sample_N[first]), int(steps.position_N[first])
        what = f"has {int(length_N[first])} tokens" if known_N[first] else "is not in the packed row"
        raise ValueError(f"a step reward is given at token {position} of sample {sample}, which {what}")
    return start_N + steps.position_N


def _take(x_N: Tensor, index: Tensor) -> Tensor:
    """x[index], where an index out of range gives any entry of x, or -1 if x is empty. The caller masks these."""
    return x_N[index.clamp(0, x_N.numel() - 1)] if x_N.numel() else torch.full_like(index, -1)
