"""A thought in passages: by hand, and whatever the text is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron_rl.rollout.programs.passages import chapters, split, token_texts

MARKERS = ("Wait,", "So ", "But ")


def passages(texts: list[str], least: int = 1, most: int = 100, markers=MARKERS) -> list[str]:
    return ["".join(texts[i] for i in passage) for passage in split(texts, markers, least, most)]


def test_a_passage_begins_with_the_token_of_its_marker():
    texts = ["Let", " me", " add", ".", " Wait", ",", " no", ".\n", "So", " it", " is", " 3"]
    assert passages(texts) == ["Let me add.", " Wait, no.\n", "So it is 3"]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["So", " 2"], ["So 2"]),  # at the beginning there is nothing before it
        (["no", "So ", "2"], ["noSo 2"]),  # inside a word
        (["a", " So", "da", " b"], ["a Soda b"]),  # "So " needs its space
        (["a", "\n", "\n", "But", " b"], ["a\n\n", "But b"]),
        (["a.\n\nSo", " b"], ["a.\n\nSo b"]),  # the first token has the marker within it
        (["x", "a.\n\nSo", " b"], ["x", "a.\n\nSo b"]),
        ([], []),
        (["", "", ""], [""]),
    ],
)
def test_where_a_marker_counts(texts, expected):
    assert passages(texts) == expected


def test_a_short_passage_goes_on_over_the_marker():
    texts = ["a", " So", " b", " So", " c", " So", " d"]
    assert passages(texts, least=3) == ["a So b", " So c So d"]


def test_a_long_passage_ends_after_a_sentence_and_without_one_at_the_limit():
    texts = ["a", " b", ".", " c", " d", "!", " e", " f", " g", " h", " i"]
    # A sentence ends with the white space after it, which the next token brings.
    assert passages(texts, least=2, most=5) == ["a b. c", " d! e", " f g h i"]
    assert passages(["a"] * 7, least=1, most=3) == ["aaa", "aaa", "a"]
    # Of both parts of a cut each has two tokens; the second sentence would leave one.
    assert passages(["a", ".\n", "b", ".\n", "c"], least=2, most=4) == ["a.\n", "b.\nc"]


def test_without_markers_only_the_length_counts():
    assert passages(["a", " So", " b"], markers=()) == ["a So b"]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["a", " b", ".", "\n", " So", " ", "Wait", ",", "But", "", "。"]), max_size=60),
    st.integers(1, 6),
    st.integers(0, 10),
)
def test_the_passages_are_the_thought(texts, least, more):
    found = split(texts, MARKERS, least, least + more)
    assert [i for passage in found for i in passage] == list(range(len(texts)))
    assert all(0 < len(passage) <= least + more for passage in found)
    for before, passage in zip(found, found[1:-1], strict=False):
        assert len(passage) >= least or len(before) == least + more, "only what follows a cut is shorter"


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("001101001", [(2, 3, 4), (5, 6, 7)]),
        ("00110", []),  # a turn alone is the answer, even with an observation after it
        ("1011", [(0, 1)]),
        ("0", []),
        ("", []),
    ],
)
def test_the_chapters_are_the_turns_before_the_last_one(mask, expected):
    assert [tuple(chapter) for chapter in chapters(np.array(list(mask)) == "1")] == expected


def test_a_character_of_several_tokens_belongs_to_the_one_that_completes_it():
    vocabulary = {letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    ids = tokenizer.encode("aé So").ids
    assert token_texts(tokenizer, ids) == ["a", "", "é", " ", "S", "o"]
