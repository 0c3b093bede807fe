"""The sources of a step's verified rollouts.

Invariant (tests/unit/loop): the rollouts of a step that the trainer interrupted are handed out again, not generated
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data import ShuffledStream
from megatron_rl.loop.budgets import ThoughtBudgets
from megatron_rl.loop.evaluation import describe_heldout
from megatron_rl.loop.rollouts import (
    EVALUATION_SEED,
    SilentRewards,
    answer_and_verify,
    scores_of,
    tell_common_reason,
    verified,
)
from megatron_rl.loop.stopping import Stopping
from megatron_rl.ports import Ports, Sink
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


class SynchronousSource:
    """Asks the next prompts when a step begins, and waits until all their answers are verified."""

    def __init__(
        self, config: GrpoRunConfig, ports: Ports, prompts: ShuffledStream[Prompt], sink: Sink, stopping: Stopping
    ) -> None:
        self._config, self._ports, self._prompts, self._sink, self._stopping = config, ports, prompts, sink, stopping
        self._silence = SilentRewards(config.rewards)
        self._budgets = ThoughtBudgets(config)
        self._verified: tuple[int, list[Group], Metrics] | None = None
        """The newest step and its groups, which outlive a policy that is lost in this step."""
        self._evaluation: Metrics = {}
        """The metrics of the evaluation that `evaluated` has not returned yet."""

    def next(self, step: int) -> Rollouts:
        numbered = self._prompts.take(self._config.rollout.prompts_per_step)
        asked = [self._budgets.give(prompt, number, step) for number, prompt in numbered]
        with self._stopping.promptly():
            if self._verified is None or self._verified[0] != step:
                self._verified = None
                groups, metrics = answer_and_verify(self._config, self._ports, asked, step, self._sink)
                self._verified = step, groups, metrics
                self._silence.count(groups, metrics, self._sink)
                tell_common_reason(groups, self._sink)
            _, groups, metrics = self._verified
            self._budgets.record(groups)
            return Rollouts(groups, scores_of(self._config, self._ports, groups, step, self._sink), dict(metrics))

    def pushed(self, version: int) -> None:
        pass

    def evaluate(self, prompts: Sequence[Prompt], version: int) -> None:
        with self._stopping.promptly():
            num_samples, phases = self._config.eval.samples_per_prompt, ("evaluate", "evaluate")
            seed = EVALUATION_SEED - 1
            groups, _ = verified(self._ports, self._sink, prompts, num_samples, version, seed, "evaluation", phases)
            self._evaluation = describe_heldout(self._config, groups)

    def evaluated(self) -> Metrics:
        metrics, self._evaluation = self._evaluation, {}
        return metrics

    def state(self) -> dict[str, Any]:
        return self._prompts.state() | {"thoughts": self._budgets.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """
        Raises:
            ValueError: the state is that of an asynchronous run, or of other data.
        """
        if "waiting" in state:
            raise ValueError(
                "the checkpoint is that of a run with rollout.max_lag or rollout.active_sampling, whose groups under "
                "way would be lost; resume with the same settings, or start a new run from its export"
            )
        self._prompts.restore(state)
        self._budgets.restore(state.get("thoughts", []))
        self._evaluation = {}  # it may be that of a later step, in which the policy was lost
