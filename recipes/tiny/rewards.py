"""An example of a reward function with TRL's signature."""

from __future__ import annotations

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
