"""Reads files of JSON lines. Each line is a row, from which a given function makes an item.

Invariants: a bad row either stops the run with an error that gives file and line, or it is skipped and counted. Blank
lines and a byte-order mark are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")
OnBadRow = Literal["fail", "skip"]
Form = Literal["messages", "prompt"]
FORMS: tuple[Form, ...] = ("messages", "prompt")
"""A row has exactly one of these two columns: chat turns, or plain text."""


class BadRow(ValueError):
    """The error about one row; `load_rows` adds file and line."""


def load_rows(path: Path, make: Callable[[str, dict[str, Any]], T], on_bad_row: OnBadRow) -> tuple[list[T], int]:
    """Read a file of JSON lines.

    Args:
        make: makes an item of (uid, row), or raises BadRow. The uid has the form `file.jsonl:17`.

    Returns:
        The items in the order of the file, and the number of skipped rows.

    Raises:
        ValueError: a row is bad and `on_bad_row` is `fail`, or there is no good row at all.
        FileNotFoundError: the file does not exist.
    """
    items: list[T] = []
    skipped: list[str] = []
    for number, row in read_rows(path):
        try:
            if isinstance(row, BadRow):
                raise row
            items.append(make(f"{path.name}:{number}", row))
        except BadRow as error:
            if on_bad_row == "fail":
                raise ValueError(f"{path}:{number}: {error}") from error
            skipped.append(f"line {number}: {error}")
    if not items:
        first = f"; the first bad one is {skipped[0]}" if skipped else ""
        raise ValueError(f"{path} holds no good row{first}; correct the file or the path")
    return items, len(skipped)


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Yields, for every line that is not blank, its number, counted from 1, and its row or the error about it."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if not raw.strip():
                continue
            try:
                yield number, _parse(raw)
            except BadRow as error:
                yield number, error


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        row = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRow(f"the row is not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise BadRow(f"the row is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadRow(f"a row must be a JSON object, but this one is a {type(row).__name__}")
    return row


def text_of(row: Mapping[str, Any], key: str) -> str:
    """The value of a column that must be text and must not be empty."""
    value = row.get(key)
    if not isinstance(value, str) or not value:
        raise BadRow(f"`{key}` must be text and not empty, but it is {value!r}")
    return value


def turns_of(row: Mapping[str, Any]) -> tuple[dict[str, str], ...]:
    """The chat turns of a row, which are its `messages`: a list of {"role": ..., "content": ...}."""
    turns = row["messages"]
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"`messages` must be a list of chat turns and not empty, but it is {turns!r}")
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict) or not all(isinstance(turn.get(k), str) for k in ("role", "content")):
            raise BadRow(f"`messages[{index}]` must have `role` and `content` as text, but it is {turn!r}")
    return tuple(turns)


def form_of(row: Mapping[str, Any]) -> Form:
    """Which of the two forms a row has."""
    forms = [key for key in FORMS if key in row]
    if len(forms) != 1:
        found = "both" if forms else f"only {sorted(row)}"
        raise BadRow(f"a row must have either `messages` (chat turns) or `prompt` (text), but this one has {found}")
    return forms[0]
