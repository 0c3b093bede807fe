from __future__ import annotations

import cover
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.types import Verdict
from megatron_rl.verifiers.instructions.checks import CHECKERS, KINDS, verify

ENGLISH = "the quick brown fox jumps over the lazy dog because it wants to reach the other side of the river"
GERMAN = "Der schnelle braune Fuchs springt über den faulen Hund, weil er auf die andere Seite des Flusses möchte."
HINDI = "यह वाक्य हिन्दी भाषा में लिखा गया है और इसमें कोई दूसरी भाषा नहीं है।"
REQUEST = "Name a colour."

# For each kind: (arguments, answers that follow the instruction, answers that do not).
CASES: dict[str, list[tuple[dict[str, object], list[str], list[str]]]] = {
    "keywords:existence": [
        ({"keywords": ["talented", "Tianjin"]}, ["Talented TIANJIN", "untalented\ntianjin"], ["talented", "tian jin"]),
        ({"keywords": ["a.c", "C++"]}, ["a.c in c++"], ["abc in C++", "a.c in C"]),
        ({"keywords": ["Straße"]}, ["STRASSE"], ["Strase"]),
    ],
    "keywords:frequency": [
        ({"keyword": "Art", "frequency": 2, "relation": "at least"}, ["Art, art", "start art", "art" * 3], ["art"]),
        ({"keyword": "art", "frequency": 2, "relation": "less than"}, ["art", "none"], ["art ART", "art" * 3]),
        ({"keyword": " a.t ", "frequency": 1, "relation": "at least"}, ["a.t"], ["art"]),
    ],
    "keywords:forbidden_words": [
        ({"forbidden_words": ["art", "C++"]}, ["start arts C", "C+ +"], ["Art!", "x C++ y", "`art`", "the-art-of"]),
        ({"forbidden_words": ["a.c"]}, ["abc"], ["(A.C)"]),
        ({"forbidden_words": ["हिन"]}, ["हिन्दी"], ["हिन भाषा"]),
    ],
    "keywords:letter_frequency": [
        ({"letter": "Q", "let_frequency": 2, "let_relation": "at least"}, ["q Q", "qqq"], ["q", "no"]),
        ({"letter": "q", "let_frequency": 2, "let_relation": "less than"}, ["q", "no"], ["qQ", "qqq"]),
        ({"letter": "#", "let_frequency": 4, "let_relation": "at least"}, ["## one\n## two"], ["### one"]),
        ({"letter": "é", "let_frequency": 1, "let_relation": "at least"}, ["É"], ["e"]),
    ],
    "language:response_language": [
        ({"language": "de"}, [GERMAN, "Ja", "größer"], [ENGLISH, HINDI, "12 + 3 = 15", "```\n```", "ça"]),
        ({"language": "hi"}, [HINDI, "हाँ"], [GERMAN, "🙂", "OK"]),
        ({"language": "zh"}, ["这句话是用中文写的，没有其他语言。", "你好"], [ENGLISH, "OK"]),
        ({"language": "ru"}, ["да"], ["OK"]),
        (
            {"language": "en"},
            [ENGLISH, "OK", "Yes.", "No.", "Hello", "Done", "Paris", "I am"],
            [GERMAN, "größer", "да", "Bonjour, comment allez-vous?", "42", "..."],
        ),
    ],
    "length_constraints:number_sentences": [
        ({"num_sentences": 3, "relation": "at least"}, ["A b. C d! E f?", "One.\nTwo.\nThree"], ["A b. C d!", "..."]),
        ({"num_sentences": 3, "relation": "less than"}, ["Dr. Who. J. Doe.", "one\ntwo\nthree"], ["No. I. Am."]),
    ],
    "length_constraints:number_paragraphs": [
        (
            {"num_paragraphs": 2},
            ["a\n***\nb", "a *** b", "***\na\n\nb\n* * *\nc\n***", "***Bold*** a\n***\nb"],
            ["a", "a\n***\n***\nb", "a\n***\nb\n***\nc", "a\n\nb", "***a***b", "a\n****\nb", "a\n******\nb"],
        ),
        ({"num_paragraphs": 1}, ["a", "***\na"], ["a *** b", "***"]),
    ],
    "length_constraints:number_words": [
        (
            {"num_words": 3, "relation": "at least"},
            ["one two three", "a-b c", "eins, zwei – drei!"],
            ["one two", "don't"],
        ),
        ({"num_words": 3, "relation": "less than"}, ["one two", "हिन्दी भाषा", "* one\n* two"], ["a b c", "`a` b\nc d"]),
    ],
    "length_constraints:nth_paragraph_first_word": [
        (
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Elm"},
            ["a\n\nelm trees", "a\n \nElm, b", "\n\na\n\n**ELM** b", "a\n\n\n\n'Elm' b", "a\r\n\r\nelm"],
            ["elm\n\na", "a\n\nelms", "a\nelm", "elm", "a\n\nelm\n\nb", "a\n\nthe elm", "a\n\nelm-tree"],
        ),
    ],
    "detectable_content:number_placeholders": [
        (
            {"num_placeholders": 2},
            ["[a] [b c]", "[name]\n[address]!", "`[x]` [y] [z]"],
            ["[a]", "[] [a]", "[ ] [b]", "[a\nb] [c]", "(a) (b)", "[a [b"],
        ),
    ],
    "detectable_content:postscript": [
        (
            {"postscript_marker": "P.S."},
            ["Bye.\nP.S. x", "p. s. x", "**P.S.** x"],
            ["PS x", "P.P.S. x", "P.S x", "ups."],
        ),
        ({"postscript_marker": "P.P.S"}, ["P.P.S. x", "P.P.S x", "p. p. s: x"], ["P.S. x", "P.P. x", "p.p.super"]),
        ({"postscript_marker": "Note (a):"}, ["a\nnote (a): x", "Note (a):x"], ["Note a: x", "Note (a) x"]),
    ],
    "detectable_format:number_bullet_lists": [
        (
            {"num_bullets": 2},
            ["* a\n* b", "Text\n  - a\n\t+ b", "* a\n---\n* b", "* a\n* * *\n* b", "* **a**\n*b* c\n- -5\n-5"],
            ["* a", "* a\n* b\n* c", "*a\n*b", "1. a\n2. b", "a * b\nc - d", "- \n* a", "• a\n• b"],
        ),
    ],
    "detectable_format:constrained_response": [
        (
            {},
            ["My answer is yes.", "I think so. My answer is maybe. My answer is maybe.", "**My answer is no.**"],
            ["yes", "my answer is yes.", "My answer is yes", "My answer is yes. My answer is no. My answer is maybe."],
        ),
    ],
    "detectable_format:number_highlighted_sections": [
        (
            {"num_highlights": 2},
            ["*a* and *b*", "**a b**\n*c*", "***a*** *b*", "* *a*\n* **b**", "**a *b* c** *d*"],
            ["*a*", "***a***", "* a\n* b\n", "*a\nb* *c*", "** ** *a*", "2 * 3 * 4 * 5", "_a_ _b_", "****"],
        ),
    ],
    "detectable_format:multiple_sections": [
        (
            {"section_spliter": "Section", "num_sections": 2},
            ["Section 1\na\nSection 2\nb", "**Section 1:** a **Section 2:** b", "Section 1 Section 2 Section 3"],
            ["Section 1", "SECTION 1\nSECTION 2", "Section one\nSection two", "Subsection 1 MySection 2"],
        ),
        ({"section_spliter": "Part (a.", "num_sections": 1}, ["Part (a. 1"], ["Part (ab 1"]),
    ],
    "detectable_format:json_format": [
        (
            {},
            [
                '{"a": [1, 2.5, null]}',
                '```json\n{"a": 1}\n```',
                "```\n[]\n```",
                ' "text" ',
                "1" * 5000,
                "\n```\n{}\n```\n",
                "[" * 200 + "]" * 200,
                '```JSON {"a":1}```',
                '{"a": "he said “hi”"}',
            ],
            [
                "{'a': 1}",
                "{“a”: 1}",
                '{"a": 1,}',
                'Here: {"a": 1}',
                "[NaN]",
                "```json\n{}",
                "{}\n{}",
                "```[1]abc",
                "[" * 201 + "]" * 201,
            ],
        ),
    ],
    "detectable_format:title": [
        (
            {},
            ["<<Joy>>\nText", "a <<A < B>> c", "# <<Title>>", "<<<x>>>"],
            ["<<>>", "<< >>", "<Joy>", "<<Joy\n>>", ">> a <<", "<<Joy", "Joy"],
        ),
    ],
    "combination:two_responses": [
        (
            {},
            ["a\n******\nb", "******\na\n******\nb\n******", "a,b******b"],
            ["a", "a\n******\na", "a\n******\n******\nb", "a\n******\nb\n******\nc", "a\n*****\nb", "a\n*******\nb"],
        ),
    ],
    "combination:repeat_prompt": [
        (
            {"prompt_to_repeat": f"{REQUEST}\n"},
            [f"{REQUEST} Blue.", f"  {REQUEST.upper()}\nBlue", REQUEST],
            ["Blue.", f"Sure! {REQUEST}", "Name a color. Blue", "Name a colour"],
        ),
    ],
    "startend:end_checker": [
        (
            {"end_phrase": "Peace!"},
            ["Love. Peace!", 'x PEACE!\n"', "peace! ", '"Love. Peace!"\n'],
            ["Peace! Bye", "Peace", "Peace!)", "Peace! x"],
        ),
    ],
    "startend:quotation": [
        ({}, ['"a"', ' "a "b" c"\n', "“a”"], ["a", '"a', 'a"', '"', '""', "'a'", '"a".', "```\na\n```"]),
    ],
    "change_case:capital_word_frequency": [
        (
            {"capital_frequency": 3, "capital_relation": "at least"},
            ["I SAW A cat", "ONE-TWO THREE É", "U.S. COVID-19 **OK**", "DON'T DO IT"],
            ["I SAW it", "Mc IIi II I", "1 2 3"],
        ),
        ({"capital_frequency": 3, "capital_relation": "less than"}, ["I SAW it", "no"], ["A B C", "A B C D"]),
    ],
    "change_case:english_capital": [
        (
            {},
            [
                ENGLISH.upper(),
                "THE PARADOX OF POWER AND RESPONSIBILITY WEIGHS HEAVILY ON HIM.",
                "NO.",
                "CAFÉ",
                "RÉSUMÉ SENT",
            ],
            [ENGLISH, GERMAN.upper(), "12", "GRÖSSER", "ДА"],
        )
    ],
    "change_case:english_lowercase": [
        (
            {},
            [ENGLISH, f"1. {ENGLISH}!", "bananas, apples, pears."],
            [ENGLISH.capitalize(), "größer.", GERMAN.lower(), HINDI, "12"],
        )
    ],
    "punctuation:no_comma": [({}, ["No comma; none.", "1'000"], ["a, b", "1,000", "`f(a,b)`", "这，那", "هذا، ذلك"])],
    "copy:repeat_phrase": [
        (
            {"phrase": "The early bird catches the worm", "small_n": 2},
            [
                "The early cat catches the worm. The late bird catches the worm.",
                "The early cat eats the worm. The old bird catches the worm. The late bird catches the worm.",
                "the early bird eats the worm\n**The early bird catches a worm**\nThe worm",
            ],
            [
                "The early cat catches the worm.",
                "The early bird catches the worm. The early cat catches the worm.",
                "The early cat eats the worm. The late bird catches the worm.",
                "A early bird catches the worm. The early bird catches the fish",
                "The old bird catches the worm. " * 3,
                "A early bird catches the worm. The old bird catches the worm.",
                "The early bird catches the fish. The old bird catches the worm.",
            ],
        ),
        (
            {"phrase": "one two three", "small_n": 1},
            ["Now: one big three"],
            ["Now: one two three", "one two big three"],
        ),
    ],
    **dict.fromkeys(
        ["copy:copy", "copy:copying_simple"],
        [
            (
                {"prompt_to_repeat": f"{REQUEST}\n"},
                [REQUEST, f"\n{REQUEST.upper()} "],
                [f"{REQUEST} Blue.", "Blue", f'"{REQUEST}"'],
            )
        ],
    ),
    "copy:copying_multiple": [
        (
            {"prompt_to_repeat": REQUEST, "N": 2},
            [f"{REQUEST}\n******\n{REQUEST}", f"{REQUEST}******{REQUEST.lower()}"],
            [REQUEST, "\n******\n".join([REQUEST] * 3), f"{REQUEST}\n***\n{REQUEST}", f"{REQUEST} {REQUEST}"],
        ),
    ],
    "new:copy_span_idx": [
        ({"prompt_to_repeat": REQUEST, "n_start": 5, "n_end": 7}, ["a c", " A C\n"], ["a co", "a", "ac", "Name"]),
        ({"prompt_to_repeat": REQUEST, "n_start": 0, "n_end": 0}, ["N"], ["Na"]),
        ({"prompt_to_repeat": REQUEST, "n_start": 0, "n_end": 13}, [REQUEST], [REQUEST[:-1]]),
    ],
    "detectable_format:sentence_hyphens": [
        (
            {},
            ["One is here.-Two is there.", "A well-known fact!-It ends", "Dr. Who came.-He left.", "\nJust one."],
            ["One. Two.", "One.- Two.", "One. -Two.", "One.-Two. Three.", "One.\nTwo.", "one\ntwo"],
        ),
    ],
    "detectable_format:square_brackets": [
        (
            {},
            ["[One] [two].", "[well-known],[it's]\n[me!]"],
            ["One", "[one two]", "[one] two", "one [two]", "[one]two", "!"],
        ),
    ],
    "detectable_format:bigram_wrapping": [
        (
            {},
            ["<<I am>> <<at home>>", "<<I am>>, <<at home>>.", "<<I am>> here", "<<I am>> <<here>>", "<<It's me.>>"],
            [
                "I",
                "I am",
                "<<I>> <<am>>",
                "<<I am here>>",
                "<I am>",
                "so <<I am>>",
                "<<I am>> at home",
                "<<I am>> a <<b c>>",
            ],
        ),
    ],
    "keywords:no_adjacent_consecutive": [
        (
            {},
            ["a cat", "bad apple", "1 2 3", "z a", "one, six", "а в"],
            ["a bee", "Big 'cat'", "so they", "а б", "x, Y"],
        ),
    ],
    "keywords:word_once": [({"keyword": "dog"}, ["A dog.", "Dogs and a DOG"], ["A cat", "d og"])],
    "keywords:word_count_different_numbers": [
        (
            {"keyword": "dog", "frequency": 2, "relation": "less than"},
            ["Dog, dog", "dogs dog hotdog DOG"],
            ["dog", "dog dog dog", "dogs dog"],
        ),
        ({"keyword": "dog", "frequency": 0}, ["dogs"], ["dog"]),
    ],
    "keywords:exclude_word_harder": [({"keyword": "dog"}, ["dogs"], ["a dog here", "Dog.", "the dog"])],
    "keywords:palindrome": [({}, ["my level.", "Anna", "(noon)"], ["a I", "oh no", "www III", "121", "ab ba"])],
    "keywords:keyword_specific_position": [
        (
            {"keyword": "dog", "n": 2, "m": 3},
            ["Hi. It's a dog.", "Hi, you! (The) big, DOG. No"],
            ["Hi. It's a big dog.", "It's a dog. Hi.", "Hi. A dog", "Hi. It is dogs", "dog"],
        ),
        ({"keyword": ["ice cream"], "n": 1, "m": 2}, ["Good ice cream."], ["Ice cream.", "Good ice"]),
    ],
    "keywords:start_end": [
        (
            {},
            ["Love is love\n", "**Love** is\nLOVE", "it's it’s"],
            ["Love is love.", "Love", "love is loved", "Love is **love**"],
        ),
    ],
    "paragraphs:paragraphs": [({}, ["a\n* * *\nb", "a\n***\nb\n\nc"], ["a\n\nb", "a", "a\n***\nb\n***\nc"])],
    "paragraphs:paragraphs2": [({}, ["a\n\nb", "\na\n\n\n b\nc\n\n"], ["a\nb", "a\n\nb\n\nc", "a\n***\nb"])],
    "first_word:first_word_sent": [
        (
            {"first_word": "So"},
            ["So it is. SO be it!", "so, one", "**So** it is.-So be it."],
            ["So it is. Be it so.", "Sore.", "Is it so", "!"],
        ),
        ({"first_word": ["So"]}, ["So it is."], ["It is."]),
    ],
    "first_word:first_word_answer": [
        ({"first_word": "yes"}, ["Yes, it is. No.", "**YES**", "yes"], ["It is, yes", "yesterday", "yes-men", "!"]),
    ],
    "last_word:last_word_sent": [
        ({"last_word": "it"}, ["Do it. Is this it?!", 'Say "IT".'], ["Do it. It is.", "Do that. Do it.", "bit", "!"]),
    ],
    "last_word:last_word_answer": [
        ({"last_word": "brief"}, ["In Brief.", "in brief**\n", "brief"], ["Brief it is", "debrief", "a-brief", "?"]),
    ],
    "punctuation:punctuation_dot": [({}, ["No dot!", "1,5"], ["A dot.", "3.14", "`a.b`", "..."])],
    "punctuation:punctuation_exclamation": [({}, ["None.", "¡no"], ["Yes!", "`a != b`"])],
    "count:lowercase_counting": [
        ({"N": 2}, ["one two THREE Four 5", "NONE", "well-known don't"], ["a b c", "one two DREI été", "`a` b, c"]),
    ],
    "count:counting_composition": [
        (
            {"n_sent": 2, "n_words": 3},
            ["Cats run fast. Dogs don't run.\n* * *\nI am here. You, there, no!\n***\nOne two three. Four 5 six."],
            [
                "Cats run fast. Dogs do run.\n* * *\nI am here. You are there.",
                "Cats run fast. Dogs do run.\n***\nI am here. You are there.\n***\nOne two three.",
                "Cats run fast. Dogs do run.\n***\nI am here. You are there.\n***\nOne two three. Four.",
                "Cats run fast. Dogs do run. A b c.\n***\nI am here. You are.\n***\nOne two three. Four 5 six.",
            ],
        ),
    ],
    "count:count_unique": [({}, ["One. Two, three.", "it's it"], ["One. one.", "a-b, a-b", "The cat the"])],
    "count:count_increment_word": [
        (
            {"keyword1": "cat", "keyword2": "dog"},
            ["Cat dog DOG", "dog cat dogs dog"],
            ["cat dog", "cat cat dog dog", "dog dog"],
        ),
    ],
    "letters:letter_counting": [
        ({"N": 3, "relation": "at least"}, ["abc", "a1b2c", "где"], ["ab", "12345"]),
        ({"N": 3, "relation": "less than"}, ["ab", "12345"], ["abc", "где", "abcd"]),
    ],
    "letters:letter_counting2": [
        ({"letter": "s", "let_frequency": 2, "let_relation": "at least"}, ["Sos", "sss"], ["so"]),
        ({"letter": "s", "let_frequency": 2, "let_relation": "less than"}, ["so"], ["sos"]),
    ],
}


