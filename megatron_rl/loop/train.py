"""The training loop, which is the same for every algorithm, engine and placement.

    push weights -> evaluate -> answer -> verify -> estimate advantages -> plan -> log-probs -> update -> save

Invariants (tests/unit/loop, tests/e2e): a run that was killed and resumed computes the same losses as a run without
interruption; metrics count what leaves a step (zero-signal groups, abstentions); a run that ends early, for any reason,
leaves its newest complete state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from megatron_rl.algorithms import Coefficients
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data import ShuffledStream
from megatron_rl.loop.checkpoints import Checkpoints, Stateful, WholeState
from megatron_rl.loop.engine_source import EngineSource
from megatron_rl.loop.health.run import RunHealth
from megatron_rl.loop.probes import with_utilities
from megatron_rl.loop.recovery import run_and_recover
from megatron_rl.loop.replay import ReplayedSource, dump
from megatron_rl.loop.shares import batch_of, plan_step
from megatron_rl.loop.source import RolloutSource, Through
from megatron_rl.loop.stopping import NEVER, Stopping
from megatron_rl.loop.updates import Updates
from megatron_rl.ports import Ports, Sink
from megatron_rl.types import ModelShape, Prompt


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
    again and continues with the newest state that is left.

    Raises:
        ValueError: trainer and engine disagree, every verdict is an abstention, or a loss is not finite.
        TooManyRestarts: more processes were lost than the run allows.
    """
    sink, checkpoints = records
    is_exact = config.model.dtype == "float32" and config.rollout.quantization is None
    coefficients = Coefficients(config.algorithm, is_exact)
    source = rollout_source(config, shape, ports, prompts, sink, stopping)
    updates = Updates(config, ports.policy, coefficients, sink)
    health = RunHealth(config, ports, sink, checkpoints)
    parts: dict[str, Stateful] = {"stream": source, "coefficients": coefficients}

    def train_from(step: int) -> None:
        while True:
            if stopping() and step < config.run.steps:
                return whole.save()
            with sink.phase("sync"):
                metrics = ports.bridge.push(version=step)
            source.pushed(step)
            if step == config.run.steps:
                metrics |= source.evaluated()
                checkpoints.judge(step, metrics)
                sink.log(step, metrics)
                return
            ports.policy.mirror(step)
            rollouts = source.next(step)
            with sink.phase("plan"):
                shares, planned = plan_step(config, shape, batch_of(config, rollouts, step))
            metrics |= rollouts.metrics | planned | updates.make(shares, planned, rollouts, step)
            step += 1
            whole.mark(step)
            metrics |= source.evaluated()
            checkpoints.judge(step - 1, metrics)
            # A step is logged before it is saved: if the save is interrupted, it is logged again, and else not missing.
            recorded = config.run.recorded_answers
            sink.samples(step - 1, rollouts.groups, ports.stream.tokens, recorded, shares.policy[0])
            health.look(step - 1, sink.log(step - 1, metrics), rollouts)
            whole.save_if_due(sink, is_last=step == config.run.steps, stops=stopping())

    step = checkpoints.restore(ports.policy, parts)
    with WholeState(checkpoints, ports.policy, parts) as whole:
        whole.mark(step)
        run_and_recover(train_from, step, ports.policy, whole, sink, ports.bridge.rejoin)
    return whole.step


def rollout_source(
    config: GrpoRunConfig, shape: ModelShape, ports: Ports, prompts: Prompts, sink: Sink, stopping: Stopping
) -> RolloutSource:
    """What gives the rollouts of each step: the engines, or what another run has written."""
    rollout = config.rollout
    source: RolloutSource
    if rollout.replay is not None:
        source = ReplayedSource(config, rollout.replay, sink)
    else:
        source = EngineSource(config, ports, prompts.train, prompts.heldout, sink, stopping)
    if rollout.prefix_values is not None and rollout.prefix_values.by == "trainer":
        source = Through(source, sink, "prefix_values", partial(with_utilities, config, shape, ports.policy))
    if rollout.dump and rollout.replay is None:
        source = Through(source, sink, "dump", partial(dump, config, config.run_folder / "rollouts", ports.stream))
    return source
