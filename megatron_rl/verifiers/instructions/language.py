"""The language of a text, as the kinds of instructions see it.

Invariant: the result depends on the text alone, on every machine.
"""

from __future__ import annotations

import functools
import unicodedata
from collections import defaultdict
from pathlib import Path

import langdetect  # type: ignore[import-untyped]
from langdetect.detector_factory import DetectorFactory  # type: ignore[import-untyped]
from langdetect.lang_detect_exception import LangDetectException  # type: ignore[import-untyped]
from langdetect.utils.ngram import NGram  # type: ignore[import-untyped]

SHORT = 50
"""A text with fewer letters is too short for langdetect, which takes many such English texts for another language."""
FEW = 12
"""A text with fewer letters says no more about its language than its letters do: `OK` and `Paris` are written in
many."""


@functools.cache
def _languages() -> DetectorFactory:
    # langdetect itself reads its profiles in the order of the file system, and uses a new random seed for every
    # detection.
    folder = Path(langdetect.__file__).parent / "profiles"
    factory = DetectorFactory()
    factory.load_json_profile([path.read_text(encoding="utf-8") for path in sorted(folder.iterdir())])
    factory.set_seed(0)
    return factory


def known_languages() -> frozenset[str]:
    """The codes of the languages that can be detected: ISO 639-1, and `zh-cn` and `zh-tw` for Chinese."""
    return frozenset(_languages().langlist)


def may_be_in(language: str, text: str) -> bool:
    """Whether langdetect finds this language (`zh` is both forms of Chinese), or the text is too short for it and has
    only letters of this language."""
    found = language_of(text)
    return found is not None and _is(found, language) or _is_short(text, FEW) and _has_letters_of(language, text)


def may_be_english(text: str) -> bool:
    """The same for English, and any other text of few letters if they are ASCII's."""
    letters = "".join(filter(str.isalpha, text))
    return letters.isascii() and _is_short(text, SHORT) or may_be_in("en", text)


def _is_short(text: str, bound: int) -> bool:
    return 0 < sum(map(str.isalpha, text)) < bound


def _is(code: str, language: str) -> bool:
    return code == language or code.startswith(f"{language}-")


def _has_letters_of(language: str, text: str) -> bool:
    """Whether all letters are of a script that a language is written in, and langdetect knows them from its texts."""
    letters = {letter for letter in text.lower() if letter.isalpha()}
    if not {_script(letter) for letter in letters} <= _scripts(language):  # Russian texts have Latin letters, too
        return False
    return all(_share(language, letter) for letter in letters)


def _script(letter: str) -> str:
    return unicodedata.name(letter, "").partition(" ")[0]


def _share(language: str, letter: str) -> float:
    """How frequent a letter is in a language, by langdetect's profiles."""
    factory = _languages()
    shares = factory.word_lang_prob_map.get(NGram.normalize(letter), ())
    return float(sum(share for share, code in zip(shares, factory.langlist, strict=False) if _is(code, language)))


@functools.cache
def _scripts(language: str) -> frozenset[str]:
    """The scripts that a language is written in: those with a tenth of its letters or more."""
    frequency: defaultdict[str, float] = defaultdict(float)
    for letter in filter(lambda gram: len(gram) == 1 and gram.isalpha(), _languages().word_lang_prob_map):
        frequency[_script(letter)] += _share(language, letter)
    return frozenset(script for script, share in frequency.items() if share > 0.1 * sum(frequency.values()))


def language_of(text: str) -> str | None:
    """The language code of the first 10 000 characters of a text; None if it has no letters.

    langdetect is a naive Bayes classifier of character n-grams (Nakatani Shuyo, "Language Detection Library for Java",
    2010). It is often wrong about a text of a few words.
    """
    detector = _languages().create()
    detector.append(text)
    try:
        language: str = detector.detect()
    except LangDetectException:  # there is no n-gram that it knows
        return None
    return language
