"""Environments of the library verifiers, with a stand-in for the program that plays them. The library itself plays in
tests/unit/rollout/test_rollout_verifiers.py."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from patience import deadline

from megatron_rl.recipes.environment_libraries.verifiers_library import play

HERE = Path(__file__).parent
URL = "http://127.0.0.1:1/v1"


@pytest.fixture
def program(tmp_path):
    """An interpreter that runs the stand-in, and what it hears."""
    python, heard = tmp_path / "python", tmp_path / "heard"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S {HERE / "stand_in_for_verifiers.py"} "$@"\n')
    python.chmod(0o755)
    return {"python": str(python), "environment": {"heard": str(heard)}}


def within_limit(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, deadline(30)))


def replies(**reply) -> dict:
    return {"task": {"reply": reply}}


def heard_by(program: dict) -> list:
    return [json.loads(line) for line in Path(program["environment"]["heard"]).read_text().splitlines()]


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_one_program_plays_all_episodes_of_an_environment(program):
    async def run():
        plays = [play(replies(reward=n / 8), URL, **program) for n in range(20)]
        return await asyncio.gather(*plays)

    assert within_limit(run()) == [n / 8 for n in range(20)]
    heard = heard_by(program)
    assert len({pid for pid, _ in heard}) == 1
    assert heard[3][1] == {"number": 3, "task": {"reply": {"reward": 3 / 8}}, "base_url": URL}


def test_a_fault_is_of_its_episode_alone(program):
    async def run():
        both = play(replies(fault="the judge is gone"), URL, **program), play(replies(reward=1), URL, **program)
        return await asyncio.gather(*both, return_exceptions=True)

    fault, reward = within_limit(run())
    assert (type(fault), str(fault), reward) == (RuntimeError, "the judge is gone", 1.0)


def test_a_program_that_dies_fails_its_episodes_and_the_next_one_has_another(program):
    async def run():
        both = play({"task": {}}, URL, **program), play({"task": {"dies": True}}, URL, **program)
        faults = await asyncio.gather(*both, return_exceptions=True)
        return faults, await play(replies(reward=1), URL, **program)

    faults, reward = within_limit(run())
    reason = "the program that plays verifiers has ended with status 7; the log says why"
    assert [str(fault) for fault in faults] == [reason] * 2
    assert reward == 1.0 and len({pid for pid, _ in heard_by(program)}) == 2


def test_an_episode_that_is_given_up_ends_in_the_program(program):
    async def run():
        hangs = asyncio.ensure_future(play({"task": {}}, URL, **program))
        await until(Path(program["environment"]["heard"]).exists)
        hangs.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hangs
        return await play(replies(reward=1), URL, **program)

    assert within_limit(run()) == 1.0
    orders = [order for _, order in heard_by(program)]
    assert [order["number"] for order in orders] == [0, 0, 1] and "task" not in orders[1]


def test_a_program_that_can_play_nothing_says_why(program):
    refused = program | {"environment": {"refused": "there is no taskset 'chess'"}}
    with pytest.raises(RuntimeError, match="there is no taskset 'chess'"):
        within_limit(play(replies(reward=1), URL, **refused))
    with pytest.raises(FileNotFoundError, match="/nowhere/python"):
        within_limit(play(replies(reward=1), URL, {}, "/nowhere/python"))
    with pytest.raises(ValueError, match="`task`.*'name'"):
        within_limit(play({"name": 1}, URL, **program))


def test_a_python_without_the_library_says_what_to_install(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without installed packages
    python.chmod(0o755)
    with pytest.raises(RuntimeError, match="pip install verifiers.*arguments.python"):
        within_limit(play(replies(reward=1), URL, {}, str(python)))
