"""The policy as a group of Ray actors, one Megatron rank each, which `models.py` joins with the run's other models.

The driver sends each rank the numbers of its own samples and references to their tokens. The tokens go from the engine
to the rank through Ray's object store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl import spans
from megatron_rl.actor.spec import ActorSpec
from megatron_rl.algorithms.passes import STOPPED, Column, Needs
from megatron_rl.bridge.sender import BridgeSender
from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.cluster.nodes import RayPlacement
from megatron_rl.cluster.payloads import fetch
from megatron_rl.cluster.profiling import ProfiledRank
from megatron_rl.cluster.trainers import MegatronRank, RankGroup
from megatron_rl.config.cluster import ClusterConfig
from megatron_rl.types import Epochs, Gradient, Metrics, Share, Shares, TokenNumbers, TokenSpan

if TYPE_CHECKING:
    from megatron_rl.actor.actor import MegatronActor

log = logging.getLogger(__name__)

PEAK = "memory/trainer_bytes/max"
"""The metric of the largest memory that any rank has had: what torch has allocated on a GPU, or a process on a CPU."""


class TrainerRank(ProfiledRank, MegatronRank):
    """The process of one rank of the policy."""

    def __init__(self, spec: ActorSpec, rank: int, logs: str, role: str) -> None:
        super().__init__(spec, rank, logs, role)
        self.sender: BridgeSender | None = None

    def build(self, store: Any) -> MegatronActor:
        from megatron_rl.actor.actor import MegatronActor
        from megatron_rl.actor.speed import SpeedMeter

        world_size = self.spec.policy.parallel.mesh.world_size
        actor = MegatronActor(self.spec, rank=self.rank, world_size=world_size, store=store)
        self.speed = SpeedMeter()
        return actor

    def start(self, address: str, port: int, secret: str, load_model: bool) -> bool:
        fused_norms = super().start(address, port, secret, load_model)
        if load_model:
            self.actor.keep_reference()
        self.actor.load_teacher()
        return fused_norms

    def begin(self, share: Share, coefficients: Mapping[str, float]) -> Metrics:
        share = self.fetched(share)
        start = time.perf_counter()
        with spans.span("begin"):
            metrics: Metrics = self.actor.begin(share, coefficients)
        log.info("took %d samples of a step in %.2f s", len(share.names), time.perf_counter() - start)
        return metrics

    def score(self, share: Share) -> dict[int, float]:
        logps: dict[int, float] = self.actor.score(replace(share, tokens=fetch(share.tokens)))
        return logps

    def update(self, minibatch: int, coefficients: Mapping[str, float], epoch: int) -> tuple[Metrics, float]:
        """One optimizer step; returns its metrics with PEAK, and the seconds of this rank's matrix product."""
        from megatron_rl.actor.platform import peak_memory_bytes

        product_s = self.speed.seconds()
        start = time.perf_counter()
        with spans.span("update", minibatch):
            metrics = self.actor.update(minibatch, coefficients, epoch)
        seconds = time.perf_counter() - start
        log.info("%s, %.2f s", describe_update(metrics, minibatch, epoch), seconds)
        return metrics | {PEAK: float(peak_memory_bytes())}, product_s

    def require_finite_weights(self) -> None:
        from megatron_rl.actor.overflow import require_finite_weights

        require_finite_weights(self.actor)

    def token_numbers(self, coefficients: Mapping[str, float]) -> dict[int, dict[str, np.ndarray]]:
        from megatron_rl.actor.inspection import token_numbers

        return token_numbers(self.actor, coefficients)

    def gradient_of(self, minibatch: int, part: TokenSpan, coefficients: Mapping[str, float]) -> Gradient:
        from megatron_rl.actor.inspection import gradient_of

        return gradient_of(self.actor, minibatch, part, coefficients)

    def find_untrained(self) -> list[int]:
        tokens: list[int] = self.actor.find_untrained()
        return tokens

    def connect(self, setup: BridgeSetup) -> None:
        if self.sender is not None:
            self.sender.close()
        self.pushed = setup.shape
        self.sender = BridgeSender(setup, self.rank, self.actor.sent(self.pushed), self.actor.made(self.pushed))

    def push(self, version: int, verify: bool, late: list[int]) -> Metrics:
        self.actor.require("weight sync")
        assert self.sender is not None, "`connect` comes first"
        self.actor.sent(self.pushed)
        with spans.span("push", version):
            return self.sender.push(version, verify, late)


