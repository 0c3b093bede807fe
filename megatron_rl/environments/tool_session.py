"""The tools of one answer: functions, and the methods of an object.

The calls of a turn run at the same time. Each gives one observation, in their order. A turn without a call ends the
answer.

Invariants (tests/unit/environments): every call gives exactly one observation; an error is one that begins with
`Error: `; what nobody would read is not called.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from megatron_rl.config.environment import ToolsEnvironment
from megatron_rl.config.exception_text import said
from megatron_rl.environments.calls import Calls, OutOfTime
from megatron_rl.environments.environment import Closing, Reaction
from megatron_rl.environments.hermes import AskedCall, calls_of
from megatron_rl.environments.objects import AnswerObject
from megatron_rl.environments.tools import Tool


class ToolSession:
    """The tools of one answer.

    Args:
        own: the object of the answer; None: there is none.
        delimiter: the text that ends a thought; calls inside a thought do not count. Empty if the model does not think.
    """

    def __init__(
        self, cfg: ToolsEnvironment, tools: Mapping[str, Tool], own: AnswerObject | None, delimiter: str, calls: Calls
    ) -> None:
        self._cfg, self._tools, self._own = cfg, tools, own
        self._delimiter, self._calls = delimiter, calls
        self._num_turns = 0

    async def begin(self, row: Mapping[str, Any]) -> str:
        return "" if self._own is None else await self._own.begin(row)

    async def react(self, text: str) -> Reaction:
        asked = calls_of(text, self._delimiter)
        if self._cfg.ends_at_malformed_calls and any(call.fault for call in asked):
            return Reaction(done=True)
        self._num_turns += 1
        if self._num_turns == self._cfg.max_turns:  # nobody would read the results
            return Reaction(done=not asked)
        given = await asyncio.gather(*map(self._result, asked))
        messages = tuple({"role": "tool", "name": name, "content": content} for name, content, _ in given)
        return Reaction(messages, None, not given, sum(failed for *_, failed in given), len(given))

    async def closing(self) -> Closing:
        return Closing() if self._own is None else await self._own.closing()

    async def end(self) -> None:
        pass

    async def _result(self, call: AskedCall) -> tuple[str, str, bool]:
        """The name of the tool, the text of the observation, and whether it is an error."""
        name = call.name
        try:
            if call.fault:
                raise ValueError(call.fault)
            function = self._function(name)
            result = await self._calls.call(function, **call.arguments)
            return name, _as_text(result), False
        except ValidationError as error:
            faults = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
            return name, f"Error: wrong arguments of {name}: {'; '.join(faults)}", True
        except OutOfTime as error:
            return name, f"Error: {name} gave {error}", True
        except Exception as error:  # a tool may raise anything, and the model is to read it
            return name, f"Error: {said(error)}", True

    def _function(self, name: str) -> Callable[..., Any]:
        """
        Raises:
            ValueError: there is no such tool.
        """
        names = (*self._tools, *(self._own.tools if self._own else ()))
        if name not in names:
            raise ValueError(f"there is no tool {name!r}, only {', '.join(names)}")
        return self._tools[name].function if self._own is None or name in self._tools else self._own.tool(name)


def _as_text(result: Any) -> str:
    """A text as it is, else JSON; what JSON does not know, such as a date or a NumPy number, as Python prints it.

    Raises:
        TypeError: Python prints its address alone.
    """
    try:
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        if all(vars(object)[name] is getattr(type(result), name) for name in ("__str__", "__repr__")):
            raise
        return str(result)
