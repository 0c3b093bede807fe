"""The metrics of the generation for a step: the engines' speed and idle time, and what the verifiers measured."""

from __future__ import annotations

from megatron_rl.ports import Collected
from megatron_rl.types import Metrics
from megatron_rl.verifiers.metrics import merged

NUM_HELD = 2
"""The number of steps whose groups and metrics are kept after use, because a lost policy may go back to the state
before these steps."""


class GenerationMetrics:
    def __init__(self, num_engines: int) -> None:
        self._num_engines = num_engines
        self._scorings: list[tuple[Metrics, int]] = []
        """The metrics and the number of answers of each scoring since the last step."""
        self._of_steps: dict[int, list[tuple[Metrics, int]]] = {}
        """The scorings of the last NUM_HELD steps."""
        self._num_tokens = 0
        """The number of tokens in the answers that were collected since the last step."""

    def count(self, collected: Collected) -> None:
        rollouts = [rollout for group in collected.groups.values() for rollout in group.rollouts]
        self._scorings.append((collected.metrics, sum(group.num_answers for group in collected.groups.values())))
        self._num_tokens += sum(rollout.num_new_tokens for rollout in rollouts)

    def forget(self) -> None:
        """Forget what was counted since the last step, because it does not belong to one."""
        self._scorings, self._num_tokens = [], 0

    def of_step(self, step: int) -> Metrics:
        """Since the last step. A step that is done again, with the groups that it had, has the metrics that it had."""
        scorings = self._scorings or self._of_steps.get(step, [])
        num_tokens = self._num_tokens
        self.forget()
        self._of_steps = {s: own for s, own in self._of_steps.items() if step - NUM_HELD < s < step}
        self._of_steps[step] = scorings
        metrics = merged([part for part, _ in scorings], [size for _, size in scorings])
        idle_s, span_s = metrics.pop("stream/idle_s", 0.0), metrics.pop("stream/span_s", 0.0)
        if span_s:  # otherwise all groups were there, none was collected, and nothing is known of the engines
            metrics["rollout/tokens_per_s"] = num_tokens / span_s
            metrics["rollout/idle"] = idle_s / (span_s * self._num_engines)
        return metrics
