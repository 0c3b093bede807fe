"""Leads the models of a run, its engines and its teachers' engines that share GPUs through the phases of a run.

The training loop does not know of it: the models, the engines, the teachers and the bridge each ask for the phase that
they need before they do anything. A push ends in the phase `generating`. The side that gives memory up does so before
the other side takes it. One teacher is awake in the phase `scoring`, and none in the others.

Invariants (tests/unit/cluster, tests/e2e): the sides never hold more together than one of the phases allows; the
numbers of the run equal the numbers without shared GPUs, also after an engine, the policy or another model was lost.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import get_args

from megatron_rl.cluster.engines import EngineGroup
from megatron_rl.cluster.placement import Placement
from megatron_rl.cluster.policy import PolicyGroup
from megatron_rl.cluster.teachers import TeacherGroup
from megatron_rl.cluster.trainers import RankGroup
from megatron_rl.layout import Links
from megatron_rl.types import Phase

log = logging.getLogger(__name__)

ORDER: tuple[Phase, ...] = get_args(Phase)
"""The phases in this order: the trainers hold less and less, and the engines more and more, until a teacher scores."""


class Colocation:
    def __init__(
        self,
        policy: PolicyGroup,
        engines: EngineGroup,
        others: Iterable[RankGroup] = (),
        teachers: Iterable[TeacherGroup] = (),
    ) -> None:
        """
        Args:
            policy, others: the models, whose ranks are not started yet, because vLLM starts on GPUs without trainers.
            engines: they start or have started, so the run begins in the phase `generating`.
            teachers: their engines are not started yet, because each of them takes a GPU's memory.
        """
        self._policy, self._engines = policy, engines
        self._trainers: list[RankGroup] = [policy, *others]
        self._phase: Phase = "generating"
        self._teachers = list(teachers)
        self._awake: TeacherGroup | None = None
        """The teacher that has the memory."""
        engines.before = partial(self.enter, "generating")
        for teacher in self._teachers:
            teacher.before = partial(self.enter, "scoring", teacher)
        for group in self._trainers:
            group.before, group.make_room = self.enter, self.make_room

    def start_engines(self) -> None:
        """Wait until the engines have started. The ranks import Megatron-Core in this time."""
        self._engines.locate()
        for group in self._trainers:
            group.prepare(self._gpus)
        self._engines.wait()
        for teacher in self._teachers:
            self._engines.enter("scoring")
            teacher.locate()
            teacher.begin(_cut(self._gpus, teacher))
            teacher.wait()
            teacher.enter("generating")

    def enter(self, phase: Phase, teacher: TeacherGroup | None = None) -> None:
        """Switch trainers and engines to a phase.

        Args:
            teacher: the one that scores.
        """
        if (phase, teacher) == (self._phase, self._awake):
            return
        log.info("phase %s", phase)
        self._sleep()
        trainers_give = ORDER.index(phase) > ORDER.index(self._phase)
        sides: list[RankGroup | EngineGroup] = [*self._trainers, self._engines]
        if not trainers_give:
            sides = [self._engines, *self._trainers]
        for side in sides:
            side.enter(phase)
        if teacher is not None:
            teacher.enter(phase)
        self._phase, self._awake = phase, teacher

    def _sleep(self) -> None:
        """Let the teacher that is awake give up its memory."""
        if self._awake is not None:
            self._awake.enter("generating")
            self._awake = None

    def make_room(self) -> Sequence[str | None]:
        """Put the engines to sleep (phase `training`) before the trainer's ranks start. Returns the GPU that each of
        these shares with a rank of an engine; None if the run has no GPUs."""
        self._sleep()
        self._engines.enter("training")
        self._phase = "training"
        return self._gpus

    @property
    def _gpus(self) -> Sequence[str | None]:
        gpus = [gpu for process in self._engines.processes for gpu in process.placed.gpus]
        return gpus or [None] * self._policy.mesh.world_size


def _cut(gpus: Sequence[str | None], teacher: TeacherGroup) -> list[str | None]:
    """The GPUs of each engine of a teacher: engine i has those of the trainer ranks from i times its ranks on."""
    num, engines = teacher.num_ranks, range(len(teacher.processes))
    own = [[gpu for gpu in gpus[i * num : (i + 1) * num] if gpu is not None] for i in engines]
    return [",".join(part) or None for part in own]


def shared_links(placement: Placement) -> Links:
    """The links of trainers and engines that share GPUs. They know the nodes if all nodes have the same number of
    ranks; otherwise each rank counts as a node of its own."""
    [trainers] = placement.groups["trainer"]
    sizes = set(Counter(rank.node.id for rank in trainers).values())
    return Links(gpus_per_node=sizes.pop() if len(sizes) == 1 else 1, colocated=True)
