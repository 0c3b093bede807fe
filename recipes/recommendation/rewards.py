"""Rewards of recommended items, with TRL's signature.

A completion is a thought, `</think>`, `<item>` and the tokens of an item. The row's column `items` has the texts of all
right items. The samples of a thought are adjacent, the best beam first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

CLOSE, ITEM = "</think>", "<item>"


def hit(
    completions: Sequence[str], items: Sequence[list[str]], log_extra: Callable[[str, list[int]], None], **columns: Any
) -> list[float]:
    """1 if the item is one of the right ones, else 0. It reports their number, and an evaluation computes recall@k from
    it."""
    log_extra("num_relevant", [len(right) for right in items])
    return _hits(completions, items)


def first_hit(
    prompts: Sequence[Any], completions: Sequence[str], items: Sequence[list[str]], **columns: Any
) -> list[float]:
    """Whether the first item of the thought is right, for all items of a thought alike."""
    return _by_thought(prompts, completions, items, lambda hits: hits[0])


def hit_share(
    prompts: Sequence[Any], completions: Sequence[str], items: Sequence[list[str]], **columns: Any
) -> list[float]:
    """The share of the thought's items that are right, for all items of a thought alike."""
    return _by_thought(prompts, completions, items, lambda hits: sum(hits) / len(hits))


def levels(completions: Sequence[str], items: Sequence[list[str]], **columns: Any) -> list[float]:
    """The share of the item's codes, from the first level on, that agree with the nearest right item."""
    scores = []
    for text, right in zip(completions, items, strict=True):
        codes = _codes(_item(text))
        agreements = [_agreement(codes, _codes(one)) / len(_codes(one)) for one in right]
        scores.append(max(agreements))
    return scores


def form(completions: Sequence[str], **columns: Any) -> list[float]:
    """1 if the thought is one genre and nothing else, else 0."""
    return [float(re.fullmatch(r"<a_\d+>", text.partition(CLOSE)[0]) is not None) for text in completions]


def _item(text: str) -> str:
    """The text of the item; empty if there is none."""
    return text.partition(CLOSE)[2].partition(ITEM)[2]


def _codes(item: str) -> list[str]:
    return re.findall(r"<[^>]+>", item)


def _agreement(codes: list[str], others: list[str]) -> int:
    """The number of codes before the first one that differs."""
    for number, (one, other) in enumerate(zip(codes, others, strict=False)):
        if one != other:
            return number
    return min(len(codes), len(others))


def _hits(completions: Sequence[str], items: Sequence[list[str]]) -> list[float]:
    return [float(_item(text) in right) for text, right in zip(completions, items, strict=True)]


def _by_thought(
    prompts: Sequence[Any],
    completions: Sequence[str],
    items: Sequence[list[str]],
    value: Callable[[list[float]], float],
) -> list[float]:
    """A value of the hits of each thought, for each of its items."""
    hits = _hits(completions, items)
    thoughts = groupby(range(len(hits)), key=lambda i: (prompts[i], completions[i].partition(ITEM)[0]))
    scores: list[float] = []
    for _, indices in thoughts:
        own = [hits[i] for i in indices]
        scores += [value(own)] * len(own)
    return scores
