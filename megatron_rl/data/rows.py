"""JSON lines, one row a line, each made into something by a given function.

Invariants: a bad row is named by file and line; it stops the run, or is skipped and counted; blank lines and
a byte-order mark are no rows.
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
    """What is wrong with one row; `load_rows` adds where."""


def load_rows(path: Path, make: Callable[[str, dict[str, Any]], T], on_bad_row: OnBadRow) -> tuple[list[T], int]:
    """Read a file of JSON lines.

    Args:
        make: (uid, row) -> item; it raises BadRow. The uid is `file.jsonl:17`.

    Returns:
        The items in file order, and the number of rows skipped.

    Raises:
        ValueError: a bad row with `fail`; no good row at all.
        FileNotFoundError: no such file.
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
        raise ValueError(f"{path} holds no good row{first}")
    return items, len(skipped)


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Every line that is not blank: its number, from 1, and its row or what is wrong with it."""
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
        raise BadRow(f"not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise BadRow(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadRow(f"a row is a JSON object, this is a {type(row).__name__}")
    return row


def text_of(row: Mapping[str, Any], key: str) -> str:
    """A column that must be text and not empty."""
    value = row.get(key)
    if not isinstance(value, str) or not value:
        raise BadRow(f"`{key}` must be text and not empty; it is {value!r}")
    return value


def turns_of(row: Mapping[str, Any]) -> tuple[dict[str, str], ...]:
    """The chat turns of a row: `messages`, a list of {"role": ..., "content": ...}."""
    turns = row["messages"]
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"`messages` must be a list of chat turns and not empty; it is {turns!r}")
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict) or not all(isinstance(turn.get(k), str) for k in ("role", "content")):
            raise BadRow(f"`messages[{index}]` must have `role` and `content` as text; it is {turn!r}")
    return tuple(turns)


def form_of(row: Mapping[str, Any]) -> Form:
    """Which of the two forms a row has."""
    forms = [key for key in FORMS if key in row]
    if len(forms) != 1:
        found = "both" if forms else f"only {sorted(row)}"
        raise BadRow(f"a row has either `messages` (chat turns) or `prompt` (text); this one has {found}")
    return forms[0]
