"""Plans a step, and distributes it over the data-parallel ranks.

Invariant (tests/unit/loop): every planned sample is in one share, with its own tokens and numbers, and a share has no
other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from megatron_rl.algorithms import estimate_advantages, loss_weights
from megatron_rl.algorithms.passes import Column
from megatron_rl.balance import plan_microbatches
from megatron_rl.config.losses import Aggregation
from megatron_rl.config.policy import ModelConfig, ParallelConfig
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.config.teachers import teacher_of
from megatron_rl.types import (
    AnnotatedBatch,
    Credit,
    Metrics,
    MicrobatchPlan,
    Minibatches,
    ModelShape,
    Rollouts,
    Share,
    Shares,
    StepBatch,
    TokenNumbers,
    TokenRewards,
)
from megatron_rl.types.step import numbers

TOTALS = ("balance/tokens", "balance/flops", "balance/model_flops", "balance/num_microbatches")
"""The metrics of a plan that add up over the epochs of a step. The others are means."""


def plan_step(config: GrpoRunConfig, shape: ModelShape, batch: StepBatch) -> tuple[Shares, Metrics]:
    """The shares of a step, and the metrics of advantages and plan."""
    algorithm, critic = config.algorithm, config.critic
    credit, metrics = estimate_advantages(batch, algorithm)

    def dealt(
        parallel: ParallelConfig, model: ModelConfig, aggregation: Aggregation, updates: int, epochs: int
    ) -> tuple[list[list[Share]], Metrics]:
        shares: list[list[Share]] = []
        plans: list[MicrobatchPlan] = []
        for epoch in range(epochs):
            is_new = epoch == 0 or (algorithm.reshuffle and updates > 1)
            if is_new:
                seed = (config.run.seed, batch.version, epoch) if epoch else ()
                plan = plan_microbatches(
                    batch,
                    credit.active,
                    shape,
                    parallel,
                    config.balance,
                    Minibatches(updates, seed),
                    recompute=model.recompute,
                )
                weights = loss_weights(batch, plan, aggregation, algorithm.loss_agg_tokens)
                plans.append(plan)
                shares.append(deal(batch, plan, parallel.data, weights, credit, epochs))
            else:
                plans.append(plans[0])
                shares.append(shares[0])
        of_plans = {name: [plan.metrics[name] for plan in plans] for name in plans[0].metrics}
        return shares, {name: sum(all_) if name in TOTALS else fmean(all_) for name, all_ in of_plans.items()}

    own = algorithm.updates_per_step, algorithm.epochs
    policy, planned = dealt(config.policy.parallel, config.model, algorithm.aggregation, *own)
    others = {}
    if critic is not None:
        model = critic.model or config.model
        others["critic"], _ = dealt(critic.parallel, model, "token-mean", *critic.updates_of(algorithm))
    return Shares(policy, others), {**metrics, **planned}


def batch_of(config: GrpoRunConfig, rollouts: Rollouts, version: int) -> StepBatch:
    """The batch of a step."""
    weights = np.array([reward.weight for reward in config.rewards])
    batch = StepBatch.of_groups(rollouts.groups, version, weights, rollouts.greedy_rewards)
    columns: dict[str, Any] = {}
    if config.teachers:
        teachers = [teacher_of(config.teachers, group.prompt.columns) for group in rollouts.groups]
        of_groups = np.array([0.0 if number is None else config.teachers[number].weight for number in teachers])
        columns["teacher_weights"] = of_groups[batch.group_of]
    if "pass_rate" in config.algorithm.adv_estimator.needs:
        rates = numbers(group.prompt.columns.get("pass_rate") for group in rollouts.groups)
        columns["pass_rates"] = rates[batch.group_of]
    patches = [
        one.episode.patches if one.episode else tuple(picture.num_patches for picture in group.prompt.pictures)
        for group in rollouts.groups
        for one in group.rollouts
    ]
    if any(patches):
        columns["patches"] = patches
    return AnnotatedBatch.of(batch, **columns) if columns else batch


def with_columns(shares: Sequence[Share], columns: Mapping[Column, TokenNumbers]) -> list[Share]:
    """The shares with references to columns of their samples."""
    return [
        replace(share, columns={name: numbers.needed_by(share.index) for name, numbers in columns.items()})
        for share in shares
    ]


def deal(
    batch: StepBatch,
    plan: MicrobatchPlan,
    num_ranks: int,
    weights: np.ndarray | None = None,
    credit: Credit | None = None,
    epochs: int = 1,
    logp_reference: np.ndarray | None = None,
) -> list[Share]:
    """The share of each data-parallel rank in an epoch.

    Args:
        weights: float64 [S], the factor of each action token's loss (`loss_weights`). None: the samples are only looked
            at.
        credit: None: no sample has an advantage, as in supervised training.
        epochs: the number of epochs of the step.
        logp_reference: float64 [S], see `TrainingRow.logp_reference`; None if there are none.
    """
    num_samples = len(batch.names)
    weights = np.zeros(num_samples) if weights is None else weights
    credit = credit or Credit(np.zeros(num_samples), np.ones(num_samples, bool))
    shares = [_share(batch, plan, credit, weights, rank, epochs) for rank in range(num_ranks)]
    if logp_reference is None:
        return shares
    return [replace(share, logp_reference=logp_reference[share.index]) for share in shares]


def _share(
    batch: StepBatch, plan: MicrobatchPlan, credit: Credit, weights: np.ndarray, rank: int, epochs: int
) -> Share:
    of_rank = [minibatch[rank] for minibatch in plan.minibatches]
    index = np.array([sample for minibatch in of_rank for micro in minibatch for sample in micro], np.int64)
    index_in_group = batch.index_in_group
    place = {sample: position for position, sample in enumerate(index.tolist())}
    weighted = batch.teacher_weights if isinstance(batch, AnnotatedBatch) else None
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
        sums=credit.sums and credit.sums._replace(first=credit.sums.first[index], stop=credit.sums.stop[index]),
        epochs=epochs,
        teacher_weights=None if weighted is None else weighted[index],
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
