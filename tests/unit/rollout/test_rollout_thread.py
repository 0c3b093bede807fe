"""The thread that owns the engine: what happens to those who wait when vLLM fails."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from patience import deadline

from megatron_rl.types import Mesh, Prompt

ROW = Prompt("row", (5, 6, 7), "")


def test_calls_are_made_in_their_order(make_stage, folders):
    stage = make_stage(folders[0], Mesh(), max_prompt_tokens=8, max_response_tokens=8)
    thread, seen = stage.engine._thread, []

    async def many():
        await asyncio.gather(*(thread.call(lambda number=number: seen.append(number)) for number in range(100)))

    stage.run(many())
    assert seen == [*range(100)]


def test_in_a_pause_only_its_own_calls_are_made(make_stage, folders):
    """The others follow when it ends, in their order, and before those that come later."""
    stage = make_stage(folders[0], Mesh(), max_prompt_tokens=8, max_response_tokens=8)
    thread, seen = stage.engine._thread, []

    def pause(paused: bool) -> None:
        seen.append("pause" if paused else "go on")
        thread.paused = paused

    async def both():
        calls = [thread.call(lambda: pause(True))]
        calls += [thread.call(lambda name=name: seen.append(name)) for name in "ab"]
        calls += [thread.call(lambda: seen.append("at once"), while_paused=True)]
        calls += [thread.call(lambda: pause(False), while_paused=True), thread.call(lambda: seen.append("c"))]
        await asyncio.gather(*calls)

    stage.run(both())
    assert seen == ["pause", "at once", "go on", "a", "b", "c"]


def test_calls_that_a_pause_holds_back_end_with_vllm(make_stage, folders):
    stage = make_stage(folders[0], Mesh(), max_prompt_tokens=8, max_response_tokens=8)
    thread = stage.engine._thread

    async def held_back():
        await thread.call(lambda: setattr(thread, "paused", True))
        waiting = asyncio.create_task(thread.call(lambda: None))
        await thread.call(lambda: None, while_paused=True)  # the thread has put the other one aside
        thread._fail("vLLM is gone")
        await waiting

    with pytest.raises(RuntimeError, match="^vLLM is gone$"):
        stage.run(held_back())


def test_a_step_that_fails_ends_all_that_is_waited_for(make_stage, folders):
    stage = make_stage(folders[0], Mesh(), max_prompt_tokens=8, max_response_tokens=8)
    stage.push(folders[0], 0)

    def fails():
        raise OSError("the device is gone")

    stage.engine._thread.engine.step = fails
    for _ in range(2):  # while it generates, and afterwards
        with pytest.raises(RuntimeError, match="^a step of vLLM failed: the device is gone$"):
            stage.run(stage.engine.generate([ROW], 4, 0, seed=0))
    assert not stage.engine.alive


def test_a_worker_that_dies_ends_all_that_is_waited_for(make_stage, folders):
    """The thread itself may wait for the dead worker: the answers end all the same."""
    stage = make_stage(folders[0], Mesh(), tensor=2, max_prompt_tokens=8, max_response_tokens=200)
    stage.push(folders[0], 0)

    async def both():
        answers = asyncio.create_task(stage.engine.generate([ROW] * 64, 16, 0, seed=0))
        await asyncio.sleep(0)
        await stage.engine._thread.call(lambda: None)  # the requests have been added
        os.kill(stage.engine._thread.engine.model_executor.workers[1].proc.pid, signal.SIGKILL)
        return await asyncio.gather(answers, return_exceptions=True)

    [error] = stage.run(asyncio.wait_for(both(), deadline(60)))
    assert isinstance(error, RuntimeError) and "a worker of vLLM has died" in str(error)
    assert not stage.engine.alive