def truth_of(kind: str, arguments: dict[str, object] | None = None) -> dict[str, object]:
    return {"instruction_id": [kind], "kwargs": [arguments]}


def test_every_kind_has_answers_that_follow_it_and_answers_that_do_not():
    assert set(CASES) == set(KINDS) == set(CHECKERS)
    assert len(KINDS) == 25 + 29
    assert all(case[1] and case[2] for cases in CASES.values() for case in cases)


@pytest.mark.parametrize("kind", CASES)
def test_answers_that_follow_an_instruction_and_answers_that_do_not(kind):
    for arguments, right, wrong in CASES[kind]:
        for answer in right:
            assert verify(answer, truth_of(kind, arguments), "all") == Verdict(1.0), (arguments, answer)
        for answer in wrong:
            verdict = verify(answer, truth_of(kind, arguments), "all")
            assert verdict == Verdict(0.0, f"not followed: {kind}"), (arguments, answer)


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("answer", ["", " \n\t"])
def test_an_empty_answer_follows_nothing(kind, answer):
    for arguments, _, _ in CASES[kind]:
        assert verify(answer, truth_of(kind, arguments), "share") == Verdict(0.0, "the answer is empty")


HOSTILE = ["a" * 100_000, "." * 99_999 + "x", "*a " * 33_333, "[<<" * 33_333, "\n \n-" * 25_000, "A.-1. B\n" * 12_500]


