"""The objective of a critic: the value loss of all action tokens, in the form of the other objectives (objective.py).

Shape letters: T packed tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_rl.algorithms.columns import PackedColumns
from megatron_rl.algorithms.objective import Metric, require_finite
from megatron_rl.algorithms.passes import Needs
from megatron_rl.algorithms.plain_objective import PlainObjective
from megatron_rl.algorithms.value_loss import explained_variance, value_loss
from megatron_rl.algorithms.whitening import SumOverRanks, moments
from megatron_rl.config.value_loss import ValueLossConfig
from megatron_rl.types import Denominators


class ValueObjective(PlainObjective):
    """The sum over action tokens of the value loss, each with its weight.

    Metrics: `loss`; `clipfrac`, the share of the action tokens whose loss is constant because of the clip.
    """

    needs = Needs(loss=frozenset({"value", "return"}))

    def __init__(self, cfg: ValueLossConfig) -> None:
        self.cfg = cfg

    def __call__(
        self,
        value_T: Tensor,
        entropy_T: Tensor | None,
        columns: PackedColumns,
        denominators: Denominators,
        coefficients: Mapping[str, float],
    ) -> tuple[Tensor, dict[str, Metric]]:
        old_T, return_T, mask_T = columns.value_T, columns.return_T, columns.action_mask_T
        assert old_T is not None and return_T is not None, "`values` and `set_targets` come first"
        require_finite(columns, {"value": value_T, "value_old": old_T, "return": return_T})

        def actions(x_T: Tensor) -> Tensor:
            return torch.where(mask_T, x_T, 0.0)

        cfg = self.cfg
        loss_T, clipped_T = value_loss(
            actions(value_T),
            actions(old_T),
            actions(return_T),
            clip=cfg.cliprange_value,
            kind=cfg.kind,
            delta=cfg.huber_delta,
        )
        loss = (actions(columns.weight_T) * loss_T).sum()
        clipped = (clipped_T & mask_T).sum() / denominators.num_tokens
        return loss, {"loss": Metric(loss.detach(), "sum"), "clipfrac": Metric(clipped, "sum")}


def describe_values(columns: Sequence[PackedColumns], sum_over_ranks: SumOverRanks) -> dict[str, Tensor]:
    """How well the values at a step's start predict its returns, over the action tokens of all ranks: their means
    `value_mean` and `return_mean`, and `explained_variance`, which is NaN if the returns do not vary. All ranks must
    call it (a collective).

    Args:
        columns: the columns of this rank's micro-batches of the whole step.
    """
    mask_T = torch.cat([c.action_mask_T for c in columns])
    value_T = torch.cat([c.value_T for c in columns if c.value_T is not None])
    return_T = torch.cat([c.return_T for c in columns if c.return_T is not None])
    return {
        "value_mean": moments(value_T[mask_T], sum_over_ranks)[0],
        "return_mean": moments(return_T[mask_T], sum_over_ranks)[0],
        "explained_variance": explained_variance(value_T, return_T, mask_T, sum_over_ranks),
    }
