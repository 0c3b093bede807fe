"""Objects whose public methods are tools: each answer has its own, which keeps what the calls have done.

Invariants (tests/unit/environments): an object is of one answer alone; what its own methods raise at the beginning or
at the end is an `EnvironmentFault` with the place where it came from, and never a reward.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import validate_call

from megatron_rl.config.function import load_function, short_path
from megatron_rl.config.raised import place, said
from megatron_rl.environments.calls import Calls
from megatron_rl.environments.environment import Closing, UserCode, fault_of_reward
from megatron_rl.environments.tools import Tool, tool_of

NO_TOOLS = ("reset", "get_reward")
CHOOSES = "environment"
"""The column of the rows that names one of several kinds of objects."""
MAX_CHARACTERS = 2**16
"""The longest text of an attribute that reward functions get."""


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """The objects that one callable makes."""

    where: str
    """Names it in a fault."""
    make: Callable[[], Any]
    type_name: str
    tools: Mapping[str, Tool]
    """The methods of the first object, for their schemas."""
    owns_reward: bool


def kind_from(make: Callable[[], Any], where: str) -> Kind:
    """
    Raises:
        ValueError: an object cannot be made, has no `reset`, or has a method that cannot be offered as a tool.
    """
    try:
        first = make()
    except Exception as error:  # a user's class may raise anything
        raise ValueError(f"{where} raised {said(error)}{place(error)}") from error
    # Of the class: to ask an object for its members would compute its properties.
    names = [name for name, _ in inspect.getmembers(type(first), inspect.isfunction)]
    if "reset" not in names:
        raise ValueError(f"{where} makes a {type(first).__name__}, which has no method reset; it begins an answer")
    offered = [name for name in names if not name.startswith("_") and name not in NO_TOOLS]
    tools = {name: tool_of(getattr(first, name), f"{where}, the method {name},") for name in offered}
    return Kind(where, make, type(first).__name__, tools, "get_reward" in names)


@cache
def _kind_of(path: str) -> Kind:
    return kind_from(load_function(path), f"rollout.environment.objects: {short_path(path)}")


def kinds_of(objects: str | Mapping[str, str] | None) -> dict[str | None, Kind]:
    """The kinds of `rollout.environment.objects`, by what the rows' column names; None if there is only one."""
    if objects is None:
        return {}
    named = objects if isinstance(objects, Mapping) else {None: objects}
    return {name: _kind_of(path) for name, path in named.items()}


class AnswerObject:
    """The object of one answer."""

    def __init__(self, kinds: Mapping[str | None, Kind], calls: Calls) -> None:
        self._kinds, self._calls = kinds, calls
        self._kind: Kind | None = None
        self._made: Any = None

    @property
    def tools(self) -> Mapping[str, Tool]:
        """Its tools with their schemas."""
        return {} if self._kind is None else self._kind.tools

    def tool(self, name: str) -> Callable[..., Any]:
        """The method with this name, which checks its arguments."""
        return validate_call(getattr(self._made, name))  # type: ignore[no-any-return]

    async def begin(self, row: Mapping[str, Any]) -> str:
        """Make the object and reset it. Returns what it appends to the prompt.

        Raises:
            EnvironmentFault: it has failed, or there is no such kind.
        """
        name = None if None in self._kinds else row.get(CHOOSES)
        self._kind = self._kinds.get(name)
        if self._kind is None:
            raise UserCode("rollout.environment.objects", self._calls).fault(
                f"the row's column {CHOOSES}",
                f"is {name!r}, which is not among the environments {', '.join(map(str, self._kinds))}",
            )
        self._code = UserCode(self._kind.where, self._calls)
        self._made = await self._code.call("__init__", self._kind.make)
        given = {key: value for key, value in row.items() if name is None or key != CHOOSES}
        wanted = inspect.signature(self._made.reset).parameters
        if not any(one.kind is one.VAR_KEYWORD for one in wanted.values()):
            given = {key: value for key, value in given.items() if key in wanted}
        text = await self._code.call("reset", self._made.reset, **given)
        if text is not None and not isinstance(text, str):
            raise self._code.fault("reset", f"returned {text!r}, but it must return a text or None")
        return text or ""

    async def closing(self) -> Closing:
        """
        Raises:
            EnvironmentFault: it has failed.
        """
        if self._kind is None:
            return Closing()
        reward = None
        if self._kind.owns_reward:
            reward = await self._code.call("get_reward", self._made.get_reward)
            if fault := fault_of_reward(reward):
                raise self._code.fault("get_reward", f"returned {reward!r}, {fault}")
        return Closing(None if reward is None else float(reward), _state_of(self._made))


def _state_of(made: Any) -> dict[str, Any]:
    """The attributes that JSON has, as it reads them back; arrays and tensors are lists."""
    found: dict[str, Any] = {}
    for name, value in list(getattr(made, "__dict__", {}).items()):
        # Neither a set nor a circle, and nothing that a thread goes on changing, which was given up.
        with suppress(TypeError, ValueError, AttributeError, RuntimeError):
            text = json.dumps(value, default=lambda one: one.tolist())
            if len(text) <= MAX_CHARACTERS and _has_text_keys(value):
                found[name] = json.loads(text)
    return found


def _has_text_keys(value: Any) -> bool:
    """JSON has no other keys of a mapping, and would change them."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_text_keys(one) for key, one in value.items())
    return all(map(_has_text_keys, value)) if isinstance(value, list | tuple) else True
