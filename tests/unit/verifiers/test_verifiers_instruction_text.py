from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.verifiers.instructions.language import language_of
from megatron_rl.verifiers.instructions.text import DIVIDER, paragraphs, parts_between, sentences, words

ENGLISH = "the quick brown fox jumps over the lazy dog because it wants to reach the other side of the river"
GERMAN = "Der schnelle braune Fuchs springt über den faulen Hund, weil er auf die andere Seite des Flusses möchte."
HINDI = "यह वाक्य हिन्दी भाषा में लिखा गया है और इसमें कोई दूसरी भाषा नहीं है।"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("no end", ["no end"]),
        ("all lower. it goes on! right?", ["all lower.", "it goes on!", "right?"]),
        (
            "Dr. Smith met J. K. Rowling, e.g. in the U.S. Army.",
            ["Dr. Smith met J. K. Rowling, e.g. in the U.S. Army."],
        ),
        (
            "It was 5 p.m. He left, etc. and so on, etc. Then",
            ["It was 5 p.m.", "He left, etc. and so on, etc.", "Then"],
        ),
        ("1. First\n2. Second one.\n10. Third", ["1. First\n2. Second one.", "10. Third"]),
        ("There are 3. Pi is 3.14.", ["There are 3.", "Pi is 3.14."]),
        ("Wait... what?! Yes... No", ["Wait... what?!", "Yes...", "No"]),
        ('"Stop!" he said. "Go." She went.', ['"Stop!" he said.', '"Go."', "She went."]),
        ("**Bold.** Next (in brackets.) End", ["**Bold.**", "Next (in brackets.)", "End"]),
        ("これは文です。二つ目です！", ["これは文です。", "二つ目です！"]),
        ("यह एक है। यह दो है।", ["यह एक है।", "यह दो है।"]),
        ("see www.example.com/a.html now", ["see www.example.com/a.html now"]),
        ("Line one\nLine two", ["Line one\nLine two"]),
        ("It is in R.\n\nSo is J. Doe.", ["It is in R.", "So is J. Doe."]),
        ("I met Dr.\nWho. ", ["I met Dr.\nWho."]),
        ("Apple Inc. makes it. Her Ph.D. was long.", ["Apple Inc. makes it.", "Her Ph.D. was long."]),
        (" It is 3.5. \n next ", ["It is 3.5.", "next"]),
        ("... !!! 🙂", []),
        ("", []),
    ],
)
def test_sentences(text, expected):
    assert sentences(text) == expected


@given(st.text("aBcß1हि .!?…。-\n'\"_*’,", max_size=60))
def test_every_word_is_in_exactly_one_sentence(text):
    assert [word for sentence in sentences(text) for word in words(sentence)] == words(text)


def test_words():
    assert words("I don’t know well-known 1,000 things, 3.14, or U.S. _law_…") == (
        ["I", "don’t", "know", "well-known", "1,000", "things", "3.14", "or", "U.S", "law"]
    )
    assert words("हिन्दी भाषा: é e\u0301 -- a--b 'c'") == ["हिन्दी", "भाषा", "é", "e\u0301", "a", "b", "c"]


@given(st.lists(st.text("ab \n", min_size=1).filter(str.strip), min_size=1, max_size=5))
def test_joined_paragraphs_come_apart_again(parts):
    flat = [" ".join(part.split()) for part in parts]
    assert parts_between(DIVIDER, "\n***\n".join(flat)) == flat
    assert paragraphs("\n\n".join(flat)) == flat


TEXTS = [ENGLISH, GERMAN, HINDI, "dogs are great", "no", "Schiff ahoi amigo", "la casa è un bel house"]


def test_the_language_is_the_same_after_other_texts():
    here = [language_of(text) for text in TEXTS]
    assert here[:3] == ["en", "de", "hi"]
    assert [language_of(text) for text in reversed(TEXTS)] == here[::-1]


@pytest.mark.deep
def test_the_language_is_the_same_in_another_process():
    code = (
        "import sys, json; from megatron_rl.verifiers.instructions.language import language_of;"
        "print(json.dumps([language_of(text) for text in json.loads(sys.stdin.read())[::-1]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(TEXTS),
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [language_of(text) for text in reversed(TEXTS)]


def test_text_without_letters_has_no_language():
    assert language_of("12 + 3 = 15!") is None
    assert language_of("") is None
