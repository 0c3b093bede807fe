"""Plays environments of the library verifiers (its API `verifiers.v1`, seen with 0.4.0) as agents.

    environment: {kind: agent, path: "megatron_rl.recipes.environment_libraries.verifiers_library:play",
                  arguments: {python: /opt/verifiers/bin/python, environment: {taskset: {id: gsm8k}, agent: ...}}}

The library needs versions of its own of much that vLLM needs too, and its episodes start processes. So each engine
starts one program (`verifiers_program.py`) in the library's Python, which plays all episodes of this engine. It reads
one JSON object a line: `{"number": 1, "task": {...}, "base_url": ...}` begins an episode, `{"number": 1}` gives it up.
It writes `{"number": 1, "reward": 0.5}` or `{"number": 1, "fault": "why"}`, and `{"fault": "why"}` if it can play
nothing. It ends when the engine's process does, because its standard input ends then.

Invariants (tests/unit/environments): a program that ends fails all its episodes with the reason, and the next episode
starts another one; an episode that is given up ends in the program, too.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("verifiers_program.py")
END_S = 10.0
"""How long the program may take to end its own processes, in seconds."""


class LibraryProgram:
    """The program, with one environment.

    Args:
        python: the interpreter that has verifiers.
        environment: the environment, as JSON.
        ended: called when nothing more can be played.
    """

    def __init__(self, python: str, environment: str, ended: Callable[[], object]) -> None:
        self._python, self._environment, self._ended = python, environment, ended
        self._numbers, self._waiting = count(), dict[int, asyncio.Future[float]]()
        self._started = asyncio.ensure_future(self._start())
        self._reading = asyncio.ensure_future(self._read())

    async def play(self, task: Mapping[str, Any], base_url: str) -> float:
        """The reward of an episode.

        Raises:
            RuntimeError: the episode has failed, or the program.
        """
        orders = (await asyncio.shield(self._started)).stdin
        assert orders is not None, "it is a pipe"
        number = next(self._numbers)
        self._waiting[number] = future = asyncio.get_running_loop().create_future()
        try:
            orders.write(json.dumps({"number": number, "task": task, "base_url": base_url}).encode() + b"\n")
            return float(await future)
        finally:
            if self._waiting.pop(number, None) is not None and not orders.is_closing():
                orders.write(json.dumps({"number": number}).encode() + b"\n")

    async def _start(self) -> Process:
        # With -P the folder of the program is not searched for modules: its files have names of libraries.
        return await asyncio.create_subprocess_exec(
            self._python, "-P", str(PROGRAM), self._environment, stdin=PIPE, stdout=PIPE
        )

    async def _read(self) -> None:
        """Give out the replies until the program ends."""
        await asyncio.wait([self._started])
        if self._started.exception() is not None:  # `play` raises it
            self._ended()
            return
        process = self._started.result()
        assert process.stdin is not None and process.stdout is not None, "they are pipes"
        reason = ""
        try:
            while line := await process.stdout.readline():
                reply = json.loads(line)
                if "number" not in reply:
                    reason = reply["fault"]
                elif (future := self._waiting.pop(reply["number"], None)) is not None and not future.done():
                    if "fault" in reply:
                        future.set_exception(RuntimeError(reply["fault"]))
                    else:
                        future.set_result(reply["reward"])
            status = await process.wait()
            reason = reason or f"the program that plays verifiers has ended with status {status}; the log says why"
        finally:
            self._ended()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(RuntimeError(reason or "the engine has ended"))
            self._waiting.clear()
            process.stdin.close()  # this ends the program
            try:
                await asyncio.wait_for(process.wait(), END_S)
            except TimeoutError:
                process.kill()
                await process.wait()


_programs: dict[tuple[asyncio.AbstractEventLoop, str, str], LibraryProgram] = {}
"""The programs that run, by their event loops and arguments."""


async def play(row: Mapping[str, Any], base_url: str, environment: Mapping[str, Any], python: str = "") -> float:
    """Play one episode. Returns the reward of the agent that learns.

    Args:
        row: its column `task` is a task of the environment's taskset: `task.data.model_dump(mode="json")`.
        base_url: where the model is.
        environment: what verifiers has below `[env]`: the taskset, the agents, their harnesses and runtimes.
        python: the interpreter that has verifiers; empty: the one that runs this.

    Raises:
        ValueError: the row has no such column.
        RuntimeError: the episode has failed, or the program that plays it.
        OSError: there is no such interpreter.
    """
    if not isinstance(row.get("task"), Mapping):
        raise ValueError(f"the row must have a task of verifiers in the column `task`; it has {sorted(row)}")
    own = (python or sys.executable, json.dumps(environment, sort_keys=True))
    key = (asyncio.get_running_loop(), *own)
    if key not in _programs:
        _programs[key] = LibraryProgram(*own, ended=partial(_programs.pop, key, None))
    return await _programs[key].play(row["task"], base_url)
