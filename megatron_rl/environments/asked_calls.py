"""The calls of tools in a turn of the model.

Invariants (tests/unit/environments): every opening mark after the reasoning, and outside of a call, gives one call,
which has a name, or the fault that the model reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

from jinja2 import TemplateError

from megatron_rl.environments.call_formats import FORMATS, HEADER, AskedCall, CallFormat, Channels
from megatron_rl.environments.call_reader import Schemas

Render = Callable[[Sequence[Mapping[str, Any]], bool], str]
"""The text of chat turns, and whether it ends where the assistant's answer begins -> the text."""
QUESTION = {"role": "user", "content": "question"}
MOST_CALLS = 128
"""The largest number of calls in a turn: reading and answering thousands of them would hold up the engine."""
OTHER_FORMS = re.compile(r"<\|python_tag\|>|<\|tool_call")
"""What chat templates with other formats write, such as LFM2's and Gemma 4's."""


def calls_of(text: str, form: CallFormat, schemas: Schemas, delimiter: str = "") -> list[AskedCall]:
    """The calls outside of a turn's reasoning, in their order.

    Args:
        text: the turn, with what the prompt says of it: a chat template may open the reasoning (`opening_of`).
        delimiter: the text that ends reasoning; empty if the model does not reason, or has channels for it.
    """
    calls = _first(form.calls(text, schemas))
    if not delimiter or isinstance(form, Channels):
        return calls
    return _first(form.calls(_without_reasoning(text, delimiter, calls), schemas))


def _first(calls: Iterable[AskedCall]) -> list[AskedCall]:
    """The calls of a turn, of which the last one is a fault if there are too many."""
    found = [*islice(calls, MOST_CALLS + 1)]
    if len(found) > MOST_CALLS:
        found[-1] = replace(found[-1], fault=f"a turn may have {MOST_CALLS} calls", kind="malformed")
    return found


def _without_reasoning(text: str, delimiter: str, calls: Sequence[AskedCall]) -> str:
    """The turn with spaces in the place of its reasoning. Reasoning ends at the first delimiter outside of calls, whose
    arguments may have one. A turn may open it again, and leave it open.

    Example, with the delimiter </think>: `so</think>ok<think>hm</think>done` becomes `ok` and `done`, with spaces.
    """
    closed = [call for call in calls if call.is_closed]
    opening = delimiter.replace("/", "", 1)
    marks = [
        found
        for found in re.finditer(f"{re.escape(delimiter)}|{re.escape(opening)}", text)
        if not any(call.start < found.start() < call.stop for call in closed)
    ]
    begun = 0 if any(mark[0] == delimiter for mark in marks) else None
    for mark in marks:
        if mark[0] == delimiter and begun is not None:
            text, begun = text[:begun] + " " * (mark.end() - begun) + text[mark.end() :], None
        elif mark[0] == opening and begun is None:
            begun = mark.start()
    return text if begun is None else text[:begun]


def as_turn(text: str, form: CallFormat, calls: Sequence[AskedCall]) -> dict[str, Any]:
    """A turn of the model in the form of chat templates: its calls are `tool_calls`. What is no call stays in the
    content, which is the text around the calls."""
    good = [call for call in calls if not call.fault]
    if isinstance(form, Channels):
        said = _said(text)
    else:
        bounds = [0, *(place for call in good for place in (call.start, call.stop)), len(text)]
        parts = [text[start:stop] for start, stop in list(pairwise(bounds))[::2]]
        said = {"content": "\n".join(filter(None, (part.strip("\n") for part in parts))) if good else text}
    turn = {"role": "assistant", **said}
    return turn | {"tool_calls": [written(call) for call in good]} if good else turn


def _said(text: str) -> dict[str, str]:
    """The channels of a turn of gpt-oss: the reasoning and the answer."""
    parts: dict[str, list[str]] = {"analysis": [], "final": []}
    for found in HEADER.finditer(text):
        channel = (found[2] or "").strip()
        if channel in parts:
            parts[channel].append(re.split(r"<\|(?:end|return|call|start)\|>", text[found.end() :], maxsplit=1)[0])
    said = {"content": "".join(parts["final"])}
    return said | {"thinking": "\n".join(parts["analysis"])} if parts["analysis"] else said


def written(call: AskedCall) -> dict[str, Any]:
    """A call in the form of chat templates."""
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id else {})


def with_texts(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The turns with the arguments of calls as JSON texts, as some templates expect them (DeepSeek-V3.1)."""

    def as_text(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [
        {**turn, "tool_calls": list(map(as_text, turn["tool_calls"]))} if "tool_calls" in turn else dict(turn)
        for turn in turns
    ]


def rendering_calls(render: Render) -> Render:
    """The same template for turns with calls whose arguments are objects."""

    def rendered(turns: Sequence[Mapping[str, Any]], opens_answer: bool) -> str:
        try:
            return render(turns, opens_answer)
        except (TypeError, ValueError):
            return render(with_texts(turns), opens_answer)

    return rendered


def format_of(render: Render, ends: Sequence[str], name: str) -> str:
    """The format of the calls that a chat template asks for: it writes calls itself, or tells the model how. It may do
    neither, and leave it to the model's training.

    Args:
        render: the chat template with the tools.
        ends: the texts of the tokens that end a turn.
        name: of one of the tools.

    Returns:
        A name of FORMATS; `other` for another format, and `unknown` if the template does not show any.
    """
    text, end = written_call(render, ends, name)
    schemas = {name: {"properties": {"x": {"type": "string"}}}}
    for form, one in FORMATS.items():
        calls = one.calls(text + end if one.reads_end else text, schemas)
        if [(call.name, call.arguments) for call in calls] == [(name, {"x": "y"})]:
            return form
    if name in text:
        return "other"
    told = render([QUESTION], True)
    hints = [form for form, one in FORMATS.items() if re.search(one.hint, told)]
    return hints[0] if hints else "other" if OTHER_FORMS.search(told) else "unknown"


def written_call(render: Render, ends: Sequence[str], name: str) -> tuple[str, str]:
    """What a chat template writes of a turn that calls a tool, and the end of the turn; empty if it takes no calls."""
    asked = AskedCall(0, 0, True, name, {"x": "y"}, id=f"functions.{name}:0")
    turn = {"role": "assistant", "content": "", "tool_calls": [written(asked)]}
    try:
        text = rendering_calls(render)([QUESTION, turn], False)
    except (TemplateError, LookupError, TypeError, AttributeError, ValueError):  # a template that takes no calls
        return "", ""
    opened, closed = render([QUESTION], True), render([QUESTION], False)
    text, end = without_end(text.removeprefix(opened if text.startswith(opened) else closed), ends)
    return text, end


def without_end(text: str, ends: Sequence[str]) -> tuple[str, str]:
    """A turn of a template up to the end of the turn, and the end; empty if another turn's beginning ends it."""
    place, end = max(((text.rfind(end), end) for end in ends), default=(-1, ""))
    return (text[:place], end) if place >= 0 and not text[place + len(end) :].strip() else (text, "")
