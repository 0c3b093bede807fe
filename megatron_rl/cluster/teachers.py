"""Teachers in processes of their own, which score the answers of complete groups while other groups are generated.

Their log-probs are objects of Ray's store, one for a group, so they travel with the tokens (`StoredTokens.teacher`).
Invariant (tests/e2e): a teacher's process that dies is replaced, out of the run's budget of restarts, and what it was
asked for is asked again; nothing is trained without its teacher's log-probs.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, cast

import ray

from megatron_rl.cluster.demands import role_of_teacher
from megatron_rl.cluster.engines import ATTEMPTS, EngineGroup, EngineRank, ScoringJob
from megatron_rl.cluster.nodes import RayPlacement
from megatron_rl.cluster.payloads import ObjectItem
from megatron_rl.cluster.process import Process
from megatron_rl.cluster.restarts import Restarts
from megatron_rl.cluster.waiting import ProcessLost, gather
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.config.teachers import engine_config, served_teachers, teacher_of
from megatron_rl.data.tokenizer import open_tokenizer
from megatron_rl.types import Group, Prompt, Tokenizer
from megatron_rl.verifiers.teacher_server import TeacherServer

SCORING = "to score for a teacher"
"""What a teacher is asked to do, as messages name it."""
SHADOW_TOKENS = 16_384
"""A group that may have so many tokens keeps an engine busy alone; smaller ones are scored together."""


class ServedRank(EngineRank):
    """The process that asks a teacher's server."""

    async def start(self) -> None:
        teacher = self.config.teachers[0]
        tokenizer = open_tokenizer(self.config.model.path)
        self.engine: Any = TeacherServer(teacher, self.name)
        size, most = len(tokenizer), self.config.rollout.max_prompt_tokens
        await self.engine.check(cast(Tokenizer, tokenizer), range(0, size, -(-size // most)))

    async def alive(self) -> bool | str:
        return True

    async def close(self) -> None:
        """There is nothing to free."""


class GuestRank(EngineRank):
    """The process of a teacher's engine on GPUs that others reserve."""

    async def share(self, gpus: str) -> None:
        """Start vLLM, later, on these GPUs. CUDA reads the variable when it starts."""
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus


class TeacherGroup(EngineGroup):
    """The processes of one teacher."""

    def __init__(
        self, config: GrpoRunConfig, number: int, logs: Path, placement: RayPlacement, restarts: Restarts
    ) -> None:
        self.role = role_of_teacher(number)
        self.records = f"unfinished_teacher_{number}"
        own = GuestRank if config.cluster.colocate else EngineRank
        self.rank = own if config.teachers[number].server is None else ServedRank
        self._gpus: Sequence[str | None] = ()
        """What each engine shares."""
        super().__init__(engine_config(config, number), logs, placement, restarts, loads_weights=True)

    @property
    def is_guest(self) -> bool:
        """Whether they share GPUs that others reserve: then they start when these are named."""
        return self.rank is GuestRank

    @property
    def num_ranks(self) -> int:
        """The number of ranks of each engine."""
        return self._config.rollout.engine_ranks

    def begin(self, gpus: Sequence[str | None]) -> None:
        """Start vLLM in every engine, on the GPUs that each shares; None on a CPU."""
        self._gpus = gpus
        self._starting = super()._begin()

    def _begin(self) -> list[ray.ObjectRef]:
        return [] if self.is_guest else super()._begin()

    def _start(self, index: int) -> ray.ObjectRef:
        if self.is_guest and (gpus := self._gpus[index]) is not None:
            self.engines[index].share.remote(gpus)  # Ray begins the calls of an actor in their order
        return super()._start(index)


class ScoringCall(NamedTuple):
    """A call of a teacher's process."""

    engine: int
    count: ray.ObjectRef
    scores: ray.ObjectRef


class AskedTeacher(NamedTuple):
    """Groups that a teacher's engine scores together."""

    teacher: int
    groups: Sequence[int]
    """Their indices."""
    jobs: Sequence[ScoringJob]
    call: ScoringCall | None
    """None: it is made when the teacher has the memory of the GPUs."""


class Teachers:
    """All teachers that engines compute. Its methods may be called in several threads.

    Args:
        engines: the policy's, which score for a teacher that is the policy itself. If one of them dies meanwhile, the
            run ends, with its state saved.
    """

    role = "teacher"

    def __init__(
        self, config: GrpoRunConfig, logs: Path, placement: RayPlacement, restarts: Restarts, engines: EngineGroup
    ) -> None:
        self._config, self._deadlines, self._engines = config, placement.deadlines, engines
        self._own = {
            number: TeacherGroup(config, number, logs, placement, restarts) for number, _ in served_teachers(config)
        }
        by_policy = {number: engines for number, one in enumerate(config.teachers) if one.is_policy}
        self._groups: Mapping[int, EngineGroup] = {**self._own, **by_policy}
        self.guests = [group for group in self._own.values() if group.is_guest]
        """The teachers that share the GPUs of the policy's engines, and take turns with them."""
        self._lock = Lock()
        """Held while the load is changed, and while processes are replaced."""
        self._load = {number: Counter(dict.fromkeys(range(len(g.engines)), 0)) for number, g in self._groups.items()}

    @property
    def processes(self) -> list[Process]:
        return [process for group in self._own.values() for process in group.processes]

    def wait(self) -> None:
        """Wait until all teachers have started; see `EngineGroup.wait`."""
        for group in self._own.values():
            group.wait()

    def close(self) -> None:
        for group in self._own.values():
            group.close()

    def begin(self, groups: Sequence[Group], idle: bool = False) -> list[AskedTeacher]:
        """Ask the teachers of groups for their log-probs. Returns at once. Teachers that take turns on GPUs are asked
        when `finish` waits for them.

        Args:
            idle: whether the policy's engines answer nothing now. If all groups of a step are handed out together,
                small groups are scored only then, all in one call, and so are all groups whose teacher is the policy:
                the tokens that an engine computes together, and with them the rounding, are then always the same.

        Raises:
            ValueError: a row has no prompt for its teacher.
        """
        rollout = self._config.rollout
        of_teachers: dict[int, list[int]] = {}
        for i, group in enumerate(groups):
            number = teacher_of(self._config.teachers, group.prompt.columns)
            if number is not None and number in self._groups and group.rollouts:
                of_teachers.setdefault(number, []).append(i)
        large = rollout.samples_per_group * rollout.max_model_tokens >= SHADOW_TOKENS
        asked = []
        # The policy first: then its engines need not wake up for it.
        for number, own in sorted(of_teachers.items(), key=lambda pair: pair[0] in self._own):
            in_turn = bool(self.guests) and (number not in self._own or self._own[number].is_guest)
            if not rollout.one_by_one and idle == (number in self._own and large and not in_turn):
                continue
            engines, alone = len(self._groups[number].engines), not rollout.one_by_one and not idle
            parts = [[i] for i in own] if alone else [own[k::engines] for k in range(engines)]
            for part in filter(None, parts):
                jobs = [self._job(number, groups[i]) for i in part]
                asked.append(AskedTeacher(number, part, jobs, None if in_turn else self._call(number, jobs)))
        return asked

    def finish(self, groups: Sequence[Group], asked: Sequence[AskedTeacher]) -> list[Group]:
        """The groups that `begin` got with their teachers' log-probs, when they are there.

        Raises:
            ValueError: a teacher cannot score a group.
            ProcessLost: its processes were lost each time.
        """
        taught = list(groups)
        for number, parts in groupby(asked, key=lambda one: one.teacher):
            calls = [(one, one.call or self._call(number, one.jobs)) for one in parts]
            for one, call in calls:
                scores, first = self._scores(one, call), 0
                for i in one.groups:
                    payload = taught[i].payload
                    items = [ObjectItem(scores, first + k) for k in range(len(payload))]
                    first += len(payload)
                    own = [replace(tokens, teacher=item) for tokens, item in zip(payload, items, strict=True)]
                    taught[i] = replace(taught[i], payload=own)
        return taught

    def _scores(self, asked: AskedTeacher, call: ScoringCall) -> ray.ObjectRef:
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                self._wait_for(asked.teacher, call)
                break
            except ProcessLost:
                if not attempts_left or asked.teacher not in self._own:
                    raise
                with self._lock:
                    self._own[asked.teacher].replace_dead()
                call = self._call(asked.teacher, asked.jobs)
        return call.scores

    def _wait_for(self, number: int, call: ScoringCall) -> None:
        process = self._groups[number].processes[call.engine]
        try:
            gather([call.count], [process], SCORING, self._deadlines.limit_s(SCORING))
        finally:
            with self._lock:
                self._load[number][call.engine] -= 1

    def _call(self, number: int, jobs: Sequence[ScoringJob]) -> ScoringCall:
        group = self._groups[number]
        group.before()
        with self._lock:
            load = self._load[number]
            engine = min(load, key=load.__getitem__)
            load[engine] += 1
            actor = group.engines[engine]
        return ScoringCall(engine, *actor.score.options(num_returns=2).remote(jobs))

    def _job(self, number: int, group: Group) -> ScoringJob:
        prompt = self._own_prompt(number, group.prompt)
        return ScoringJob(list(group.payload), group.rollouts[0].num_prompt_tokens, prompt)

    def _own_prompt(self, number: int, prompt: Prompt) -> Any:
        if (column := self._config.teachers[number].prompt) is None:
            return None
        if column not in prompt.columns:
            raise ValueError(f"prompt {prompt.uid} has no column {column}, which teachers.{number}.prompt names")
        return prompt.columns[column]
