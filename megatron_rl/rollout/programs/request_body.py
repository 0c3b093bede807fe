"""The body of a request to `chat/completions`, which the other dialects are translated to."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, field_validator, model_validator

from megatron_rl.environments import Schemas

MAX_CHOICES = 128
NumTokens = Annotated[int, Field(strict=True, ge=1)]


class _Part(BaseModel, extra="allow"):
    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _has_its_text(self) -> Self:
        if self.type == "text" and self.text is None:
            raise ValueError("a part of the type text has no text")
        return self


class _Function(BaseModel):
    name: str
    arguments: str | dict[str, Any] = "{}"


class _ToolCall(BaseModel, extra="allow"):
    function: _Function


class _Message(BaseModel, extra="allow"):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_ToolCall] | None = None


class Body(BaseModel, extra="allow"):
    """A request to `chat/completions`. Its other fields have no effect."""

    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None
    stream: bool | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    logprobs: Annotated[bool, Field(strict=True)] | None = None
    stream_options: dict[str, Any] | None = None

    @field_validator("tools")
    @classmethod
    def _tools_are_functions(cls, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        for number, tool in enumerate(tools or []):
            function = tool.get("function", {})
            if not isinstance(function, dict) or not isinstance(function.get("parameters") or {}, dict):
                raise ValueError(f"the function of tool {number}, and its parameters, must be objects")
        return tools

    @property
    def stops(self) -> list[str]:
        """The texts before which the answer ends."""
        return [stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if stop]

    @property
    def schemas(self) -> Schemas:
        offered = [tool.get("function", {}) for tool in self.tools or []]
        return {str(tool.get("name")): tool.get("parameters") or {} for tool in offered}
