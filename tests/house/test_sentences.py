"""Docstrings, comments, Markdown and the comments of configurations use the words of the field.

`phrases.json` has the number of times that each phrase below occurs. The numbers may only shrink: more of a phrase
fails, and fewer fails too until the number is lowered (`python tests/house/test_sentences.py` lowers all of them).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUMBERS = Path(__file__).with_name("phrases.json")
FOLDERS = ("megatron_rl", "recipes", "tools", "slurm", "configs", "docs")
HISTORY = "CHANGELOG.md"
PHRASES = {
    "those of": r"those (of|which|that|whose)",
    "that of": r"that of",
    "anew": r"anew",
    "so many": r"so many",
    "beside": r"beside",
    "of which": r"(of|to|for|in|from|with) which",
    "whatever": r"whatever",
    "once more": r"once more",
    "it is a collective": r"it is a collective",
}
PATTERNS = {name: re.compile(rf"\b{words}\b".replace(" ", r"\s+"), re.IGNORECASE) for name, words in PHRASES.items()}
TOKENS = re.compile(
    r"""
    (?P<comments> \#.* (?: \n[ \t]*\#.* )* )
    | (?P<string> \"{3} (?: [^"\\] | \\[\s\S] | "(?!"") )* \"{3} ) (?P<alone> [ \t]*$ )?
    | '{3} (?: [^'\\] | \\[\s\S] | '(?!'') )* '{3}
    | "(?: [^"\\\n] | \\[\s\S] )*"
    | '(?: [^'\\\n] | \\[\s\S] )*'
    """,
    re.MULTILINE | re.VERBOSE,
)
"""What of a Python file can hold a comment or look like one. Parsing would take longer than all the rest."""


def prose() -> Iterator[tuple[str, str]]:
    """The file and the text of everything that is written for readers."""
    folders = [ROOT / name for name in FOLDERS]
    for path in [*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))]:
        if path.name != HISTORY:
            yield path.relative_to(ROOT).as_posix(), path.read_text()
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        yield from ((place, text) for text in docstrings_and_comments(path.read_text()))
    for path in (ROOT / "configs").rglob("*.yaml"):
        yield path.relative_to(ROOT).as_posix(), path.read_text().replace("#", "")


def docstrings_and_comments(source: str) -> Iterator[str]:
    """Every string that is a statement, which is a docstring or stands below an attribute, and every comment. Comments
    on consecutive lines are one text."""
    for token in TOKENS.finditer(source):
        before = source[source.rfind("\n", 0, token.start()) + 1 : token.start()]
        if token["comments"]:
            yield token["comments"].replace("#", "")
        elif token["alone"] is not None and before in (" " * len(before), " " * (len(before) - 1) + "r"):
            yield token["string"]


@cache
def counts() -> dict[str, Counter[str]]:
    """How often each phrase occurs in each file."""
    occurrences: dict[str, Counter[str]] = {name: Counter() for name in PHRASES}
    for place, text in prose():
        for name, pattern in PATTERNS.items():
            number = sum(1 for _ in pattern.finditer(text))
            if number:
                occurrences[name][place] += number
    return occurrences


def test_comments_and_docstrings_are_found_and_code_is_not():
    source = '''
x = "anew"  # once more
# those
# of it
class A:
    y: int = 0
    """Whatever."""
    z = """
    # beside
    """
'''
    texts = list(docstrings_and_comments(source))
    found = {name for name, pattern in PATTERNS.items() if any(pattern.search(text) for text in texts)}
    assert found == {"once more", "those of", "whatever"}


@pytest.mark.parametrize("name", PHRASES)
def test_a_phrase_becomes_rarer(name):
    allowed, files = json.loads(NUMBERS.read_text())[name], counts()[name]
    number, most = files.total(), ", ".join(f"{place} ({number})" for place, number in files.most_common(5))
    assert number <= allowed, f"'{name}' occurs {number} times, above {allowed}: use plain words; most are in {most}"
    assert number == allowed, f"'{name}' occurs {number} times now: write {number} in {NUMBERS.name}, not {allowed}"


if __name__ == "__main__":
    old = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    new = {name: min(files.total(), old.get(name, files.total())) for name, files in counts().items()}
    NUMBERS.write_text(json.dumps(new, indent=1) + "\n")
