"""Plain typed functions as tools, and whether the arguments of a call fit them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jsonschema import Draft202012Validator
from pydantic import validate_call
from pydantic.errors import PydanticUserError

from megatron_rl.config.function import load_function


@dataclass(frozen=True)
class Tool:
    name: str
    function: Callable[..., Any]
    """Takes the arguments by name, and raises pydantic's ValidationError if they do not fit its types."""
    schema: Mapping[str, Any] = field(hash=False)
    """The JSON schema of the tool for the chat template."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of its arguments."""
        given: Mapping[str, Any] = self.schema["function"]["parameters"]
        return given

    def fault_of(self, arguments: Mapping[str, Any]) -> str:
        """What of these arguments the schema does not allow; empty if it allows all. A number in quotes is no number,
        although pydantic would take it."""
        faults = sorted(self._validator.iter_errors(dict(arguments)), key=lambda fault: list(map(str, fault.path)))
        return "; ".join(f"{'.'.join(map(str, one.path)) or 'arguments'}: {one.message}" for one in faults)

    @cached_property
    def _validator(self) -> Draft202012Validator:
        return Draft202012Validator({"additionalProperties": False, **_with_null(self.parameters)})


def _with_null(schema: Any) -> Any:
    """The schema with `nullable`, which transformers writes, as JSON schemas have it."""
    if not isinstance(schema, Mapping):
        return [_with_null(one) for one in schema] if isinstance(schema, list) else schema
    found = {key: _with_null(one) for key, one in schema.items() if key != "nullable"}
    return {"anyOf": [found, {"type": "null"}]} if schema.get("nullable") is True else found


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
