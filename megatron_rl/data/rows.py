"""What a row is: a mapping from the names of its columns to plain values of JSON's types.

Invariants: a value that is not plain is made plain, or the row is refused by the name of the column.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, ClassVar, Literal

from megatron_rl.config.given_rows import image_text

OnBadRow = Literal["fail", "skip", "cut"]
Row = dict[str, Any]
Turns = tuple[dict[str, Any], ...]
"""Chat turns. Each has `role` and `content` as text."""


class FilledRow(dict[str, Any]):
    """A row from a library that gives all mappings in a column the same keys, and fills in None (Parquet, Arrow,
    `datasets`). In rows from JSON, None is what somebody has written."""


class BadRow(ValueError):
    """The error about one row; `BadRows` adds file and row."""

    reason: ClassVar[str] = "malformed"
    """The reason in a word, for counts."""


class LongRow(BadRow):
    """A row has more tokens than the run allows."""

    reason = "too long"


def counted(number: int, noun: str) -> str:
    """Example: `1 row`, `1,200 rows`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def plain_row(row: Mapping[str, Any]) -> Row:
    """The row with plain values: None, truth values, numbers, text, lists and mappings with text as keys. Dates and
    times become text in the form of ISO 8601, decimal numbers become text, and images `data:image/png;base64,...`.

    Raises:
        BadRow: a column has a value of another type, such as bytes.
    """
    return {name: _plain(value, name) for name, value in row.items()}


def _plain(value: Any, column: str) -> Any:
    if (text := image_text(value)) is not None:
        return text
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one, column) for one in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(one, column) for key, one in value.items()}
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    kind = f"a value of the type {type(value).__name__}, which has no form in JSON"
    if isinstance(value, bytes):
        kind = f"{len(value):,} bytes, which do not begin as an image's"
    raise BadRow(f"column `{column}` holds {kind}; write it as text or numbers, or remove the column")


def text_of(row: Mapping[str, Any], key: str) -> str:
    """The value of a column that must be text and must not be empty."""
    value = row.get(key)
    if not isinstance(value, str) or not value:
        raise BadRow(f"`{key}` must be text and not empty, but it is {value!r}")
    return value


def turns_of(row: Mapping[str, Any], key: str = "messages", sees_images: bool = False) -> Turns:
    """The chat turns in a column: a list of {"role": ..., "content": ...}.

    Further keys of a turn and of its calls stay if they have a value. Arguments of a call keep their None unless
    a library may have filled it in. As in OpenAI's form, `content` may be a list of parts of text, and null if there
    are calls.

    Args:
        sees_images: whether parts may be images; such a content stays a list.
    """
    value = row.get(key)
    turns = listed_turns(value)
    if not turns:
        raise BadRow(f"`{key}` must be a list of chat turns and not empty, but it is {value!r}")
    is_filled = isinstance(row, FilledRow) and not isinstance(value, str)
    return tuple(_turn(turn, f"`{key}[{index}]`", is_filled, sees_images) for index, turn in enumerate(turns))


def listed_turns(value: Any) -> list[Any] | None:
    """The value if it is a list, or the list of chat turns that it encodes as JSON; None if it is neither."""
    if isinstance(value, str) and value.lstrip().startswith("[") and '"role"' in value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, list) and all(isinstance(turn, dict) for turn in value) else None
    return value if isinstance(value, list) else None


CALLS = ("tool_calls", "function_call")
"""The keys of a turn with calls of tools: OpenAI's present form, and its earlier one."""


def _turn(turn: Any, place: str, is_filled: bool, sees_images: bool) -> dict[str, Any]:
    """
    Args:
        is_filled: whether a library may have filled in None.
    """
    if isinstance(turn, dict):
        content = turn.get("content")
        if content is None and any(turn.get(key) for key in CALLS):
            turn = turn | {"content": ""}
        elif isinstance(content, list) and sees_images and any(_is_image(part) for part in content):
            if not all(
                _is_image(part) or isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
            ):
                raise BadRow(f"{place} has parts that are neither text nor images: {str(content)[:200]}")
        elif isinstance(content, list):
            if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
                why = "parts are texts or images here" if sees_images else "the model is trained as one of text"
                raise BadRow(f"{place} has parts that are no text: {str(content)[:200]}; {why}")
            turn = turn | {"content": "".join(part["text"] for part in content)}
    whole = turn | {"content": ""} if isinstance(turn, dict) and isinstance(turn.get("content"), list) else turn
    if not isinstance(whole, dict) or not all(isinstance(whole.get(k), str) for k in ("role", "content")):
        raise BadRow(f"{place} must have `role` and `content` as text, but it is {turn!r}")
    for key, kind in (("tool_calls", list), ("function_call", dict)):
        calls = turn.get(key)
        if calls and not (isinstance(calls, kind) and all(isinstance(one, dict) for one in _as_list(calls))):
            raise BadRow(
                f"{place} must have `{key}` as a {'list of mappings' if kind is list else 'mapping'}: {calls!r}"
            )
    return {
        name: without_none(value) if is_filled or name not in CALLS else without_none_outside(value)
        for name, value in turn.items()
        if value is not None
    }


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and "image" in str(part.get("type"))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def without_none_outside(value: Any) -> Any:
    """Calls or tools without the keys that have None and only describe them, such as `id` and `description`. What is
    deeper, arguments and JSON schemas, stays: None has a meaning there."""
    if isinstance(value, list):
        return [without_none_outside(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {key: one for key, one in value.items() if one is not None}
    if isinstance(function := kept.get("function"), dict):
        kept["function"] = {key: one for key, one in function.items() if one is not None}
    return kept


def without_none(value: Any) -> Any:
    """The value without the keys of mappings that have None, at any depth."""
    if isinstance(value, list):
        return [without_none(one) for one in value]
    if isinstance(value, dict):
        return {key: without_none(one) for key, one in value.items() if one is not None}
    return value
