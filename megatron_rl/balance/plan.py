"""Plans a step: distributes its samples over optimizer steps, ranks and micro-batches. The plan is a pure value.

Invariants (tests/unit/balance): every active sample is in exactly one micro-batch, and no other sample is in any; no
micro-batch exceeds the cap, alignment padding included, except for the micro-batch of a single longer sample if this is
allowed; all data-parallel ranks of a mini-batch have the same number of micro-batches; a group's active samples are in
one mini-batch; the same input gives the same plan.

Shape letters: S samples, C micro-batches of all ranks, P of each rank, R ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_rl.balance.assign import AssignmentLimits, assign
from megatron_rl.balance.cost import sample_costs
from megatron_rl.balance.flops import tower_flops, training_flops
from megatron_rl.balance.metrics import bubble, imbalance, lockstep, lockstep_floor
from megatron_rl.balance.packing import padded
from megatron_rl.config.balance import BalanceConfig
from megatron_rl.config.policy import ParallelConfig
from megatron_rl.types import AnnotatedBatch, Denominators, Mesh, MicrobatchPlan, Minibatches, ModelShape, StepBatch

WHOLE = Minibatches()


def plan_microbatches(
    batch: StepBatch,
    active: np.ndarray,
    shape: ModelShape,
    parallel: ParallelConfig,
    balance: BalanceConfig,
    minibatches: Minibatches = WHOLE,
    *,
    recompute: str = "none",
) -> MicrobatchPlan:
    """Plan one epoch of a step.

    Groups with an active sample are distributed in order over the mini-batches. The numbers of groups differ by at most
    one, so no group is left over. Each mini-batch is assigned to ranks and micro-batches (`assign`). With a
    pipeline the cheap positions are at both ends, where the pipeline fills and drains. Without one the most expensive
    position comes first, so that a lack of memory shows at once.

    If fewer groups than mini-batches have an active sample, there are fewer mini-batches, because one without samples
    has no gradient. `len(plan.minibatches)` is the number of optimizer steps; it is 0 if no sample is active.

    Args:
        active: bool [S], the samples that are planned.
        parallel: gives the data-parallel ranks, the pipeline stages, the alignment that sequences are padded to, and
            the number that must divide the number of micro-batches; some micro-batches may be empty.
        balance: gives the cap, the cost, whether groups stay together, and what happens to samples above the cap.
        minibatches: the wanted number, and the order of the groups.
        recompute: the recomputation of the layers, `none` or `full`. It changes the cost.

    Returns:
        The plan. Its metrics cover the whole epoch:
            balance/tokens             tokens without padding
            balance/flops              FLOPs of the optimizer steps on all ranks
            balance/model_flops        the same without recomputation
            balance/num_microbatches   number of micro-batches of a rank
            balance/imbalance          (max - mean) / mean of the ranks' costs, in the worst mini-batch
            balance/lockstep           lockstep cost divided by a lower bound of every plan's
            balance/fill               tokens divided by the cap of all micro-batches, empty ones included
            balance/padding            share of the padded tokens that alignment added
            balance/bubble             estimated share of idle time of a pipeline stage
            balance/oversize           number of samples above the cap

    Raises:
        ValueError: the cap is below the alignment; there is no mini-batch; an active sample has no token or
            no action, or is longer than the cap and this is refused. The error says which number to change.
    """
    mesh, cap = parallel.mesh, balance.max_tokens_per_microbatch
    sizes_S = padded(batch.lengths, parallel.alignment)
    _check_numbers(cap, parallel.alignment, minibatches.number)
    _check_samples(batch, active, sizes_S, parallel.alignment, balance)
    patches = batch.patches if isinstance(batch, AnnotatedBatch) and batch.patches else [()] * len(batch.lengths)
    tower_S = tower_flops(patches, shape, recompute)
    # The ranks of a model divide the layers' work, but each rank of the first stage computes the whole tower.
    of_images_S = mesh.tensor * mesh.context * mesh.pipeline * tower_S
    costs_S = sample_costs(batch.lengths, balance.cost, shape, recompute, of_images_S)
    flops_S = training_flops(batch.lengths, shape, recompute) + tower_S
    needed_S = training_flops(batch.lengths, shape) + tower_flops(patches, shape)
    limits = AssignmentLimits(cap, mesh.data, parallel.microbatch_multiple)
    plan = _Writer(sizes_S, costs_S, flops_S, limits, mesh)
    for samples in _deal_groups(batch.group_of, active, minibatches):
        groups = batch.group_of[samples] if balance.groups == "together" else None
        packing = assign(sizes_S[samples], costs_S[samples], limits, groups)
        plan.add(samples, packing.cell_S, packing.count)
        plan.denominators.append(Denominators(int(batch.num_actions[samples].sum()), len(samples)))
    return MicrobatchPlan(
        minibatches=tuple(plan.minibatches),
        denominators=tuple(plan.denominators),
        tokens=tuple(plan.tokens),
        flops=tuple(plan.flops),
        max_tokens=cap,
        alignment=parallel.alignment,
        metrics=plan.metrics(int(batch.lengths[active].sum()), int((sizes_S[active] > cap).sum()))
        | {"balance/model_flops": float(needed_S[active].sum())},
    )


class _Writer:
    """Collects mini-batches as nested tuples, and the sums for the step's metrics."""

    def __init__(
        self, sizes_S: np.ndarray, costs_S: np.ndarray, flops_S: np.ndarray, limits: AssignmentLimits, mesh: Mesh
    ):
        self.sizes_S, self.costs_S, self.flops_S = sizes_S, costs_S, flops_S
        self.limits, self.mesh = limits, mesh
        self.minibatches: list[tuple[tuple[tuple[int, ...], ...], ...]] = []
        self.denominators: list[Denominators] = []
        self.tokens: list[tuple[tuple[int, ...], ...]] = []
        self.flops: list[tuple[tuple[float, ...], ...]] = []
        self.imbalances: list[float] = []
        self.lockstep, self.floor, self.idle = 0.0, 0.0, 0.0

    def add(self, samples: np.ndarray, cell_S: np.ndarray, count: int) -> None:
        """Add a mini-batch.

        Args:
            samples: ascending indices.
            cell_S: their cells, `position * num_ranks + rank`. Position 0 is the most expensive.
            count: the number of positions.
        """
        num_ranks = self.limits.num_ranks
        position_S, rank_S = np.divmod(cell_S, num_ranks)
        if self.mesh.pipeline > 1:  # costs 5 4 3 2 1 become 1 3 5 4 2
            order = np.concatenate([np.arange(count)[::-1][::2], np.arange(count)[::-1][1::2][::-1]])
            position_S = np.argsort(order)[position_S]
        cell_S = rank_S * count + position_S  # number a rank's micro-batches consecutively
        num_cells = num_ranks * count

        def sums(of_S: np.ndarray) -> np.ndarray:
            return np.bincount(cell_S, weights=of_S[samples], minlength=num_cells).reshape(num_ranks, count)

        cost_PR = sums(self.costs_S).T
        self.tokens.append(_tuples(sums(self.sizes_S).astype(np.int64)))
        self.flops.append(_tuples(sums(self.flops_S)))
        members = samples[np.argsort(cell_S, kind="stable")].tolist()
        ends = np.cumsum(np.bincount(cell_S, minlength=num_cells)).tolist()
        cells = [tuple(members[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        self.minibatches.append(tuple(tuple(cells[r * count : (r + 1) * count]) for r in range(num_ranks)))
        self.imbalances.append(imbalance(cost_PR))
        cost_P = cost_PR.max(1)
        self.lockstep += lockstep(cost_PR)
        self.floor += lockstep_floor(self.sizes_S[samples], self.costs_S[samples], self.limits.cap, num_ranks)
        idle = bubble(cost_P, self.mesh.pipeline, self.mesh.virtual)
        self.idle += idle / (1 - idle) * float(cost_P.sum())

    def metrics(self, num_tokens: int, num_oversize: int) -> dict[str, float]:
        slots = sum(len(minibatch[0]) for minibatch in self.minibatches)
        padded_tokens = sum(sum(map(sum, tokens)) for tokens in self.tokens)
        busy = self.idle + self.lockstep
        return {
            "balance/tokens": float(num_tokens),
            "balance/flops": float(sum(sum(map(sum, flops)) for flops in self.flops)),
            "balance/num_microbatches": float(slots),
            "balance/imbalance": max(self.imbalances, default=0.0),
            "balance/lockstep": self.lockstep / self.floor if self.floor else 1.0,
            "balance/fill": num_tokens / (slots * self.limits.num_ranks * self.limits.cap) if slots else 0.0,
            "balance/padding": 1 - num_tokens / padded_tokens if padded_tokens else 0.0,
            "balance/bubble": self.idle / busy if busy else 0.0,
            "balance/oversize": float(num_oversize),
        }


def _tuples(array_RP: np.ndarray) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, array_RP.tolist()))


def _deal_groups(group_S: np.ndarray, active_S: np.ndarray, minibatches: Minibatches) -> list[np.ndarray]:
    """The samples of each mini-batch that has any. Whole groups are distributed in order, and the numbers of groups
    differ by at most one."""
    indices = np.flatnonzero(active_S)
    _, first, number = np.unique(group_S[indices], return_index=True, return_inverse=True)
    place = np.argsort(np.argsort(first))  # of each group, by first appearance
    if minibatches.seed:
        place = np.random.default_rng(minibatches.seed).permutation(len(first))[place]
    cuts = np.cumsum([len(part) for part in np.array_split(first, minibatches.number)])
    owner = np.searchsorted(cuts, place[number], side="right")
    parts = [indices[owner == update] for update in range(minibatches.number)]
    return [samples for samples in parts if len(samples)]


def _check_numbers(cap: int, alignment: int, updates: int) -> None:
    if cap < alignment:
        raise ValueError(
            f"the cap of {cap} tokens per micro-batch is below the alignment of {alignment}: raise "
            f"balance.max_tokens_per_microbatch to {alignment} or more"
        )
    if updates < 1:
        raise ValueError(f"the number of mini-batches is {updates}: an epoch needs at least 1")


def _check_samples(
    batch: StepBatch, active: np.ndarray, sizes_S: np.ndarray, alignment: int, balance: BalanceConfig
) -> None:
    cap = balance.max_tokens_per_microbatch
    empty_S = active & ((batch.lengths < 1) | (batch.num_actions < 1))
    if empty_S.any():
        index = int(np.flatnonzero(empty_S)[0])
        raise ValueError(
            f"active sample {index} ({batch.names[index]}) has {batch.lengths[index]} tokens and "
            f"{batch.num_actions[index]} action tokens, so it has no gradient; make it inactive"
        )
    long_S = active & (sizes_S > cap)
    if long_S.any() and balance.oversize == "refuse":
        index, longest = int(np.flatnonzero(long_S)[0]), int(sizes_S[long_S].max())
        raise ValueError(
            f"sample {index} ({batch.names[index]}) has {batch.lengths[index]} tokens, {sizes_S[index]} when padded to "
            f"a multiple of {alignment}: above the cap of {cap}. {long_S.sum()} samples in all are above it; raise "
            f"balance.max_tokens_per_microbatch to {longest} or more, or set balance.oversize to alone"
        )
