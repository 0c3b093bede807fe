"""The kinds of verifiable instructions, one function each: (text of the answer, arguments) -> whether it is followed.

The 25 kinds of IFEval are defined by Zhou et al., "Instruction-Following Evaluation for Large Language Models",
arXiv:2311.07911, and its published checkers; the 29 kinds of IFTrain by Pyatkin et al., "Generalizing Verifiable
Instruction Following", arXiv:2507.02833, table 9, and the checkers in open-instruct. `checks.py` has the table of
their names.

Invariants: a function's result depends on its arguments alone; its annotations say which arguments a row must give, and
are checked before it runs; it raises ValueError for arguments that contradict each other; it takes linear time. The
whole answer is judged: code blocks and Markdown are text like any other.

The published checkers judge some answers differently than the sentence in the prompt demands. That sentence is the
definition here. These are all differences:
- Keywords, markers and phrases are literal text; they were regular expressions. A whole word may begin or end with any
  character (`C++`). A combining mark belongs to its word, so words in Hindi are not cut into pieces.
- Nothing is drawn at random when an argument is missing or out of range: that is an error. `letter` may be any one
  character, as in two rows of IFEval.
- Language: langdetect runs with a fixed seed and order of profiles. An answer without letters is in no language; it
  counted as followed. Words in capitals, which langdetect mostly ignores, are made lower case for `english_capital`.
  `zh` stands for both forms of Chinese. Fewer than 12 letters count as every language that is written in them, because
  langdetect takes `OK` for Slovak. Fewer than 50 letters, all of them ASCII, count as English for `english_capital` and
  `english_lowercase`.
- Accents are composed, and quotation marks, apostrophes, hyphens and spaces have one form on both sides
  (`truth.composed`), so `café`, `don't` and `well-known` are found however they are written.
- Sentences are split by the rules of `text.sentences`, without trained data.
- Words in capitals or lower case, and the words of all IFTrain kinds, follow `text.words`:
  punctuation is never a word, `don't` is one word. Only `number_words` counts runs of word characters, as published.
- Dividers `***` and `* * *` mean the same, and stand between white space; `***bold***` is no divider. Six asterisks are
  exactly six.
- `nth_paragraph_first_word` numbers the paragraphs that it counts; it counted without blank ones, but numbered with
  them. A line of white space is blank. Markdown before the first word is ignored.
- `number_bullet_lists`: a bullet is `*`, `-` or `+`, white space, and text; dividers and emphasis at the beginning of a
  line are none. `number_highlighted_sections` counts `***text***` once, and no asterisk next to white space.
- `number_placeholders`: brackets hold text. `quotation`: so do the quotation marks, and they may be typographic.
  `no_comma`: the commas of Arabic and East Asian scripts are commas.
- `constrained_response`: exactly one of the three options is in the answer; all three together counted as followed.
- `json_format`: a fence of backticks is closed; NaN and Infinity are not JSON; at most 200 brackets are nested.
- `postscript`: P.P.S. is not P.S. `multiple_sections`: the marker is not the end of a longer word.
- `word_once`: the prompt says to include the keyword, so more than once is right too. `word_count_different_numbers`:
  the prompt says exactly how often, so `relation` is not used. Counts of this kind and of `count_increment_word` are of
  whole words. `exclude_word_harder` also finds the word next to punctuation, and ignores case.
- `copy_span_idx` includes the character at `n_end`, as the prompt says.
- `letter_counting` counts the letters of every script. `lowercase_counting` counts the words of every script.
- `repeat_phrase` ignores case, and text between the repetitions that only shares the phrase's first and last word.
- `sentence_hyphens` allows hyphens inside words. `square_brackets` and `bigram_wrapping` allow punctuation outside the
  brackets; the last word of an odd number may stand alone, but there is at least one bigram.
- `no_adjacent_consecutive` compares letters only, not digits or punctuation.
- `counting_composition` counted the period of a sentence as a word, so that no correct answer was accepted;
  `count_unique` did too. `count_unique` ignores case.
- `palindrome`: a word of three or more letters that are not all the same; `a` and `I` were palindromes.
- `keyword_specific_position` ignores case.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Annotated, Any, Literal, NoReturn

import regex  # type: ignore[import-untyped]
from pydantic import BeforeValidator, Field, StringConstraints

from megatron_rl.verifiers.instructions.language import known_languages, may_be_english, may_be_in
from megatron_rl.verifiers.instructions.text import (
    DIVIDER,
    RUN,
    SIX_ASTERISKS,
    boundaries,
    folded_words,
    paragraphs,
    parts_between,
    sentences,
    words,
)


def _single(value: Any) -> Any:
    """The public rows of IFTrain hold some words as a list of one word."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


