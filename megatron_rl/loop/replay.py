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
from megatron_rl.loop.rollouts import scores_of
from megatron_rl.loop.source import Rollouts
from megatron_rl.ports import Critic, Policy, Ports, Sink
from megatron_rl.types import Group, Metrics, Prompt, Tokens


def dump(folder: Path, step: int, rollouts: Rollouts, ports: Ports) -> None:
    """Write the rollouts of a step. The driver holds the tokens of one group at a time."""
    tokens = (ports.stream.tokens(group, with_routes=True) for group in rollouts.groups)
    write_step(folder, step, rollouts.groups, tokens, rollouts.scores.greedy_rewards, rollouts.metrics)


class ReplayedSource:
    """Hands out the rollouts that another run has written; a `RolloutSource`."""

    def __init__(self, config: GrpoRunConfig, folder: Path, sink: Sink) -> None:
        self._config, self._folder, self._sink = config, folder, sink

    def next(self, step: int) -> Rollouts:
        """
        Raises:
            ValueError: the folder has no rollouts of this step, or they are those of other rewards.
        """
        with self._sink.phase("generate"):
            saved = read_step(self._folder, step)
            num_rewards = len(self._config.rewards)
            [verdict, *_] = [sample.verdict for group in saved.groups for sample in group.samples]
            if verdict is None or len(verdict.parts) != num_rewards:
                raise ValueError(
                    f"rollout.replay: the answers in {self._folder} have other rewards than this run's {num_rewards}; "
                    f"give it the rewards of the run that wrote them"
                )
            return Rollouts(saved.groups, scores_of(self._config, saved.groups, saved.greedy_rewards), saved.metrics)

    def pushed(self, version: int) -> None:
        pass

    def evaluate(self, prompts: Sequence[Prompt], version: int) -> None:
        raise AssertionError("a run that replays has no held-out prompts")

    def evaluated(self) -> Metrics:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


def ports_without_engines(policy: Policy, critic: Critic | None = None) -> Ports:
    """The ports of a run that replays."""
    none: Any = _NoEngines()
    return Ports(policy, none, none, critic)


class _NoEngines:
    """What the loop asks of engines and bridge in a run that replays."""

    def push(self, version: int) -> Metrics:
        return {}

    def rejoin(self) -> None:
        pass

    def tokens(self, group: Group, with_routes: bool = False) -> Sequence[Tokens]:
        tokens: Sequence[Tokens] = group.payload
        return tokens
