"""Objects whose public methods are tools: each answer has its own, which keeps what the calls have done.

Invariants (tests/unit/environments): an object is of one answer alone; what its own methods raise at the beginning or
at the end is an `EnvironmentFault` with the place where it came from, and never a reward.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import validate_call

from megatron_rl.config.environment import CHOOSES, ToolsEnvironment
from megatron_rl.config.exception_text import place, said
from megatron_rl.config.function import load_function, short_path
from megatron_rl.environments.calls import Calls
from megatron_rl.environments.environment import Closing, EnvironmentFault, UserCode, fault_of_reward
from megatron_rl.environments.tools import Tool, tool_of

log = logging.getLogger(__name__)

NO_TOOLS = ("reset", "get_reward")
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
    wanted: tuple[str, ...]
    """The arguments of `reset` without a default."""


def kind_from(make: Callable[[], Any], where: str) -> Kind:
    """
    Raises:
        ValueError: an object cannot be made, has no `reset`, or has a method that cannot be offered as a tool.
    """
    if asked := _required(make, where):
        raise ValueError(
            f"{where} asks for the argument {asked[0]!r}, but every object is made without arguments; give it a "
            "default, or name a function that makes the object"
        )
    try:
        first = make()
    except (Exception, SystemExit) as error:  # a user's class may raise anything
        raise ValueError(f"{where} raised {said(error)}{place(error)}; correct it") from error
    # Of the class: to ask an object for its members would compute its properties.
    names = [name for name, _ in inspect.getmembers(type(first), inspect.isfunction)]
    if "reset" not in names:
        if inspect.isclass(make):
            raise ValueError(f"{where} is a class without a method reset, which begins an answer; write it")
        given = "None" if first is None else f"an object of the class {type(first).__name__}"
        raise ValueError(
            f"{where} must be a class, or a function that returns an object, with a method reset; it returned {given}"
        )
    offered = [name for name in names if not name.startswith("_") and name not in NO_TOOLS]
    tools = {name: tool_of(getattr(first, name), f"{where}, the method {name},") for name in offered}
    wanted = _required(first.reset, f"{where}, reset")
    return Kind(where, make, type(first).__name__, tools, "get_reward" in names, wanted)


def _required(function: Callable[..., Any], where: str) -> tuple[str, ...]:
    """The arguments without a default; none if Python does not know the signature.

    Raises:
        ValueError: one has no name for its caller.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    required = [one for one in parameters if one.default is one.empty]
    for one in required:
        if one.kind is one.POSITIONAL_ONLY:
            raise ValueError(f"{where} takes {one.name!r} by its position alone; remove the `/` from its arguments")
    return tuple(one.name for one in required if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD))


@cache
def _kind_of(path: str) -> Kind:
    return kind_from(load_function(path), f"rollout.environment.objects: {short_path(path)}")


def kinds_of(cfg: ToolsEnvironment, functions: Collection[str]) -> dict[str | None, Kind]:
    """The kinds of `rollout.environment.objects`, by what the rows' column names; None if there is only one.

    Args:
        functions: the names of the tools that all answers have.

    Raises:
        ValueError: an error of `kind_from`, or the model would have two tools of one name, or none.
    """
    if cfg.objects is None:
        return {}
    named = cfg.objects if isinstance(cfg.objects, Mapping) else {None: cfg.objects}
    kinds = {name: _kind_of(path) for name, path in named.items()}
    for kind in kinds.values():
        if twice := [name for name in kind.tools if name in functions]:
            raise ValueError(f"rollout.environment: two tools are named {twice[0]!r}; rename one")
        if not kind.tools and not functions:
            raise ValueError(
                f"{kind.where} has no method that could be a tool, so the model could do nothing; write one besides "
                "reset and get_reward whose name does not begin with _"
            )
    return kinds


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

    async def end(self) -> None:
        """Close the object, if it is a context manager. Its answer is complete, so that an error is only told."""
        leave = getattr(type(self._made), "__exit__", None)
        if leave is not None:
            try:
                await self._code.call("__exit__", leave, self._made, None, None, None)
            except EnvironmentFault as fault:
                log.warning("%s", fault)

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
