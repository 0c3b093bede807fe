"""The critic's loss, and the explained variance of the returns.

Invariants: the loss is never below the loss without the clip; where it is clipped it has no gradient; the squared loss
and Huber's are equal near 0. The explained variance does not depend on how the tokens are split over ranks.

Shape letters: T packed tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from megatron_rl.algorithms.equality import RESOLUTION
from megatron_rl.algorithms.whitening import SumOverRanks, moments, one_rank


def value_loss(
    value_T: Tensor,
    old_value_T: Tensor,
    return_T: Tensor,
    *,
    clip: float | None,
    kind: Literal["squared", "huber"] = "squared",
    delta: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The clipped value loss of each token: max(l(V - R), l(V_old + clip(V - V_old, -c, c) - R)), l(x) = x^2 / 2.

    This is the form of PPO2 (OpenAI Baselines), which corresponds to the policy loss of Schulman et al. 2017
    (arXiv:1707.06347, eq. 7): a value that has moved towards its target by more than c does not lower the loss any
    further.

    Args:
        value_T, old_value_T, return_T: V now, V when the advantages were computed, and the target R; all finite.
        clip: the constant c; None means no clip.
        kind: `huber` is |x| delta - delta^2 / 2 where |x| exceeds delta (Huber 1964).

    Returns:
        loss_T, to be summed and divided by the step's global denominator.
        clipped_T: bool, where the clip makes the loss constant in V.

    Example:
        V_old 0, V 1, R 2 and c = .5 give the plain loss .5 and the clipped loss 1.125, so the loss is 1.125 and has no
        gradient.
    """

    def loss(x_T: Tensor) -> Tensor:
        if kind == "huber":
            return huber_loss(x_T, return_T, reduction="none", delta=delta)
        return (x_T - return_T).square() / 2

    plain_T = loss(value_T)
    if clip is None:
        return plain_T, torch.zeros_like(plain_T, dtype=torch.bool)
    clipped_T = loss(old_value_T + (value_T - old_value_T).clamp(-clip, clip))
    return torch.maximum(plain_T, clipped_T), clipped_T.detach() > plain_T.detach()


@torch.no_grad()
def explained_variance(
    value_T: Tensor, return_T: Tensor, action_mask_T: Tensor, sum_over_ranks: SumOverRanks = one_rank
) -> Tensor:
    """1 - Var(R - V) / Var(R) over the action tokens of all ranks, as a 0-dim float64. A perfect critic has 1, a
    constant one has 0, and the result is NaN if the returns do not vary."""
    _, unexplained = moments((return_T.double() - value_T.double())[action_mask_T], sum_over_ranks)
    mean, total = moments(return_T[action_mask_T], sum_over_ranks)
    return torch.where(total.sqrt() > RESOLUTION * mean.abs(), 1 - unexplained / total, torch.nan)
