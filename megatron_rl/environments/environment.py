"""The contract of an environment, and the environment that wraps a user's class.

Invariants (tests/unit/environments): an exception, a time-out or a result of the wrong form of the user's class is an
`EnvironmentFault` with the place where it came from; it is never a reward.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Any, NamedTuple, Protocol

from megatron_rl.config.environment import ClassEnvironment
from megatron_rl.config.exception_text import place, printable, said
from megatron_rl.config.function import load_function, short_path
from megatron_rl.environments.calls import Calls, OutOfTime
from megatron_rl.environments.observed import content_of
from megatron_rl.types import LARGEST_SCORE

log = logging.getLogger(__name__)

MAX_REASON = 500
"""The largest number of characters of the reason of a fault, which travels with the sample."""


class EnvironmentFault(Exception):
    """The environment has failed, so nothing can be said about the answer."""


class EnvironmentTimeout(EnvironmentFault):
    """The environment has exceeded a time limit."""


class Step(NamedTuple):
    """What an environment answers to a turn of the model."""

    observation: str | list[dict[str, Any]]
    """What the model reads next: a text, or content parts with images, as `content_of` reads them. It has no effect if
    the episode is done."""
    reward: float | None = None
    """The reward of the turn; None: it has none."""
    done: bool = False
    """Whether the episode is over."""


class Environment(Protocol):
    """What a class of the user's own must have. Every answer gets an object of it, which is made and reset while the
    first turn is sampled. `reset` and `step` may be `async`. If there is a method `close()`, it is called at the end in
    every case."""

    def reset(self, row: Mapping[str, Any]) -> None:
        """Begin an episode. The first observation is the prompt of the row.

        Args:
            row: the columns of the row, without its question.
        """

    def step(self, text: str) -> Step:
        """Answer to a turn of the model. A plain tuple (observation, reward, done) will do.

        Args:
            text: what the model has sampled in this turn, its thought included, without the end of the turn.
        """


@dataclass(frozen=True, slots=True)
class Reaction:
    """What follows a turn of the model."""

    messages: tuple[Mapping[str, Any], ...] = ()
    """The observations as turns of the chat template, `role` and `content`, which is a text or content parts."""
    reward: float | None = None
    done: bool = False
    errors: tuple[str, ...] = ()
    """The kinds of the calls of tools that gave an error, see `TOOL_ERRORS`."""
    num_calls: int = 0
    """The number of calls of tools."""


class Closing(NamedTuple):
    """What an environment says when its answer is complete."""

    reward: float | None = None
    state: Mapping[str, Any] | None = None
    """See `types.Conversation`."""


class Session(Protocol):
    """The environment of one answer. `begin` comes first, and `end` last, exactly once."""

    async def begin(self, row: Mapping[str, Any]) -> str:
        """
        Returns:
            What is appended to the last turn of the prompt.

        Raises:
            EnvironmentFault: the environment has failed.
        """
        ...

    async def react(self, text: str) -> Reaction:
        """
        Raises:
            EnvironmentFault: the environment has failed.
        """
        ...

    async def closing(self) -> Closing:
        """Comes after the last turn, unless the environment has failed.

        Raises:
            EnvironmentFault: the environment has failed.
        """
        ...

    async def end(self) -> None: ...


class UserCode:
    """Calls of a user's class, whose errors are faults.

    Args:
        path: names it in a fault.
    """

    def __init__(self, path: str, calls: Calls) -> None:
        self._path, self._calls = path, calls

    async def call(self, method: str, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        try:
            return await self._calls.call(function, *arguments, **named)
        except OutOfTime as error:
            raise EnvironmentTimeout(str(self.fault(method, f"raised OutOfTime: {error}"))) from error
        except Exception as error:  # a user's class may raise anything
            raise self.fault(method, f"raised {said(error)}{place(error)}") from error

    def fault(self, method: str, what: str) -> EnvironmentFault:
        return EnvironmentFault(f"{short_path(self._path)}, {method} {printable(what)}"[:MAX_REASON])


def class_of(cfg: ClassEnvironment) -> type[Any]:
    """The user's class, whose methods may come from its base classes.

    Raises:
        ValueError: it cannot be imported, lacks a method, or does not take `arguments` or what `Environment` says.
    """
    made, where = load_function(cfg.path), f"rollout.environment.path: {short_path(cfg.path)}"
    if not inspect.isclass(made):
        raise ValueError(f"{where} is no class, and the key needs one; name the class")
    absent = [name for name in ("reset", "step") if not callable(getattr(made, name, None))]
    if absent := absent or sorted(getattr(made, "__abstractmethods__", ())):
        raise ValueError(f"{where} has no method {' and no '.join(absent)}; write it")
    given = ", ".join(f"{name}=..." for name in cfg.arguments)  # a value may be a key to a service
    faults = {f"{made.__name__}({given})": _misfit(made, **cfg.arguments)}
    for name, argument in (("reset", "row"), ("step", "text")):
        if inspect.isfunction(method := inspect.getattr_static(made, name)):
            faults[f"{name}({argument})"] = _misfit(method, "self", argument)
    for call, fault in faults.items():
        if fault:
            raise ValueError(f"{where} is called as {call}: {fault}; correct its arguments")
    return made


def _misfit(function: Callable[..., Any], /, *given: Any, **named: Any) -> str:
    """Why a function does not take these arguments; empty if it does, or if Python does not know."""
    try:
        inspect.signature(function, follow_wrapped=False).bind(*given, **named)  # a wrapper may add arguments
    except TypeError as error:
        return str(error)
    except ValueError:
        pass
    return ""


class ClassSession:
    """An object of the user's class.

    Args:
        made: the class.
    """

    def __init__(self, made: Callable[..., Any], cfg: ClassEnvironment, calls: Calls) -> None:
        self._class, self._arguments, self._code = made, cfg.arguments, UserCode(cfg.path, calls)
        self._environment: Any = None

    async def begin(self, row: Mapping[str, Any]) -> str:
        self._environment = await self._code.call("__init__", self._class, **self._arguments)
        given = await self._code.call("reset", self._environment.reset, dict(row))
        if given is not None:
            raise self._code.fault("reset", f"returned {given!r}, but the first observation is the row's prompt")
        return ""

    async def react(self, text: str) -> Reaction:
        given = await self._code.call("step", self._environment.step, text)
        try:
            return await asyncio.to_thread(self._reaction, given)  # it may write large images
        except EnvironmentFault:
            raise
        except BaseException as error:  # a value's own methods may raise anything
            raise self._code.fault("step", f"returned a value that raised {said(error)}{place(error)}") from error

    def _reaction(self, given: Any) -> Reaction:
        wanted, fault = "but it must return (observation, reward, done)", self._code.fault
        if not isinstance(given, tuple) or not 1 <= len(given) <= 3:
            raise fault("step", f"returned {given!r}, {wanted}")
        step = Step(*given)
        content = step.observation if isinstance(step.observation, str) else content_of(step.observation)
        if content is None:
            raise fault("step", f"returned the observation {step.observation!r}, {wanted}, the first as text")
        reward = step.reward
        if no_reward := fault_of_reward(reward):
            raise fault("step", f"returned the reward {reward!r}, {no_reward}")
        if isinstance(step.done, str):
            raise fault("step", f"returned {step.done!r} for done, {wanted}, the last as True or False")
        message = {"role": "user", "content": content}
        return Reaction((message,), None if reward is None else float(reward), bool(step.done))

    async def closing(self) -> Closing:
        return Closing()

    async def end(self) -> None:
        close = getattr(self._environment, "close", None)
        if close is None:
            return
        try:
            await self._code.call("close", close)
        except EnvironmentFault as fault:  # the answer is complete
            log.warning("%s", fault)


def fault_of_reward(given: Any) -> str | None:
    """Why this is no reward; None if it is one, or if it is None."""
    if given is None:
        return None
    if not isinstance(given, Real) or not abs(given) < inf:  # type: ignore[operator]  # mypy's Real has no order
        return "which is no finite number and not None"
    return f"which is above {LARGEST_SCORE:g}" if abs(given) > LARGEST_SCORE else None  # type: ignore[operator]
