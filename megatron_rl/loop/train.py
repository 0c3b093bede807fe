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

from megatron_rl.algorithms import Coefficients, disagreement, estimate_advantages, loss_weights
from megatron_rl.balance import plan_microbatches
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data import ShuffledStream
from megatron_rl.loop.checkpoints import Checkpoints, due
from megatron_rl.loop.rollouts import answer_and_verify, as_batch, evaluate_heldout
from megatron_rl.ports import Bridge, Engine, Policy, Sink, Verifier
from megatron_rl.types import Metrics, ModelShape, Prompt


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
    algorithm, coefficients = config.algorithm, Coefficients(config.algorithm)
    state = {"stream": prompts.train, "coefficients": coefficients}
    step = checkpoints.restore(ports.policy, state)
    metrics = synchronise(config, ports, prompts, sink, step)
    while step < config.run.steps:
        groups, described = answer_and_verify(config, ports, prompts.train.next(), step, sink)
        batch = as_batch(config, ports, groups, step, sink)
        with sink.phase("plan"):
            metrics |= described | estimate_advantages(batch, algorithm)
            plan = plan_microbatches(
                batch,
                shape,
                config.policy.parallel,
                config.balance,
                algorithm.updates_per_step,
                recompute=config.model.recompute,
            )
            batch.weights = loss_weights(batch, plan, algorithm.aggregation, algorithm.loss_agg_tokens)
            metrics |= plan.metrics
        if plan.minibatches:
            with sink.phase("logprobs"):
                metrics |= ports.policy.begin(batch, plan)
            check_agreement(metrics, algorithm.max_mismatch, step)
        updates = []
        with sink.phase("update"):
            for minibatch in range(len(plan.minibatches)):
                updates.append(ports.policy.update(minibatch, coefficients.values))
                check_agreement(updates[0], algorithm.max_mismatch, step)
        metrics |= describe_updates(updates, coefficients)
        if updates:
            coefficients.adapt(metrics, int(metrics["samples/active"]))
        sink.samples(step, groups[:1], [ports.engine.tokens(group) for group in groups[:1]])

        step += 1
        stop = stopping()
        if stop or step == config.run.steps or due(step, config.checkpoint.every):
            with sink.phase("checkpoint"):
                checkpoints.save(ports.policy, step, state)
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


def describe_updates(updates: Sequence[Metrics], coefficients: Coefficients) -> Metrics:
    """A step's updates as one: the largest of a `/max`, the smallest of a `/min`, else the mean; and the coefficients
    that they used.

    `on_policy/ratio_error` is how far the first update's ratios are from 1: the weights are still those of logp_old.
    """
    if not updates:
        return {}
    together = {"max": max, "min": min}
    metrics = {
        name: together.get(name.rpartition("/")[2], fmean)([update[name] for update in updates]) for name in updates[0]
    }
    in_force = {f"coefficient/{name}": value for name, value in coefficients.values.items()}
    ratio_error = max(updates[0]["ratio/max"] - 1, 1 - updates[0]["ratio/min"])
    return metrics | in_force | {"on_policy/ratio_error": ratio_error}


def check_agreement(metrics: Metrics, bound: float, step: int) -> None:
    """At lag 0 engine and trainer hold the same weights, so they must give the same tokens the same log-probs. Known
    before the first update, or by it; the policy refuses such an update itself, before it changes a weight."""
    problem = disagreement(metrics, bound)
    if problem:
        raise ValueError(f"step {step}: {problem}")
