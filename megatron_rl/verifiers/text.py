"""The text reward: the text after the thought is compared with the row's `ground_truth` as text.

Invariants (tests/unit/verifiers): scores are between 0 and 1; equal texts score 1, except as a pattern; of several
ground truths the best one counts; it fails only if a row has no ground truth that can be compared.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable
from typing import Any

import regex  # type: ignore[import-untyped]

from megatron_rl.config.rewards import TextReward
from megatron_rl.types import Verdict
from megatron_rl.verifiers.truth import composed, texts_of

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
# ASCII's, and the punctuation of all scripts.
_PUNCTUATION = regex.compile(rf"[\p{{P}}{re.escape(string.punctuation)}]")


def normalised(text: str) -> str:
    """The text in lower case, without punctuation and English articles, with single spaces between words. The order of
    these steps is the same as in SQuAD's evaluation, which knows ASCII punctuation alone: `U.S.` becomes `us`."""
    return " ".join(_ARTICLES.sub(" ", _without_punctuation(text)).split())


def _without_punctuation(text: str) -> str:
    return " ".join(_PUNCTUATION.sub("", text.lower()).split())


def _lower(text: str) -> str:
    return " ".join(text.lower().split())


def form_of(truth: str) -> Callable[[str], str]:
    """The normalisation for comparing a ground truth: `normalised`, unless nothing would be left of it. The
    choice `A` keeps its article and `?!` its punctuation, because otherwise every empty answer would be right."""
    return next((form for form in (normalised, _without_punctuation) if form(truth)), _lower)


def f1(text: str, truth: str) -> float:
    """SQuAD's F1 (Rajpurkar et al. 2016, arXiv:1606.05250): the harmonic mean of precision and recall of the normalised
    words. Each word counts as often as it is in both texts. If a text has no words, it is 1 if the other one has none
    either, as in SQuAD 2.0; but a row whose ground truth is empty has none."""
    form = form_of(truth)
    words, expected = form(text).split(), form(truth).split()
    if not words or not expected:
        return float(words == expected)
    shared = (Counter(words) & Counter(expected)).total()
    return 2 * shared / (len(words) + len(expected))


def verify(cfg: TextReward, text: str, truth: Any) -> Verdict:
    """A pattern can take very long for some texts, which is why each answer has a deadline (`JudgedReward`)."""
    try:
        truths = list(map(composed, texts_of(truth, "text")))
    except ValueError as error:
        return Verdict(None, str(error), failed=True)
    found, expected = composed(text.strip()), [one.strip() for one in truths]
    if cfg.compare == "regex":
        return _matched(found, truths)
    if cfg.compare == "f1":
        return Verdict(max(f1(found, one) for one in expected))
    if cfg.compare == "normalised":
        forms = [(form_of(one), one) for one in expected]
        return Verdict(1.0) if any(form(found) == form(one) for form, one in forms) else Verdict(0.0, "other text")
    return Verdict(1.0) if found in expected else Verdict(0.0, "other text")


def _matched(text: str, patterns: list[str]) -> Verdict:
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(re.compile(pattern))
        except (re.error, OverflowError, RecursionError) as error:
            return Verdict(None, f"ground_truth {pattern!r} is no pattern of Python's re: {error}", failed=True)
    return Verdict(1.0) if any(one.fullmatch(text) for one in compiled) else Verdict(0.0, "no match")
