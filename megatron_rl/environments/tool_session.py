"""The tools of one answer: functions, and the methods of an object.

The calls of a turn run at the same time. Each gives one observation, in their order. A turn without a call ends the
answer.

Invariants (tests/unit/environments): every call gives exactly one observation; an error is one that begins with
`Error: `; what nobody would read is not called.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from megatron_rl.config.environment import ToolsEnvironment
from megatron_rl.config.exception_text import said
from megatron_rl.environments.asked_calls import calls_of
from megatron_rl.environments.call_formats import AskedCall, CallFormat
from megatron_rl.environments.calls import Calls, OutOfTime
from megatron_rl.environments.environment import Closing, Reaction
from megatron_rl.environments.objects import AnswerObject
from megatron_rl.environments.observed import content_of
from megatron_rl.environments.tools import Tool


class ToolSession:
    """The tools of one answer.

    Args:
        own: the object of the answer; None: there is none.
        form: the format of calls.
        delimiter: the text that ends a thought; calls inside a thought do not count. Empty if the model does not think.
    """

    def __init__(
        self,
        cfg: ToolsEnvironment,
        tools: Mapping[str, Tool],
        own: AnswerObject | None,
        form: CallFormat,
        delimiter: str,
        calls: Calls,
    ) -> None:
        self._cfg, self._functions, self._own = cfg, tools, own
        self._form, self._delimiter, self._calls = form, delimiter, calls
        self._num_turns = 0

    async def begin(self, row: Mapping[str, Any]) -> str:
        return "" if self._own is None else await self._own.begin(row)

    async def react(self, text: str) -> Reaction:
        schemas = {name: tool.parameters for name, tool in self._tools.items()}
        asked = calls_of(text, self._form, schemas, self._delimiter)
        if self._cfg.ends_at_malformed_calls and any(call.fault for call in asked):
            return Reaction(done=True, errors=tuple(call.kind for call in asked if call.kind))
        self._num_turns += 1
        if self._num_turns == self._cfg.max_turns:  # nobody would read the results
            return Reaction(done=not asked)
        given = await asyncio.gather(*map(self._result, asked))
        messages = tuple(
            {"role": "tool", "name": call.name, "content": content} | ({"tool_call_id": call.id} if call.id else {})
            for call, (content, _) in zip(asked, given, strict=True)
        )
        return Reaction(messages, None, not given, tuple(kind for _, kind in given if kind), len(given))

    async def closing(self) -> Closing:
        return Closing() if self._own is None else await self._own.closing()

    async def end(self) -> None:
        if self._own is not None:
            await self._own.end()

    @property
    def _tools(self) -> Mapping[str, Tool]:
        return {**self._functions, **(self._own.tools if self._own else {})}

    async def _result(self, call: AskedCall) -> tuple[str | list[dict[str, Any]], str]:
        """The content of the observation, and the kind of its error; empty if it is none."""
        name, tool = call.name, self._tools.get(call.name)
        if call.fault:
            return f"Error: ValueError: {call.fault}", call.kind
        if tool is None:
            names = ", ".join(self._tools)
            return f"Error: ValueError: there is no tool {name!r}, only {names}", "unknown_tool"
        if fault := tool.fault_of(call.arguments):
            return f"Error: wrong arguments of {name}: {fault}", "arguments"
        try:
            function = tool.function if self._own is None or name in self._functions else self._own.tool(name)
            given = await self._calls.call(function, **call.arguments)
            content = given if isinstance(given, str) else await asyncio.to_thread(content_of, given)
            return _as_text(given) if content is None else content, ""
        except ValidationError as error:
            faults = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
            return f"Error: wrong arguments of {name}: {'; '.join(faults)}", "arguments"
        except OutOfTime as error:
            return f"Error: {name} gave {error}", "timed_out"
        except Exception as error:  # a tool may raise anything, and the model is to read it
            return f"Error: {said(error)}", "raised"


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
