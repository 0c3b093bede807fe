"""The data of every token of a packed row, and sums over the samples in the row.

Shape letters: T packed tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedColumns:
    """Columns with one entry for each token, all of shape [T]. Entry t belongs to the token that position t predicts,
    which is the next token of the same sample. A sample is always whole in one micro-batch. Where the action mask is
    False, the other entries mean nothing.
    """

    action_mask_T: Tensor
    """bool: whether the policy sampled the predicted token. False at a sample's last position and in padding."""
    sample_T: Tensor
    """int64: the index of the sample in the micro-batch, below T."""
    token_T: Tensor
    """int64: a number that identifies the token in the whole step, the same in every packing."""
    weight_T: Tensor
    """The factor of the token's loss (aggregation.py). The sum over all tokens is the step's loss."""
    advantage_T: Tensor
    logp_rollout_T: Tensor
    """Log-probs of the engine when it sampled the tokens."""
    lag_T: Tensor
    """int: the number of versions between the weights that sampled the token and the weights at the step's start."""
    reward_T: Tensor | None = None
    """float64: the rewards at actions for token advantages (token_advantages.py), 0 elsewhere; None if
    the estimator gives one number for each sample."""
    value_T: Tensor | None = None
    """The critic's values at the step's start, of the states before the tokens; None if there is no critic."""
    return_T: Tensor | None = None
    """What the critic learns; None if there is no critic."""
    logp_old_T: Tensor | None = None
    """Log-probs under the weights at the step's start. None if the loss does not need them, or if the step's only
    update computes them itself: see `Needs.passes`."""
    logp_ref_T: Tensor | None = None
    """Log-probs under the reference policy; None if the loss does not need them."""
    mean_weight_T: Tensor | None = None
    """The mean importance weight of the mini-batch, by which each weight is divided; None means 1."""
    selected_T: Tensor | None = None
    """bool: the tokens that Clip-Cov or KL-Cov has chosen from the whole mini-batch; None for other losses."""
    high_entropy_T: Tensor | None = None
    """bool: the tokens whose entropy is high enough for a policy loss; None means all tokens."""


@dataclass(frozen=True, slots=True)
class ComparedColumns(PackedColumns):
    """The columns of answers that a loss of preferences compares (preference_objective.py)."""

    logp_reference_T: Tensor | None = None
    """float64: the log-prob of all actions of the sample together under the reference model; 0 without a reference,
    and the pair's margin for a reward model."""
    partner_T: Tensor | None = None
    """float64: what the sample's own number is compared with; None before `Objective.prepare`."""


@dataclass(frozen=True, slots=True)
class TaughtColumns(PackedColumns):
    """The columns of a run with teachers (distillation.py)."""

    teacher_weight_T: Tensor | None = None
    """The weight of the sample's teacher; 0 if it has none."""
    logp_teacher_T: Tensor | None = None
    """Log-probs of the tokens under the teacher, NaN where it gave none; or [T, K] of those in `support_T`."""
    support_T: Tensor | None = None
    """[T, K]: the tokens at each position over which the policy is compared with its teacher; None for the sampled
    token alone. They may be whole numbers in float32."""
    logp_support_T: Tensor | None = None
    """[T, K]: their log-probs under the current policy, with the gradient."""


@dataclass(frozen=True, slots=True)
class GroupedColumns(PackedColumns):
    """The columns of a run that adds up numbers over the answers of a group (token_baseline.py)."""

    entry_T: Tensor | None = None
    """int64: the entry of the sums to which an action adds (`GroupSums`); `size` if it has none."""
    size: Tensor | None = None
    """int64, without dimensions: the number of entries on all ranks."""
    energy_T: Tensor | None = None
    """See `FirstPass`; under the weights at the step's start."""


class FirstPass(NamedTuple):
    """The numbers of a pass of the policy over a micro-batch; None for what nobody needs."""

    logp_T: Tensor
    entropy_T: Tensor | None = None
    energy_T: Tensor | None = None
    """The squared norm of the gradient of log p with respect to the logits divided by the temperature: (1 - p)^2 plus
    the p_v^2 of all other tokens v."""

    def each(self, change: Callable[[Tensor], Tensor]) -> FirstPass:
        return FirstPass(change(self.logp_T), *(None if x_T is None else change(x_T) for x_T in self[1:]))


def support_of(columns: PackedColumns) -> Tensor | None:
    """`support_T`, if there is any."""
    return columns.support_T if isinstance(columns, TaughtColumns) else None


def with_support(columns: PackedColumns, logp_support_TK: Tensor | None) -> PackedColumns:
    """The columns with `logp_support_T`, if there is any."""
    return replace(columns, logp_support_T=logp_support_TK) if isinstance(columns, TaughtColumns) else columns


def sum_by(owner_T: Tensor, x_T: Tensor) -> Tensor:
    """The sum of x over the tokens with the same owner, for every token.

    Args:
        owner_T: int64 in [0, T).
    """
    # There are as many sums as tokens, and most of them are unused, because counting the owners would make a GPU wait.
    return torch.zeros_like(x_T).index_add(0, owner_T, x_T)[owner_T]


def mean_by(owner_T: Tensor, mask_T: Tensor, x_T: Tensor) -> Tensor:
    """The mean of x over the owner's action tokens, for every token; 0 if the owner has none."""
    count_T = sum_by(owner_T, mask_T.to(x_T.dtype))
    return sum_by(owner_T, torch.where(mask_T, x_T, 0.0)) / count_T.clamp(min=1)


def max_by(owner_T: Tensor, mask_T: Tensor, x_T: Tensor) -> Tensor:
    """The largest x of the owner's action tokens, for every token; -inf if the owner has none."""
    masked_T = torch.where(mask_T, x_T, -torch.inf)
    return torch.full_like(masked_T, -torch.inf).scatter_reduce(0, owner_T, masked_T, "amax")[owner_T]


def segments(action_mask_T: Tensor, sample_T: Tensor) -> Tensor:
    """Number the segments, which are runs of actions. A run ends at a forced token and at the end of its sample.

    Returns:
        int64 [T] in [0, T), equal within a run. A token that is no action has the number of the run before it.

    Example: the mask 0 1 1 0 1 of one sample gives 0 1 1 1 2.
    """
    before_T = torch.zeros_like(action_mask_T)
    before_T[1:] = action_mask_T[:-1] & (sample_T[1:] == sample_T[:-1])
    number_T = (action_mask_T & ~before_T).cumsum(0)
    return number_T.clamp(max=max(len(number_T) - 1, 0))