Relation = Literal["at least", "less than"]
Count = Annotated[int, Field(ge=0)]
Position = Annotated[int, Field(ge=1)]
Letter = Annotated[str, StringConstraints(min_length=1, max_length=1)]
Phrase = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True), BeforeValidator(_single)]
Phrases = Annotated[list[Phrase], Field(min_length=1)]
Request = Annotated[str, StringConstraints(min_length=1)]

OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
COMMAS = frozenset(",，､、،")
MAX_JSON_DEPTH = 200
"""JSON with more nested brackets is not read: how many Python could read depends on the depth of its own calls."""
QUOTATION_MARKS = ('""', "“”")
BULLET = re.compile(r"\s*[*+-]\s+\S")
HIGHLIGHT = re.compile(r"(?<!\*)(\*{1,3})(?![\s*])[^*\n]++(?<!\s)\1(?!\*)")
PLACEHOLDER = re.compile(r"\[([^\[\]\n]+)\]")
BRACKETED_WORD = re.compile(r"\[[^\[\]\s]+\]")
BRACKETED_BIGRAM = re.compile(r"<<\s*[^<>\s]+\s+[^<>\s]+\s*>>")


def _compare(count: int, relation: Relation, bound: int) -> bool:
    return count >= bound if relation == "at least" else count < bound


def _num_whole_words(text: str, keyword: str) -> int:
    """How often a keyword is in a text, in upper or lower case, where no word goes on at its ends."""
    return len(regex.findall(rf"(?<!\w){regex.escape(keyword)}(?!\w)", text, flags=regex.IGNORECASE))


def _words_of(argument: str) -> list[str]:
    """The words of an argument that stands for a word."""
    found = folded_words(argument)
    if not found:
        raise ValueError(f"{argument!r} has no letter and no digit, so it is not a word")
    return found


def _begins(text: str, word: str) -> bool:
    expected = _words_of(word)
    return folded_words(text)[: len(expected)] == expected


def _ends(text: str, word: str) -> bool:
    expected = _words_of(word)
    return folded_words(text)[-len(expected) :] == expected


def _is_copy(text: str, original: str) -> bool:
    return text.strip().casefold() == original.strip().casefold()


# IFEval: keywords and letters


def existence(text: str, /, *, keywords: Phrases) -> bool:
    """All keywords are in the answer, possibly inside longer words."""
    folded = text.casefold()
    return all(keyword.casefold() in folded for keyword in keywords)


def frequency(text: str, /, *, keyword: Phrase, frequency: Count, relation: Relation) -> bool:
    """The keyword is in the answer so often; occurrences inside longer words count."""
    return _compare(text.casefold().count(keyword.casefold()), relation, frequency)


def forbidden_words(text: str, /, *, forbidden_words: Phrases) -> bool:
    """None of the words is in the answer as a whole word."""
    return not any(_num_whole_words(text, word) for word in forbidden_words)


def letter_frequency(text: str, /, *, letter: Letter, let_frequency: Count, let_relation: Relation) -> bool:
    """The letter, or other character, is in the answer so often, in upper or lower case."""
    return _compare(text.lower().count(letter.lower()), let_relation, let_frequency)


# IFEval: language and case


def response_language(text: str, /, *, language: Phrase) -> bool:
    """The answer is in the language with this code, ISO 639-1."""
    if language != "zh" and language not in known_languages():
        raise ValueError(f"language: {language!r} is none of {', '.join(sorted(known_languages()))}")
    return may_be_in(language, text)


