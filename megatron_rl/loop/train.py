"""The training loop: one, for every algorithm, engine and placement.

    push weights -> answer -> verify -> estimate advantages -> plan -> log-probs -> update -> save, evaluate

Invariants (tests/unit/loop, tests/e2e): a run that was killed and resumed computes the same losses as one that
was not; what leaves a step (zero-signal groups, abstentions) is a counted metric; the run stops with the cause
when trainer and engine disagree about the log-probs of the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from megatron_rl.algorithms import estimate_advantages
from megatron_rl.balance import plan_microbatches
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data import ShuffledStream
from megatron_rl.loop.checkpoints import Checkpoints, due
from megatron_rl.loop.rollouts import answer_and_verify, evaluate_heldout
from megatron_rl.ports import Bridge, Engine, Policy, Sink, Verifier
from megatron_rl.types import Batch, Metrics, ModelShape, Prompt


@dataclass(frozen=True, slots=True)
class Ports:
    policy: Policy
    engine: Engine
    bridge: Bridge
    verifier: Verifier


@dataclass(frozen=True, slots=True)
class Prompts:
    train: ShuffledStream[Prompt]
    heldout: Sequence[Prompt]


def train(
    config: GrpoRunConfig,
    shape: ModelShape,
    ports: Ports,
    prompts: Prompts,
    records: tuple[Sink, Checkpoints],
    stopping: Callable[[], bool] = lambda: False,
) -> int:
    """Train to config.run.steps, or until `stopping` says so after a step; returns the steps that are done.

    Raises:
        ValueError: trainer and engine disagree, every verdict abstained, or a loss is not finite.
    """
    sink, checkpoints = records
    step = checkpoints.restore(ports.policy, prompts.train)
    metrics = synchronise(config, ports, prompts, sink, step)
    while step < config.run.steps:
        groups, described = answer_and_verify(config, ports, prompts.train.next(), step, sink)
        with sink.phase("plan"):
            batch = Batch.from_groups(groups)
            metrics |= described | estimate_advantages(batch, config.algorithm)
            plan = plan_microbatches(
                batch, shape, config.policy.parallel, config.balance, config.algorithm.updates_per_step
            )
            metrics |= plan.metrics
        if plan.minibatches:
            with sink.phase("logprobs"):
                metrics |= ports.policy.begin(batch, plan)
            check_agreement(metrics, config.algorithm.max_mismatch, step)
        with sink.phase("update"):
            updates = [ports.policy.update(minibatch) for minibatch in range(len(plan.minibatches))]
        metrics |= describe_updates(updates)
        sink.samples(step, groups[:1], [ports.engine.tokens(group) for group in groups[:1]])

        step += 1
        stop = stopping()
        if stop or step == config.run.steps or due(step, config.checkpoint.every):
            with sink.phase("checkpoint"):
                checkpoints.save(ports.policy, step, prompts.train)
        sink.log(step - 1, metrics)
        if stop and step < config.run.steps:
            return step
        metrics = synchronise(config, ports, prompts, sink, step)
    sink.log(step, metrics)
    return step


def synchronise(config: GrpoRunConfig, ports: Ports, prompts: Prompts, sink: Sink, step: int) -> Metrics:
    """Push the weights that `step` begins with, and evaluate them when due: they are the step's first part."""
    with sink.phase("sync"):
        metrics = ports.bridge.push(version=step)
    if prompts.heldout and (step in (0, config.run.steps) or due(step, config.eval.every)):
        with sink.phase("evaluate"):
            metrics |= evaluate_heldout(config, ports, prompts.heldout, step)
    return metrics


def describe_updates(updates: Sequence[Metrics]) -> Metrics:
    """A step's updates as one: the largest of a `/max`, the smallest of a `/min`, else the mean.

    `on_policy/ratio_error` is how far the first update's ratios are from 1: the weights are still those of logp_old.
    """
    if not updates:
        return {}
    together = {"max": max, "min": min}
    metrics = {
        name: together.get(name.rpartition("/")[2], fmean)([update[name] for update in updates]) for name in updates[0]
    }
    return metrics | {"on_policy/ratio_error": max(updates[0]["ratio/max"] - 1, 1 - updates[0]["ratio/min"])}


def check_agreement(metrics: Metrics, bound: float, step: int) -> None:
    """At lag 0 engine and trainer hold the same weights, so they must give the same tokens the same log-probs."""
    seen = metrics["mismatch/mean_abs"]
    if not seen <= bound:
        raise ValueError(
            f"step {step}: trainer and engine disagree: mean |logp_old - logp_rollout| is {seen:.2e}, above "
            f"algorithm.max_mismatch = {bound:g}. The engine does not compute what the trainer trains (weights, "
            "temperature or precision); raise the bound only if you know why"
        )
