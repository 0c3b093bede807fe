"""The calls of tools in the text of a turn, in Hermes' form:

    <tool_call>
    {"name": "multiply", "arguments": {"a": 6, "b": 7}}
    </tool_call>

A call ends where its JSON ends, so a string in it may have any of the marks.

Invariant (tests/unit/environments): every opening mark outside of a call's JSON gives one call, which has a name, or
the fault that the model reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

OPENING, CLOSING = "<tool_call>", "</tool_call>"
DECODER = json.JSONDecoder()
SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class AskedCall:
    """What a turn has written as a call."""

    start: int
    stop: int
    """Its characters, marks included."""
    is_closed: bool
    name: str = "error"
    """The tool's name, if there is no fault."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""
    """Why it calls nothing; empty if it does."""


def calls_of(text: str, delimiter: str = "") -> list[AskedCall]:
    """The calls after a turn's thought, in their order.

    Args:
        delimiter: the text that ends a thought; empty if the model does not think.
    """
    start, stop = _answer(text, delimiter) if delimiter else (0, len(text))
    calls: list[AskedCall] = []
    while (start := text.find(OPENING, start, stop)) >= 0:
        calls.append(_call(text[:stop], start))
        start = calls[-1].stop
    return calls


def _call(text: str, start: int) -> AskedCall:
    """The call whose opening mark begins at this character."""
    begin = start + len(OPENING)
    given: Any = None
    fault, end = "", begin
    try:
        given, end = DECODER.raw_decode(text, SPACE.match(text, begin).end())  # type: ignore[union-attr]
    except json.JSONDecodeError as error:
        fault = f"the call is not JSON: {error.msg} at character {error.pos - begin}"
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, and deep lists
        fault = f"the call is not JSON: {error}"
    stop = min((place for mark in (OPENING, CLOSING) if (place := text.find(mark, end)) >= 0), default=len(text))
    if not text.startswith(CLOSING, stop):
        return AskedCall(start, stop, False, fault=f"a {OPENING} without {CLOSING}")
    if not fault and text[end:stop].strip():
        fault = f"the call is not JSON: more follows it at character {end - begin}"
    fault = fault or _fault_of(given)
    stop += len(CLOSING)
    if fault:
        return AskedCall(start, stop, True, fault=fault)
    return AskedCall(start, stop, True, given["name"], given.get("arguments", {}))


def _fault_of(given: Any) -> str:
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        return 'a call must be {"name": ..., "arguments": {...}}'
    if not isinstance(given.get("arguments", {}), dict):
        return "the arguments of a call must be a JSON object"
    return ""


def _answer(text: str, delimiter: str) -> tuple[int, int]:
    """The first and last character of what a turn says after its thought, which ends at the first delimiter outside of
    calls: arguments may have one. A turn without a delimiter is an open thought from where it opens one."""
    calls = [call for call in calls_of(text) if call.is_closed]
    for found in re.finditer(re.escape(delimiter), text):
        if not any(call.start < found.start() < call.stop for call in calls):
            return found.end(), len(text)
    return 0, len(text.partition(delimiter.replace("/", "", 1))[0])


def as_turn(text: str, calls: Sequence[AskedCall]) -> dict[str, Any]:
    """A turn of the model in the form of chat templates: its calls are `tool_calls`. What is no call stays in the
    content, which is the text around the calls."""
    good = [call for call in calls if not call.fault]
    if not good:
        return {"role": "assistant", "content": text}
    bounds = [0, *(place for call in good for place in (call.start, call.stop)), len(text)]
    parts = [text[start:stop].strip("\n") for start, stop in list(pairwise(bounds))[::2]]
    asked = [{"name": call.name, "arguments": dict(call.arguments)} for call in good]
    return {
        "role": "assistant",
        "content": "\n".join(filter(None, parts)),
        "tool_calls": [{"type": "function", "function": function} for function in asked],
    }
