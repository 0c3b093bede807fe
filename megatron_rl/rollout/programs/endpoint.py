"""An OpenAI-compatible server in front of an engine, so that any agent can be trained without a change to it.

Each answer has its own address, its `base_url`, and all requests to it belong to this answer: the engine answers `POST
{base_url}/chat/completions`, and the tokens are recorded (conversations.py). Sampling follows the run's configuration,
because the log-probs of an action must equal the trainer's: `temperature`, `top_p` and the like of a request have no
effect, and the log names each the first time that it differs. So it does with all else that is not supported, such as
`stop`, `tool_choice`, `logit_bias` and `response_format`.

Supported are text messages, `tools` and `tool_calls` in the model's format, `max_tokens`, and `stream` (the whole
answer is one piece). `n` above 1 and `logprobs` are refused.

Invariants (tests/unit/rollout): a request to an unknown address, or after the end of its answer, samples nothing; a
refused request changes nothing.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from aiohttp import web
from pydantic import BaseModel, Field, ValidationError, model_validator

from megatron_rl.environments import CallFormat, Schemas, as_turn, calls_of
from megatron_rl.rollout.program import Call, Completion
from megatron_rl.rollout.programs.conversations import MAX_SHOWN, Conversations, Refused

log = logging.getLogger(__name__)

MODEL = "policy"
"""The name of the model, as `{base_url}/models` gives it. Any name in a request is taken for it."""
MAX_REQUEST_BYTES = 64 << 20
MAX_WAITING = 4096
"""The number of connections that may wait until the server accepts them, because hundreds of agents ask at once. Linux
bounds it by net.core.somaxconn, which is 4,096 by default."""

NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0,
    "logit_bias": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "stop": [],
    "tool_choice": "auto",
}
"""The values of fields that ask for nothing."""
ABOUT_THE_CALLER = {
    "metadata",
    "model",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "user",
}
"""The fields that say nothing about the answer."""
MAX_TOLD = 100
"""The number of fields that the log names."""

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
    n: Annotated[int, Field(strict=True)] | None = None
    logprobs: bool | int | None = None

    @model_validator(mode="after")
    def _has_one_answer(self) -> Self:
        if self.n not in (None, 1):
            raise ValueError(f"n is {self.n}, but a call has one answer; make several calls")
        if self.logprobs:
            raise ValueError("logprobs are not given; the run records them itself")
        return self


async def _body_of(request: web.Request) -> Body:
    """
    Raises:
        Refused: the body is no JSON, or a field of it is wrong.
    """
    try:
        return Body.model_validate(await request.json())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Refused(f"{where}: {first['msg']}" if where else first["msg"].removeprefix("Value error, ")) from None
    except web.RequestPayloadError as error:
        raise Refused(f"the body of the request cannot be read: {error}") from None
    except (ValueError, LookupError, RecursionError) as error:
        raise Refused(f"the request is no JSON: {error}") from None


Ask = Callable[[list[int], Call], Awaitable[Completion]]
"""Sample what follows these tokens."""


@dataclass(eq=False)
class AnswerLine:
    """The answer behind one address."""

    name: str
    url: str
    """The `base_url` for the agent."""
    conversations: Conversations
    ask: Ask
    num_abandoned: int = 0
    """The number of calls whose caller went away before the answer was there, as after a timeout of its client."""


class Abandoned(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True, slots=True)
class TurnReading:
    """How the tokens of a turn become the message that an agent gets."""

    form: CallFormat
    delimiter: str
    """The text that ends reasoning; a call inside it is none. Empty if the model does not reason."""
    decode: Callable[[list[int]], str]
    """Token ids -> text, with the special tokens."""

    def message(self, completion: Completion, schemas: Schemas) -> dict[str, Any]:
        """The assistant's turn: the calls of tools are `tool_calls`. A turn that was cut, or has a call that cannot be
        read, is text."""
        drops_end = completion.stopped and not self.form.reads_end
        text = self.decode(list(completion.ids[:-1] if drops_end else completion.ids))
        asked = calls_of(text, self.form, schemas, self.delimiter) if completion.stopped else []
        if not asked or any(call.fault for call in asked):
            return {"role": "assistant", "content": text}
        turn = as_turn(text, self.form, asked)
        for call in turn["tool_calls"]:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return turn | {"tool_calls": [{"id": f"call_{secrets.token_hex(6)}", **call} for call in turn["tool_calls"]]}


class Endpoint:
    """
    Args:
        reading: how the agents get the model's turns.
        max_tokens: the largest number of tokens of a conversation.
        sampling: the sampling parameters of the run.
    """

    def __init__(self, host: str, reading: TurnReading, max_tokens: int, sampling: Mapping[str, float]) -> None:
        self._host, self._reading, self._max_tokens, self._sampling = host, reading, max_tokens, dict(sampling)
        self._lines: dict[str, AnswerLine] = {}
        self._told: set[str] = set()
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post("/{line}/v1/chat/completions", self._complete)
        app.router.add_get("/{line}/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None)
        self._port = 0

    async def start(self) -> None:
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, 0, backlog=MAX_WAITING)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        await self._runner.cleanup()

    def open(self, conversations: Conversations, ask: Ask) -> AnswerLine:
        """A new address."""
        name = secrets.token_urlsafe(16)
        line = AnswerLine(name, f"http://{self._host}:{self._port}/{name}/v1", conversations, ask)
        self._lines[name] = line
        return line

    def end(self, line: AnswerLine) -> None:
        """Answer no further request to this address."""
        del self._lines[line.name]

    async def _models(self, request: web.Request) -> web.Response:
        if request.match_info["line"] not in self._lines:
            return _error(404, "this answer has ended, or there is none with this address")
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "you"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        line = self._lines.get(request.match_info["line"])
        if line is None:
            return _error(404, "this answer has ended, or there is none with this address")
        try:
            body = await _body_of(request)
            answered = await self._answer(line, body, request)
        except Abandoned:
            return _error(408, "the caller has gone")
        except (Refused, ValueError, RecursionError) as error:
            log.warning("a call of an agent was refused: %s", error)
            return _error(400, str(error))
        if not body.stream:
            return web.json_response(answered)
        return await _streamed(request, answered)

    async def _answer(self, line: AnswerLine, body: Body, request: web.Request) -> dict[str, Any]:
        """
        Raises:
            Abandoned: the caller has gone. What was sampled is left out: a caller that tries again gets another answer,
                and trained with the first one the agent would count twice.
            Refused: the request cannot be answered.
        """
        self._tell_differences(body)
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        asked = line.conversations.ask(messages, body.tools or [])
        size = len(asked.ids)
        left = self._max_tokens - size
        if left < 1:
            raise Refused(
                f"the conversation has {size} tokens, but rollout.max_prompt_tokens + "
                f"rollout.max_response_tokens is {self._max_tokens}"
            )
        wanted = body.max_completion_tokens or body.max_tokens or left
        completion = await line.ask(asked.ids, Call(min(left, wanted)))
        if request.transport is None or request.transport.is_closing():
            line.num_abandoned += 1
            log.warning("an agent did not wait for an answer of %d tokens, which is left out", len(completion.ids))
            raise Abandoned
        offered = [tool.get("function", {}) for tool in body.tools or []]
        schemas = {str(tool.get("name")): tool.get("parameters") or {} for tool in offered}
        message = self._reading.message(completion, schemas)
        line.conversations.answered(asked, completion, message)
        reason = "tool_calls" if message.get("tool_calls") else "stop" if completion.stopped else "length"
        used = {"prompt_tokens": size, "completion_tokens": len(completion.ids)}
        return {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": MODEL,
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": used | {"total_tokens": sum(used.values())},
        }

    def _tell_differences(self, body: Body) -> None:
        asked = body.model_extra or {}
        for name, given in asked.items():
            own = self._sampling.get(name, NEUTRAL.get(name))
            if given in (None, own) or name in self._told | ABOUT_THE_CALLER or len(self._told) == MAX_TOLD:
                continue
            self._told.add(name)
            if name in self._sampling:
                log.warning("an agent asks for %s %s, but the run samples with %s", name, given, own)
            else:
                shown = repr(given)[:MAX_SHOWN]
                log.warning("an agent asks for %.50s %s, which is not supported and has no effect", name, shown)


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)


async def _streamed(request: web.Request, answered: Mapping[str, Any]) -> web.StreamResponse:
    [choice] = answered["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    common = {name: answered[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    pieces = [
        common | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        common | {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        common | {"choices": [], "usage": answered["usage"]},
    ]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(f"data: {json.dumps(piece)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
