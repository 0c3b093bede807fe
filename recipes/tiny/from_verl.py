"""A reward function as it is written for verl's `custom_reward_function`."""

from __future__ import annotations

import re
from typing import Any


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    digit_score: float = 0.0,
) -> dict[str, Any]:
    """1 if the last number of the answer is the ground truth; else `digit_score` times the share of digits."""
    numbers = re.findall(r"-?\d+", solution_str)
    if numbers and numbers[-1] == ground_truth:
        return {"score": 1.0, "acc": True, "pred": numbers[-1]}
    share = sum(map(str.isdigit, solution_str)) / max(len(solution_str), 1)
    return {"score": digit_score * share, "acc": False, "pred": numbers[-1] if numbers else ""}
