"""The three forms in which agents ask a model: OpenAI's chat completions and Responses, and Anthropic's Messages.

The endpoint (endpoint.py) answers chat completions. A dialect translates a request into one and its answer back; all
else is the same. So a Responses request has no memory on the server: the agent sends the whole conversation, as codex
does with `store: false`.

Invariants (tests/unit/rollout): an answer that comes back in a request of the same dialect is the turn that was
answered, so the conversation goes on from its tokens.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.rollout.programs.conversations import Refused

MODEL = "policy"
"""The name of the model in each answer. Any name in a request is taken for it."""

Json = dict[str, Any]
Event = tuple[str, Json]
"""The name of an event of a stream, and its data."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One form of requests and answers."""

    path: str
    """What follows the `base_url`."""
    request: Callable[[Json], Json]
    """A request -> the body of a chat completion. Fields without a translation stay as they are.

    Raises:
        Refused: a part of it has no translation.
    """
    answer: Callable[[Json], Json]
    """A chat completion -> the answer."""
    events: Callable[[Json], Iterator[Event]]
    """The answer -> the events of a stream that bring it in one piece."""
    error: Callable[[str], Json]


def line_of(event: Event) -> bytes:
    """An event as a stream of server-sent events has it."""
    name, data = event
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def _openai_error(message: str) -> Json:
    return {"error": {"message": message, "type": "invalid_request_error"}}


