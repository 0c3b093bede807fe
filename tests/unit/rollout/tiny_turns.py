"""A chat template in the characters of the tiny models, and an environment for their turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.environments import EnvironmentFault, EnvironmentTimeout, Reaction
from megatron_rl.rollout.programs.turns import Turns


def render(turns: Sequence[Mapping[str, Any]], tools: Sequence[Any], add_generation_prompt: bool) -> str:
    """`?question<eos>=answer<eos>`, and so on."""
    signs = {"user": "?", "assistant": "="}
    text = "".join(f"{signs[turn['role']]}{turn['content']}<eos>" for turn in turns)
    return text + ("=" if add_generation_prompt else "")


class Lengths:
    """Says how long each turn was, which is also its reward, and ends after the row's number of turns."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.has_ended = False

    async def begin(self, row: Mapping[str, Any]) -> str:
        self.row = row
        if row.get("fails_at") == 0:
            raise EnvironmentFault("it cannot begin")
        return ""

    async def react(self, text: str) -> Reaction:
        self.texts.append(text)
        if self.row.get("late_at") == len(self.texts):
            raise EnvironmentTimeout("too late")
        failures = self.row.get("failures")  # as many times as it fails; None: always
        if self.row.get("fails_at") == len(self.texts) and (failures is None or failures):
            if failures:
                failures.pop()
            raise EnvironmentFault("it broke down")
        size = len(text)
        message = {"role": "user", "content": str(size)}
        return Reaction(
            (message,), float(size), done=len(self.texts) == self.row["num_turns"], errors=("raised",) * (size % 2)
        )

    async def end(self) -> None:
        self.has_ended = True


def turns_of(folder: Path, made: list[Lengths]) -> Callable[[RolloutConfig], Turns]:
    """
    Args:
        made: gets every environment.
    """

    def new() -> Lengths:
        made.append(Lengths())
        return made[-1]

    return lambda rollout: Turns(folder, rollout, render, new)
