"""The value of an override, by Hydra's grammar: numbers, truth values, null, quoted text, lists and mappings.

A text that does not follow the grammar is itself the value, as for paths.
"""

from __future__ import annotations

import re
from typing import Any

WORDS = {"null": None, "true": True, "false": False}
INTEGER = re.compile(r"[+-]?\d+(?:_\d+)*")
NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:inf|nan)", re.IGNORECASE)


def parse(text: str) -> Any:
    """The value of the text after `=`.

    >>> parse("[console, 'wandb']"), parse("1e-6"), parse("True"), parse("")
    (['console', 'wandb'], 1e-06, True, None)
    """
    text = text.strip()
    if not text:
        return None
    value, end = _read(text, 0)
    return value if end == len(text) else text


def _read(text: str, place: int) -> tuple[Any, int]:
    """The value that begins at `place`, and the place after it; -1 if it does not follow the grammar."""
    char = text[place : place + 1]
    if char in "'\"" and char:
        end = text.find(char, place + 1)
        return (text[place + 1 : end], end + 1) if end > 0 else (None, -1)
    if char == "[":
        return _read_list(text, place + 1)
    if char == "{":
        return _read_mapping(text, place + 1)
    found = re.compile(r"[^,\[\]{}]*").match(text, place)
    assert found is not None, "the pattern matches an empty text too"
    return _word(found[0].strip()), found.end()


def _read_list(text: str, place: int) -> tuple[Any, int]:
    values: list[Any] = []
    while True:
        place = _skip(text, place)
        if text[place : place + 1] == "]":
            return values, place + 1
        value, place = _read(text, place)
        if place < 0:
            return None, -1
        values.append(value)
        place = _skip(text, place)
        if text[place : place + 1] == ",":
            place += 1
        elif text[place : place + 1] != "]":
            return None, -1


def _read_mapping(text: str, place: int) -> tuple[Any, int]:
    values: dict[str, Any] = {}
    while True:
        place = _skip(text, place)
        if text[place : place + 1] == "}":
            return values, place + 1
        found = re.compile(r"\s*['\"]?([\w.-]+)['\"]?\s*:\s*").match(text, place)
        if found is None:
            return None, -1
        value, place = _read(text, found.end())
        if place < 0:
            return None, -1
        values[found[1]] = value
        place = _skip(text, place)
        if text[place : place + 1] == ",":
            place += 1
        elif text[place : place + 1] != "}":
            return None, -1


def _skip(text: str, place: int) -> int:
    while text[place : place + 1].isspace():
        place += 1
    return place


def _word(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if INTEGER.fullmatch(text):
        return int(text)
    return float(text) if NUMBER.fullmatch(text) else text