@pytest.mark.parametrize("kind", cover.essential(CASES, *[*CASES][::3]))
def test_long_hostile_answers_are_judged(kind):
    """A regular expression or a loop that takes quadratic time would need minutes for each of these."""
    arguments, _, _ = CASES[kind][0]
    for answer in HOSTILE:
        verdict = verify(answer, truth_of(kind, arguments), "all")
        assert verdict.score in (0.0, 1.0), verdict


BOUNDED = [
    ("keywords:frequency", "frequency", "relation", {"keyword": "a"}),
    ("keywords:letter_frequency", "let_frequency", "let_relation", {"letter": "a"}),
    ("length_constraints:number_sentences", "num_sentences", "relation", {}),
    ("length_constraints:number_words", "num_words", "relation", {}),
    ("change_case:capital_word_frequency", "capital_frequency", "capital_relation", {}),
    ("letters:letter_counting", "N", "relation", {}),
    ("letters:letter_counting2", "let_frequency", "let_relation", {"letter": "a"}),
]


@pytest.mark.parametrize(("kind", "bound", "relation", "others"), BOUNDED)
@settings(max_examples=40)
@given(text=st.text("aA .!\n-,", min_size=1).filter(str.strip), number=st.integers(0, 6))
def test_an_answer_has_either_at_least_a_number_or_less(kind, bound, relation, others, text, number):
    def follows(which: str, limit: int) -> bool:
        return verify(text, truth_of(kind, {**others, bound: limit, relation: which}), "all").score == 1.0

    assert follows("at least", number) != follows("less than", number)
    assert follows("at least", 0)
    assert follows("at least", number) or not follows("at least", number + 1)
