"""Plays environments of NeMo Gym, which are servers of tools and of a verifier (its resources servers).

    environment: {kind: agent, path: "megatron_rl.recipes.environment_libraries.nemo_gym:play", arguments: {url: "http://gym:8000"}}

A row is one of theirs, with `responses_create_params` and all columns that their verifier needs. `play` does what their
simple_agent does with the environment (NeMo Gym at 07d6b0d): `POST /seed_session` with the row, `POST /<tool>` with the
arguments of each call of a tool, and `POST /verify` with the row and all that the model has said, as an object of
OpenAI's Responses API. The session is in cookies. The model is asked through `base_url`, for chat completions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from uuid import uuid4

from aiohttp import ClientSession, ClientTimeout, CookieJar, TCPConnector

THOUGHT_BEGIN, THOUGHT_END = "<think>", "</think>"
"""Around a thought. The verifier gets it as an item `reasoning`, apart from the answer."""
MAX_REASON = 300
MODEL = "policy"


class Malformed(ValueError):
    """A row that is none of NeMo Gym's, or that cannot be asked as chat completions."""


async def play(row: Mapping[str, Any], base_url: str, url: str, max_steps: int | None = None) -> float:
    """Play one episode. Returns the verifier's reward.

    Args:
        row: a row of NeMo Gym.
        base_url: where the model is.
        url: where the resources server is.
        max_steps: the largest number of the model's turns; None: no limit except the token limit.

    Raises:
        Malformed: see there.
        RuntimeError: a server answers with an error, the verifier says that it has failed, or gives no reward. An error
            of a tool is none: the model reads it.
        aiohttp.ClientError: a server cannot be reached, or has died.
    """
    params = row.get("responses_create_params")
    if not isinstance(params, Mapping):
        raise Malformed(f"the row has no column `responses_create_params`, as NeMo Gym's have; it has {list(row)}")
    turns, tools, output = messages_of(params), tools_of(params), list[dict[str, Any]]()
    body = {"model": MODEL} | ({"tools": tools} if tools else {})
    if params.get("max_output_tokens"):
        body["max_tokens"] = params["max_output_tokens"]
    url, offered = url.rstrip("/"), {tool["function"]["name"] for tool in tools}
    # A connection that waits while the model answers may be closed by the server just when it is used again.
    connector, cookies = TCPConnector(force_close=True), CookieJar(unsafe=True)
    async with ClientSession(timeout=ClientTimeout(total=None), connector=connector, cookie_jar=cookies) as http:
        await _post(http, f"{url}/seed_session", row)
        num_steps, goes_on = 0, True
        while goes_on and (max_steps is None or num_steps < max_steps):
            answered = await _post(http, f"{base_url}/chat/completions", body | {"messages": turns})
            [choice] = answered["choices"]
            num_steps += 1
            message, calls = choice["message"], choice["message"].get("tool_calls") or []
            turns.append(message)
            output += items_of(message)
            goes_on = bool(calls) and choice["finish_reason"] != "length"
            for call in calls if goes_on else ():
                result = await _call(http, url, call["function"], offered)
                turns.append({"role": "tool", "tool_call_id": call["id"], "content": result})
                output.append({"type": "function_call_output", "call_id": call["id"], "output": result})
        judged = await _post(http, f"{url}/verify", {**row, "response": _response(params, output)})
    if "_ng_failure_class" in judged:
        raise RuntimeError(f"{url}/verify has failed: {json.dumps(_failure(judged))}"[:MAX_REASON])
    if "reward" not in judged:
        raise RuntimeError(f"{url}/verify gave no reward: {json.dumps(judged)}"[:MAX_REASON])
    return float(judged["reward"])


def messages_of(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The turns before the model's first one, as chat completions have them.

    Raises:
        Malformed: the input has an item that is neither a message nor a call of a tool or its result.
    """
    given = params.get("input") or []
    turns: list[dict[str, Any]] = []
    if params.get("instructions"):
        turns.append({"role": "system", "content": params["instructions"]})
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        kind = item.get("type") or "message"
        if kind == "message" and "role" in item:
            turns.append({"role": item["role"], "content": _text(item.get("content"))})
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if turns and turns[-1]["role"] == "assistant":
                turns[-1].setdefault("tool_calls", []).append(call)
            else:
                turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            turns.append({"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])})
        else:
            raise Malformed(f"responses_create_params.input has an item of type {kind!r}, which chat completions lack")
    return turns


def tools_of(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools, as chat completions have them.

    Raises:
        Malformed: a tool is no function.
    """
    tools: Sequence[Mapping[str, Any]] = params.get("tools") or []
    others = [tool.get("type") for tool in tools if tool.get("type") != "function"]
    if others:
        raise Malformed(f"responses_create_params.tools has a tool of type {others[0]!r}, but only functions fit")
    names = ("name", "description", "parameters")
    return [{"type": "function", "function": {n: tool[n] for n in names if n in tool}} for tool in tools]


def items_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A turn of the model as items of the Responses API: its thought, its text, its calls of tools."""
    thought, ended, text = message["content"].partition(THOUGHT_END)
    if not ended:
        thought, text = "", message["content"]
    calls = [
        {"type": "function_call", "call_id": call["id"], "id": call["id"], "status": "completed", **call["function"]}
        for call in message.get("tool_calls") or []
    ]
    items: list[dict[str, Any]] = []
    if ended:
        summary = [{"type": "summary_text", "text": thought.removeprefix(THOUGHT_BEGIN)}]
        items.append({"type": "reasoning", "id": f"rs_{uuid4().hex}", "summary": summary, "status": "completed"})
    if text or not calls:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        common = {"id": f"msg_{uuid4().hex}", "role": "assistant", "status": "completed"}
        items.append({"type": "message", "content": content} | common)
    return items + calls


async def _call(http: ClientSession, url: str, function: Mapping[str, str], offered: Collection[str]) -> str:
    """The result of a call of a tool. It reports errors as text, as their agent does. A name that was not offered calls
    nothing: it could be the verifier's."""
    if function["name"] not in offered:
        return json.dumps({"error": f"There is no tool {function['name']!r}"})
    try:
        arguments = json.loads(function["arguments"])
    except ValueError as error:
        return json.dumps({"error": f"Invalid tool call arguments: {error!r}"})
    async with http.post(f"{url}/{function['name']}", json=arguments) as answer:
        return await answer.text()


async def _post(http: ClientSession, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    async with http.post(url, json=body) as answer:
        if answer.status >= 400:
            raise RuntimeError(f"{url} answered with status {answer.status}: {await answer.text()}"[:MAX_REASON])
        given = await answer.json(content_type=None)
    if not isinstance(given, dict):
        raise RuntimeError(f"{url} answered with no JSON object: {given!r}"[:MAX_REASON])
    return given


def _response(params: Mapping[str, Any], output: list[dict[str, Any]]) -> dict[str, Any]:
    """What the model has said, and the results of tools, as an object of the Responses API."""
    given = {"tools": params.get("tools") or [], "tool_choice": params.get("tool_choice") or "auto"}
    head = {"id": f"resp_{uuid4().hex}", "object": "response", "created_at": time.time(), "model": MODEL}
    return head | given | {"output": output, "parallel_tool_calls": params.get("parallel_tool_calls", True)}


def _failure(judged: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in judged.items() if name.startswith("_ng_failure")}


def _text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    others = [part.get("type") for part in content if part.get("type") not in ("input_text", "output_text", "text")]
    if others:
        raise Malformed(f"responses_create_params.input has a part of type {others[0]!r}, but only text can be asked")
    return "".join(part["text"] for part in content)
