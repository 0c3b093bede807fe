"""A policy with a critic, as one `ports.Policy`.

The values of a step's tokens go from the critic's ranks to the policy's through Ray's object store, and the returns go
back. Both learn at the same time. They are saved, loaded and started again together, because one cannot go on without
the other.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_rl.cluster.critic import CriticGroup
from megatron_rl.cluster.policy import PolicyGroup
from megatron_rl.loop.checkpoints import critic_path
from megatron_rl.loop.shares import with_columns
from megatron_rl.ports import PolicyLost
from megatron_rl.types import Metrics, Shares


class PolicyWithCritic:
    """
    Args:
        warmup_steps: the number of first steps of the run that train only the critic.
    """

    def __init__(self, policy: PolicyGroup, critic: CriticGroup, warmup_steps: int) -> None:
        self._policy, self._critic, self._warmup_steps = policy, critic, warmup_steps
        self.mesh = policy.mesh
        self.score, self.export_hf, self.find_untrained = policy.score, policy.export_hf, policy.find_untrained

    @property
    def num_changes(self) -> int:
        return self._policy.num_changes + self._critic.num_changes

    def begin(self, shares: Shares, coefficients: Mapping[str, float]) -> Metrics:
        """See `ports.Policy`. The metric `perf/critic_values_s` is the time of the critic's prediction, in seconds."""
        start = time.perf_counter()
        values = self._critic.values(shares.critic)
        seconds = time.perf_counter() - start
        first, *later = shares.policy
        self._is_warming = first[0].version < self._warmup_steps
        annotated = shares._replace(policy=[with_columns(first, {"value": values}), *later])
        return self._policy.begin(annotated, coefficients) | {"perf/critic_values_s": seconds}

    def update(self, coefficients: Mapping[str, float]) -> tuple[list[Metrics], Metrics]:
        """See `ports.Policy`."""
        self._critic.learn(self._policy.columns(["return"])["return"])
        updates = [] if self._is_warming else self._policy.update(coefficients)[0]
        return updates, describe_critic(*self._critic.finish())

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        self._critic.save(critic_path(folder), {})
        self._policy.save(folder, extra)

    def finish_save(self, wait: bool) -> bool:
        return self._critic.finish_save(wait) and self._policy.finish_save(wait)

    def load(self, folder: Path) -> dict[str, Any]:
        self._critic.load(critic_path(folder))
        return self._policy.load(folder)

    def mirror(self, step: int) -> None:
        self._policy.mirror(step)
        self._critic.mirror(step)

    def restart(self, cause: PolicyLost) -> Collection[int]:
        """See `ports.Policy`. The mirrors of both must hold a step."""
        steps = self._policy.restart(cause)
        of_critic = self._critic.start_again()
        return [step for step in steps if step in of_critic]

    def load_mirror(self, step: int) -> None:
        self._policy.load_mirror(step)
        self._critic.load_mirror(step)


def describe_critic(values: Metrics, updates: Sequence[Metrics]) -> Metrics:
    """The metrics of the critic's step: `critic/` and the names of `describe_values`, `ValueObjective` and an update.
    The ones of the updates are means.

    Args:
        values, updates: what `CriticGroup.finish` returned.
    """
    means = {name: fmean([update[name] for update in updates]) for name in updates[0]}
    return {f"critic/{name}": value for name, value in (values | means).items()}
