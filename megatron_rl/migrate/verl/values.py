"""The value of an override, by Hydra's grammar: numbers, truth values, null, quoted text, lists and mappings.

A text that does not follow the grammar is itself the value, as for paths.
"""

from __future__ import annotations

import re
from typing import Any

WORDS = {"null": None, "true": True, "false": False}
INTEGER = re.compile(r"[+-]?\d+(?:_\d+)*")
NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:inf|nan)", re.IGNORECASE)
NAME = re.compile(r"['\"]?([\w.-]+)['\"]?\s*:")


def parse(text: str) -> Any:
    """The value of the text after `=`.

    >>> parse("[console, 'wandb']"), parse("1e-6"), parse("True"), parse("")
    (['console', 'wandb'], 1e-06, True, None)
    """
    try:
        value, rest = _read(text)
    except ValueError:
        return text.strip()
    return (value if text.strip() else None) if not rest.strip() else text.strip()


def _read(text: str) -> tuple[Any, str]:
    """The first value of a text, and what is behind it.

    Raises:
        ValueError: it does not follow the grammar.
    """
    text = text.lstrip()
    if text[:1] in ("'", '"'):
        end = text.index(text[0], 1)
        return text[1:end], text[end + 1 :]
    if text[:1] in ("[", "{"):
        return _entries(text[1:], {"[": "]", "{": "}"}[text[0]])
    word = re.split(r"[,\[\]{}]", text, maxsplit=1)[0]
    plain = word.strip()
    if plain.lower() in WORDS:
        return WORDS[plain.lower()], text[len(word) :]
    value = int(plain) if INTEGER.fullmatch(plain) else float(plain) if NUMBER.fullmatch(plain) else plain
    return value, text[len(word) :]


def _entries(text: str, end: str) -> tuple[Any, str]:
    """The entries of a list or a mapping up to the bracket that ends it."""
    names, values = [], []
    while not (text := text.lstrip()).startswith(end):
        if end == "}":
            if (name := NAME.match(text)) is None:
                raise ValueError(text)
            names.append(name[1])
            text = text[name.end() :]
        value, text = _read(text)
        values.append(value)
        text = text.lstrip()
        if text[:1] != "," and not text.startswith(end):
            raise ValueError(text)
        text = text.removeprefix(",")
    return dict(zip(names, values, strict=True)) if end == "}" else values, text[1:]