class PolicyGroup(RankGroup):
    """All ranks of the policy."""

    role, kind = "trainer", TrainerRank

    def __init__(self, spec: ActorSpec, cluster: ClusterConfig, logs: Path, placement: RayPlacement) -> None:
        self._epochs: Epochs = ()
        self._held: Sequence[Share] = ()
        """The shares of the epoch that the ranks hold."""
        super().__init__(spec, cluster, logs, placement)

    @property
    def needs(self) -> Needs:
        """The columns that the objective takes."""
        return self._spec.objective.needs

    def score(self, shares: Sequence[Share]) -> Mapping[int, float]:
        """See `ports.Policy`."""
        self.before("training")
        given = zip(self.ranks, self._of_replicas(shares), strict=True)
        answers = self._gather_all([rank.score.remote(share) for rank, share in given], "to score right answers")
        return {index: logp for answer in answers for index, logp in answer.items()}

    def begin(self, shares: Shares, coefficients: Mapping[str, float]) -> Metrics:
        """See `ports.Policy`."""
        self.before("training")
        self._epochs, self._held = shares.policy, shares.policy[0]
        given = zip(self.ranks, self._of_replicas(self._held), strict=True)
        calls = [rank.begin.remote(share, dict(coefficients)) for rank, share in given]
        mirrored = self._finish_mirrors()
        metrics: Metrics = self._gather(calls, "to compute log-probs")
        return metrics | mirrored

    def columns(self, names: Sequence[Column]) -> dict[Column, TokenNumbers]:
        """Columns of the step that `begin` was given."""
        return self.columns_of(self._held, names)

    def update(self, coefficients: Mapping[str, float]) -> list[Metrics]:
        """See `ports.Policy`. The metrics of an update have PEAK, `slowest_rank/number` and `slowest_rank/ratio`: the
        rank whose matrix product took longest, and how many times as long as the product of the median rank."""
        self.before("training")
        updates: list[Metrics] = []
        columns = self.columns(self.needs.kept) if any(shares is not self._held for shares in self._epochs) else {}
        for epoch, shares in enumerate(self._epochs):
            if shares is not self._held:
                self._gather(self.take(shares, columns), "to take its samples")
                self._held = shares
            for minibatch in range(len(shares[0].minibatches)):
                updates.append(self._update(minibatch, coefficients, epoch))
                if STOPPED in updates[-1]:
                    return updates
        return updates

    def token_numbers(self, coefficients: Mapping[str, float]) -> dict[int, dict[str, np.ndarray]]:
        """The numbers of all tokens of the step that `begin` was given; see `actor.inspection.token_numbers`."""
        answers = self._gather_all([rank.token_numbers.remote(dict(coefficients)) for rank in self.ranks], "to look")
        return {sample: numbers for answer in answers for sample, numbers in answer.items()}

    def find_untrained(self) -> list[int]:
        """The tokens whose embeddings no training has moved."""
        tokens: list[int] = self._all("find_untrained", "to look at its embedding")
        return tokens

    def gradient_of(self, minibatch: int, part: TokenSpan, coefficients: Mapping[str, float]) -> Gradient:
        """The gradient of some tokens' loss alone; see `actor.inspection.gradient_of`."""
        answer: Gradient = self._all("gradient_of", "to compute a gradient", minibatch, part, dict(coefficients))
        return answer

    def _update(self, minibatch: int, coefficients: Mapping[str, float], epoch: int) -> Metrics:
        calls = [rank.update.remote(minibatch, coefficients, epoch) for rank in self.ranks]
        answers: list[tuple[Metrics, float]] = self._gather_all(calls, "to update")
        self.num_changes += STOPPED not in answers[0][0]
        if "loss_scale" in answers[0][0]:  # a model in float16
            self._all("require_finite_weights", "to look at its weights")
        number, ratio = slowest([seconds for _, seconds in answers])
        peak = max(metrics[PEAK] for metrics, _ in answers)
        return answers[0][0] | {PEAK: peak, "slowest_rank/number": float(number), "slowest_rank/ratio": ratio}


def describe_update(metrics: Metrics, minibatch: int, epoch: int) -> str:
    """A line of a rank's log about an update, with the epoch counted from 1 as in the metrics.

    >>> describe_update({"loss": 0.25, "ppo_kl": 0.03, "stopped": 1.0}, 0, 1)
    'epoch 2, update 0: loss 0.25, not made: algorithm.stop_epochs, KL 0.03'
    """
    where = f"epoch {epoch + 1}, update {minibatch}: loss {metrics['loss']:.6g}"
    if STOPPED in metrics:
        return f"{where}, not made: algorithm.stop_epochs, KL {metrics['ppo_kl']:.6g}"
    return f"{where}, gradient norm {metrics['grad_norm']:.6g}"


def slowest(seconds: Sequence[float]) -> tuple[int, float]:
    """The index of the largest number, and its ratio to the median; of an even count, the lower of the two medians."""
    number = max(range(len(seconds)), key=lambda i: seconds[i])
    return number, seconds[number] / median_low(seconds)
