"""The critic's loss, and how much of the returns it explains.

Invariants: the loss is never below the unclipped one; where it is clipped it has no gradient; squared and Huber agree
near 0. The explained variance does not depend on how the tokens were split over ranks.

Shape letters: T packed tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from megatron_rl.algorithms.whitening import ROUNDING, SumOverRanks, moments, one_rank


def value_loss(
    value_T: Tensor,
    old_value_T: Tensor,
    return_T: Tensor,
    *,
    clip: float | None,
    kind: Literal["squared", "huber"] = "squared",
    delta: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Clipped value loss per token: max(l(V - R), l(V_old + clip(V - V_old, -c, c) - R)), l(x) = x^2 / 2.

    The form of PPO2 (OpenAI Baselines), the value's counterpart of Schulman et al. 2017 (arXiv:1707.06347, eq. 7): a
    value that moved towards its target by more than c gains nothing by moving on.

    Args:
        value_T, old_value_T, return_T: V now, V when the advantages were made, and the target R; finite everywhere.
        clip: c; None for no clip.
        kind: `huber` is |x| delta - delta^2 / 2 beyond delta (Huber 1964).

    Returns:
        loss_T, to be summed and divided by the step's global denominator.
        clipped_T: bool, where the clip holds and the loss is flat in V.

    Example:
        V_old 0, V 1, R 2, c = .5: plain loss .5, clipped 1.125, so 1.125 and no gradient.
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
    """1 - Var(R - V) / Var(R) over the action tokens of all ranks, 0-dim float64: 1 is a perfect critic, 0 no better
    than a constant, NaN where the returns do not vary."""
    _, unexplained = moments((return_T.double() - value_T.double())[action_mask_T], sum_over_ranks)
    mean, total = moments(return_T[action_mask_T], sum_over_ranks)
    return torch.where(total.sqrt() > ROUNDING * mean.abs(), 1 - unexplained / total, torch.nan)
