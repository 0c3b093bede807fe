"""An example of a reward function with TRL's signature."""

from __future__ import annotations


def digits_in_answer(prompts, completions, completion_ids, **columns) -> list[float]:
    """The share of digits among the characters after the thought, which even a random model earns now and then."""
    scores = []
    for completion in completions:
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        answer = text.rpartition("</think>")[2].strip()
        scores.append(sum(c.isdigit() for c in answer) / max(len(answer), 1))
    return scores
