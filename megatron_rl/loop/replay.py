"""Rollouts that are written in one run and trained on in another.

Invariant (tests/e2e): a run that replays the rollouts of a run with the same configuration computes its losses to the
bit, and so does every other metric but the ones of engines and verifiers at work.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data.saved_rollouts import read_step, remove_step, write_step
from megatron_rl.ports import Policy, Ports, Sink, Stream
from megatron_rl.types import Group, Metrics, Rollouts, Tokens

OF_WORK = re.compile(r".*(_s|/seconds|/idle|/preempted|/restarts)|stream/.*|rollout/(drafted|accepted).*")
"""The metrics that say how engines and verifiers worked. A run that replays has none at work."""


def dump(config: GrpoRunConfig, folder: Path, stream: Stream, rollouts: Rollouts, step: int) -> Rollouts:
    """Write the rollouts of a step, and return them. The driver holds the tokens of one group at a time."""
    tokens = (stream.tokens(group, with_routes=True) for group in rollouts.groups)
    write_step(folder, step, rollouts, tokens, settings(config))
    if not isinstance(config.rollout.dump, bool):
        remove_step(folder, step - config.rollout.dump.last)
    return rollouts


def settings(config: GrpoRunConfig) -> dict[str, Any]:
    """The keys that rollouts depend on when they are trained on, in JSON's types."""
    distillation = config.algorithm.distillation
    teachers = [one.model_dump(mode="json", include={"prompt", "datasets"}) for one in config.teachers]
    return ({"teachers": teachers} if distillation and distillation.by == "engine" else {}) | {
        "rewards": {reward.label: reward.weight for reward in config.rewards},
        "algorithm.shaping": [shaping.model_dump(mode="json") for shaping in config.algorithm.shaping],
        # Files of earlier versions lack the key `forbid`.
        "rollout.sampling": config.rollout.sampling.model_dump(
            mode="json", exclude=set() if config.rollout.sampling.forbid else {"forbid"}
        ),
        "rollout.samples_per_prompt": config.rollout.samples_per_prompt,
        "rollout.prompts_per_step": config.rollout.prompts_per_step,
    }


class ReplayedSource:
    """Hands out the rollouts that another run has written; a `RolloutSource`."""

    def __init__(self, config: GrpoRunConfig, folder: Path, sink: Sink) -> None:
        self._settings, self._folder, self._sink = settings(config), folder, sink

    def next(self, step: int) -> Rollouts:
        """
        Raises:
            ValueError: the folder has no rollouts of this step, or they were made with other settings.
        """
        with self._sink.phase("generate"):
            saved = read_step(self._folder, step, self._settings)
            metrics = {name: value for name, value in saved.metrics.items() if not OF_WORK.fullmatch(name)}
            return replace(saved, metrics=metrics)

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
