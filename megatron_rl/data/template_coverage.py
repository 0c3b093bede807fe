"""Looks for what a chat template writes of the turns that it gets.

A template leaves out keys and roles that it does not know, without a word. What is left out of an answer is not
trained, and what is left out of a history is not seen by the model.

Invariants (tests/unit/data): texts are compared without white space, as they are or escaped as in JSON, HTML or Python.
Each part of an answer must be there as often as the answer has it.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from megatron_rl.data.rows import CALLS, BadRow

Turn = Mapping[str, Any]
Render = Callable[[Sequence[Turn]], str]
"""Writes turns with a chat template, without a generation prompt."""
THOUGHTS = (
    "reasoning_content",
    "reasoning",
    "thinking",
    "thought",
    "thoughts",
    "thinking_content",
    "reasoning_text",
    "chain_of_thought",
)
"""The keys of a turn that hold a thought; the first four are the usual ones."""
ANSWERS = (*THOUGHTS, "refusal")
"""The keys of an answer besides `content` and calls whose text must not get lost."""
TAG = re.compile(r"[<\[◁]\|?(/|END_)?[^<>\[\]◁▷|\s]*(?:think|thought|reason)[^<>\[\]◁▷|\s]*\|?[>\]▷]", re.IGNORECASE)
"""What begins a thought, or, with its group, ends it: `<think>`, `</think>`, `[/THINK]`, `<|END_THINKING|>`."""
MAX_WORDS = 50
"""The number of words of a turn that are looked for in the text that a template writes."""
HTML_OF_JSON = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&'"}
"""What jinja's own filter `tojson` writes for these signs."""


class WrittenText(NamedTuple):
    """A text of a turn that must be written."""

    key: str
    """The key of the turn that has it."""
    text: str
    number: int = 0
    """The number of the turn, from 1, where there are several."""
    is_optional: bool = False
    """Whether the template may leave it out."""


def require_turns(turns: Sequence[Turn], text: str, render: Render, trained: Collection[int] = ()) -> None:
    """Check the turns of a history. Templates may leave out its thoughts.

    Args:
        text: what the template writes of the turns.
        render: writes other turns with the same template.
        trained: the indices of turns that are looked at elsewhere, as answers.

    Raises:
        BadRow: no word of a turn is in the text, or the content or a call of an assistant's turn is not.
    """
    folded = text.casefold()
    pieces: list[WrittenText] = []
    for number, turn in enumerate(turns, start=1):
        pieces += _pieces_of_history(turn, number, number - 1 in trained)
        if turn.get("role") == "assistant":
            continue
        content = turn.get("content")
        words = content.split(maxsplit=MAX_WORDS)[:MAX_WORDS] if isinstance(content, str) else []
        if words and not any(form.casefold() in folded for word in words for form in forms(word)):
            raise BadRow(
                f"the chat template writes nothing of turn {number}, whose role is {turn.get('role')!r}; use a role "
                "that it knows, or correct the template"
            )
    if all(piece.is_optional for piece in pieces):
        return
    lost = missing(pieces, text) or _lost_call(turns, text, render, trained)
    if lost is not None:
        raise BadRow(
            f"turn {lost.number} of the role assistant: the chat template does not write {_named(lost)}; "
            f"{remedy(turns[lost.number - 1], lost, None)}"
        )


def _pieces_of_history(turn: Turn, number: int, is_trained: bool) -> list[WrittenText]:
    """What a turn of a history has. Only texts and calls of assistants must be written; the others are looked for so
    that they are not taken for one of these."""
    content = str(turn.get("content") or "")
    is_optional = is_trained or turn.get("role") != "assistant"
    found = [WrittenText("content", content if is_optional else TAG.split(content)[-1]), *pieces_of_calls(turn)]
    return [piece._replace(number=number, is_optional=is_optional) for piece in found if piece.text.strip()]


