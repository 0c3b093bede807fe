"""Environments in real processes under Ray."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
import waiting_environments
from patience import deadline

from megatron_rl.cluster.environments import RemoteSessions
from megatron_rl.cluster.session import ray_session
from megatron_rl.config.cluster import ClusterConfig
from megatron_rl.config.environment import ClassEnvironment
from megatron_rl.environments import EnvironmentFault

FILE = Path(waiting_environments.__file__)


@pytest.fixture(scope="module", autouse=True)
def session(tmp_path_factory):
    with ray_session(ClusterConfig(), num_trainers=2, logs=tmp_path_factory.mktemp("logs")):
        yield


def remote(name: str, logs: Path, processes: int, **options) -> RemoteSessions:
    cfg = ClassEnvironment(path=f"{FILE}:{name}", processes=processes, **options)
    return RemoteSessions(cfg, "", "hermes", logs, "engine 0")


async def in_time(awaitable):
    return await asyncio.wait_for(awaitable, deadline(120))


async def begun(sessions: RemoteSessions, name: str):
    session = sessions.new()
    await in_time(session.begin({"name": name}))
    return session


async def told(session, text: str = "x") -> list[str]:
    [message] = (await in_time(session.react(text))).messages
    return message["content"].split()


def test_an_environment_stays_in_its_process_whose_death_costs_its_own_answers_alone(tmp_path):
    async def play() -> None:
        sessions = remote("Place", tmp_path, processes=2)
        first, second, third = [await begun(sessions, name) for name in "abc"]
        pid = int((await told(first))[0])
        other = int((await told(second))[0])
        assert await told(first) == [str(pid), "a"] and await told(third) == [str(pid), "c"]
        assert pid != other and os.getpid() not in (pid, other)

        with pytest.raises(EnvironmentFault, match=r"Place, step raised OSError: the disk is gone \(.*:\d+\)$"):
            await told(first, "fail")
        os.kill(pid, signal.SIGKILL)
        psutil.Process(pid).wait(deadline(30)) if psutil.pid_exists(pid) else None
        for lost in (first, third):
            with pytest.raises(EnvironmentFault, match="the process of this environment has died"):
                await told(lost)
            await in_time(lost.end())
        assert await told(second) == [str(other), "b"]
        fourth = await begun(sessions, "d")  # the turn of the other process
        fifth = await begun(sessions, "e")
        places = {int((await told(session))[0]) for session in (fourth, fifth)}
        assert other in places and pid not in places and len(places) == 2

    asyncio.run(play())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "engine_0_environments_0.log",
        "engine_0_environments_1.log",
    ]


@pytest.mark.deep
def test_a_process_that_does_not_answer_is_started_anew(tmp_path):
    async def play() -> None:
        sessions = remote("Blocks", tmp_path, processes=1, step_timeout_s=deadline(60))
        blocked = await begun(sessions, "a")
        assert await told(blocked, "free") == ["free"]
        blocked._limit_s = 0.2
        with pytest.raises(EnvironmentFault, match="did not answer in 0.2 s"):
            await told(blocked, "block")
        assert await told(await begun(sessions, "b"), "free") == ["free"]

    asyncio.run(play())
