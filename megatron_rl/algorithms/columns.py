"""What is known of every token of a packed row, and sums over the samples that stand in it.

Shape letters: T packed tokens of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedColumns:
    """All [T] and aligned to the predicted token: entry t belongs to the token that position t predicts, the next
    one of the same sample. A sample stands whole in one micro-batch. Where the mask is False an entry means nothing.
    """

    action_mask_T: Tensor
    """bool: the predicted token was sampled by the policy. False at a sample's last position and in padding."""
    sample_T: Tensor
    """int64: index of the sample in the micro-batch, below T."""
    token_T: Tensor
    """int64: names the token in the whole step, the same number in every packing."""
    weight_T: Tensor
    """What the token's loss is multiplied by (aggregation.py): the sum over all tokens is the step's loss."""
    advantage_T: Tensor
    logp_rollout_T: Tensor
    lag_T: Tensor
    """int: versions between the weights that sampled the token and those at the step's start."""
    logp_old_T: Tensor | None = None
    """Log-probs at the step's start. None where the loss needs none, or where the step's only update has the same ones
    itself: see `Needs.logp_old`."""
    logp_ref_T: Tensor | None = None
    mean_weight_T: Tensor | None = None
    """The mean importance weight of the mini-batch, by which each is divided; None is 1."""
    selected_T: Tensor | None = None
    """bool: tokens that the loss singles out over the whole mini-batch (Clip-Cov, KL-Cov)."""
    high_entropy_T: Tensor | None = None
    """bool: tokens that have a policy loss; None is all."""


def sum_by(owner_T: Tensor, x_T: Tensor) -> Tensor:
    """For every token the sum of x over the tokens with the same owner.

    Args:
        owner_T: int64 in [0, T).
    """
    # As many sums as tokens, most of them unused: the number of owners would cost a GPU a synchronisation.
    return torch.zeros_like(x_T).index_add(0, owner_T, x_T)[owner_T]


def mean_by(owner_T: Tensor, mask_T: Tensor, x_T: Tensor) -> Tensor:
    """For every token the mean of x over its owner's action tokens; 0 where the owner has none."""
    count_T = sum_by(owner_T, mask_T.to(x_T.dtype))
    return sum_by(owner_T, torch.where(mask_T, x_T, 0.0)) / count_T.clamp(min=1)


def max_by(owner_T: Tensor, mask_T: Tensor, x_T: Tensor) -> Tensor:
    """For every token the largest x of its owner's action tokens; -inf where the owner has none."""
    masked_T = torch.where(mask_T, x_T, -torch.inf)
    return torch.full_like(masked_T, -torch.inf).scatter_reduce(0, owner_T, masked_T, "amax")[owner_T]


def segments(action_mask_T: Tensor, sample_T: Tensor) -> Tensor:
    """Number the runs of actions: a run ends where a forced token, or another sample, interrupts it.

    Returns:
        int64 [T] in [0, T), equal within a run. A token that is no action has the number of the run before it.

    Example:
        mask 0 1 1 0 1, one sample: 0 1 1 1 2.
    """
    before_T = torch.zeros_like(action_mask_T)
    before_T[1:] = action_mask_T[:-1] & (sample_T[1:] == sample_T[:-1])
    number_T = (action_mask_T & ~before_T).cumsum(0)
    return number_T.clamp(max=max(len(number_T) - 1, 0))
