"""Reward functions with TRL's signature: an example, and one for models with random weights."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any


def digits_in_answer(
    prompts: Sequence[Any],
    completions: Sequence[str | list[dict[str, str]]],
    completion_ids: Sequence[list[int]],
    **columns: Any,
) -> list[float]:
    """The share of digits among the characters after the thought, which even a random model earns now and then."""
    scores = []
    for completion in completions:
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        answer = text.rpartition("</think>")[2].strip()
        scores.append(sum(c.isdigit() for c in answer) / max(len(answer), 1))
    return scores


def noise(completions: Sequence[str | list[dict[str, str]]], **columns: Any) -> list[float]:
    """A number from 0 to 1 that depends on the whole text, so that nearly every group of answers trains something."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [zlib.crc32(text.encode("utf-8", "backslashreplace")) / 2**32 for text in texts]
