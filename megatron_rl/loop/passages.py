"""The metrics of the passages of thoughts (`rollout.prefix_values`), and a warning if thoughts have none."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from megatron_rl.ports import Sink
from megatron_rl.types import UTILITY, Group, Metrics

MANY = 0.5


def describe_passages(groups: Sequence[Group]) -> Metrics:
    """`passages/mean` is the number of rewarded passages of an answer, `passages/single` the share of answers with at
    most one, which adds no information to the reward of the whole answer. `passages/utility_mean` is the mean reward of
    a passage, and `passages/helpful` the share of passages with a reward above 0."""
    rewards = [[r.value for r in s.token_rewards if r.kind == UTILITY] for group in groups for s in group.rollouts]
    metrics = {
        "passages/mean": fmean(map(len, rewards)),
        "passages/single": fmean(len(own) <= 1 for own in rewards),
    }
    flat = [value for own in rewards for value in own]
    if flat:
        metrics |= {"passages/utility_mean": fmean(flat), "passages/helpful": fmean(value > 0 for value in flat)}
    return metrics


class UnsplitThoughts:
    """Warns once, in the first step, if many thoughts have no second passage."""

    def __init__(self) -> None:
        self._is_first = True

    def count(self, metrics: Metrics, sink: Sink) -> None:
        """Look at the metrics of a step."""
        single = metrics.get("passages/single", 0.0)
        if self._is_first and single > MANY:
            sink.warn(
                f"{single:.0%} of the answers have at most one passage of a thought, so that rollout.prefix_values "
                "rewards little more than the answer: do its markers occur in thoughts, is min_tokens too large, or do "
                "rows lack its column?"
            )
        self._is_first = False
