"""The objective of supervised training, in the form of the other objectives (objective.py).

Shape letters: T packed tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_rl.algorithms.columns import PackedColumns
from megatron_rl.algorithms.objective import Metric, require_finite
from megatron_rl.algorithms.passes import Needs
from megatron_rl.algorithms.plain_objective import PlainObjective
from megatron_rl.types import Denominators


class SupervisedObjective(PlainObjective):
    """The negative log-likelihood of the action tokens, which are the completions of the rows. Its metric is `loss`."""

    needs = Needs()

    def __call__(
        self,
        logp_T: Tensor,
        entropy_T: Tensor | None,
        columns: PackedColumns,
        denominators: Denominators,
        coefficients: Mapping[str, float],
    ) -> tuple[Tensor, dict[str, Metric]]:
        require_finite(columns, {"logp": logp_T})
        mask_T = columns.action_mask_T
        loss = -(torch.where(mask_T, columns.weight_T, 0.0) * torch.where(mask_T, logp_T, 0.0)).sum()
        return loss, {"loss": Metric(loss.detach(), "sum")}
