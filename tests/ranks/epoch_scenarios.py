"""Steps of several epochs, each with its own mini-batches, dealt by the real planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from scenarios import ALGORITHM, COEFFICIENTS, build
from shares import TrainSample

from megatron_rl.actor.trainer import MegatronTrainer
from megatron_rl.algorithms.aggregation import loss_weights
from megatron_rl.balance import plan_microbatches
from megatron_rl.config.balance import BalanceConfig
from megatron_rl.config.policy import ParallelConfig
from megatron_rl.loop.shares import deal
from megatron_rl.models import read_shape
from megatron_rl.types import Credit, MicrobatchPlan, Minibatches, Share, StepBatch, TokenRewards

PER_GROUP = 2


class Composition(NamedTuple):
    updates: int = 2
    """Mini-batches of an epoch."""
    epochs: int = 2
    seed: tuple[int, ...] = (0, 0)


def batch_of(samples: Sequence[TrainSample]) -> StepBatch:
    num = len(samples)
    return StepBatch(
        names=[sample.name for sample in samples],
        group_of=np.arange(num) // PER_GROUP,
        lengths=np.array([len(sample.tokens.ids) for sample in samples]),
        num_actions=np.array([sample.tokens.action_mask.sum() for sample in samples]),
        payloads=[[sample.tokens for sample in samples[i : i + PER_GROUP]] for i in range(0, num, PER_GROUP)],
        version=0,
        is_cut=np.zeros(num, bool),
        rewards=np.zeros(num),
    )


def plans_of(folder, samples: Sequence[TrainSample], composition: Composition, parallel: ParallelConfig) -> list:
    batch, active = batch_of(samples), np.ones(len(samples), bool)
    balance = BalanceConfig(max_tokens_per_microbatch=48)
    return [
        plan_microbatches(
            batch,
            active,
            read_shape(folder),
            parallel,
            balance,
            Minibatches(composition.updates, (*composition.seed, epoch) if epoch else ()),
        )
        for epoch in range(composition.epochs)
    ]


def minibatches_of(plans: Sequence[MicrobatchPlan]) -> list[list[int]]:
    """The samples of each update, which no layout changes."""
    return [
        sorted(sample for rank in minibatch for micro in rank for sample in micro)
        for plan in plans
        for minibatch in plan.minibatches
    ]


def shares_of(actor: MegatronTrainer, samples: Sequence[TrainSample], composition: Composition) -> list[Share]:
    """This rank's share in each epoch. `TrainSample.index` is the sample's number."""
    given = [(i, *reward) for i, sample in enumerate(samples) for reward in sample.token_rewards or ()]
    rewards = TokenRewards(*(np.array(x) for x in zip(*given, strict=True))) if given else None
    credit = Credit(np.array([s.advantage for s in samples]), np.ones(len(samples), bool), rewards)
    parallel, batch = actor.spec.policy.parallel, batch_of(samples)
    shares = []
    for plan in plans_of(actor.spec.model.path, samples, composition, parallel):
        weights = loss_weights(batch, plan, "token-mean")
        dealt = deal(batch, plan, parallel.data, weights, credit, composition.epochs)
        shares.append(dealt[actor.mesh.coordinates(actor.rank)[2]])
    return shares


def gathered(actor: MegatronTrainer, names) -> dict[str, dict[int, np.ndarray]]:
    """The columns of all samples of the step."""
    told = actor.agreement.gather(actor.columns(names))
    return {name: {i: x_L for one in told for i, x_L in one.get(name, {}).items()} for name in names}


def train_epochs(
    rank, world_size, url, *, folder, samples, layout, composition, algorithm=ALGORITHM, coefficients=(), **settings
) -> tuple[list[dict[str, float]], Any]:
    """(the metrics of each update, the metrics of the step's beginning)"""
    actor = build(rank, world_size, url, folder, layout, algorithm, **settings)
    factors = COEFFICIENTS | dict(coefficients)
    first, *later = shares_of(actor, samples, composition)
    if samples[0].values is not None:
        first = replace(first, columns={"value": {s.index: s.values for s in samples}})
    told = actor.begin(first, factors)
    columns = gathered(actor, actor.spec.objective.needs.kept)
    metrics = []
    for epoch, share in enumerate([first, *later]):
        if epoch:
            actor.take(replace(share, columns=columns))
        metrics += [actor.update(i, factors, epoch) for i in range(len(share.minibatches))]
    actor.close()
    return metrics, told
