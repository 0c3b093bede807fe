"""A server in front of an engine, so that any agent can be trained without a change to it.

Each answer has its own address, its `base_url`, which nobody can guess, and all requests to it belong to this answer.
It answers OpenAI's chat completions and Responses, and Anthropic's Messages (dialects.py), and the tokens are recorded
(conversations.py). Sampling follows the run's configuration, because the log-probs of an action must equal the
trainer's: `temperature`, `top_p` and the like of a request have no effect, and the log names each the first time that
it differs. So it does with all else that is not supported, such as `tool_choice`, `logit_bias` and `response_format`: a
grammar changes the distribution, and the trainer does not know it.

Invariants (tests/unit/rollout): a request to an unknown address, or after the end of its answer, samples nothing; a
refused request changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from socket import gethostname
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from megatron_rl.environments import CallFormat, Schemas, as_turn, calls_of
from megatron_rl.rollout.program import Call, Completion
from megatron_rl.rollout.programs.conversations import MAX_SHOWN, Asked, Conversations, Refused
from megatron_rl.rollout.programs.dialects import (
    CHAT,
    DIALECTS,
    MESSAGES,
    MODEL,
    Dialect,
    Json,
    chat_completion,
    line_of,
)
from megatron_rl.rollout.programs.request_body import Body

log = logging.getLogger(__name__)

LOCAL = "127.0.0.1"
MAX_REQUEST_BYTES = 64 << 20
BODY_S = 60.0
"""The longest time in which the body of a request must arrive."""
SIGN_OF_LIFE_S = 10.0
"""The time between two comments of a stream that waits for its answer, so that no client or proxy gives up."""
MAX_WAITING = 4096
"""The number of connections that may wait until the server accepts them, because hundreds of agents ask at once. Linux
bounds it by net.core.somaxconn, which is 4,096 by default."""

NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0,
    "logit_bias": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "tool_choice": "auto",
    "tools that are no functions": [],
    "top_logprobs": 0,
}
"""The values of fields that ask for nothing."""
ABOUT_THE_CALLER = {
    "client_metadata",
    "include",
    "metadata",
    "model",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
"""The fields that say nothing about the answer."""
MAX_TOLD = 100
"""The number of fields that the log names."""


async def _body_of(request: web.Request, dialect: Dialect) -> Body:
    """
    Raises:
        Refused: the body is no JSON, or a field of it is wrong.
        TimeoutError: it has not arrived.
    """
    try:
        async with asyncio.timeout(BODY_S):
            asked = await request.json()
        return Body.model_validate(dialect.request(asked) if isinstance(asked, dict) else asked)
    except Refused:
        raise
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Refused(f"{where}: {first['msg']}" if where else first["msg"].removeprefix("Value error, ")) from None
    except web.RequestPayloadError as error:
        raise Refused(f"the body of the request cannot be read: {error}") from None
    except (AttributeError, TypeError) as error:  # a translation has met a value of another type
        raise Refused(f"a part of the request has another type than {dialect.path} has there: {error}") from None
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


GONE = "this answer has ended, or there is none with this address"


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
    opening: str = ""
    """See `opening_of`."""

    def text(self, completion: Completion) -> str:
        """What a turn says, without the token that ends it if its format does not read this."""
        drops_end = completion.stopped and not self.form.reads_end
        return self.decode(list(completion.ids[:-1] if drops_end else completion.ids))

    def message(self, completion: Completion, schemas: Schemas) -> dict[str, Any]:
        """The assistant's turn: the calls of tools are `tool_calls`. A turn that was cut, or has a call that cannot be
        read, is text."""
        text = self.text(completion)
        whole = self.opening + text
        asked = calls_of(whole, self.form, schemas, self.delimiter) if completion.stopped else []
        if not asked or any(call.fault for call in asked):
            return {"role": "assistant", "content": text}
        turn = as_turn(whole, self.form, asked)
        turn["content"] = turn["content"].removeprefix(self.opening)
        for call in turn["tool_calls"]:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return turn | {"tool_calls": [{"id": f"call_{secrets.token_hex(6)}", **call} for call in turn["tool_calls"]]}

    def until(self, completion: Completion, stops: Sequence[str]) -> tuple[Completion, str, str | None]:
        """A turn up to the token that completes the first of these texts, what it says before this text, and the text;
        None if it has none. The rest of what was sampled is left out, as if the engine had stopped there."""
        text = self.text(completion)
        found = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
        if not found:
            return completion, text, None
        place, stop = min(found)
        num = bisect_left(
            range(len(completion.ids)), place + len(stop), key=lambda i: len(self.decode(list(completion.ids[: i + 1])))
        )
        end = min(num + 1, len(completion.ids))
        cut = replace(
            completion,
            **{name: getattr(completion, name)[:end] for name in ("ids", "logp", "version")},
            stopped=False,
        )
        return cut, text[:place], stop

    def log_probs(self, completion: Completion) -> dict[str, Any]:
        """The log-prob of each token, as chat completions have them."""
        tokens = zip(map(self.decode, ([id] for id in completion.ids)), completion.logp, strict=True)
        said = [
            {"token": text, "logprob": logp, "bytes": [*text.encode()], "top_logprobs": []} for text, logp in tokens
        ]
        return {"content": said}


class Endpoint:
    """
    Args:
        reading: how the agents get the model's turns.
        max_tokens: the largest number of tokens of a conversation.
        sampling: the sampling parameters of the run.
        remote: whether other machines may connect.
    """

    def __init__(
        self, reading: TurnReading, max_tokens: int, sampling: Mapping[str, float], remote: bool = False
    ) -> None:
        self._reading, self._max_tokens, self._sampling, self._remote = reading, max_tokens, dict(sampling), remote
        self._lines: dict[str, AnswerLine] = {}
        self._told: set[str] = set()
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        for dialect in DIALECTS:
            app.router.add_post(f"/{{line}}/v1/{dialect.path}", partial(self._complete, dialect))
        app.router.add_post("/{line}/v1/messages/count_tokens", self._count)
        app.router.add_get("/{line}/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None)
        self._port = 0

    async def start(self) -> None:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "0.0.0.0" if self._remote else LOCAL, 0, backlog=MAX_WAITING)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        await self._runner.cleanup()

    def open(self, conversations: Conversations, ask: Ask) -> AnswerLine:
        """A new address."""
        name = secrets.token_urlsafe(16)
        line = AnswerLine(
            name, f"http://{gethostname() if self._remote else LOCAL}:{self._port}/{name}/v1", conversations, ask
        )
        self._lines[name] = line
        return line

    def end(self, line: AnswerLine) -> None:
        """Answer no further request to this address."""
        del self._lines[line.name]

    async def _models(self, request: web.Request) -> web.Response:
        if request.match_info["line"] not in self._lines:
            return web.json_response(CHAT.error(GONE), status=404)
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "you"}]})

    async def _count(self, request: web.Request) -> web.StreamResponse:
        """The number of tokens that a request of Anthropic's Messages would have."""
        return await self._complete(MESSAGES, request, counts=True)

    async def _complete(self, dialect: Dialect, request: web.Request, counts: bool = False) -> web.StreamResponse:
        line = self._lines.get(request.match_info["line"])
        if line is None:
            return web.json_response(dialect.error(GONE), status=404)
        try:
            body = await _body_of(request, dialect)
            if dialect is not CHAT and (body.n or 1) > 1:
                raise Refused(f"n: a request to {dialect.path} has one answer")
            asked = self._asked(line, body)
            if counts:
                return web.json_response({"input_tokens": len(asked[0].ids)})
            if body.stream:
                tells_usage = dialect is not CHAT or bool((body.stream_options or {}).get("include_usage"))
                return await self._stream(dialect, request, self._answer(line, body, asked, request), tells_usage)
            return web.json_response(dialect.answer(await self._answer(line, body, asked, request)))
        except (Abandoned, TimeoutError):
            return web.json_response(dialect.error("the caller has gone, or is too slow"), status=408)
        except (Refused, ValueError, RecursionError) as error:
            log.warning("a call of an agent was refused: %s", error)
            return web.json_response(dialect.error(str(error)), status=400)

    async def _stream(
        self, dialect: Dialect, request: web.Request, answer: Coroutine[Any, Any, Json], tells_usage: bool
    ) -> web.StreamResponse:
        """The answer in one piece, since a call of a tool is one only when it is complete. Until then come comments."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        answering = asyncio.ensure_future(answer)
        with suppress(ConnectionError):  # the caller has gone: `_answer` counts it
            await response.prepare(request)
            while not (await asyncio.wait([answering], timeout=SIGN_OF_LIFE_S))[0]:
                await response.write(b": the model answers\n\n")
        try:
            events = [*dialect.events(dialect.answer(await answering))]
        except (Refused, ValueError, RecursionError) as error:
            log.warning("a call of an agent was refused: %s", error)
            events = [("error", dialect.error(str(error)))]
        for event in events:
            if tells_usage or event[1].get("choices") != []:  # such a chunk is for callers that ask for it
                await response.write(line_of(event))
        if dialect is CHAT:
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _asked(self, line: AnswerLine, body: Body) -> list[Asked]:
        """The conversation up to the answer, once for each choice.

        Raises:
            Refused: the request cannot be answered.
        """
        self._tell_differences(body)
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        asked = [line.conversations.ask(messages, body.tools or []) for _ in range(body.n or 1)]
        size = len(asked[0].ids)
        if size >= self._max_tokens:
            # Harnesses shorten their history, or end, if they find the words of Anthropic or of vLLM in an error.
            raise Refused(
                f"prompt is too long: {size} tokens > {self._max_tokens} maximum. This model's maximum context length "
                "is rollout.max_prompt_tokens + rollout.max_response_tokens"
            )
        return asked

    async def _answer(self, line: AnswerLine, body: Body, asked: Sequence[Asked], request: web.Request) -> Json:
        """
        Raises:
            Abandoned: the caller has gone. What was sampled is left out: a caller that tries again gets another answer,
                and trained with the first one the agent would count twice.
            Refused: the chat template cannot continue the answer.
        """
        size = len(asked[0].ids)
        left = self._max_tokens - size
        call = Call(min(left, body.max_completion_tokens or body.max_tokens or left))
        completions = await asyncio.gather(*(line.ask(one.ids, call) for one in asked))
        if request.transport is None or request.transport.is_closing():
            line.num_abandoned += len(completions)
            num = sum(len(one.ids) for one in completions)
            log.warning("an agent did not wait for an answer of %d tokens, which is left out", num)
            raise Abandoned
        choices = []
        for index, (one, sampled) in enumerate(zip(asked, completions, strict=True)):
            completion, text, stop = self._reading.until(sampled, body.stops)
            message = self._reading.message(completion, body.schemas)
            if stop is not None:
                message = {"role": "assistant", "content": text}
            line.conversations.answered(one, completion, message)
            ended = "stop" if completion.stopped or stop is not None else "length"
            logprobs = self._reading.log_probs(completion) if body.logprobs else None
            reason = "tool_calls" if message.get("tool_calls") else ended
            choice = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
            choices.append(choice | ({} if stop is None else {"stop_sequence": stop}))
        return chat_completion(choices, size, sum(len(one.ids) for one in completions))

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
