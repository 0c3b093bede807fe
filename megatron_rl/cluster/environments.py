"""Environments in separate processes, on the node of the engine whose answers they serve, or on all nodes.

The engine's actor owns these actors, so they end with it.

Invariants (tests/unit/cluster): an environment stays in one process; if the process dies, its node is lost, or it does
not answer, only its own answers fail, and a new one takes its place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from itertools import count, cycle
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_rl.cluster.process import begin_process
from megatron_rl.config.environment import TurnsEnvironment
from megatron_rl.environments import Closing, EnvironmentFault, EnvironmentTimeout, Reaction, Session, Sessions

MAX_CALLS = 2**20
"""The number of calls of a process that Ray runs at once; threads limit how many work (`environments.calls`)."""
STUCK_S = 30.0
"""A process that does not answer within the time limits of its calls, and so much longer, is ended."""

BEGINS = 3
"""How many processes in turn may die before an episode has begun in one. Until Ray knows that a node is lost, it starts
processes there that never run."""

log = logging.getLogger(__name__)


class _Died(EnvironmentFault):
    """The process has died."""


class EnvironmentRank:
    """A process of environments."""

    def __init__(self, cfg: TurnsEnvironment, delimiter: str, form: str, path: str, name: str) -> None:
        begin_process(Path(path), name)
        self._sessions = Sessions(cfg, delimiter, form)
        self._playing: dict[int, Session] = {}

    async def begin(self, key: int, row: Mapping[str, Any]) -> str:
        self._playing[key] = self._sessions.new()
        return await self._playing[key].begin(row)

    async def react(self, key: int, text: str) -> Reaction:
        return await self._playing[key].react(text)

    async def closing(self, key: int) -> Closing:
        return await self._playing[key].closing()

    async def end(self, key: int) -> None:
        await self._playing.pop(key).end()


class RemoteSessions:
    """The processes of one engine. Each new environment goes to the next one in turn.

    Args:
        logs: the folder of the logs.
        engine: the name of the engine, the prefix of the processes' names.
    """

    def __init__(self, cfg: TurnsEnvironment, delimiter: str, form: str, logs: Path, engine: str) -> None:
        self._cfg, self._delimiter, self._form = cfg, delimiter, form
        self._names = [f"{engine} environments {i}" for i in range(cfg.processes)]
        self._logs = logs
        self._actors = [self._started(name) for name in self._names]
        self._keys, self._next = count(), cycle(range(cfg.processes))

    def new(self) -> Session:
        """The environment of another answer."""
        # A session begins with two calls, and the calls of a turn may wait for threads.
        limit_s, index = 2 * self._cfg.step_timeout_s + STUCK_S, next(self._next)
        return _RemoteSession(self, index, self._actors[index], next(self._keys), limit_s)

    def actor(self, index: int) -> Any:
        return self._actors[index]

    def replace(self, index: int, actor: Any, why: str) -> None:
        """Restart a process, unless it was already restarted after `actor`."""
        if self._actors[index] is actor:
            log.warning("%s %s, and is restarted", self._names[index], why)
            ray.kill(actor)
            self._actors[index] = self._started(self._names[index])

    def _started(self, name: str) -> Any:
        own_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        where = "SPREAD" if self._cfg.spread else own_node
        options = {"num_cpus": 0, "max_concurrency": MAX_CALLS, "scheduling_strategy": where}
        path = self._logs / f"{name.replace(' ', '_')}.log"
        made = ray.remote(EnvironmentRank).options(**options)
        return made.remote(self._cfg, self._delimiter, self._form, str(path), name)


class _RemoteSession:
    """
    Args:
        index: the index of the process within the engine.
        key: names the environment in its process.
        limit_s: the longest time of a call, in seconds.
    """

    def __init__(self, sessions: RemoteSessions, index: int, actor: Any, key: int, limit_s: float) -> None:
        self._sessions, self._index, self._actor = sessions, index, actor
        self._key, self._limit_s = key, limit_s

    async def begin(self, row: Mapping[str, Any]) -> str:
        for _ in range(BEGINS - 1):
            with suppress(_Died):  # nothing of the episode is lost yet
                return str(await self._result(self._actor.begin.remote(self._key, row)))
            self._actor = self._sessions.actor(self._index)
        return str(await self._result(self._actor.begin.remote(self._key, row)))

    async def react(self, text: str) -> Reaction:
        reaction: Reaction = await self._result(self._actor.react.remote(self._key, text))
        return reaction

    async def closing(self) -> Closing:
        closing: Closing = await self._result(self._actor.closing.remote(self._key))
        return closing

    async def end(self) -> None:
        with suppress(EnvironmentFault):  # the process has died, and the environment with it
            await self._result(self._actor.end.remote(self._key))

    async def _result(self, call: ray.ObjectRef) -> Any:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(call.future()), self._limit_s)
        except EnvironmentFault as fault:  # Ray's error has its own text around ours
            kind = EnvironmentTimeout if isinstance(fault, EnvironmentTimeout) else EnvironmentFault
            raise kind(str(getattr(fault, "cause", fault))) from None
        except RayActorError as error:
            self._sessions.replace(self._index, self._actor, "has died")
            raise _Died("the process of this environment has died") from error
        except TimeoutError:
            self._sessions.replace(self._index, self._actor, "does not answer")
            raise EnvironmentTimeout(f"the process of this environment did not answer in {self._limit_s:g} s") from None
