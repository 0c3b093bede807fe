"""The seconds of a whole step on H100 GPUs: who works, who waits, and for how long. Estimates, not measurements.

In turns, a step is its generation, the trainers' passes and updates, and a push. With `rollout.max_lag` generation and
training go on at the same time, and the longer of the two counts. Invariants (tests/unit/planning): calculations by
hand; of the whole steps that others have published, and that no rate is fitted to, the median of predicted / published
and half of the runs are within 0.8 to 1.25.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.config.rollout import LONGEST_TAIL, ExpectedTokens
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.layout import Links
from megatron_rl.layout.traffic import traffic
from megatron_rl.observe.records import METRICS, read_lines
from megatron_rl.planning.engine import EngineMemory
from megatron_rl.planning.estimates import (
    Work,
    largest_work,
    most_microbatches,
    planned_microbatches,
    training_seconds,
)
from megatron_rl.planning.generation import Decoding, answer_lengths, generation_seconds
from megatron_rl.planning.parameters import BYTES
from megatron_rl.planning.rates import H100, Rates
from megatron_rl.planning.teachers import pass_seconds, scoring_seconds
from megatron_rl.planning.transfer import planned_transfer
from megatron_rl.types import ModelShape

PUSH_S = 0.2
"""What a push over NCCL takes however few its bytes are, in seconds."""
LAST_STEPS = 20
"""The number of steps of a run that tell the lengths of its answers: the last ones."""


@dataclass(frozen=True, slots=True)
class PushSeconds:
    """The time of a push, between two bounds."""

    least: float
    """What the fullest link needs."""
    most: float
    """What a push of as many bytes takes in other systems that send from shard to shard over NCCL, or the fullest link
    if that is longer."""

    @classmethod
    def of(cls, wire_s: float, num_bytes: float, rates: Rates = H100) -> PushSeconds:
        """
        Args:
            wire_s: the time of the fullest link at the rate of its data sheet.
            num_bytes: the bytes that an engine receives on all of its ranks together.
        """
        least = wire_s / rates.nic
        return cls(least, PUSH_S + max(least, num_bytes / rates.push_bytes_per_s))


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """The parts of a step, in seconds.

    >>> step = StepSeconds(generation=300.0, training=100.0, push=10.0, overlaps=False, shared=False, turn=5.0)
    >>> step.total, step.trainers_wait, step.engines_wait
    (415.0, 300.0, 100.0)
    """

    generation: float
    training: float
    push: float
    overlaps: bool
    """Whether the engines generate while the trainers train."""
    shared: bool
    """Whether both have the same GPUs in turns."""
    turn: float = 0.0
    """`Rates.turn_s`."""
    teaching: float = 0.0
    """The engines of the slowest teacher, which read complete answers while others are generated."""

    @property
    def other(self) -> float:
        """What is neither generation nor training nor the push. It counts as nobody's waiting."""
        return 0.0 if self.overlaps else self.turn

    @property
    def _parts(self) -> float:
        """Generation and training, as they follow each other."""
        answers = max(self.generation, self.teaching)
        return max(answers, self.training) if self.overlaps else answers + self.training

    @property
    def total(self) -> float:
        return self._parts + self.other + self.push

    @property
    def trainers_wait(self) -> float:
        """How long the GPUs of the trainers wait for answers."""
        return self._wait(self.training)

    @property
    def engines_wait(self) -> float:
        """How long the GPUs of the engines wait for weights."""
        return self._wait(self.generation)

    @property
    def teachers_wait(self) -> float:
        """How long the GPUs of the slowest teacher wait for answers."""
        return self._parts - self.teaching

    def _wait(self, own: float) -> float:
        return 0.0 if self.shared else self._parts - own

    def idle_share(self, trainer_gpus: int, engine_gpus: int, teacher_gpus: int = 0) -> float:
        """The share of a step's GPU-hours that GPUs wait for the other side."""
        waits = trainer_gpus * self.trainers_wait + engine_gpus * self.engines_wait + teacher_gpus * self.teachers_wait
        return waits / (self.total * (trainer_gpus + engine_gpus + teacher_gpus))


