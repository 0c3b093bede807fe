"""The critic's trainer: a model that ends with a value for each token, and learns the returns of the policy's answers.

A step has three parts. The critic computes the values (`values`), the policy's ranks compute advantages and returns
from them (token_advantages.py), and the critic learns the returns (`set_targets`, then `update`). Its mesh may differ
from the policy's. Invariant (tests/ranks): values and gradients do not depend on the layout or on the number of
micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megatron_rl.actor.agreement import sum_over_data_ranks
from megatron_rl.actor.trainer import MegatronTrainer
from megatron_rl.algorithms.objective import Metric
from megatron_rl.algorithms.value_objective import describe_values
from megatron_rl.types import Metrics, Share


class MegatronCritic(MegatronTrainer):
    role = "critic"

    def values(self, share: Share) -> dict[int, np.ndarray]:
        """Take the samples of a step that belong to this data-parallel rank, and compute the value of the state before
        each token.

        Args:
            share: see `take`.

        Returns:
            The values at the tokens of this replica's samples, each float32 [L], by the sample's index in the step.
            Only the rank that reports the replica's metrics has them; on others it is empty.

        Raises:
            ValueError: see `take`.
        """
        self.take(share)
        passes = self._forward(list(self.rows))
        if passes:
            self.rows.set("value", [one.logp_T for one in passes])
        return self.columns(["value"]).get("value", {})

    def set_targets(self, returns: Mapping[int, np.ndarray]) -> Metrics:
        """Set the targets of the step's updates.

        Args:
            returns: float32 [L] of each of this replica's samples, by its index in the step, as
                `columns` of the policy gives them.

        Returns:
            What `describe_values` says about the values of this step.
        """
        self.require("training")
        self.rows.set_numbers("return", returns)
        described = {}
        if self.is_last_stage:
            described = describe_values(self.rows.columns, sum_over_data_ranks)
        # One replica reports, because the sums include all replicas.
        reports = [{name: Metric(value, "sum") for name, value in described.items()}]
        is_first = self.reports_metrics and self.mesh.coordinates(self.rank)[2] == 0
        return self.agreement.reduce(reports if is_first else [])
