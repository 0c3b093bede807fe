"""Reward functions as they are written for TRL's GRPOTrainer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import TrainerState

Turns = list[dict[str, str]]


def accuracy(
    completions: Sequence[Turns],
    solution: Sequence[str],
    log_metric: Callable[[str, float], None] | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **kwargs: Any,
) -> list[float]:
    """1 if the last number of a completion is the row's `solution`, else 0."""
    numbers = [re.findall(r"-?\d+", completion[0]["content"]) for completion in completions]
    found = [each[-1] if each else None for each in numbers]
    if log_extra:
        log_extra("found", found)
    if log_metric:
        log_metric("has_number", sum(number is not None for number in found) / len(found))
    return [float(number == truth) for number, truth in zip(found, solution, strict=True)]


async def digits(completions: Sequence[Turns], trainer_state: TrainerState, **kwargs: Any) -> list[float]:
    """The share of digits, which even a random model earns now and then; it counts less as the training goes on."""
    weight = 1 - trainer_state.global_step / trainer_state.max_steps
    texts = [completion[0]["content"] for completion in completions]
    return [weight * sum(map(str.isdigit, text)) / max(len(text), 1) for text in texts]
