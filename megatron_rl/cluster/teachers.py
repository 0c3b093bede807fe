"""Teachers in processes of their own, which score the answers of complete groups while other groups are generated.

Their log-probs are objects of Ray's store, one for a group, so they travel with the tokens (`StoredTokens.teacher`).
Invariant (tests/e2e): a teacher's process that dies is replaced, out of the run's budget of restarts, and what it was
asked for is asked again; nothing is trained without its teacher's log-probs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, cast

import ray

from megatron_rl.cluster.engines import ATTEMPTS, EngineGroup, EngineRank
from megatron_rl.cluster.nodes import RayPlacement
from megatron_rl.cluster.payloads import ObjectItem
from megatron_rl.cluster.placement import role_of_teacher
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


class TeacherGroup(EngineGroup):
    """The processes of one teacher."""

    def __init__(
        self, config: GrpoRunConfig, number: int, logs: Path, placement: RayPlacement, restarts: Restarts
    ) -> None:
        self.role = role_of_teacher(number)
        self.records = f"unfinished_teacher_{number}"
        self.rank = EngineRank if config.teachers[number].server is None else ServedRank
        super().__init__(engine_config(config, number), logs, placement, restarts, loads_weights=True)


@dataclass(frozen=True, slots=True)
class AskedTeacher:
    """A call of a teacher's process for a group."""

    teacher: int
    engine: int
    arguments: tuple[Any, ...]
    count: ray.ObjectRef
    scores: ray.ObjectRef


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

    def begin(self, group: Group, idle: bool = False) -> AskedTeacher | None:
        """Ask the group's teacher for its log-probs; None if it has none. Returns at once.

        Args:
            idle: whether the policy's engines answer nothing now. If all groups of a step are handed out together, the
                policy scores itself only then: the tokens that engines compute together would otherwise be others each
                time. The other teachers have then been asked.

        Raises:
            ValueError: the row has no prompt for its teacher.
        """
        number = teacher_of(self._config.teachers, group.prompt.columns)
        if number is None or number not in self._groups or not group.rollouts:
            return None
        waits = number not in self._own and not self._config.rollout.one_by_one
        if waits != idle:
            return None
        arguments = (list(group.payload), group.rollouts[0].num_prompt_tokens, self._own_prompt(number, group.prompt))
        return self._ask(number, arguments)

    def finish(self, group: Group, asked: AskedTeacher | None) -> Group:
        """The group with its teacher's log-probs, when they are there.

        Raises:
            ValueError: the teacher cannot score the group.
            ProcessLost: its processes were lost each time.
        """
        if asked is None:
            return group
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                self._wait_for(asked)
                break
            except ProcessLost:
                if not attempts_left or asked.teacher not in self._own:
                    raise
                with self._lock:
                    self._own[asked.teacher].replace_dead()
                asked = self._ask(asked.teacher, asked.arguments)
        payload = [replace(one, teacher=ObjectItem(asked.scores, i)) for i, one in enumerate(group.payload)]
        return replace(group, payload=payload)

    def _wait_for(self, asked: AskedTeacher) -> None:
        process = self._groups[asked.teacher].processes[asked.engine]
        try:
            gather([asked.count], [process], SCORING, self._deadlines.limit_s(SCORING))
        finally:
            with self._lock:
                self._load[asked.teacher][asked.engine] -= 1

    def _ask(self, number: int, arguments: tuple[Any, ...]) -> AskedTeacher:
        with self._lock:
            load = self._load[number]
            engine = min(load, key=load.__getitem__)
            load[engine] += 1
            actor = self._groups[number].engines[engine]
        count, scores = actor.score.options(num_returns=2).remote(*arguments)
        return AskedTeacher(number, engine, arguments, count, scores)

    def _own_prompt(self, number: int, prompt: Prompt) -> Any:
        if (column := self._config.teachers[number].prompt) is None:
            return None
        if column not in prompt.columns:
            raise ValueError(f"prompt {prompt.uid} has no column {column}, which teachers.{number}.prompt names")
        return prompt.columns[column]
