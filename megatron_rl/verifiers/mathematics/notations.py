"""Answers that are no formulas: words, times of day, letters of a choice, numbers with their base, sets by name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from megatron_rl.verifiers.mathematics.plain_number import FUNCTION_NAMES, TEXT_COMMAND, plain_number

_WORDS = re.compile(r"[^\W\d_]+(?:[ '\".,;:!?/()-]+[^\W\d_]+)*[ .!?)]*")
_LONG_WORD = re.compile(r"[^\W\d_]{3,}")
_OTHER_NAMES = ("sqrt", "infinity", "inf")


def plain_text(text: str) -> str:
    """The text without commands for type, white space, case and the final full stop."""
    return " ".join(TEXT_COMMAND.sub(r"\1", text).replace('"', "").split()).strip().rstrip(".").casefold()


def is_words(text: str) -> bool:
    r"""Whether a text is no mathematics: words of three letters or more that name no function, `no`, or `\text{...}`
    alone. Shorter words may be products of variables."""
    plain = plain_text(text)
    if not _WORDS.fullmatch(plain):
        return False
    long_words = [word for word in _LONG_WORD.findall(plain) if word not in (*FUNCTION_NAMES, *_OTHER_NAMES)]
    return bool(long_words) or plain == "no" or (len(plain) > 1 and TEXT_COMMAND.fullmatch(text) is not None)


def with_empty_set(text: str) -> str:
    r"""The text, or `\emptyset` if it says that there is no solution."""
    return r"\emptyset" if re.fullmatch("no solutions?", plain_text(text)) else text


_CHOICE = re.compile(
    r"(?:(?i:option|choice|answer)\s+)?(?:\(([A-J])\)(?:\s+[\w\\].*)?|([A-J])[).:](?:\s+[\w\\].*)?|([A-Ja-j]))",
    re.DOTALL,
)


def choice(text: str) -> str | None:
    """The letter of a choice, as in A, (A), or (A) 5 km."""
    match = _CHOICE.fullmatch(TEXT_COMMAND.sub(r"\1", text).strip())
    return next(letter for letter in match.groups() if letter).upper() if match else None


_JOINT = r"(?:[\s,;]|\b(?:and|or)\b)*+"
_CIRCLED = rf"\\textcircled\s*\{{?\s*([0-9]{{1,2}})(?![0-9])\s*+\}}?+{_JOINT}"
_IN_BRACKETS = rf"\(([0-9]{{1,2}}|[A-J])\){_JOINT}"
_NUMBERS = rf"(?<![0-9])([0-9]{{1,2}})(?![0-9]){_JOINT}"
_LETTERS = rf"([A-J]){_JOINT}"


def circled(text: str) -> frozenset[str] | None:
    """The numbers of several circled ones (①③), in any order; None if the text is anything else, also one alone."""
    return _labels(text, _CIRCLED)


def same_choices(text: str, other: str) -> bool | None:
    """Whether two lists name the same numbers or letters, as (1)(3) and ①③ do, or A, B, D and ABD; None if this tells
    nothing: neither has circled numbers, and not both are lists of letters."""
    has_circles = circled(text) or circled(other)
    kinds = (_CIRCLED, _IN_BRACKETS, _NUMBERS) if has_circles else (_LETTERS, _IN_BRACKETS)
    ours, theirs = (next(filter(None, (_labels(one, kind) for kind in kinds)), None) for one in (text, other))
    if has_circles:
        return ours == theirs
    return ours == theirs if ours and theirs and not re.search("[0-9]", text + other) else None


def _labels(text: str, label: str) -> frozenset[str] | None:
    """The two or more different labels that a text consists of, by the pattern of one and what follows it."""
    text = TEXT_COMMAND.sub(r"\1", text)
    found = re.findall(label, text)
    is_list = re.fullmatch(f"(?:{label})+", text) and len(found) == len(set(found)) > 1
    return frozenset(found) if is_list else None


_CLOCK = re.compile(
    r"([0-9]{1,2})(?:\s*:\s*([0-5][0-9]))?(?::([0-5][0-9]))?"
    r"\s*(?:([ap])\.?\s?m\b\.?|(noon|midnight)\b|hours?\b|hrs\b|o'clock)?",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class TimeOfDay:
    times: frozenset[int]
    """The seconds since midnight: of two times if only the halves of the day tell them apart."""
    is_marked: bool
    is_sure: bool
    """Whether it cannot be a ratio, because it has am or pm or is not in lowest terms."""

    def is_same(self, other: TimeOfDay) -> bool:
        """The half of the day may be left out, like any other unit."""
        if self.is_marked or other.is_marked:
            return bool(self.times & other.times)
        return self.times == other.times


def clock(text: str) -> TimeOfDay | None:
    """A time of day, as in 2:30, 14:30:05 or 3 p.m."""
    match = _CLOCK.fullmatch(TEXT_COMMAND.sub(r" \1", text).replace("{:}", ":").strip())
    if match is None or int(match[1]) > 24:
        return None
    hour, minute, second = (int(part or 0) for part in match.groups()[:3])
    half = match[4] or match[5]
    if half is None and (match[2] is None or (match[3] is not None and "0" not in (match[2][0], match[3][0]))):
        return None  # a number, or a ratio of three
    start = (minute + 60 * (hour % 12)) * 60 + second
    if hour > 12 or (hour == 0 and half is None):
        times = frozenset({start + 12 * 3600 * (12 < hour < 24)})
    elif half is None:
        times = frozenset({start, start + 12 * 3600})
    else:
        times = frozenset({start + 12 * 3600 * (half.lower() in ("p", "noon"))})
    return TimeOfDay(times, half is not None, half is not None or match[2][0] == "0" or math.gcd(hour, minute) > 1)


_BASE = re.compile(r"([0-9][0-9A-Za-z]*)\s*_\s*\{?\s*([0-9]{1,2})\s*\}?")


def right_side(text: str) -> str:
    """What follows the equals sign in `x = 5` or `total cost = 5`; the text itself if it is no single equation."""
    left, sign, right = text.rpartition("=")
    return right if sign and not re.search(r"[<>,;!\\]|=|\b(?:and|or)\b", left + right.replace(",", "")) else text


def digits_and_base(text: str) -> tuple[str, str] | None:
    match = _BASE.fullmatch(text)
    return (match[1].upper().lstrip("0"), match[2]) if match else None


_CONGRUENCE = re.compile(
    r"(?:[a-z]\s*(?:\\equiv|=)\s*)?(-?[0-9]+)\s*(?:\(\s*\\?mod(?![a-z])|\\[pb]?mod(?![a-z])|,?\s*mod(?![a-z]))"
    r"\s*\{?\s*([1-9][0-9]*)\s*\}?\s*\)?"
)


def congruence(text: str) -> tuple[int, int] | None:
    r"""The value and the modulus of x \equiv 12 \pmod 7, or of 12 (mod 7): 12 and 7."""
    match = _CONGRUENCE.fullmatch(TEXT_COMMAND.sub(r"\1", text).strip())
    return (int(match[1]), int(match[2])) if match else None


def same_remainder(text: str, other: str) -> bool | None:
    """Whether two congruences are the same, as 12 (mod 7) and 5 (mod 7) are; None if neither text is one. The modulus
    may be left out, and then the numbers are compared."""
    ours, theirs = congruence(text), congruence(other)
    if ours and theirs:
        return ours[1] == theirs[1] and (ours[0] - theirs[0]) % ours[1] == 0
    if found := ours or theirs:
        number = plain_number(right_side(other if ours else text))
        return number is not None and number.value == found[0]
    return None


_SETS = re.compile(r"[A-Z]|\\(?:cap|cup|setminus|backslash)(?![A-Za-z])|[()]|'|\^\{?c\}?")
_MAX_SETS, _MAX_BRACKETS = 6, 10


def region(text: str, names: str) -> int | None:
    r"""What A \cap (B \cup C)' stands for in a Venn diagram of the sets with these names, as one bit for each of its
    areas; None if the text is anything else. An intersection or a difference binds closer than a union."""
    tokens = _SETS.findall(text)
    if "".join(tokens) != "".join(text.split()) or not any(token[0] == "\\" for token in tokens):
        return None
    if len(names) > _MAX_SETS or tokens.count("(") > _MAX_BRACKETS:
        return None
    areas = range(2 ** len(names))
    whole = sum(1 << area for area in areas)
    values = {name: sum(1 << area for area in areas if area >> n & 1) for n, name in enumerate(names)}
    try:
        found = _union(tokens, values, whole)
    except (IndexError, KeyError):
        return None
    return None if tokens else found


def set_names(*texts: str) -> str:
    """The names of the sets in some texts."""
    return "".join(sorted(set(re.findall("(?<![A-Za-z\\\\])[A-Z](?![A-Za-z])", " ".join(texts)))))


def _union(tokens: list[str], values: dict[str, int], whole: int) -> int:
    """The value of the first union. Its tokens are taken off the list."""
    found = _intersection(tokens, values, whole)
    while tokens and tokens[0] == r"\cup":
        tokens.pop(0)
        found |= _intersection(tokens, values, whole)
    return found


def _intersection(tokens: list[str], values: dict[str, int], whole: int) -> int:
    found = _one_set(tokens, values, whole)
    while tokens and tokens[0] in (r"\cap", r"\setminus", r"\backslash"):
        sign, other = tokens.pop(0), _one_set(tokens, values, whole)
        found &= other if sign == r"\cap" else whole & ~other
    return found


def _one_set(tokens: list[str], values: dict[str, int], whole: int) -> int:
    token = tokens.pop(0)
    found = _union(tokens, values, whole) if token == "(" else values[token]
    if token == "(" and tokens.pop(0) != ")":
        raise KeyError("a bracket is open")
    while tokens and tokens[0][0] in "'^":
        tokens.pop(0)
        found = whole & ~found
    return found