def step_seconds(
    config: GrpoRunConfig, shape: ModelShape, engine: EngineMemory | None, expected: ExpectedTokens | None = None
) -> StepSeconds:
    """
    Args:
        engine: the memory of the engines, which bounds the answers that an engine decodes at once; None on CPUs.
        expected: how long the answers are. None: every answer has the longest length, and as many groups are useful as
            are expected.
    """
    rollout, parallel, rates = config.rollout, config.policy.parallel, Rates.of(config)
    work, prompt, known = largest_work(config), rollout.max_prompt_tokens, expected or expected_tokens(config)
    useful = known.useful if known is not None and rollout.active_sampling else 1.0
    answers: Sequence[float] | np.ndarray = work.lengths - prompt
    held = engine.half if engine else math.inf  # answers of all ages have half of the largest length in the mean
    if expected is not None:
        prompt = expected.prompt or prompt
        answers = answer_lengths(expected, rollout.max_response_tokens, len(work.lengths))
        mixed = np.random.default_rng(0).permutation(answers)
        work = Work(np.ceil(prompt + mixed).astype(np.int64), work.num_updates, work.num_passes, work.num_epochs)
        if engine:
            longest = rollout.max_model_tokens
            running = prompt + float((answers**2).sum() / (2 * answers.sum()))  # the mean of what an answer holds
            held = engine.longest * longest / running
    microbatches = most_microbatches(planned_microbatches(config, shape, parallel, work))
    training_s = pass_seconds(config, work, parallel, microbatches, rates) + training_seconds(
        work,
        shape,
        parallel,
        microbatches,
        dtype=config.model.dtype,
        recompute=config.model.recompute,
        optimizer=config.policy.optimizer,
        rates=rates,
    )
    of_engine = np.asarray(answers)[:: rollout.num_engines]
    generation_s = generation_seconds(
        Decoding.of(rollout, shape.served, BYTES[config.model.dtype], rates),
        of_engine,
        prompt=prompt,
        prompts=rollout.prompts_per_step / rollout.num_engines,
        at_once=max(1, min(held, rollout.max_sequences or math.inf)),
        batches=rollout.max_lag + 1,
    )
    teaching_s, scoring_s = scoring_seconds(config, work.lengths, rates)
    return StepSeconds(
        generation=generation_s / useful + scoring_s,
        training=training_s,
        push=push_seconds(config, shape, rates).most,
        overlaps=rollout.max_lag > 0,
        shared=config.cluster.colocate,
        turn=rates.turn_s,
        teaching=teaching_s,
    )


def expected_tokens(config: GrpoRunConfig) -> ExpectedTokens | None:
    """The lengths of answers that are given or, if the run has begun, the ones of its last steps. The longest answer of
    a step counts as the tail."""
    if config.rollout.expected_tokens is not None:
        return config.rollout.expected_tokens
    steps = [one for one in read_lines(config.run_folder / METRICS, LAST_STEPS) if one.get("length/response_mean")]
    if not steps:
        return None
    mean, tail = (
        float(np.mean([one[f"length/response_{name}"] for one in steps if one.get(f"length/response_{name}")]))
        for name in ("mean", "max")
    )
    groups = config.rollout.prompts_per_step
    replaced = float(np.mean([one.get("stream/useless") or 0.0 for one in steps]))
    tail = min(max(tail, 1.001 * mean), LONGEST_TAIL * mean)
    return ExpectedTokens(mean=mean, tail=tail, useful=groups / (groups + replaced))


def push_seconds(config: GrpoRunConfig, shape: ModelShape, rates: Rates) -> PushSeconds:
    """The time of a push. Every GPU has a NIC of its own."""
    plan = planned_transfer(config, shape, config.policy.parallel.mesh)
    links = Links(rates.gpus_per_node, colocated=config.cluster.colocate)
    found = traffic(plan, links, int(config.bridge.bucket_mib * 2**20))
    return PushSeconds.of(found.least_s, found.needed_bytes / plan.engines.num, rates)
