"""The training loop, which is the same for every algorithm, engine and placement.

    push weights -> evaluate -> answer -> verify -> estimate advantages -> plan -> log-probs -> update -> save

With a critic its values come before the log-probs, and it learns while the policy is updated.

Invariants (tests/unit/loop, tests/e2e): a run that was killed and resumed computes the same losses as a run without
interruption; metrics count what leaves a step (zero-signal groups, abstentions); the run stops if trainer and engine
give different log-probs to the same tokens; a run that ends early, for any reason, leaves its newest complete state.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from megatron_rl.algorithms import Coefficients, disagreement
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data import ShuffledStream
from megatron_rl.loop.checkpoints import Checkpoints, Stateful, WholeState, due
from megatron_rl.loop.engine_source import EngineSource
from megatron_rl.loop.passages import UnsplitThoughts
from megatron_rl.loop.performance import performance
from megatron_rl.loop.probes import with_utilities
from megatron_rl.loop.recovery import run_and_recover
from megatron_rl.loop.replay import ReplayedSource, dump
from megatron_rl.loop.rollouts import UntrainedSteps
from megatron_rl.loop.shares import plan_step, with_values
from megatron_rl.loop.source import RolloutSource
from megatron_rl.loop.stopping import NEVER, Stopping
from megatron_rl.loop.stragglers import Stragglers
from megatron_rl.ports import Ports, Sink
from megatron_rl.types import Metrics, ModelShape, Prompt


@dataclass(frozen=True, slots=True)
class Prompts:
    train: ShuffledStream[Prompt]
    heldout: Sequence[Prompt]
    """The prompts of evaluations; if it is empty, nothing is evaluated."""


def train(
    config: GrpoRunConfig,
    shape: ModelShape,
    ports: Ports,
    prompts: Prompts,
    records: tuple[Sink, Checkpoints],
    stopping: Stopping = NEVER,
) -> int:
    """Train up to step config.run.steps, or until `stopping` asks for a stop; returns the number of steps that are
    done.

    However it ends, the newest complete state is saved, unless the policy is lost. A policy that is lost is started
    anew and continues with the newest state that is left.

    Raises:
        ValueError: trainer and engine disagree, every verdict is an abstention, or a loss is not finite.
        TooManyRestarts: a process was lost once more than the run allows.
    """
    sink, checkpoints = records
    is_exact = config.model.dtype == "float32" and config.rollout.quantization is None
    coefficients = Coefficients(config.algorithm, is_exact)
    source: RolloutSource
    if config.rollout.replay is not None:
        source = ReplayedSource(config, config.rollout.replay, sink)
    else:
        source = EngineSource(config, ports, prompts.train, sink, stopping)
    parts: dict[str, Stateful] = {"stream": source, "coefficients": coefficients}
    stragglers, untrained, thoughts = Stragglers(), UntrainedSteps(), UnsplitThoughts()
    values = config.rollout.prefix_values
    num_warmup_steps = config.critic.warmup_steps if config.critic else 0

    def train_from(step: int) -> None:
        while True:
            if stopping() and step < config.run.steps:
                return whole.save()
            with sink.phase("sync"):
                metrics = ports.bridge.push(version=step)
            if prompts.heldout and (step in (0, config.run.steps) or due(step, config.eval.every)):
                source.evaluate(prompts.heldout, step)
            if step == config.run.steps:
                metrics |= source.evaluated()
                checkpoints.judge(step, metrics)
                return sink.log(step, metrics)
            source.pushed(step)
            ports.policy.mirror(step)
            rollouts = source.next(step)
            if values is not None and values.by == "trainer":
                with sink.phase("prefix_values"):
                    rollouts = with_utilities(config, shape, ports.policy, rollouts, step)
            thoughts.count(rollouts.metrics, sink)
            if config.rollout.dump:
                with sink.phase("dump"):
                    dump(config.run_folder / "rollouts", step, rollouts, ports)
            with sink.phase("plan"):
                shares, planned = plan_step(config, shape, rollouts, step)
                metrics |= rollouts.metrics | planned
            num_updates = len(shares.policy[0].minibatches)
            if num_updates:
                if ports.critic is not None:
                    with sink.phase("values"):
                        predicted = ports.critic.values(shares.critic)
                    shares = shares._replace(policy=with_values(shares.policy, predicted))
                with sink.phase("logprobs"):
                    metrics |= ports.policy.begin(shares.policy, coefficients.values)
                check_agreement(metrics, coefficients.max_mismatch, step)
            updates = []
            start = time.perf_counter()
            with sink.phase("update"):
                if ports.critic is not None and num_updates:
                    whole.spoil()
                    ports.critic.learn(ports.policy.returns())
                for minibatch in range(num_updates if step >= num_warmup_steps else 0):
                    updates.append(ports.policy.update(minibatch, coefficients.values))
                    whole.spoil()
                if ports.critic is not None and num_updates:
                    metrics |= describe_critic(ports.critic.finish())
            if updates:
                metrics |= performance(config, planned, time.perf_counter() - start)
                stragglers.count(updates, sink)
            metrics |= describe_updates(updates, coefficients)
            untrained.count(num_updates > 0, rollouts.groups, sink)
            if updates:
                coefficients.adapt(metrics, int(metrics["samples/active"]))
            step += 1
            whole.mark(step)
            metrics |= source.evaluated()
            checkpoints.judge(step - 1, metrics)
            # A step is logged before it is saved: if the save is interrupted, it is logged again, and else not missing.
            shown = rollouts.groups[:1]
            sink.samples(step - 1, shown, [ports.stream.tokens(group) for group in shown])
            sink.log(step - 1, metrics)
            if step == config.run.steps or due(step, config.checkpoint.every) or stopping():
                with sink.phase("checkpoint"):
                    whole.save()
            if step < config.run.steps and due(step, config.checkpoint.export_every):
                with sink.phase("checkpoint"):
                    ports.policy.export_hf(config.run_folder / "exports" / f"step_{step:06d}")

    step = checkpoints.restore(ports.policy, parts)
    with WholeState(checkpoints, ports.policy, parts) as whole:
        whole.mark(step)
        run_and_recover(train_from, step, ports.policy, whole, sink, ports.bridge.rejoin)
    return whole.step


def describe_critic(told: Sequence[Metrics]) -> Metrics:
    """The metrics of the critic's step: `critic/` and the names of `describe_values`, `ValueObjective` and an update.
    Those of the updates are means.

    Args:
        told: what `Critic.finish` returned.
    """
    values, *updates = told
    means = {name: fmean([update[name] for update in updates]) for name in updates[0]}
    return {f"critic/{name}": value for name, value in (values | means).items()}


def describe_updates(updates: Sequence[Metrics], coefficients: Coefficients) -> Metrics:
    """The metrics of a step from those of its updates, with the coefficients that the updates used. The step's value is
    the largest for names that end in `/max`, the smallest for `/min`, and the mean for all others.

    `on_policy/ratio_error` is the largest deviation from 1 of the first update's ratios. It should be 0, because the
    weights are still those of logp_old.
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
    """Check that engine and trainer, which have the same weights at the step's start, give the same log-probs to the
    same tokens. If the mismatch is known only from the first update, the policy refuses this update itself before it
    changes a weight.

    Raises:
        ValueError: the mean mismatch exceeds the bound.
    """
    problem = disagreement(metrics, bound)
    if problem:
        raise ValueError(f"step {step}: {problem}")