def english_capital(text: str, /) -> bool:
    """The answer is in English, in capital letters."""
    return text.isupper() and may_be_english(text.lower())


def english_lowercase(text: str, /) -> bool:
    """The answer is in English, in lower-case letters."""
    return text.islower() and may_be_english(text)


def capital_word_frequency(text: str, /, *, capital_frequency: Count, capital_relation: Relation) -> bool:
    """The answer has the given number of words whose letters are all capital letters; `I` and `A` are such words."""
    return _compare(sum(word.isupper() for word in words(text)), capital_relation, capital_frequency)


# IFEval: length


def number_sentences(text: str, /, *, num_sentences: Count, relation: Relation) -> bool:
    return _compare(len(sentences(text)), relation, num_sentences)


def number_words(text: str, /, *, num_words: Count, relation: Relation) -> bool:
    return _compare(len(RUN.findall(text)), relation, num_words)


def number_paragraphs(text: str, /, *, num_paragraphs: Position) -> bool:
    """Dividers `***` separate exactly the given number of paragraphs, none of them empty."""
    return len(parts_between(DIVIDER, text)) == num_paragraphs


def nth_paragraph_first_word(
    text: str, /, *, num_paragraphs: Position, nth_paragraph: Position, first_word: Phrase
) -> bool:
    """Blank lines separate the given number of paragraphs, and the nth, counted from 1, begins with the word."""
    if nth_paragraph > num_paragraphs:
        raise ValueError(f"nth_paragraph is {nth_paragraph}, but num_paragraphs is {num_paragraphs}")
    found = paragraphs(text)
    return len(found) == num_paragraphs and _begins(found[nth_paragraph - 1], first_word)


# IFEval: content and format


def number_placeholders(text: str, /, *, num_placeholders: Count) -> bool:
    """At least the given number of placeholders like [address]."""
    return sum(bool(content.strip()) for content in PLACEHOLDER.findall(text)) >= num_placeholders


def postscript(text: str, /, *, postscript_marker: Phrase) -> bool:
    """The answer has the marker of a postscript. A space may follow each period of the marker but the last."""
    marker = re.escape(postscript_marker[:-1]).replace(r"\.", r"\.\s?") + re.escape(postscript_marker[-1])
    after = r"(?!\w)" if postscript_marker[-1].isalnum() else ""
    return re.search(rf"(?<![\w.]){marker}{after}", text, flags=re.IGNORECASE) is not None


def number_bullet_lists(text: str, /, *, num_bullets: Count) -> bool:
    """Exactly the given number of bullet points of Markdown."""
    # A line with a marker alone, such as `* * *`, is a divider.
    bullets = [line for line in text.splitlines() if BULLET.match(line) and len(set(line.split())) > 1]
    return len(bullets) == num_bullets


def constrained_response(text: str, /) -> bool:
    """Exactly one of the three options is in the answer."""
    return sum(option in text for option in OPTIONS) == 1


def number_highlighted_sections(text: str, /, *, num_highlights: Count) -> bool:
    """At least the given number of parts of a line are *highlighted* or **highlighted**."""
    return sum(1 for _ in HIGHLIGHT.finditer(text)) >= num_highlights


def multiple_sections(text: str, /, *, section_spliter: Phrase, num_sections: Count) -> bool:
    """At least the given number of section marks, such as `Section 1`, in the upper and lower case of the marker."""
    return len(re.findall(rf"(?<!\w){re.escape(section_spliter)}\s?\d+", text)) >= num_sections


def json_format(text: str, /) -> bool:
    """The answer is JSON, possibly inside a fence of three backticks."""

    def not_json(constant: str) -> NoReturn:
        raise ValueError(f"JSON has no {constant}")

    content = text.strip()
    if content.startswith("```") and content.endswith("```"):
        content = content[3:-3]
        content = content[4:] if content[:4].casefold() == "json" else content
    depths = itertools.accumulate((c in "[{") - (c in "]}") for c in content)
    if max(depths, default=0) > MAX_JSON_DEPTH:
        return False
    try:
        json.loads(content, parse_int=str, parse_float=str, parse_constant=not_json)
    except ValueError:
        return False
    return True


