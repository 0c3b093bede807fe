"""Plain typed functions as tools, and how chat templates ask for their calls (hermes.py has the form)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jinja2 import TemplateError
from pydantic import validate_call
from pydantic.errors import PydanticUserError

from megatron_rl.config.function import load_function
from megatron_rl.environments.hermes import OPENING, calls_of
from megatron_rl.environments.observations import QUESTION, Render

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
    tools: dict[str, Tool] = {}
    for path in paths:
        function = load_function(path)
        if not inspect.isfunction(function):
            raise ValueError(f"rollout.environment.paths: {path} is {type(function).__name__}, but must be a function")
        if function.__name__ in tools:
            raise ValueError(f"rollout.environment.paths: two tools are named {function.__name__!r}; rename one")
        tools[function.__name__] = tool_of(function, f"rollout.environment.paths: {path}")
    return tools


def tool_of(function: Callable[..., Any], where: str) -> Tool:
    """
    Args:
        function: of the user's own, or a method of an object.
        where: names it in an error.

    Raises:
        ValueError: it lacks a type or a description.
    """
    from transformers.utils.chat_template_utils import (  # it takes a second to import
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        return Tool(function.__name__, validate_call(function), get_json_schema(function))
    except (DocstringParsingException, TypeHintParsingException, PydanticUserError, NameError) as error:
        raise ValueError(
            f"{where} cannot be offered as a tool: {str(error).rstrip('.!')}; it needs a type for each argument, and a "
            "docstring that says what it does and, under `Args:`, what each argument is"
        ) from error


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
    if any((call.name, call.arguments) == (name, asked["arguments"]) for call in calls_of(written)):
        return "hermes"
    if name not in written and re.search(rf'{OPENING}\s*\{{\s*"name"', told):
        return "hermes"
    return "other" if name in written or any(mark in told for mark in OTHER_FORMS) else "unknown"
