"""A program that plays episodes of an environment of the library verifiers. It runs in that library's Python, and
imports nothing of megatron_rl. `verifiers_library.py` starts it and says what it reads and writes."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from functools import partial
from typing import Any

MAX_REASON = 400
INSTALL = (
    "{python} cannot import verifiers ({error}): install it there (`pip install verifiers`), or set "
    "rollout.environment.arguments.python to the Python of an environment that has it"
)


async def play(vf: Any, environment: Any, task: dict[str, Any], base_url: str) -> float:
    """Play one episode. Returns its reward."""
    task_class = type(environment.taskset).task_type()
    data = task_class.data_type().model_validate(task)
    context = vf.ModelContext(
        model="policy", client=vf.EvalClientConfig(base_url=base_url), sampling=vf.SamplingConfig()
    )
    episode = await environment.run_episode(task_class(data, environment.config.taskset.task), context)
    if not episode.ok:
        errors = [error for trace in episode.traces for error in trace.errors] + episode.errors
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
    learning = [trace for trace in episode.traces if trace.agent.trainable]
    if len(learning) != 1:
        raise RuntimeError(f"the episode has {len(learning)} agents that learn, but an answer has one reward")
    return float(learning[0].reward)


async def main(settings: str) -> None:
    """Play what standard input asks for, until it ends."""
    # What the environment prints, and what its own processes read, must not be taken for the two ends of this line.
    orders, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def say(**reply: Any) -> None:
        replies.write(json.dumps(reply) + "\n")

    try:
        vf: Any = importlib.import_module("verifiers.v1")
    except ImportError as error:
        say(fault=INSTALL.format(python=sys.executable, error=error))
        return
    try:
        environment = vf.load_environment(vf.resolve_env_config(json.loads(settings)))
    except Exception as error:  # any code of an environment's author
        say(fault=f"the environment cannot be made: {type(error).__name__}: {error}"[:MAX_REASON])
        return

    async def answer(number: int, **episode: Any) -> None:
        try:
            say(number=number, reward=await play(vf, environment, **episode))
        except asyncio.CancelledError:
            pass  # nobody waits for it
        except Exception as error:
            say(number=number, fault=f"{type(error).__name__}: {error}"[:MAX_REASON])

    reader, playing = asyncio.StreamReader(limit=1 << 30), dict[int, asyncio.Task[None]]()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), orders)
    async with environment.serving():
        while line := await reader.readline():
            order = json.loads(line)
            number = order["number"]
            if "task" in order:
                playing[number] = asyncio.ensure_future(answer(**order))
                playing[number].add_done_callback(partial(playing.pop, number))
            elif number in playing:
                playing[number].cancel()
        for task in playing.values():
            task.cancel()
        await asyncio.gather(*playing.values(), return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
