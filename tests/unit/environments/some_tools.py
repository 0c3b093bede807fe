"""Tools and environments that behave well, and badly."""

from __future__ import annotations

import asyncio
import datetime
import sys
from threading import Event

import numpy as np

RELEASED = Event()
"""Set when a tool that hangs may go on."""
CLOSED: list[str] = []


class Own(BaseException):
    pass


ENDS = {
    "interrupt": KeyboardInterrupt(),
    "generator": GeneratorExit("gone"),
    "cancel": asyncio.CancelledError("not me"),
    "own": Own("mine"),
    "stop": StopIteration("no more"),
    "half": ValueError("half: \ud800"),
}
"""What ends a thread, a task or an event loop, by its name."""


async def ends(kind: str) -> None:
    if kind == "exit":
        sys.exit(3)
    raise ENDS[kind]


def gives(kind: str):
    """Give a result of some type.

    Args:
        kind: of the result.
    """
    circle: list = []
    circle.append(circle)
    day = datetime.date(2026, 11, 28)
    results = {"date": day, "set": {1}, "numpy": np.int64(3), "bytes": b"x", "circle": circle, "dict": {"a": 1}}
    return results[kind]


def apply(function: str, method: str, self: str = "") -> str:
    """Have arguments whose names the project's own functions use, too.

    Args:
        function: any text.
        method: any text.
        self: any text.
    """
    return f"{function} {method} {self}"


async def broken_within(kind: str, how: str) -> str:
    """Fail.

    Args:
        kind: what is raised.
        how: where it is raised.
    """
    if how == "direct":
        await ends(kind)
    elif how == "gathered":
        await asyncio.gather(ends(kind))
    else:
        async with asyncio.TaskGroup() as group:
            group.create_task(ends(kind))
    return "done"


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: the first factor.
        b: the second factor.
    """
    return a * b


async def later(text: str) -> str:
    """Give a text back.

    Args:
        text: any text.
    """
    await asyncio.sleep(0)
    return text


def hang() -> str:
    """Wait for ever."""
    RELEASED.wait()
    return "never"


async def hang_async() -> str:
    """Wait for ever, and refuse to end."""
    while not RELEASED.is_set():
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return "too late"
    return "never"


def megabyte() -> str:
    """Return a megabyte."""
    return "x" * 1_000_000


def broken(kind: str) -> object:
    """Fail.

    Args:
        kind: how.
    """
    if kind == "exit":
        sys.exit(3)
    if kind in ENDS:
        raise ENDS[kind]
    if kind == "no JSON":
        return object()
    raise OSError("the disk is gone")


def without_types(a):
    """Do nothing.

    Args:
        a: anything.
    """


class Countdown:
    """Asks for numbers, and gives a reward for each."""

    def __init__(self, rounds: int = 2) -> None:
        self.left = rounds

    def reset(self, row) -> None:
        self.name = row["name"]

    def step(self, text: str):
        self.left -= 1
        return f"{self.name} {text}, {self.left} left", float(text), self.left == 0

    def close(self) -> None:
        CLOSED.append(self.name)


class AsyncCountdown(Countdown):
    async def reset(self, row) -> None:
        super().reset(row)

    async def step(self, text: str):
        return super().step(text)


class Named:
    """Has arguments whose names the project's own functions use, too."""

    def __init__(self, function: str = "", method: str = "") -> None:
        self.name = function or method

    def reset(self, row) -> None:
        pass

    def step(self, text: str):
        return self.name, None, False


class Greets(Countdown):
    def reset(self, row) -> str:
        return "hello"


class Returns(Countdown):
    """Returns what the row says."""

    def reset(self, row) -> None:
        self.given = row["given"]
        self.name = "returns"

    def step(self, text: str):
        if isinstance(self.given, BaseException):
            raise self.given
        return self.given


class Gathers(Returns):
    async def step(self, text: str):
        await asyncio.gather(ends(self.given))


class Hangs(Countdown):
    def step(self, text: str):
        RELEASED.wait()
