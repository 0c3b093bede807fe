"""Tells what is not healthy about a run's steps, and keeps what `megatron-rl explain` needs of the steps that it tells
about."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping

import numpy as np

from megatron_rl.config.health import HealthRule
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data.saved_rollouts import keep_step, path_of
from megatron_rl.data.tokenizer import open_tokenizer
from megatron_rl.loop.checkpoints import Checkpoints
from megatron_rl.loop.health.rules import Health
from megatron_rl.loop.replay import dump
from megatron_rl.ports import Ports, Sink
from megatron_rl.types import Metrics, Rollouts

MOST_KEPT = 5
"""The number of steps that are kept for one rule. A run that breaks it all the time would fill the disk."""
EXPLAINED: Mapping[HealthRule, str] = {
    "jump": "grad_norm",
    "untrained_tokens": "grad_norm",
    "mismatch": "mismatch",
    "entropy": "entropy",
    "length": "length",
    "thoughts": "length",
}
"""The rules whose steps are kept, and the metric that `megatron-rl explain` looks at."""
NEEDS_WEIGHTS = ("grad_norm", "mismatch")
MOST_NAMED = 5
"""The number of tokens that a message names."""


class RunHealth:
    def __init__(self, config: GrpoRunConfig, ports: Ports, sink: Sink, checkpoints: Checkpoints) -> None:
        self._config, self._ports, self._checkpoints = config, ports, checkpoints
        self._health = Health(sink, config)
        self._num_kept: Counter[HealthRule] = Counter()

    def look(self, step: int, metrics: Metrics, rollouts: Rollouts) -> None:
        """Look at a step that is done, and warn.

        Raises:
            ValueError: a rule of `run.stop_on` is broken.
        """

        def told(rule: HealthRule, message: str) -> str:
            if rule == "untrained_tokens":
                message += self._names_of_untrained(rollouts)
            ended = message if message.endswith((".", "?")) else f"{message}."
            return f"{ended} {self._keep(rule, step, rollouts)}" if rule in EXPLAINED else message

        self._health.look(step, metrics, told)

    def _keep(self, rule: HealthRule, step: int, rollouts: Rollouts) -> str:
        """Keep a step for a rule, and say how to look at it."""
        if self._num_kept[rule] == MOST_KEPT:
            return f"{MOST_KEPT} such steps are kept already, and this one is not"
        self._num_kept[rule] += 1
        metric, folder = EXPLAINED[rule], self._config.run_folder / "rollouts"
        if self._config.rollout.replay is None:
            if not path_of(folder, step).exists():
                dump(self._config, folder, self._ports.stream, rollouts, step)
            keep_step(folder, step)
        what = "The step's answers are kept"
        if metric in NEEDS_WEIGHTS:
            self._checkpoints.keep(step)
            what = "The step's answers and the newest checkpoint before it are kept"
        chosen = "" if metric == "grad_norm" else f" --metric {metric}"
        command = f"megatron-rl explain {shlex.quote(str(self._config.run_folder))} --step {step}{chosen}"
        return f"{what}; this command looks into them: {command}"

    def _names_of_untrained(self, rollouts: Rollouts) -> str:
        untrained, counted = self._ports.policy.find_untrained(), Counter[int]()
        for group in rollouts.groups:
            for tokens in self._ports.stream.tokens(group):
                sampled = tokens.ids[tokens.action_mask]
                counted.update(sampled[np.isin(sampled, untrained)].tolist())
        names = open_tokenizer(self._config.model.path).convert_ids_to_tokens(list(counted))
        most = sorted(zip(names, counted.items(), strict=True), key=lambda one: -one[1][1])[:MOST_NAMED]
        listed = [
            f"{name!r} (id {token}, sampled {'once' if count == 1 else f'{count:,} times'})"
            for name, (token, count) in most
        ]
        if len(counted) > len(most):
            listed.append(f"{len(counted) - len(most):,} others")
        return f": {', '.join(listed)}. Forbid them with rollout.sampling.forbid"