def title(text: str, /) -> bool:
    """A line of the answer has a title in double angular brackets."""
    spans = [(line, line.find("<<"), line.rfind(">>")) for line in text.split("\n")]
    return any(0 <= start < end and line[start:end].strip("< >\t") for line, start, end in spans)


# IFEval: combinations, beginning and end, punctuation


def two_responses(text: str, /) -> bool:
    """Six asterisks separate two different answers."""
    parts = parts_between(SIX_ASTERISKS, text)
    return len(parts) == 2 and parts[0] != parts[1]


def repeat_prompt(text: str, /, *, prompt_to_repeat: Request) -> bool:
    """The answer begins with the request, in upper or lower case."""
    return text.strip().casefold().startswith(prompt_to_repeat.strip().casefold())


def end_checker(text: str, /, *, end_phrase: Phrase) -> bool:
    """The answer ends with the phrase, in upper or lower case; quotation marks around the answer are ignored."""
    return text.strip().strip('"').rstrip().casefold().endswith(end_phrase.casefold())


def quotation(text: str, /) -> bool:
    """Double quotation marks are around the whole answer."""
    content = text.strip()
    return len(content) > 2 and content[0] + content[-1] in QUOTATION_MARKS


def no_comma(text: str, /) -> bool:
    return COMMAS.isdisjoint(text)


# IFTrain: copies


def is_copy(text: str, /, *, prompt_to_repeat: Request) -> bool:
    """The answer is the request and nothing else, in upper or lower case."""
    return _is_copy(text, prompt_to_repeat)


def copying_multiple(text: str, /, *, prompt_to_repeat: Request, N: Position) -> bool:
    """The answer is the request N times, with six asterisks between them."""
    parts = SIX_ASTERISKS.split(text)
    return len(parts) == N and all(_is_copy(part, prompt_to_repeat) for part in parts)


def copy_span_idx(text: str, /, *, prompt_to_repeat: Request, n_start: Count, n_end: Count) -> bool:
    """The answer is what stands from character n_start, counted from 0, to character n_end of the request."""
    if not n_start <= n_end < len(prompt_to_repeat):
        raise ValueError(
            f"n_start {n_start} and n_end {n_end} are not a span of the {len(prompt_to_repeat)} characters of "
            "prompt_to_repeat"
        )
    return _is_copy(text, prompt_to_repeat[n_start : n_end + 1])


def repeat_phrase(text: str, /, *, phrase: Phrase, small_n: Position) -> bool:
    """The phrase is repeated exactly so often, each time with exactly one of its inner words replaced."""
    original, found = folded_words(phrase), folded_words(text)
    if len(original) < 3:
        raise ValueError(f"phrase: {phrase!r} has no word between its first and its last that could be replaced")
    size, start, num_replaced = len(original), 0, []
    while start + size <= len(found):
        part = found[start : start + size]
        replaced = sum(a != b for a, b in zip(original, part, strict=True))
        is_repetition = part[0] == original[0] and part[-1] == original[-1] and replaced <= 1
        if is_repetition:
            num_replaced.append(replaced)
        start += size if is_repetition else 1
    return num_replaced == [1] * small_n


# IFTrain: format and punctuation


def sentence_hyphens(text: str, /) -> bool:
    """A hyphen and nothing else is between each two sentences, and there is no line break."""
    content = text.strip()
    return len(content.splitlines()) <= 1 and all(content[end:start] == "-" for end, start in boundaries(content))


def square_brackets(text: str, /) -> bool:
    """Every word is in square brackets of its own."""
    return BRACKETED_WORD.search(text) is not None and not words(BRACKETED_WORD.sub(" ", text))


def bigram_wrapping(text: str, /) -> bool:
    """Every two words are in double angular brackets; the last word of an odd number may stand alone."""
    *between, rest = BRACKETED_BIGRAM.split(text)
    return bool(between) and not any(words(part) for part in between) and len(words(rest)) <= 1