def _lost_call(turns: Sequence[Turn], text: str, render: Render, trained: Collection[int]) -> WrittenText | None:
    """A call without which the template writes the same. Its name and arguments may stand elsewhere, as in `tools`."""
    for index, turn in enumerate(turns):
        called = next((key for key in CALLS if turn.get(key)), None)
        if called is None or index in trained:
            continue
        less = {key: value for key, value in turn.items() if key not in CALLS}
        with suppress(BadRow):  # a template may refuse results without their calls
            if render([*turns[:index], less, *turns[index + 1 :]]) == text:
                return WrittenText(called, "", index + 1)
    return None


def require_answer(turn: Turn, number: int, completion: str, write: Callable[[Turn], str]) -> None:
    """Check a turn that is trained.

    Args:
        number: of the turn, from 1.
        completion: what the template writes of it.
        write: what the template writes of another turn in its place.

    Raises:
        BadRow: the turn is blank, or a part of it is not written: its content, a thought, or the name or an argument of
            a call.
    """
    place = f"turn {number} of the role assistant"
    pieces = pieces_of(turn)
    if not pieces and not any(turn.get(key) for key in CALLS):
        raise BadRow(
            f"{place} is blank, so nothing would be trained; give it a text, reasoning or a call, or remove it"
        )
    lost = missing(pieces, completion)
    if lost is not None:
        raise BadRow(
            f"{place}: the chat template does not write {_named(lost)}, so it would not be trained; "
            f"{remedy(turn, lost, write)}"
        )


def _named(lost: WrittenText) -> str:
    return f"`{lost.key}`" + (f" ({lost.text.strip()[:40]!r} is missing)" if lost.text else "")


def remedy(turn: Turn, lost: WrittenText, write: Callable[[Turn], str] | None) -> str:
    """What the user can do about a lost part, found by rendering the turn with it in other forms."""
    for hint, other in _other_forms(turn, lost.key):
        with suppress(BadRow):
            if write is not None and missing(pieces_of(other), write(other)) is None:
                return hint
    if lost.key in THOUGHTS:
        return (
            f"it writes no reasoning under any of the keys {', '.join(THOUGHTS[:4])}: give the model's folder a "
            "chat_template.jinja that does, or remove the reasoning"
        )
    if lost.key == "content" and any(turn.get(key) for key in CALLS):
        return "it writes no text next to calls: remove the text, or correct the template"
    if lost.key == "content":
        return (
            "it may cut reasoning out of the text: give the model's folder a chat_template.jinja that writes all of it"
        )
    return "use a model or a chat_template.jinja that writes it, or remove it"


def _other_forms(turn: Turn, key: str) -> Iterator[tuple[str, Turn]]:
    """The turn with a part in other forms, each with what a user would have to do."""
    rest = {name: value for name, value in turn.items() if name != key}
    if key in ANSWERS:
        for other in THOUGHTS:
            if other not in turn:
                yield f"the template writes `{other}`: rename the key", {**rest, other: turn[key]}
    if key not in CALLS:
        return
    calls = [call for name in CALLS for call in _calls(turn, name)]
    inner = [_function(call) for call in calls]
    rest.pop("tool_calls", None)
    for text, convert in (("a mapping", _parsed), ("JSON text", _dumped)):
        bare = [{"name": call.get("name"), "arguments": convert(call.get("arguments"))} for call in inner]
        whole = [{"type": "function", "id": f"call_{i}", "function": call} for i, call in enumerate(bare)]
        for form, written in (
            ('{"type": "function", "id": ..., "function": {...}}', whole),
            ("{name, arguments}", bare),
        ):
            hint = f"the template writes `tool_calls` of the form {form} whose arguments are {text}: use this form"
            yield hint, {**rest, "tool_calls": written}


