"""A step's samples as optimizer steps, ranks and micro-batches: a pure value, made before anything runs.

Invariants: every active sample is in exactly one micro-batch, no other sample is in any; no micro-batch
exceeds the cap, alignment padding counted; all data-parallel ranks of a mini-batch have the same number of
micro-batches; a group's active samples share one mini-batch; the same input gives the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_rl.balance.flops import training_flops
from megatron_rl.balance.karmarkar_karp import karmarkar_karp
from megatron_rl.balance.packing import fewest_bins, pack_into, padded
from megatron_rl.config.balance import BalanceConfig
from megatron_rl.config.schema import ParallelConfig
from megatron_rl.types import Batch, Denominators, MicrobatchPlan, ModelShape

Minibatch = tuple[tuple[tuple[int, ...], ...], ...]
"""Sample indices by data-parallel rank and micro-batch."""


def plan_microbatches(
    batch: Batch, shape: ModelShape, parallel: ParallelConfig, balance: BalanceConfig, updates: int
) -> MicrobatchPlan:
    """Plan one step.

    Groups with an active sample are dealt in order, in even numbers, to `updates` mini-batches. The samples
    of a mini-batch are split over the data-parallel ranks by training FLOPs (Karmarkar-Karp), then packed:
    every rank gets the number of micro-batches that the fullest rank needs, with costs as even as the room
    allows. With a pipeline the cheap micro-batches stand at both ends, where it fills and drains.

    Fewer groups with an active sample than `updates` make fewer mini-batches: one without samples has no
    gradient and is left out, so `len(plan.minibatches)` is the number of optimizer steps. None active: no
    mini-batch.

    Args:
        batch: its lengths, num_actions, group_of and active are read.
        parallel: data-parallel ranks, pipeline stages, and the alignment that sequences are padded to.
        balance: the hard cap of a micro-batch.
        updates: mini-batches wanted.

    Returns:
        The plan; its metrics: balance/tokens (unpadded, active), balance/num_microbatches (of a rank, all
        mini-batches), balance/imbalance ((max - mean) / mean of the ranks' FLOPs, worst mini-batch),
        balance/fill (tokens over the cap of all micro-batches, empty ones included).

    Raises:
        ValueError: the cap is below the alignment; an active sample is longer than the cap, or has no token,
            or no action.
    """
    mesh, cap = parallel.mesh, balance.max_tokens_per_microbatch
    _check(batch, cap, parallel.alignment, updates)
    sizes = padded(batch.lengths, parallel.alignment)
    costs = training_flops(batch.lengths, shape)
    minibatches, denominators, imbalances = [], [], []
    for samples in _deal_groups(batch, updates):
        ranks = [samples[part] for part in karmarkar_karp(costs[samples], mesh.data)]
        rank_costs = [costs[rank].sum() for rank in ranks]
        imbalances.append(float(max(rank_costs) / np.mean(rank_costs) - 1))
        minibatches.append(_pack_ranks(ranks, sizes, costs, cap, small_ends=mesh.pipeline > 1))
        denominators.append(Denominators(int(batch.num_actions[samples].sum()), len(samples)))
    slots = sum(len(minibatch[0]) for minibatch in minibatches)
    num_tokens = int(batch.lengths[batch.active].sum())
    metrics = {
        "balance/tokens": float(num_tokens),
        "balance/num_microbatches": float(slots),
        "balance/imbalance": max(imbalances, default=0.0),
        "balance/fill": num_tokens / (slots * mesh.data * cap) if slots else 0.0,
    }
    return MicrobatchPlan(tuple(minibatches), tuple(denominators), cap, parallel.alignment, metrics)


def _deal_groups(batch: Batch, updates: int) -> list[np.ndarray]:
    """The samples of each mini-batch that has any: whole groups in order, as many in each to one group."""
    indices = np.flatnonzero(batch.active)
    owners = batch.group_of[indices]
    groups = np.array(list(dict.fromkeys(owners.tolist())), np.int64)
    parts = [indices[np.isin(owners, members)] for members in np.array_split(groups, updates)]
    return [samples for samples in parts if len(samples)]


def _pack_ranks(
    ranks: Sequence[np.ndarray], sizes: np.ndarray, costs: np.ndarray, cap: int, small_ends: bool
) -> Minibatch:
    """Pack every rank's samples into one common number of micro-batches."""
    count = max(fewest_bins(sizes[rank].tolist(), costs[rank].tolist(), cap) for rank in ranks)
    minibatch = []
    for rank in ranks:
        bins = pack_into(sizes[rank].tolist(), costs[rank].tolist(), cap, count)
        assert bins is not None, "a packing into fewer bins is one into more"
        bins.sort(key=lambda b: (sum(costs[rank[i]] for i in b), b))
        if small_ends:  # 1 2 3 4 5 becomes 1 3 5 4 2
            bins = bins[::2] + bins[1::2][::-1]
        else:  # the costliest first: what does not fit in memory fails at once
            bins.reverse()
        minibatch.append(tuple(tuple(int(rank[i]) for i in sorted(b)) for b in bins))
    return tuple(minibatch)


def _check(batch: Batch, cap: int, alignment: int, updates: int) -> None:
    if cap < alignment:
        raise ValueError(
            f"the cap of {cap} tokens a micro-batch is below the alignment of {alignment}: raise "
            f"balance.max_tokens_per_microbatch to {alignment} or more"
        )
    if updates < 1:
        raise ValueError(f"updates is {updates}: a step needs 1 optimizer step or more")
    lengths, num_actions, sizes = batch.lengths, batch.num_actions, padded(batch.lengths, alignment)
    for index in np.flatnonzero(batch.active):
        if lengths[index] < 1 or num_actions[index] < 1:
            raise ValueError(
                f"active sample {index} has {lengths[index]} tokens and {num_actions[index]} action tokens: "
                f"it carries no gradient; make it inactive"
            )
        if sizes[index] > cap:
            raise ValueError(
                f"sample {index} has {lengths[index]} tokens, {sizes[index]} when padded to a multiple of "
                f"{alignment}: above the cap of {cap}; set balance.max_tokens_per_microbatch to "
                f"{sizes[index]} or more"
            )