def _chat_events(answered: Json) -> Iterator[Event]:
    common = {name: answered[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for choice in answered["choices"]:
        delta, index = dict(choice["message"]), choice["index"]
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
        said = {"index": index, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
        yield "", common | {"choices": [said]}
        yield "", common | {"choices": [{"index": index, "delta": {}, "finish_reason": choice["finish_reason"]}]}
    yield "", common | {"choices": [], "usage": answered["usage"]}


# Responses.


def _renamed(asked: Json, names: Mapping[str, str]) -> Json:
    return {names.get(name, name): value for name, value in asked.items()}


def _text(content: Any) -> Any:
    """The content of a chat turn from the parts of another dialect."""
    if not isinstance(content, list):
        return content
    kinds = {"input_text": "text", "output_text": "text"}
    return [part | {"type": kinds.get(part.get("type"), part.get("type"))} for part in content]


def _require(holds: bool, said: str) -> None:
    if not holds:
        raise Refused(said)


def _call(id: Any, name: Any, arguments: Any) -> Json:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _add_call(turns: list[Json], call: Json) -> None:
    """Append a call to the assistant's turn that it belongs to."""
    if not turns or turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant", "content": ""})
    turns[-1].setdefault("tool_calls", []).append(call)


def _functions(tools: Sequence[Json], schema: str, is_function: Callable[[Json], bool]) -> tuple[list[Json], list[str]]:
    """The tools that are functions as chat completions have them, and the kinds of the other ones."""
    functions = [
        {"name": one.get("name"), "description": one.get("description") or "", "parameters": one.get(schema) or {}}
        for one in tools
        if is_function(one)
    ]
    others = [str(one.get("type")) for one in tools if not is_function(one)]
    return [{"type": "function", "function": one} for one in functions], others


def _from_responses(asked: Json) -> Json:
    for name in ("previous_response_id", "conversation", "background"):
        _require(not asked.get(name), f"{name}: nothing is kept between requests; send the whole conversation in input")
    given = asked.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    _require(isinstance(items, list) and bool(items), "input: it must be a text or a list of items")
    turns: list[Json] = []
    if asked.get("instructions"):
        turns.append({"role": "system", "content": asked["instructions"]})
    for item in items or []:
        kind = item.get("type") or "message"
        if kind == "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            turns.append({"role": role, "content": _text(item.get("content"))})
        elif kind == "function_call":
            _add_call(turns, _call(item.get("call_id"), item.get("name"), item.get("arguments")))
        elif kind == "function_call_output":
            output = {"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(item.get("output"))}
            turns.append(output)
        else:
            raise Refused(f"input: an item is of the type {kind!r}, which has no place in a conversation here")
    tools, others = _functions(asked.get("tools") or [], "parameters", lambda one: one.get("type") == "function")
    body = {name: value for name, value in asked.items() if name not in ("input", "instructions", "text")}
    body = _renamed(body, {"max_output_tokens": "max_completion_tokens"})
    form = (asked.get("text") or {}).get("format")
    return body | {"messages": turns, "tools": tools, "response_format": form, "tools that are no functions": others}


def _to_responses(answered: Json) -> Json:
    [choice] = answered["choices"]
    message, used, is_cut = choice["message"], answered["usage"], choice["finish_reason"] == "length"
    output: list[Json] = []
    if message["content"]:
        said = {"type": "output_text", "text": message["content"], "annotations": []}
        output.append({"type": "message", "id": _id("msg"), "role": "assistant", "content": [said]})
    for call in message.get("tool_calls", ()):
        output.append({"type": "function_call", "id": _id("fc"), "call_id": call["id"], **call["function"]})
    counts = {"input_tokens": used["prompt_tokens"], "output_tokens": used["completion_tokens"]}
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": answered["created"],
        "model": answered["model"],
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "output": [{**item, "status": "completed"} for item in output],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": counts | details | {"total_tokens": used["total_tokens"]},
    }


def _responses_events(answered: Json) -> Iterator[Event]:
    for number, (name, data) in enumerate(_unnumbered_responses_events(answered)):
        yield name, {"type": name, "sequence_number": number, **data}


def _unnumbered_responses_events(answered: Json) -> Iterator[Event]:
    yield "response.created", {"response": answered | {"status": "in_progress", "output": [], "usage": None}}
    for index, item in enumerate(answered["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        empty: Json = {"content": []} if item["type"] == "message" else {"arguments": ""}
        begun = item | empty | {"status": "in_progress"}
        yield "response.output_item.added", {"output_index": index, "item": begun}
        if item["type"] == "message":
            [part] = item["content"]
            place, text = place | {"content_index": 0}, part["text"]
            yield "response.content_part.added", place | {"part": part | {"text": ""}}
            yield "response.output_text.delta", place | {"delta": text, "logprobs": []}
            yield "response.output_text.done", place | {"text": text, "logprobs": []}
            yield "response.content_part.done", place | {"part": part}
        else:
            yield "response.function_call_arguments.delta", place | {"delta": item["arguments"]}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.done", place | done
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{answered['status']}", {"response": answered}


# Messages.


def _from_messages(asked: Json) -> Json:
    turns: list[Json] = [{"role": "system", "content": asked["system"]}] if asked.get("system") else []
    for message in asked.get("messages") or []:
        role, content = message.get("role"), message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        texts: list[Json] = []
        calls: list[Json] = []
        for block in blocks:
            kind = block.get("type")
            if kind == "tool_use":
                calls.append(_call(block.get("id"), block.get("name"), block.get("input")))
            elif kind == "tool_result":
                result = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")}
                turns.append(result)
            else:
                texts.append(block)
        if texts or calls or not blocks:
            turns.append({"role": role, "content": texts} | ({"tool_calls": calls} if calls else {}))
    tools, others = _functions(asked.get("tools") or [], "input_schema", lambda one: "input_schema" in one)
    body = {name: value for name, value in asked.items() if name != "system"}
    body = _renamed(body, {"stop_sequences": "stop"})
    return body | {"messages": turns, "tools": tools, "tools that are no functions": others}


STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _to_messages(answered: Json) -> Json:
    [choice] = answered["choices"]
    message, used = choice["message"], answered["usage"]
    content: list[Json] = [{"type": "text", "text": message["content"]}] if message["content"] else []
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    stop = choice.get("stop_sequence")
    return {
        "id": _id("msg"),
        "type": "message",
        "role": "assistant",
        "model": answered["model"],
        "content": content,
        "stop_reason": "stop_sequence" if stop is not None else STOP_REASONS[choice["finish_reason"]],
        "stop_sequence": stop,
        "usage": {"input_tokens": used["prompt_tokens"], "output_tokens": used["completion_tokens"]},
    }


def _messages_events(answered: Json) -> Iterator[Event]:
    begun = answered | {"content": [], "stop_reason": None, "stop_sequence": None}
    yield _typed("message_start", message=begun)
    for index, block in enumerate(answered["content"]):
        if block["type"] == "text":
            empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            written = json.dumps(block["input"], ensure_ascii=False)
            empty, delta = block | {"input": {}}, {"type": "input_json_delta", "partial_json": written}
        yield _typed("content_block_start", index=index, content_block=empty)
        yield _typed("content_block_delta", index=index, delta=delta)
        yield _typed("content_block_stop", index=index)
    ended = {name: answered[name] for name in ("stop_reason", "stop_sequence")}
    yield _typed("message_delta", delta=ended, usage={"output_tokens": answered["usage"]["output_tokens"]})
    yield _typed("message_stop")


def _typed(name: str, **data: Any) -> Event:
    return name, {"type": name, **data}


def _anthropic_error(message: str) -> Json:
    return {"type": "error", "error": {"type": "invalid_request_error", "message": message}}


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(8)}"


def chat_completion(choices: Sequence[Json], num_prompt_tokens: int, num_tokens: int) -> Json:
    """The answer to a chat completion."""
    used = {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_tokens}
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": list(choices),
        "usage": used | {"total_tokens": sum(used.values())},
    }


CHAT = Dialect("chat/completions", dict, dict, _chat_events, _openai_error)
RESPONSES = Dialect("responses", _from_responses, _to_responses, _responses_events, _openai_error)
MESSAGES = Dialect("messages", _from_messages, _to_messages, _messages_events, _anthropic_error)
DIALECTS = (CHAT, RESPONSES, MESSAGES)
