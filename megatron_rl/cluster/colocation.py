"""Leads the models of a run and engines that share GPUs through the phases of a run.

The training loop does not know of it: the models, the engines and the bridge each ask for the phase that
they need before they do anything. A push ends in the phase `generating`. The side that gives memory up does so before
the other side takes it.

Invariants (tests/unit/cluster, tests/e2e): the sides never hold more together than one of the phases allows; the
numbers of the run equal the numbers without shared GPUs, also after an engine, the policy or another model was lost.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import get_args

from megatron_rl.cluster.engines import EngineGroup
from megatron_rl.cluster.placement import Placement
from megatron_rl.cluster.policy import PolicyGroup
from megatron_rl.cluster.trainers import RankGroup
from megatron_rl.layout import Links
from megatron_rl.types import Phase

log = logging.getLogger(__name__)

ORDER: tuple[Phase, ...] = get_args(Phase)
"""The phases in this order: the trainers hold less and less, and the engines more and more."""


class Colocation:
    def __init__(self, policy: PolicyGroup, engines: EngineGroup, others: Iterable[RankGroup] = ()) -> None:
        """
        Args:
            policy, others: the models, whose ranks are not started yet, because vLLM starts on GPUs without trainers.
            engines: they start or have started, so the run begins in the phase `generating`.
        """
        self._policy, self._engines = policy, engines
        self._trainers: list[RankGroup] = [policy, *others]
        self._phase: Phase = "generating"
        engines.before = self.enter
        for group in self._trainers:
            group.before, group.make_room = self.enter, self.make_room

    def start_engines(self) -> None:
        """Wait until the engines have started. The ranks import Megatron-Core in this time."""
        self._engines.locate()
        for group in self._trainers:
            group.prepare(self._gpus)
        self._engines.wait()

    def enter(self, phase: Phase) -> None:
        """Switch trainers and engines to a phase."""
        if phase == self._phase:
            return
        log.info("phase %s", phase)
        trainers_give = ORDER.index(phase) > ORDER.index(self._phase)
        sides: list[RankGroup | EngineGroup] = [*self._trainers, self._engines]
        if not trainers_give:
            sides = [self._engines, *self._trainers]
        for side in sides:
            side.enter(phase)
        self._phase = phase

    def make_room(self) -> Sequence[str | None]:
        """Bring the engines into the phase `training`, the first phase of the ranks that start
        next. Returns the GPU that each of them shares with a rank of an engine; None if the run has no GPUs."""
        self._engines.enter("training")
        self._phase = "training"
        return self._gpus

    @property
    def _gpus(self) -> Sequence[str | None]:
        gpus = [gpu for process in self._engines.processes for gpu in process.placed.gpus]
        return gpus or [None] * self._policy.mesh.world_size


def shared_links(placement: Placement) -> Links:
    """The links of trainers and engines that share GPUs. They know the nodes if all nodes have the same number of
    ranks; otherwise each rank counts as a node of its own."""
    [trainers] = placement.groups["trainer"]
    sizes = set(Counter(rank.node.id for rank in trainers).values())
    return Links(gpus_per_node=sizes.pop() if len(sizes) == 1 else 1, colocated=True)
