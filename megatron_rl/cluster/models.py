"""The models of a run as one `ports.Policy`: the policy, and the models that compute columns for its tokens.

A step carries out `Needs.passes`. The columns of other models go to the policy's ranks through Ray's object store,
before the policy's own passes begin. A critic then gets the column that it learns, and learns at the same time as the
policy. All models are saved, loaded and started again together, because none can go on without the others.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.algorithms.passes import Column
from megatron_rl.cluster.critic import CriticGroup
from megatron_rl.cluster.policy import PolicyGroup
from megatron_rl.cluster.restarts import Restarts
from megatron_rl.cluster.trainers import RankGroup
from megatron_rl.loop.checkpoints import part_path
from megatron_rl.loop.shares import with_columns
from megatron_rl.ports import PolicyLost
from megatron_rl.types import Metrics, Shares, TokenNumbers


class Models:
    """
    Args:
        restarts: the budget of restarts of the run.
        others: the other models, by their names in the passes.
        warmup_steps: the number of first steps of the run in which the policy is not trained.
    """

    def __init__(
        self,
        policy: PolicyGroup,
        restarts: Restarts,
        others: Mapping[str, CriticGroup] = {},
        warmup_steps: int = 0,
    ) -> None:
        self._policy, self._restarts, self._others, self._warmup_steps = policy, restarts, others, warmup_steps
        self._passes = [one for one in policy.needs.passes(num_updates=1) if one.model in others]
        self.groups: Sequence[RankGroup] = [policy, *others.values()]
        self.mesh = policy.mesh
        self.score, self.export_hf, self.find_untrained = policy.score, policy.export_hf, policy.find_untrained

    @property
    def num_changes(self) -> int:
        return sum(group.num_changes for group in self.groups)

    def start(self, *, is_resumed: bool) -> None:
        """Load all models; see `RankGroup.start`."""
        for group in self.groups:
            group.start(is_resumed=is_resumed)

    def begin(self, shares: Shares, coefficients: Mapping[str, float]) -> Metrics:
        """See `ports.Policy`. The metrics have the time of each pass of another model, in seconds."""
        columns: dict[Column, TokenNumbers] = {}
        metrics: Metrics = {}
        for one in self._passes:
            assert one.leaves is not None, "only the policy has passes for a single update"
            start = time.perf_counter()
            columns[one.leaves] = self._others[one.model].annotate(shares.others[one.model])
            metrics[f"perf/{one.model}_{one.computes}_s"] = time.perf_counter() - start
        first, *later = shares.policy
        self._is_warming = first[0].version < self._warmup_steps
        if columns:
            shares = shares._replace(policy=[with_columns(first, columns), *later])
        return self._policy.begin(shares, coefficients) | metrics

    def update(self, coefficients: Mapping[str, float]) -> tuple[list[Metrics], Metrics]:
        """See `ports.Policy`."""
        for other in self._others.values():
            other.learn(self._policy.columns([other.learns])[other.learns])
        updates = [] if self._is_warming else self._policy.update(coefficients)
        learned: Metrics = {}
        for other in self._others.values():
            learned |= other.finish()
        return updates, learned

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        for name, other in self._others.items():
            other.save(part_path(folder, name), {})
        self._policy.save(folder, extra)

    def finish_save(self, wait: bool) -> bool:
        return all(group.finish_save(wait) for group in self.groups)

    def load(self, folder: Path) -> dict[str, Any]:
        for name, other in self._others.items():
            other.load(part_path(folder, name))
        return self._policy.load(folder)

    def mirror(self, step: int) -> None:
        for group in self.groups:
            group.mirror(step)

    def restart(self, cause: PolicyLost) -> Collection[int]:
        """See `ports.Policy`. The mirrors of all models must hold a step."""
        self._restarts.spend(str(cause))
        held = [set(group.start_again()) for group in self.groups]
        return sorted(set.intersection(*held))

    def load_mirror(self, step: int) -> None:
        for group in self.groups:
            group.load_mirror(step)
