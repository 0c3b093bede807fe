"""Rollouts that are written in one run and trained on in another.

Invariant (tests/e2e): a run that replays the rollouts of a run with the same configuration computes its losses to the
bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data.saved_rollouts import read_step, write_step
from megatron_rl.loop.rollouts import verdicts_of
from megatron_rl.ports import Policy, Ports, Sink, Stream
from megatron_rl.types import Group, Metrics, Rollouts, Tokens


def dump(folder: Path, stream: Stream, rollouts: Rollouts, step: int) -> Rollouts:
    """Write the rollouts of a step, and return them. The driver holds the tokens of one group at a time."""
    tokens = (stream.tokens(group, with_routes=True) for group in rollouts.groups)
    write_step(folder, step, rollouts, tokens)
    return rollouts


class ReplayedSource:
    """Hands out the rollouts that another run has written; a `RolloutSource`."""

    def __init__(self, config: GrpoRunConfig, folder: Path, sink: Sink) -> None:
        self._config, self._folder, self._sink = config, folder, sink

    def next(self, step: int) -> Rollouts:
        """
        Raises:
            ValueError: the folder has no rollouts of this step, or they were scored by other rewards.
        """
        with self._sink.phase("generate"):
            saved = read_step(self._folder, step)
            num_rewards = len(self._config.rewards)
            [verdict, *_] = verdicts_of(saved.groups)
            if len(verdict.parts) != num_rewards:
                raise ValueError(
                    f"rollout.replay: the answers in {self._folder} have other rewards than this run's {num_rewards}; "
                    f"give it the rewards of the run that wrote them"
                )
            return saved

    def pushed(self, version: int) -> None:
        pass

    def evaluated(self) -> Metrics:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


def ports_without_engines(policy: Policy) -> Ports:
    """The ports of a run that replays."""
    none: Any = _NoEngines()
    return Ports(policy, none, none)


class _NoEngines:
    """What the loop asks of engines and bridge in a run that replays."""

    def push(self, version: int) -> Metrics:
        return {}

    def rejoin(self) -> None:
        pass

    def tokens(self, group: Group, with_routes: bool = False) -> Sequence[Tokens]:
        tokens: Sequence[Tokens] = group.payload
        return tokens
