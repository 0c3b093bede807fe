"""Plans a step, and distributes it over the data-parallel ranks.

Invariant (tests/unit/loop): every planned sample is in one share, with its own tokens and numbers, and a share has no
other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_rl.algorithms import estimate_advantages, loss_weights
from megatron_rl.balance import plan_microbatches
from megatron_rl.config.losses import Aggregation
from megatron_rl.config.policy import ModelConfig, ParallelConfig
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.types import (
    Credit,
    Metrics,
    MicrobatchPlan,
    ModelShape,
    Rollouts,
    Share,
    Shares,
    StepBatch,
    TokenNumbers,
    TokenRewards,
)


def plan_step(config: GrpoRunConfig, shape: ModelShape, batch: StepBatch) -> tuple[Shares, Metrics]:
    """The shares of a step, and the metrics of advantages and plan."""
    algorithm = config.algorithm
    credit, metrics = estimate_advantages(batch, algorithm)

    def dealt(
        parallel: ParallelConfig, model: ModelConfig, aggregation: Aggregation, num_updates: int
    ) -> tuple[list[Share], Metrics]:
        plan = plan_microbatches(
            batch,
            credit.active,
            shape,
            parallel,
            config.balance,
            num_updates,
            recompute=model.recompute,
        )
        weights = loss_weights(batch, plan, aggregation, algorithm.loss_agg_tokens)
        return deal(batch, plan, credit, weights, parallel.data), dict(plan.metrics)

    policy, planned = dealt(config.policy.parallel, config.model, algorithm.aggregation, algorithm.updates_per_step)
    critic: list[Share] = []
    if config.critic is not None:
        own = config.critic
        num_updates = own.updates_per_step or algorithm.updates_per_step
        critic, _ = dealt(own.parallel, own.model or config.model, "token-mean", num_updates)
    return Shares(policy, critic), {**metrics, **planned}


def batch_of(config: GrpoRunConfig, rollouts: Rollouts, version: int) -> StepBatch:
    """The batch of a step."""
    weights = np.array([reward.weight for reward in config.rewards])
    return StepBatch.of_groups(rollouts.groups, version, weights, rollouts.greedy_rewards)


def with_values(shares: Sequence[Share], values: TokenNumbers) -> list[Share]:
    """The policy's shares with the values of their samples."""
    return [replace(share, values=values.needed_by(share.index)) for share in shares]


def deal(batch: StepBatch, plan: MicrobatchPlan, credit: Credit, weights: np.ndarray, num_ranks: int) -> list[Share]:
    """The share of each data-parallel rank.

    Args:
        weights: float64 [S], the factor of each action token's loss (`loss_weights`).
    """
    return [_share(batch, plan, credit, weights, rank) for rank in range(num_ranks)]


def _share(batch: StepBatch, plan: MicrobatchPlan, credit: Credit, weights: np.ndarray, rank: int) -> Share:
    of_rank = [minibatch[rank] for minibatch in plan.minibatches]
    index = np.array([sample for minibatch in of_rank for micro in minibatch for sample in micro], np.int64)
    index_in_group = batch.index_in_group
    place = {sample: position for position, sample in enumerate(index.tolist())}
    return Share(
        minibatches=tuple(tuple(tuple(place[sample] for sample in micro) for micro in mini) for mini in of_rank),
        denominators=plan.denominators,
        alignment=plan.alignment,
        version=batch.version,
        names=[batch.names[sample] for sample in index],
        index=index,
        advantages=credit.advantages[index],
        weights=weights[index],
        tokens=[batch.payloads[batch.group_of[sample]][index_in_group[sample]] for sample in index],
        token_rewards=credit.token_rewards and _rewards_of(credit.token_rewards, index),
    )


def _rewards_of(rewards: TokenRewards, index: np.ndarray) -> TokenRewards:
    """The rewards of some samples, which get new numbers.

    Args:
        index: int64 [N], the samples in their new order.
    """
    place = np.full(max(rewards.sample.max(initial=-1), index.max(initial=-1)) + 1, -1)
    place[index] = np.arange(len(index))
    sample = place[rewards.sample]
    own = sample >= 0
    return TokenRewards(sample[own], rewards.position[own], rewards.value[own])
