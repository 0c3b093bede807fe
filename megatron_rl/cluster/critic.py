"""The critic as a group of Ray actors, one Megatron rank each, which `models.py` joins with the policy.

Every method raises PolicyLost when a rank is lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import ray

from megatron_rl import spans
from megatron_rl.algorithms.passes import Column
from megatron_rl.cluster.payloads import fetch_numbers
from megatron_rl.cluster.trainers import MegatronRank, RankGroup
from megatron_rl.types import Epochs, Metrics, Share, TokenNumbers

if TYPE_CHECKING:
    from megatron_rl.actor.critic import MegatronCritic

log = logging.getLogger(__name__)


class CriticRank(MegatronRank):
    """The process of one rank of the critic."""

    def build(self, store: Any) -> MegatronCritic:
        from megatron_rl.actor.critic import MegatronCritic

        world_size = self.spec.policy.parallel.mesh.world_size
        return MegatronCritic(self.spec, rank=self.rank, world_size=world_size, store=store)

    def values(self, share: Share) -> ray.ObjectRef | None:
        """The values of this replica's samples (`MegatronCritic.values`); None on all its ranks but one."""
        share = self.fetched(share)
        start = time.perf_counter()
        with spans.span("values"):
            values = self.actor.values(share)
        log.info("valued %d samples of a step in %.2f s", len(share.names), time.perf_counter() - start)
        return ray.put(values) if values else None

    def set_targets(self, returns: Sequence[Any]) -> Metrics:
        """Returns what is said about the values of the step."""
        metrics: Metrics = self.actor.set_targets(fetch_numbers(returns))
        return metrics

    def learn(self, epoch: int, num_updates: int) -> list[Metrics]:
        """All updates of an epoch; returns the metrics of each."""
        from megatron_rl.actor.overflow import require_finite_weights

        start = time.perf_counter()
        with spans.span("updates"):
            metrics = [self.actor.update(minibatch, {}, epoch) for minibatch in range(num_updates)]
            require_finite_weights(self.actor)
        log.info("learned in %d updates, %.2f s", num_updates, time.perf_counter() - start)
        return metrics


class CriticGroup(RankGroup):
    """All ranks of the critic."""

    role, kind = "critic", CriticRank
    learns: Column = "return"
    """The column of the policy that it learns."""

    def annotate(self, epochs: Epochs) -> TokenNumbers:
        """Give every data-parallel rank its share of a step, and compute the values of the states before the tokens."""
        self.before("training")
        self._epochs, shares = epochs, epochs[0]
        self._finish_mirrors()
        given = zip(self.ranks, self._of_replicas(shares), strict=True)
        answers = self._gather_all([rank.values.remote(share) for rank, share in given], "to compute values")
        self._values = TokenNumbers.of_replicas(self.mesh, answers, [share.index for share in shares])
        return self._values

    def learn(self, returns: TokenNumbers) -> None:
        """Begin one optimizer step on each mini-batch of each epoch. It returns at once, so that the policy is updated
        at the same time. Each rank does what it is told in this order."""
        self.before("training")
        held = self._epochs[0]
        needed = self._of_replicas([returns.needed_by(share.index) for share in held])
        self._learning = [[rank.set_targets.remote(parts) for rank, parts in zip(self.ranks, needed, strict=True)]]
        for epoch, shares in enumerate(self._epochs):
            if shares is not held:
                self.take(shares, {"value": self._values, "return": returns})
                held = shares
            num_updates = len(shares[0].minibatches)
            self.num_changes += num_updates
            self._learning.append([rank.learn.remote(epoch, num_updates) for rank in self.ranks])

    def finish(self) -> Metrics:
        """Wait until the updates are done.

        Returns:
            `critic/` and the names of `describe_values`, `ValueObjective` and an update, as means over the updates.

        Raises:
            ValueError: a number is not finite. The weights are the ones before that update.
        """
        values, *epochs = [self._gather(calls, "to learn") for calls in self._learning]
        updates: list[Metrics] = [update for epoch in epochs for update in epoch]
        means = {name: fmean([update[name] for update in updates]) for name in (updates[0] if updates else ())}
        return {f"critic/{name}": value for name, value in (values | means).items()}
