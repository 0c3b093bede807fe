"""The seconds of a generation on H100 GPUs, estimated from the model's sizes and the lengths of the answers.

An engine decodes all its running answers together, one token of each in a step. A step reads the weights once, and
waits for the all-reduces of its layers; each answer then reads its own keys and values. Invariants
(tests/unit/planning): calculations by hand; the mean and the tail of the lengths are the ones that were given.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from megatron_rl.balance import forward_flops
from megatron_rl.balance.hardware import BANDWIDTH, PEAK_FLOPS
from megatron_rl.config.rollout import ExpectedTokens, RolloutConfig
from megatron_rl.models import FAMILIES
from megatron_rl.planning.engine import cache_bytes, weight_bytes
from megatron_rl.planning.rates import H100, Rates
from megatron_rl.types import ModelShape


@dataclass(frozen=True, slots=True)
class Decoding:
    """What decoding costs an engine, in seconds."""

    step_s: float
    """A step, however many answers are in it: all weights once, and the latency of its all-reduces."""
    reading_s: np.ndarray
    """float64 [T + 1]: what one answer's keys, values and states cost in all steps before position t."""
    token_s: float
    """The products of one token."""

    @classmethod
    def of(cls, rollout: RolloutConfig, shape: ModelShape, width: int, rates: Rates = H100) -> Decoding:
        """
        All experts are read in a step, because a batch of hundreds of answers needs nearly all of them. An engine with
        p pipeline stages has p groups of answers under way: a step of one of them passes all stages, and the groups
        read their keys and values at the same time.

        Args:
            width: the bytes of a number of the model.
        """
        bandwidth, stages = rates.fitting(shape)[1] * BANDWIDTH, rollout.parallel.pipeline
        weights_s = (
            FAMILIES[shape.family].num_parameters(shape)
            * weight_bytes(rollout, width)
            / rollout.parallel.tensor
            / bandwidth
        )
        latency_s = rates.all_reduce_s if rollout.parallel.tensor <= rates.gpus_per_node else rates.all_reduce_across_s
        reduces_s = 2 * shape.num_layers * latency_s if rollout.parallel.tensor > 1 else 0.0
        positions = np.arange(rollout.max_model_tokens, dtype=np.float64)
        num_bytes = np.zeros_like(positions)
        for block, number in shape.attentions.items():
            if block.is_linear:  # each token reads and writes its states
                num_bytes += number * 2 * block.kept_bytes(positions, rollout.parallel.tensor, width)
            else:
                num_bytes += number * block.kept_bytes(positions, rollout.parallel.tensor, cache_bytes(rollout, width))
        reading_s = np.concatenate([[0.0], np.cumsum(num_bytes)]) / (bandwidth * stages)
        longest = rollout.max_model_tokens
        flops = float(forward_flops(np.array([longest]), shape)[0]) / longest
        token_s = flops / (rates.products * PEAK_FLOPS * rollout.engine_ranks)
        return cls(weights_s + reduces_s, reading_s, token_s)


def answer_lengths(expected: ExpectedTokens, longest: int, count: int) -> np.ndarray:
    """float64 [count], ascending: the lengths of answers with this mean and tail, as the quantiles of a log-normal
    distribution. Longer ones than `longest` are cut.

    >>> answer_lengths(ExpectedTokens(mean=1000, tail=4000), 3000, 4).round().tolist()
    [349.0, 625.0, 978.0, 1752.0]
    """
    # ln(tail / mean) = z s - s^2 / 2 with z the 99 % quantile of the normal distribution.
    normal = NormalDist()
    z = normal.inv_cdf(0.99)
    spread = z - math.sqrt(z * z - 2 * math.log(expected.tail / expected.mean))
    middle = math.log(expected.mean) - spread * spread / 2
    quantiles = [normal.inv_cdf((index + 0.5) / count) for index in range(count)]
    lengths: np.ndarray = np.minimum(np.exp(middle + spread * np.array(quantiles)), longest)
    return lengths


def generation_seconds(
    decoding: Decoding,
    lengths: Sequence[float] | np.ndarray,
    *,
    prompt: int,
    prompts: float,
    at_once: float,
    batches: int = 1,
) -> float:
    """The seconds of an engine for the answers of a step.

    Args:
        lengths: the tokens of each of the engine's answers.
        prompt: the tokens of a prompt.
        prompts: the number of the engine's prompts.
        at_once: the number of answers that the engine decodes at once; it has memory for no more.
        batches: the batches of prompts that are under way or wait for a step: `max_lag` + 1. With one, the engine waits
            for its longest answer, and its last steps have few answers. With more, other answers take the places of
            the ones that have ended, so that half of a batch waits in the mean, and an answer may take several steps.
    """
    answers = np.asarray(lengths, dtype=np.float64)
    if batches == 1:
        steps = _makespan(answers, max(1, int(min(len(answers), at_once))))
    else:
        running = max(1.0, min((batches - 0.5) * len(answers), at_once))
        steps = max(float(answers.sum()) / running, float(answers.max()) / batches)
    ends = np.minimum(prompt + np.round(answers).astype(int), len(decoding.reading_s) - 1)
    reading_s = float((decoding.reading_s[ends] - decoding.reading_s[prompt]).sum())
    computed = float(answers.sum()) + prompts * prompt
    return steps * decoding.step_s + reading_s + computed * decoding.token_s


def _makespan(lengths: np.ndarray, places: int) -> float:
    """The steps until all answers have ended, if an answer begins as soon as another one ends. No answer's length is
    known before, so they begin in a mixed order, always the same."""
    mixed = np.random.default_rng(0).permutation(lengths)
    ends: list[float] = mixed[:places].tolist()
    heapq.heapify(ends)
    for length in mixed[places:].tolist():
        heapq.heappush(ends, heapq.heappop(ends) + length)
    return max(ends)
