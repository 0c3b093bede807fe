"""What a step does with its shares: log-probs, the optimizer steps, and their metrics.

Invariant (tests/unit/loop): the run stops if trainer and engine give different log-probs to the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean

from megatron_rl.algorithms import Coefficients, disagreement
from megatron_rl.algorithms.passes import STOPPED
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.loop.health.answers import UntrainedSteps
from megatron_rl.loop.health.stragglers import Stragglers
from megatron_rl.loop.performance import performance
from megatron_rl.ports import Policy, Sink
from megatron_rl.types import Metrics, Rollouts, Shares


class Updates:
    def __init__(self, config: GrpoRunConfig, policy: Policy, coefficients: Coefficients, sink: Sink) -> None:
        self._config, self._policy, self._coefficients, self._sink = config, policy, coefficients, sink
        self._stragglers, self._untrained = Stragglers(), UntrainedSteps()

    def make(self, shares: Shares, planned: Metrics, rollouts: Rollouts, step: int) -> Metrics:
        """Train on a step; returns its metrics. Nothing is trained if no sample has a gradient.

        Args:
            planned: the metrics of the plan.

        Raises:
            ValueError: trainer and engine disagree, or a number is not finite.
        """
        coefficients = self._coefficients
        self._untrained.count(shares.num_updates > 0, planned, rollouts.groups, self._sink)
        if not shares.num_updates:
            return {}
        with self._sink.phase("logprobs"):
            metrics = self._policy.begin(shares, coefficients.values)
        check_agreement(metrics, coefficients.max_mismatch, step)
        start = time.perf_counter()
        with self._sink.phase("update"):
            updates, of_critic = self._policy.update(coefficients.values)
        metrics |= of_critic
        made = [update for update in updates if STOPPED not in update]
        if made:  # a critic may learn alone at first
            seconds = (time.perf_counter() - start) * shares.num_updates / len(made)
            metrics |= performance(self._config, planned, seconds)
            self._stragglers.count(made, self._sink)
            metrics |= describe_updates(made, coefficients)
            if len(shares.policy) > 1:
                metrics |= self._describe_epochs(made, len(shares.policy[0][0].minibatches))
            coefficients.adapt(metrics, int(planned["samples/active"]))
        return metrics

    def _describe_epochs(self, updates: Sequence[Metrics], per_epoch: int) -> Metrics:
        """The metrics of each epoch.

        Args:
            updates: the metrics of the updates that were made.
            per_epoch: the number of updates of a whole epoch.
        """
        metrics = {"epochs": len(updates) / per_epoch}
        for start in range(0, len(updates), per_epoch):
            number, of_epoch = start // per_epoch + 1, together(updates[start : start + per_epoch])
            metrics |= {f"epoch_{number}/{name}": of_epoch[name] for name in OF_EPOCHS if name in of_epoch}
            if number > 1 and of_epoch.get("masked", 0.0) > 1 - 1e-6:  # a sum of shares in float32
                self._sink.warn(
                    f"in epoch {number} no token has a policy loss: algorithm.correction.reject and the masks of "
                    f"algorithm.loss leave none after the updates before it; lower algorithm.epochs to {number - 1}, "
                    "or the learning rate, or widen these bounds"
                )
        return metrics


OF_EPOCHS = ("ratio/mean", "ratio/max", "ratio/min", "pg_clipfrac", "ppo_kl", "masked")
"""The metrics that are reported for each epoch."""


def together(updates: Sequence[Metrics]) -> Metrics:
    """The largest of the metrics whose names end in `/max`, the smallest for `/min`, and the means of all others."""
    reduce = {"max": max, "min": min}
    return {
        name: reduce.get(name.rpartition("/")[2], fmean)([update[name] for update in updates if name in update])
        for name in dict.fromkeys(name for update in updates for name in update)
    }


def describe_updates(updates: Sequence[Metrics], coefficients: Coefficients) -> Metrics:
    """The metrics of a step, computed from its updates' metrics (`together`), with the coefficients that the updates
    used.

    `on_policy/ratio_error` is the largest deviation from 1 of the first update's ratios to pi_old. It should be 0,
    because the weights are still the weights that gave logp_old.
    """
    in_force = {f"coefficient/{name}": value for name, value in coefficients.values.items()}
    if not coefficients.cfg.is_around_engine:
        in_force["on_policy/ratio_error"] = max(updates[0]["ratio/max"] - 1, 1 - updates[0]["ratio/min"])
    return together(updates) | in_force


def check_agreement(metrics: Metrics, bound: float, step: int) -> None:
    """Check that engine and trainer, which have the same weights at the step's start, give the same log-probs to the
    same tokens. If the mismatch is known only from the first update, the policy refuses this update itself before it
    changes a weight.

    Raises:
        ValueError: the mean mismatch exceeds the bound.
    """
    problem = disagreement(metrics, bound)
    if problem:
        raise ValueError(f"step {step}: {problem}")
