"""A step as `explain` sees it: every answer with its tokens, verdict, advantage and numbers, and the metrics of the run
around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from megatron_rl.types import Epochs, Prompt, Rollout, Rollouts, Tokens

METRICS = ("grad_norm", "loss", "mismatch", "reward", "entropy", "length")
"""What can be explained."""
STORED = ("reward", "entropy", "length")
"""The metrics that need no trainers: the answers that were kept have them."""
LOGGED = {
    "grad_norm": "grad_norm",
    "loss": "loss",
    "mismatch": "mismatch/mean_abs",
    "reward": "reward/mean",
    "entropy": "logp/mean",
    "length": "length/response_mean",
}
"""The names of these metrics in metrics.jsonl. The estimate of the entropy is the mean of -log p."""


@dataclass(frozen=True, slots=True)
class ExplainedAnswer:
    """One sample of the step. Arrays have an entry for each of its L tokens."""

    index: int
    """Its index in the step."""
    prompt: Prompt
    number: int
    """Its index in its group."""
    rollout: Rollout
    tokens: Tokens
    advantage: float
    """NaN if it is not trained on. If the estimator gives each token its own, the mean over its actions, once the
    trainers have computed them."""
    engine: int | None = None
    """The index of the engine that gave it; None if it was not recorded."""
    numbers: Mapping[str, np.ndarray] = field(default_factory=dict)
    """See `actor.inspection.token_numbers`; empty if it is not trained on."""
    updates: Sequence[int] = ()
    """The updates of the step that train on it, one in each epoch, counted from 0."""

    def with_numbers(self, numbers: Mapping[str, np.ndarray]) -> ExplainedAnswer:
        """The answer with what the trainers have computed."""
        seen = replace(self, numbers=numbers)
        if "advantage" not in numbers or not self.rollout.num_actions:
            return seen
        return replace(seen, advantage=float(numbers["advantage"][self.tokens.action_mask].mean()))

    def advantage_at(self, place: int) -> float:
        """The advantage of a token."""
        return float(self.numbers["advantage"][place]) if "advantage" in self.numbers else self.advantage

    @property
    def name(self) -> str:
        return f"{self.prompt.uid}, answer {self.number}"

    @property
    def distance(self) -> np.ndarray:
        """float32 [L]: |log-prob of the trainer - log-prob of the engine| at the actions, 0 elsewhere."""
        return self.distance_to(self.numbers.get("logp", self.tokens.logp_rollout))

    def distance_to(self, logp: np.ndarray) -> np.ndarray:
        """float32 [L]: as `distance`, for other log-probs of the trainer."""
        return np.where(self.tokens.action_mask, np.abs(logp - self.tokens.logp_rollout), 0)

    def value(self, metric: str) -> float:
        """What the answer adds to a metric of the step, or its own value of it."""
        if metric == "loss":
            return float(self.numbers["loss"].sum()) if self.numbers else float("nan")
        if metric == "mismatch":
            return float(self.distance.sum()) / max(1, self.rollout.num_actions) if self.numbers else float("nan")
        if metric == "reward":
            reward = self.rollout.verdict.reward
            return float("nan") if reward is None else reward
        if metric == "entropy":
            logp = self.tokens.logp_rollout[self.tokens.action_mask]
            return -float(logp.mean()) if len(logp) else 0.0
        return float(self.rollout.num_response_tokens)

    @property
    def actions(self) -> tuple[int, int]:
        """The tokens from the first action to the last one, as [start, stop)."""
        places = self.tokens.action_mask.nonzero()[0]
        return (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)


@dataclass(frozen=True, slots=True)
class ExplainedStep:
    """A step of a run.

    Args:
        records: the run's metrics by step, from metrics.jsonl.
    """

    number: int
    answers: Sequence[ExplainedAnswer]
    records: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    labels: Sequence[str] = ()
    """The names of the rewards."""
    num_updates: int = 1
    """The number of updates that were planned for the step."""
    max_lag: int = 0
    untrained: Sequence[int] = ()
    """The tokens whose embeddings no training has moved."""
    is_exact: bool = True
    """Whether the numbers belong to the weights that the step began with."""
    earlier: Mapping[int, Mapping[int, np.ndarray]] = field(default_factory=dict)
    """The trainer's log-probs under older weights, float32 [L], by the version of the weights and the index of the
    answer. Empty if trainer and engine agree."""

    @property
    def groups(self) -> list[list[ExplainedAnswer]]:
        found: dict[int, list[ExplainedAnswer]] = {}
        for answer in self.answers:
            found.setdefault(id(answer.prompt), []).append(answer)
        return list(found.values())

    def logged(self, name: str) -> float | None:
        """The step's value of a metric; None if it was not logged."""
        return self.records.get(self.number, {}).get(name)

    def usual(self, name: str, steps: int = 20) -> float | None:
        """The median of a metric over the steps before this one; None if there is none."""
        before = [self.records[s] for s in range(self.number - steps, self.number) if s in self.records]
        values = [record[name] for record in before if name in record]
        return median(values) if values else None


def answers_of(
    rollouts: Rollouts, epochs: Epochs, numbers: Mapping[int, Mapping[str, np.ndarray]]
) -> list[ExplainedAnswer]:
    """The answers of a step whose payloads are tokens, in the order of their groups."""
    advantages = {int(i): float(a) for share in epochs[0] for i, a in zip(share.index, share.advantages, strict=True)}
    updates = updates_of(epochs)
    found: list[ExplainedAnswer] = []
    for group in rollouts.groups:
        payload: Sequence[Any] = group.payload
        for number, (rollout, tokens) in enumerate(zip(group.rollouts, payload, strict=True)):
            index = len(found)
            found.append(
                ExplainedAnswer(
                    index=index,
                    prompt=group.prompt,
                    number=number,
                    rollout=rollout,
                    tokens=tokens,
                    advantage=advantages.get(index, float("nan")),
                    engine=group.engines[number] if group.engines else None,
                    updates=updates.get(index, ()),
                ).with_numbers(numbers.get(index, {}))
            )
    return found


def updates_of(epochs: Epochs) -> dict[int, list[int]]:
    """The updates that train on each sample, by the sample's index in the step. They are counted from 0 over all
    epochs."""
    found: dict[int, list[int]] = {}
    first = 0
    for shares in epochs:
        for share in shares:
            for number, minibatch in enumerate(share.minibatches):
                for place in (place for micro in minibatch for place in micro):
                    found.setdefault(int(share.index[place]), []).append(first + number)
        first += len(shares[0].minibatches)
    return found
