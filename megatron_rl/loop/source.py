"""The interface through which the loop gets the verified rollouts of a step. They come from engines
(engine_source.py), or from another run (replay.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_rl.types import Group, Metrics, Prompt, Scores


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The verified groups of one step."""

    groups: Sequence[Group]
    scores: Scores
    metrics: Metrics


class RolloutSource(Protocol):
    def next(self, step: int) -> Rollouts:
        """The rollouts of a step, whose weights the engines hold.

        Raises:
            StopRequested: the run was asked to stop meanwhile.
            ValueError: every verdict is an abstention, or a reward has been silent for too long.
        """

    def pushed(self, version: int) -> None:
        """Note that the engines hold the weights that step `version` begins with."""

    def evaluate(self, prompts: Sequence[Prompt], version: int) -> None:
        """Begin an evaluation of the weights that the engines hold, with answers that are sampled as in training.

        Raises:
            StopRequested: the run was asked to stop meanwhile.
        """

    def evaluated(self) -> Metrics:
        """Wait for the evaluation, and return its metrics; none if no evaluation was begun. It must be called before
        the next push.

        Raises:
            ValueError: every verdict is an abstention.
        """

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of the source, in JSON's types."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state`."""
