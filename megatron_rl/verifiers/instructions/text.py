"""The words, sentences and paragraphs of a text, as the kinds of instructions count them.

Invariants: the result depends on the text alone, on every machine; the time is linear in the length of the text; every
word of a text is in exactly one of its sentences.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import regex  # type: ignore[import-untyped]

# In the module `regex`, `\w` includes combining marks, so that a word in Hindi is one word. In `re` it does not.
RUN = regex.compile(r"\w+")
WORD = regex.compile(r"[^\W_]+(?:(?:['’._‑-]|(?<=\d),(?=\d))[^\W_]+)*")

# Sentences end with these. The second group ends a sentence without white space after it.
TERMINATORS = re.compile(r"""(?P<run>[.!?…؟۔।॥]+|[。！？｡]+)(?P<closing>["'”’)\]}»」』）*_`]*)""")
EAST_ASIAN = "。！？｡"
SEPARATOR = re.compile(r"-?\s*")
# The period of these abbreviations does not end a sentence.
INSIDE_A_SENTENCE = frozenset("mr mrs ms dr prof rev gen col capt lt sgt gov sen rep st mt vs cf e.g i.e".split())
# The period of these ends a sentence if no lower-case letter comes next.
AT_THE_END_OF_A_SENTENCE = frozenset("etc inc ltd co corp jr sr al".split())
BEFORE_A_TOKEN = re.compile(r"""[\s(\[{"'“‘*_/-]""")
CHARACTERS_BEFORE = 12
"""The number of characters before a period that are examined: more than an abbreviation, or the number of a list,
has."""
LIST_NUMBER = re.compile(r"\n[\s>*#_]*[0-9]+$")

BLANK_LINES = re.compile(r"\n\s*\n")
DIVIDER = re.compile(r"(?<!\S)(?:\*\*\*|\* \* \*)(?!\S)")
SIX_ASTERISKS = re.compile(r"(?<!\*)\*{6}(?!\*)")


def words(text: str) -> list[str]:
    """The words of a text, without the punctuation around them.

    Letters, digits and their combining marks make a word. A single apostrophe, hyphen, period or underscore joins two
    parts of one word, and a comma joins digits: `don't`, `well-known`, `U.S`, `3.14` and `1,000` are one word each.
    """
    found: list[str] = WORD.findall(text)
    return found


def folded_words(text: str) -> list[str]:
    """The words of a text in a form that ignores upper and lower case and the shape of apostrophes."""
    return words(text.casefold().replace("’", "'"))


def sentences(text: str) -> list[str]:
    """The sentences of a text that have at least one word, without the white space around them.

    A sentence ends with a period, a question mark, an exclamation mark, an ellipsis, or their counterparts in other
    scripts, if white space, a hyphen or the end of the text follows. A line break alone ends no sentence. The period of
    an abbreviation (`Dr.`, `e.g.`), of an initial (`J. Smith`) or of a number that begins a line (`1. First`) ends
    none either, if no blank line follows.
    """
    found, start = [], 0
    for end, following in boundaries(text):
        found.append(text[start:end].strip())
        start = following
    found.append(text[start:].strip())
    return [sentence for sentence in found if WORD.search(sentence)]


def boundaries(text: str) -> Iterator[tuple[int, int]]:
    """For each sentence but the last: the index after its last character, and the index where the next sentence begins.
    What is between the two is white space, or a hyphen with the white space after it, or nothing in East Asian text.
    White space or a hyphen after the last sentence is a boundary too, with nothing after it."""
    for match in TERMINATORS.finditer(text):
        separator = SEPARATOR.match(text, match.end())
        assert separator is not None
        if not separator[0] and match["run"][-1] not in EAST_ASIAN:
            continue
        ends_paragraph = separator[0].count("\n") > 1
        if ends_paragraph or _ends_sentence(text, match, text[separator.end() : separator.end() + 1]):
            yield match.end(), separator.end()


def _ends_sentence(text: str, match: re.Match[str], following: str) -> bool:
    """Whether a sentence ends with these terminators.

    Args:
        following: the first character after the terminators and the white space; empty at the end of the text.
    """
    if following.islower() and any(mark in match["closing"] for mark in "\"'”’»"):
        return False  # "Stop!" he said.
    if match["run"] != ".":
        return not (following.islower() and (match["run"] == "…" or match["run"].startswith("..")))
    start = match.start()
    before = text[start - CHARACTERS_BEFORE : start] if start > CHARACTERS_BEFORE else "\n" + text[:start]
    token = BEFORE_A_TOKEN.split(before)[-1]
    if token.casefold() in INSIDE_A_SENTENCE:
        return False
    if token.casefold() in AT_THE_END_OF_A_SENTENCE:
        return not following.islower()
    if len(token) == 1 and token.isupper():
        return token == "I"
    parts = token.split(".")
    if len(parts) > 1 and all(part.isalpha() and len(part) <= 2 for part in parts):
        return token.islower() and following.isupper()  # at 5 p.m. He left. / the U.S. Army
    return not (token.isdecimal() and LIST_NUMBER.search(before))


def parts_between(divider: re.Pattern[str], text: str) -> list[str]:
    """The parts of a text between dividers, without the white space around them. A divider at the beginning or at the
    end of the text divides nothing. The list is empty if there is nothing between two dividers."""
    parts = [part.strip() for part in divider.split(text.strip())]
    parts = parts[1:] if not parts[0] else parts
    parts = parts[:-1] if parts and not parts[-1] else parts
    return parts if all(parts) else []


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a text: blank lines separate them."""
    return [part.strip() for part in BLANK_LINES.split(text) if part.strip()]