def punctuation_dot(text: str, /) -> bool:
    return "." not in text


def punctuation_exclamation(text: str, /) -> bool:
    return "!" not in text


def two_paragraphs(text: str, /) -> bool:
    """A divider `***` or `* * *` separates two paragraphs."""
    return len(parts_between(DIVIDER, text)) == 2


def two_paragraphs2(text: str, /) -> bool:
    """A blank line separates two paragraphs."""
    return len(paragraphs(text)) == 2


# IFTrain: keywords and words


def word_once(text: str, /, *, keyword: Phrase) -> bool:
    return existence(text, keywords=[keyword])


def word_count_different_numbers(
    text: str, /, *, keyword: Phrase, frequency: Count, relation: Relation | None = None
) -> bool:
    """The keyword is in the answer exactly so often as a whole word. The prompt does not tell the model the relation,
    so it is not used."""
    return _num_whole_words(text, keyword) == frequency


def exclude_word_harder(text: str, /, *, keyword: Phrase) -> bool:
    return forbidden_words(text, forbidden_words=[keyword])


def count_increment_word(text: str, /, *, keyword1: Phrase, keyword2: Phrase) -> bool:
    """The first keyword is in the answer once, the second twice, as whole words."""
    return _num_whole_words(text, keyword1) == 1 and _num_whole_words(text, keyword2) == 2


def keyword_specific_position(text: str, /, *, keyword: Phrase, n: Position, m: Position) -> bool:
    """The mth word of the nth sentence is the keyword; both are counted from 1."""
    expected, found = _words_of(keyword), sentences(text)
    return len(found) >= n and folded_words(found[n - 1])[m - 1 : m - 1 + len(expected)] == expected


def no_adjacent_consecutive(text: str, /) -> bool:
    """No word begins with the letter that follows the first letter of the word before it in the alphabet."""
    first = [word[0] for word in folded_words(text)]
    return not any(a.isalpha() and ord(b) - ord(a) == 1 for a, b in itertools.pairwise(first))


def palindrome(text: str, /) -> bool:
    """The answer has a word of three or more letters, not all the same, that is the same backwards."""
    return any(word.isalpha() and word == word[::-1] and len(set(word)) > 1 for word in RUN.findall(text.casefold()))


def start_end(text: str, /) -> bool:
    """The answer begins and ends with the same word, after which there is nothing, not even punctuation."""
    found = folded_words(text)
    return len(found) >= 2 and found[0] == found[-1] and bool(words(text.rstrip()[-1]))


def first_word_sent(text: str, /, *, first_word: Phrase) -> bool:
    """Every sentence begins with the word."""
    return all(_begins(sentence, first_word) for sentence in sentences(text) or [""])


def first_word_answer(text: str, /, *, first_word: Phrase) -> bool:
    return _begins(text, first_word)


def last_word_sent(text: str, /, *, last_word: Phrase) -> bool:
    """Every sentence ends with the word, before its punctuation."""
    return all(_ends(sentence, last_word) for sentence in sentences(text) or [""])


def last_word_answer(text: str, /, *, last_word: Phrase) -> bool:
    return _ends(text, last_word)


# IFTrain: counts


def lowercase_counting(text: str, /, *, N: Count) -> bool:
    """At most N words have lower-case letters only."""
    return sum(word.islower() for word in words(text)) <= N


def letter_counting(text: str, /, *, N: Count, relation: Relation) -> bool:
    return _compare(sum(map(str.isalpha, text)), relation, N)


def counting_composition(text: str, /, *, n_sent: Position, n_words: Position) -> bool:
    """Dividers separate three paragraphs of n_sent sentences each, and every sentence has n_words words."""
    found = [sentences(part) for part in parts_between(DIVIDER, text)]
    return len(found) == 3 and all(
        len(part) == n_sent and all(len(words(sentence)) == n_words for sentence in part) for part in found
    )


def count_unique(text: str, /) -> bool:
    """No word is in the answer twice, in upper or lower case."""
    found = folded_words(text)
    return len(set(found)) == len(found)
