"""Classes whose methods are tools, good and bad."""

from __future__ import annotations

from typing import Any

import numpy as np


class Counter:
    def reset(self, start: int = 0, prompt: Any = None) -> str:
        self.total, self.begun_with = start, prompt[-1]["content"]
        self.lock, self.seen, self.numbers, self.long = object(), {1}, {1: 2}, "x" * 100_000  # JSON has none of them
        self.circle = [self.lock]
        self.circle[0] = self.circle
        self.pair, self.best = (1, [np.int64(2)]), np.float32(0.5)
        return f" from {start}"

    def add(self, step: int) -> int:
        """Add to the total.

        Args:
            step: what is added.
        """
        self.total += step
        return self.total

    async def negate(self) -> int:
        """Change the sign of the total."""
        self.total = -self.total
        return self.total

    def get_reward(self) -> float:
        return self.total / 2


class Echo:
    def reset(self, **row: Any) -> None:
        self.row = sorted(row)

    def shout(self, text: str) -> str:
        """Shout.

        Args:
            text: what is shouted.
        """
        return text.upper()


class Breaks:
    def reset(self, at: str) -> Any:
        self.at = at
        if at == "reset":
            raise OSError("the disk is gone")
        return 3 if at == "text" else "x" * 500 if at == "length" else None

    async def rest(self) -> None:
        """Do nothing."""

    def get_reward(self) -> Any:
        return float("nan") if self.at == "reward" else None


class NoReset:
    pass


def makes_nothing() -> None: ...


def makes_no_reset() -> NoReset:
    return NoReset()


class NoTool:
    def reset(self) -> None: ...

    def get_reward(self) -> float:
        return 1.0

    def _act(self) -> None: ...


class Multiplies(NoTool):
    def multiply(self) -> None:
        """Multiply."""


class Asks(Counter):
    def __init__(self, url: str, seconds: int = 1) -> None: ...


class Unnamed(Counter):
    def reset(self, start: int, /) -> str:  # type: ignore[override]
        return ""


class Exits(Counter):
    def __init__(self) -> None:
        raise SystemExit(3)


NO_CLASS = Counter()


class NoDescription:
    def reset(self) -> None: ...

    def act(self, x: int) -> int:
        return x


class Costly:
    def __init__(self) -> None:
        raise ConnectionError("no server")
