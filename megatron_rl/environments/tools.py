"""Plain typed functions as tools that a model calls.

A turn of the model calls tools in Hermes' form, one or several times:

    <tool_call>
    {"name": "multiply", "arguments": {"a": 6, "b": 7}}
    </tool_call>

The calls of a turn run at the same time. Each gives one observation, in their order. A turn without a call ends the
answer.

Invariants (tests/unit/environments): every call gives exactly one observation; an error is one that
begins with `Error: `.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from jinja2 import TemplateError
from pydantic import ValidationError, validate_call
from pydantic.errors import PydanticUserError

from megatron_rl.config.function import load_function
from megatron_rl.config.raised import said
from megatron_rl.environments.calls import Calls, OutOfTime
from megatron_rl.environments.environment import Reaction
from megatron_rl.environments.observations import QUESTION, Render

OPENING = "<tool_call>"
CALL = re.compile(rf"{OPENING}(.*?)(?:</tool_call>|(?={OPENING})|\Z)", re.DOTALL)


OTHER_FORMS = ("<function=", "<parameter=", "<arg_key>", "<|python_tag|>", "[TOOL_CALLS]", "<|tool_call", "<|channel|>")
"""What chat templates of other models write in a call or in front of it: Qwen3-Coder and Qwen3.5, GLM, Llama 3,
Mistral, LFM2, Gemma 4 and Kimi-K2, gpt-oss."""


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    function: Callable[..., Any]
    """Takes the arguments by name, and raises pydantic's ValidationError if they do not fit its types."""
    schema: Mapping[str, Any] = field(hash=False)
    """The JSON schema of the tool for the chat template."""


def load_tools(paths: Sequence[str]) -> dict[str, Tool]:
    """The tools at these import paths, by their names.

    Raises:
        ValueError: a function cannot be imported, or lacks a type or a description, or two have the same name.
    """
    from transformers.utils.chat_template_utils import (  # it takes a second to import
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    tools: dict[str, Tool] = {}
    for path in paths:
        function = load_function(path)
        if not inspect.isfunction(function):
            raise ValueError(f"rollout.environment.paths: {path} is {type(function).__name__}, but must be a function")
        try:
            schema, checked = get_json_schema(function), validate_call(function)
        except (DocstringParsingException, TypeHintParsingException, PydanticUserError, NameError) as error:
            raise ValueError(f"rollout.environment.paths: {path} cannot be offered as a tool: {error}") from error
        if function.__name__ in tools:
            raise ValueError(f"rollout.environment.paths: two tools are named {function.__name__!r}; rename one")
        tools[function.__name__] = Tool(function.__name__, checked, schema)
    return tools


def asked_form(render: Render, name: str) -> Literal["hermes", "other", "unknown"]:
    """The form of the calls that a chat template asks for: it writes calls itself, or tells the model how. It may do
    neither, and leave it to the model's training.

    Args:
        render: the chat template with the tools.
        name: of one of the tools.
    """
    told = render([QUESTION], True)
    asked = {"name": name, "arguments": {"x": "y"}}
    calls = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": asked}]}
    try:
        written = render([QUESTION, calls], False)
    except (TemplateError, LookupError, TypeError, AttributeError, ValueError):  # a template that takes no calls
        written = ""
    written = written.removeprefix(render([QUESTION], False))
    for match in CALL.finditer(written):
        with suppress(ValueError):
            if _parsed(match[1]) == (name, asked["arguments"]):
                return "hermes"
    if name not in written and re.search(rf'{OPENING}\s*\{{\s*"name"', told):
        return "hermes"
    return "other" if name in written or any(mark in told for mark in OTHER_FORMS) else "unknown"


class ToolSession:
    """The tools of one answer. They share nothing, so there is nothing to begin or to end.

    Args:
        delimiter: the text that ends a thought; calls inside a thought do not count. Empty if the model does not think.
    """

    def __init__(self, tools: Mapping[str, Tool], delimiter: str, calls: Calls) -> None:
        self._tools, self._delimiter, self._calls = tools, delimiter, calls

    async def begin(self, row: Mapping[str, Any]) -> None:
        pass

    async def react(self, text: str) -> Reaction:
        said = after_thought(text, self._delimiter)
        given = await asyncio.gather(*(self._result(match[0], match[1]) for match in CALL.finditer(said)))
        messages = tuple({"role": "tool", "name": name, "content": content} for name, content, _ in given)
        return Reaction(messages, done=not given, num_errors=sum(failed for *_, failed in given))

    async def end(self) -> None:
        pass

    async def _result(self, whole: str, call: str) -> tuple[str, str, bool]:
        """The name of the tool, the text of the observation, and whether it is an error."""
        name = "error"
        try:
            if not whole.endswith("</tool_call>"):
                raise ValueError("a <tool_call> without </tool_call>")
            name, arguments = _parsed(call)
            tool = self._tools.get(name)
            if tool is None:
                raise ValueError(f"there is no tool {name!r}, only {', '.join(self._tools)}")
            result = await self._calls.call(tool.function, **arguments)
            return name, _as_text(result), False
        except ValidationError as error:
            faults = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
            return name, f"Error: wrong arguments of {name}: {'; '.join(faults)}", True
        except OutOfTime as error:
            return name, f"Error: {name} gave {error}", True
        except Exception as error:  # a tool may raise anything, and the model is to read it
            return name, f"Error: {said(error)}", True


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


def after_thought(text: str, delimiter: str) -> str:
    """What a turn says after its thought, which ends at the first delimiter outside of calls: arguments may have
    one. A turn without a delimiter is an open thought from where it opens one."""
    if not delimiter:
        return text
    calls = [match.span() for match in CALL.finditer(text) if match[0].endswith("</tool_call>")]
    for found in re.finditer(re.escape(delimiter), text):
        if not any(start < found.start() < end for start, end in calls):
            return text[found.end() :]
    return text.partition(delimiter.replace("/", "", 1))[0]


def _parsed(call: str) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of a call."""
    try:
        given = json.loads(call)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the call is not JSON: {error}") from None
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise ValueError('a call must be {"name": ..., "arguments": {...}}')
    arguments = given.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call must be a JSON object")
    return given["name"], arguments
