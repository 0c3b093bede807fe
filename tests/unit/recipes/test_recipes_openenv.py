"""Servers that speak OpenEnv's protocol. The ones here answer as openenv 0.10.0 does."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from patience import deadline
from websockets.asyncio.client import connect
from websockets.asyncio.server import serve
from websockets.frames import CloseCode

from megatron_rl.config.environment import ClassEnvironment
from megatron_rl.environments import EnvironmentFault, Sessions
from megatron_rl.recipes.environment_libraries import openenv


def observed(text: str, reward: float | None = None, done: bool = False) -> dict:
    return {"type": "observation", "data": {"observation": {"text": text}, "reward": reward, "done": done}}


async def guess(line, heard: list) -> None:
    """A game: the player names a number, and hears whether the secret one is higher or lower."""
    async for message in line:
        said = json.loads(message)
        heard.append(said)
        data = said.get("data", {})
        if said["type"] == "reset":
            secret, answer = data.get("seed", 5), observed("guess")
        elif not data["message"].isdigit():
            answer = {"type": "error", "data": {"message": "no number", "code": "EXECUTION_ERROR"}}
        elif (number := int(data["message"])) == secret:
            answer = observed("right", 1.0, True)
        else:
            answer = observed("higher" if number < secret else "lower", 0)
        await line.send(json.dumps(answer))
    heard.append({"type": line.close_code})


@asynccontextmanager
async def game():
    """The address of a server, and what it has heard."""
    heard: list = []
    async with serve(lambda line: guess(line, heard), "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heard


def config(url: str, **arguments) -> ClassEnvironment:
    return ClassEnvironment(
        path="megatron_rl.recipes.environment_libraries.openenv:OpenEnv", arguments={"url": url} | arguments
    )


def play(turns: list[str], row: dict | None = None, **arguments):
    """The reactions to turns, and what the server has heard."""

    async def run():
        async with game() as (url, heard):
            session = Sessions(config(arguments.pop("url", url), **arguments), "").new()
            try:
                await session.begin(row or {})
                return [await session.react(turn) for turn in turns], heard
            finally:
                await session.end()

    return asyncio.run(asyncio.wait_for(run(), deadline(30)))


def test_a_game_is_played_to_its_end():
    reactions, heard = play(
        ["3", "9", "7"], {"secret": 7}, observation="text", reset={"seed": "secret"}, fixed={"tone": "kind"}
    )
    assert [(r.messages[0]["content"], r.reward, r.done) for r in reactions] == [
        ("higher", 0.0, False),
        ("lower", 0.0, False),
        ("right", 1.0, True),
    ]
    assert heard[0] == {"type": "reset", "data": {"seed": 7}}
    assert heard[1] == {"type": "step", "data": {"tone": "kind", "message": "3"}}


def test_the_whole_observation_is_json():
    [reaction], _ = play(["5"])
    assert json.loads(reaction.messages[0]["content"]) == {"text": "right"}


@pytest.mark.parametrize(
    ("arguments", "turns", "reason"),
    [
        ({}, ["five"], 'step.*answered to step: {"message": "no number", "code": "EXECUTION_ERROR"}'),
        ({"observation": "picture"}, ["5"], "the observation has no field 'picture': {'text': 'right'}"),
        ({"reset": {"seed": "secret"}}, [], "the row has no column 'secret', which `reset` names"),
        ({"url": "http://127.0.0.1:9"}, [], "reset raised ConnectionRefusedError"),
        ({"url": "127.0.0.1:9"}, [], "must begin with http://"),
    ],
)
def test_what_goes_wrong_is_a_fault_with_its_cause(arguments, turns, reason):
    with pytest.raises(EnvironmentFault, match=reason):
        play(turns, **arguments)


def test_a_server_that_has_no_session_left_says_so(monkeypatch, caplog):
    full = {"type": "error", "data": {"message": "Server at capacity", "code": "CAPACITY_REACHED"}}

    async def late(*given, **named):
        line = await connect(*given, **named)
        await line.wait_closed()
        return line

    async def run():
        async with serve(lambda line: line.send(json.dumps(full)), "127.0.0.1", 0) as server:
            session = Sessions(config(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), "").new()
            with pytest.raises(EnvironmentFault, match="answered to reset: .*Server at capacity"):
                await session.begin({})
            await session.end()

    monkeypatch.setattr(openenv, "connect", late)
    asyncio.run(asyncio.wait_for(run(), deadline(30)))
    assert not caplog.records


def test_many_games_have_states_of_their_own():
    async def run():
        async with game() as (url, heard):
            cfg = config(url, observation="text", reset={"seed": "secret"})

            async def one(secret: int):
                session = Sessions(cfg, "").new()
                await session.begin({"secret": secret})
                reactions = [await session.react(str(number)) for number in (secret - 1, secret)]
                await session.end()
                return [r.messages[0]["content"] for r in reactions]

            return await asyncio.gather(*map(one, range(1, 51))), heard

    found, heard = asyncio.run(asyncio.wait_for(run(), deadline(30)))
    assert found == [["higher", "right"]] * 50
    assert sum(said["type"] == CloseCode.NORMAL_CLOSURE for said in heard) == 50
