"""What objectives have in common that need no advantages, no bound of a mismatch and no end of epochs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_rl.algorithms.columns import FirstPass, PackedColumns
from megatron_rl.algorithms.whitening import SumOverRanks
from megatron_rl.types import Denominators, Metrics


class PlainObjective:
    """The methods of `Objective` that such an objective leaves as they are."""

    def credit(
        self, columns: Sequence[PackedColumns], kl_coefficient: float, sum_over_ranks: SumOverRanks
    ) -> tuple[list[PackedColumns], Tensor]:
        raise AssertionError(f"{type(self).__name__} has no advantages")

    def prepare(
        self,
        columns: Sequence[PackedColumns],
        first_pass: Sequence[FirstPass] | None,
        denominators: Denominators,
        sum_over_ranks: SumOverRanks,
    ) -> list[PackedColumns]:
        return list(columns)

    def conclude(self, metrics: Metrics, max_mismatch: float | None) -> Metrics:
        return metrics

    def stops(self, metrics: Metrics) -> bool:
        return False