def missing(pieces: Sequence[WrittenText], text: str) -> WrittenText | None:
    """The first piece that must be in the text and is not; None if all are. What is found counts once: the longest
    piece is looked for first, and no other piece is found inside it."""
    left = _bare(text)
    for piece in sorted(pieces, key=lambda one: (-len(one.text), not one.is_optional)):
        found = next((form for form in forms(piece.text) if form in left), None)
        if found is not None:
            left = left.replace(found, "\0", 1)
        elif not piece.is_optional:
            return piece
    return None


def forms(text: str) -> Iterator[str]:
    """The text in all forms that a template may give it, without white space."""
    text = text.strip()
    yield _bare(text)
    plain, ascii_alone = _json(text, False), _json(text, True)
    for form in (plain, ascii_alone, repr(text)[1:-1]):
        yield _bare(form)
    for form in (text, plain):
        escaped = html.escape(form)
        yield _bare(escaped)
        yield _bare(escaped.replace("&#x27;", "&#39;").replace("&quot;", "&#34;"))
    yield _bare(ascii_alone.translate(HTML_OF_JSON))
    yield from (_bare(_json(form, is_ascii)) for form in (plain, ascii_alone) for is_ascii in (False, True))


def _json(text: str, ascii_alone: bool) -> str:
    return json.dumps(text, ensure_ascii=ascii_alone)[1:-1]


def _bare(text: str) -> str:
    return "".join(text.split())


def pieces_of(turn: Turn) -> list[WrittenText]:
    """Everything in an answer that must be written. Tags of thoughts need not: a template may have its own, and the
    generation prompt may have the first."""
    content = turn.get("content")
    found = [
        WrittenText("content", part) for part in TAG.sub("\0", content if isinstance(content, str) else "").split("\0")
    ]
    texts: set[str] = set()
    for key in ANSWERS:
        text = thought_of(turn.get(key))
        if _bare(text) not in texts:  # some servers write a thought under two keys
            found.append(WrittenText(key, text))
            texts.add(_bare(text))
    return [piece for piece in found if piece.text.strip()] + pieces_of_calls(turn)


def thought_of(value: Any) -> str:
    """The text of a thought: text, or a list of parts with text."""
    if isinstance(value, list):
        return "\n".join(thought_of(part) for part in value)
    if isinstance(value, dict):
        return "\n".join(thought_of(value.get(key)) for key in ("text", "thinking", "summary"))
    return value if isinstance(value, str) else ""


def has_thought(turn: Turn) -> bool:
    return any(thought_of(turn.get(key)).strip() for key in THOUGHTS) or bool(TAG.search(str(turn.get("content"))))


def pieces_of_calls(turn: Turn) -> list[WrittenText]:
    """The names of calls, and the keys, texts and numbers of their arguments."""
    found = []
    for key in CALLS:
        for call in _calls(turn, key):
            function = _function(call)
            found += [WrittenText(key, text) for text in _leaves(function.get("name"))]
            found += [WrittenText(key, text) for text in _leaves(_parsed(function.get("arguments"), as_text=True))]
    return [piece for piece in found if piece.text.strip()]


def _calls(turn: Turn, key: str) -> list[dict[str, Any]]:
    value = turn.get(key)
    return [call for call in (value if isinstance(value, list) else [value]) if isinstance(call, dict)]


def _function(call: dict[str, Any]) -> dict[str, Any]:
    """The name and the arguments of a call, which OpenAI's form has one level deeper."""
    inner = call.get("function")
    return inner if isinstance(inner, dict) else call


def _parsed(value: Any, as_text: bool = False) -> Any:
    """Arguments that may be JSON text.

    Args:
        as_text: numbers become the text that stands there.
    """
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value, parse_int=str, parse_float=str) if as_text else json.loads(value)
    return value


def _dumped(value: Any) -> Any:
    return value if isinstance(value, str) else json.dumps(value)


def _leaves(value: Any) -> Iterator[str]:
    """The keys, texts and numbers. Truth values and None are left out: languages write them in their own words."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield key
            yield from _leaves(one)
    elif isinstance(value, list):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield json.dumps(value)
