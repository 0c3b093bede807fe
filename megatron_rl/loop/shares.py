"""Plans a step, and deals it to the data-parallel ranks.

Invariant (tests/unit/loop): every planned sample is in one share, with its own tokens and numbers, and a share has no
payload that it does not use.
"""

from __future__ import annotations

import numpy as np

from megatron_rl.algorithms import estimate_advantages, loss_weights
from megatron_rl.balance import plan_microbatches
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.loop.source import Rollouts
from megatron_rl.types import Batch, Metrics, MicrobatchPlan, ModelShape, Share


def plan_step(config: GrpoRunConfig, shape: ModelShape, rollouts: Rollouts, step: int) -> tuple[list[Share], Metrics]:
    """The share of each data-parallel rank, and the metrics of advantages and plan. The shares have no mini-batch if no
    sample has a gradient."""
    algorithm, parallel = config.algorithm, config.policy.parallel
    batch = Batch.of_groups(rollouts.groups, version=step)
    credit, metrics = estimate_advantages(rollouts.scores, algorithm)
    plan = plan_microbatches(
        batch,
        credit.active,
        shape,
        parallel,
        config.balance,
        algorithm.updates_per_step,
        recompute=config.model.recompute,
    )
    weights = loss_weights(batch, plan, algorithm.aggregation, algorithm.loss_agg_tokens)
    return deal(batch, plan, credit.advantages, weights, parallel.data), {**metrics, **plan.metrics}


def deal(
    batch: Batch, plan: MicrobatchPlan, advantages: np.ndarray, weights: np.ndarray, num_ranks: int
) -> list[Share]:
    """The share of each data-parallel rank.

    Args:
        advantages: float64 [S], the advantage of every action token of a sample.
        weights: float64 [S], the factor of each action token's loss (`loss_weights`).
    """
    return [_share(batch, plan, advantages, weights, rank) for rank in range(num_ranks)]


def _share(batch: Batch, plan: MicrobatchPlan, advantages: np.ndarray, weights: np.ndarray, rank: int) -> Share:
    of_rank = [minibatch[rank] for minibatch in plan.minibatches]
    index = np.array([sample for minibatch in of_rank for micro in minibatch for sample in micro], np.int64)
    place = {sample: position for position, sample in enumerate(index.tolist())}
    groups, payload_of = np.unique(batch.group_of[index], return_inverse=True)
    return Share(
        minibatches=tuple(tuple(tuple(place[sample] for sample in micro) for micro in mini) for mini in of_rank),
        denominators=plan.denominators,
        alignment=plan.alignment,
        version=batch.version,
        names=[batch.names[sample] for sample in index],
        index=index,
        advantages=advantages[index],
        weights=weights[index],
        payloads=[batch.payloads[group] for group in groups],
        payload_of=payload_of,
        index_in_group=batch.index_in_group[index],
    )
