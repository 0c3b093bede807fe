"""The interface through which the loop gets the verified rollouts of a step. They come from engines
(engine_source.py), or from another run (replay.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_rl.data import ShuffledStream
from megatron_rl.ports import Sink
from megatron_rl.types import Metrics, Prompt, Rollouts


@dataclass(frozen=True, slots=True)
class Prompts:
    train: ShuffledStream[Prompt]
    heldout: Sequence[Prompt]
    """The prompts of evaluations; if it is empty, nothing is evaluated."""


class RolloutSource(Protocol):
    def pushed(self, version: int) -> None:
        """Note that the engines hold the weights that step `version` begins with, and evaluate them if an evaluation
        is due, with answers that are sampled as in training.

        Raises:
            StopRequested: the run was asked to stop meanwhile.
        """

    def next(self, step: int) -> Rollouts:
        """The rollouts of a step, whose weights the engines hold.

        Raises:
            StopRequested: the run was asked to stop meanwhile.
            ValueError: every verdict is an abstention, or a reward has been silent for too long.
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


class Through:
    """A source whose rollouts go through a function.

    Args:
        phase: the phase of the step that the function's time counts for.
        function: gets the rollouts and the step.
    """

    def __init__(
        self, source: RolloutSource, sink: Sink, phase: str, function: Callable[[Rollouts, int], Rollouts]
    ) -> None:
        self._source, self._sink, self._phase, self._function = source, sink, phase, function
        self.pushed, self.evaluated = source.pushed, source.evaluated
        self.state, self.restore = source.state, source.restore

    def next(self, step: int) -> Rollouts:
        rollouts = self._source.next(step)
        with self._sink.phase(self._phase):
            return self._function(rollouts, step)
