"""Whole matrices, put together from the ranks' parts, and split again.

A matrix is a tensor of the Hugging Face folder. So q, k and v are separate matrices, like gate and up, although they
share a parameter of Megatron; the shards of `layout` say where their parts are. One of the data-parallel ranks that
have intervals of a parameter is its worker: the others send it their intervals, it puts the matrices together with its
tensor-parallel ranks, and sends the results back. arXiv:2502.16982 gathers over DP as well, but there each rank does
the whole work. A rank without an interval of a parameter does not take part.

Invariants (tests/unit/actor, tests/ranks): every parameter has one worker, which owns a part of it; what a function
makes of a matrix is the same in every layout, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_rl.actor.optimizer.intervals import Interval, intervals
from megatron_rl.convert.forms import is_expert
from megatron_rl.models import FAMILIES, Box, Shard, is_matrix, megatron_shards, slices, volume
from megatron_rl.types import Mesh, ModelShape


class Place(NamedTuple):
    """A model, and the rank of the trainer that has a part of it."""

    shape: ModelShape
    mesh: Mesh
    rank: int
    fused_norms: bool
    """Whether the layers are Transformer Engine's."""


class Owner(NamedTuple):
    """A data-parallel rank that has the flat interval [start, stop) of a parameter."""

    rank: int
    """Among all trainer ranks."""
    start: int
    stop: int


class Part(NamedTuple):
    """A rectangle of a matrix that is a rectangle of a parameter on one of the tensor-parallel ranks."""

    peer: int
    """The rank's number among them."""
    box: Box
    local_box: Box


class Matrix(NamedTuple):
    extents: tuple[int, ...]
    parts: list[Part]


@dataclass(frozen=True, slots=True)
class SplitParameter:
    """A parameter that consists of parts of matrices. This rank has an interval of it."""

    inner: MegatronOptimizer
    """The one of Megatron's optimizers that updates it."""
    interval: Interval
    number: int
    """Its place in the order of the model, which is the same on all ranks that have parts of its matrices."""
    owners: Sequence[Owner]
    worker: Owner
    """One of the owners."""
    data_group: dist.ProcessGroup | None
    """The group of the owners; None if this rank is the only one."""
    tensor_group: dist.ProcessGroup | None
    """The group of the ranks that have the other parts; None if this rank has the whole matrices."""
    peer: int
    """This rank's number in it, or 0."""
    matrices: Sequence[Matrix]

    def transformed(self, whole: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Put the matrices together with the tensor-parallel ranks, apply a function to each, and take them apart.

        Args:
            whole: float32 [numel]: what has the form of the parameter.

        Returns:
            float32 [numel].
        """
        whole = whole.view(self.interval.parameter.shape)
        parts = [whole]
        if self.tensor_group is not None:
            parts = [torch.empty_like(whole) for _ in range(self.tensor_group.size())]
            dist.all_gather(parts, whole, group=self.tensor_group)
        result = torch.empty_like(whole)
        for matrix in self.matrices:
            gathered = whole.new_empty(matrix.extents)
            for part in matrix.parts:
                gathered[slices(part.box)] = parts[part.peer][slices(part.local_box)]
            made = function(gathered)
            for part in matrix.parts:
                if part.peer == self.peer:
                    result[slices(part.local_box)] = made[slices(part.box)]
        return result.view(-1)


def transformed(
    parameters: Sequence[SplitParameter],
    rank: int,
    flat_of: Callable[[SplitParameter], Tensor],
    function: Callable[[Tensor], Tensor],
) -> Iterator[tuple[SplitParameter, Tensor]]:
    """Apply a function of whole matrices to what has the form of the parameters. All ranks of a stage must exhaust it
    together.

    Args:
        rank: this one, among all trainer ranks.
        flat_of: gives this rank's interval of it, float32 [stop - start], which is written to.
        function: [rows, columns] -> [rows, columns].

    Yields:
        each parameter with this rank's interval of the result, float32 [stop - start].
    """
    shared = {split.number: split for split in parameters if split.data_group is not None}
    flats = {number: flat_of(split) for number, split in shared.items()}
    wholes = {}
    for number, split in shared.items():
        if split.worker.rank == rank:
            wholes[number] = flats[number].new_empty(split.interval.parameter.numel())
            wholes[number][split.interval.start : split.interval.stop] = flats[number]
    _exchange(shared, rank, flats, wholes, to_workers=True)
    for split in parameters:
        if split.data_group is None:
            yield split, split.transformed(flat_of(split), function)
        elif split.worker.rank == rank:
            whole = split.transformed(wholes[split.number], function)
            flats[split.number], wholes[split.number] = whole[split.interval.start : split.interval.stop], whole
    _exchange(shared, rank, flats, wholes, to_workers=False)
    for number, split in shared.items():
        yield split, flats[number]


def _exchange(
    shared: Mapping[int, SplitParameter],
    rank: int,
    flats: Mapping[int, Tensor],
    wholes: Mapping[int, Tensor],
    to_workers: bool,
) -> None:
    """Send the owners' intervals to the worker of each matrix, or the results back to the owners."""
    operations: dict[dist.ProcessGroup, list[dist.P2POp]] = {}
    for number, split in shared.items():
        worker = split.worker.rank
        ends = [(owner.rank, wholes[number][owner.start : owner.stop]) for owner in split.owners if worker == rank]
        if worker != rank:
            ends = [(worker, flats[number])]
        operation = dist.isend if to_workers == (worker != rank) else dist.irecv
        assert split.data_group is not None, "the parameter is shared"
        listed = operations.setdefault(split.data_group, [])
        for end, tensor in ends:
            if end != rank:
                listed.append(dist.P2POp(operation, tensor, end, split.data_group, tag=number))
    for listed in operations.values():
        for work in dist.batch_isend_irecv(listed):
            work.wait()


def split_parameters(
    optimizers: Iterable[MegatronOptimizer], names: Mapping[int, str], place: Place
) -> list[SplitParameter]:
    """The parameters that are matrices of layers and have an interval on this rank, in the order of the model.
    Collective: every rank must call it.

    Args:
        names: the local name of each parameter, by its id, in the order of the model.
    """
    order = {name: number for number, name in enumerate(names.values())}
    matrices = _matrices(place)
    found = []
    for inner in optimizers:
        named = {names[id(interval.parameter)]: interval for interval in intervals(inner)}
        held = {name: one for name, one in named.items() if is_matrix(name, one.parameter.dim())}
        group = inner.data_parallel_group if isinstance(inner, DistributedOptimizer) else None
        owners = _all_owners({name: Owner(place.rank, one.start, one.stop) for name, one in held.items()}, group)
        workers = deal(owners)
        for name, interval in held.items():
            wholes, is_split = matrices[name]
            data_group = group if len(owners[name]) > 1 else None
            tensor_group = _tensor_group(name) if is_split else None
            peer = tensor_group.rank() if tensor_group is not None else 0
            found.append(
                SplitParameter(
                    inner, interval, order[name], owners[name], workers[name], data_group, tensor_group, peer, wholes
                )
            )
    return sorted(found, key=lambda split: split.number)


def _all_owners(mine: Mapping[str, Owner], group: dist.ProcessGroup | None) -> dict[str, list[Owner]]:
    """The owners of every parameter's intervals in a group of data-parallel ranks, by name. Collective: every rank of
    the group must call it."""
    told = [mine]
    if group is not None:
        told = [{} for _ in range(group.size())]
        dist.all_gather_object(told, mine, group=group)
    owners: dict[str, list[Owner]] = {}
    for of_rank in told:
        for name, owner in of_rank.items():
            owners.setdefault(name, []).append(owner)
    return owners


def deal(owners: Mapping[str, Sequence[Owner]]) -> dict[str, Owner]:
    """Choose the worker of each parameter among its owners, so that all of them have equally many elements to work on,
    as far as possible: first the parameters with one owner, then the largest ones. Ranks that differ along the tensor
    axis alone have the same intervals, and so choose the same data-parallel rank."""
    load: dict[int, int] = {}
    chosen = {}
    sizes = {name: max(owner.stop for owner in found) for name, found in owners.items()}
    for name in sorted(owners, key=lambda name: (len(owners[name]) > 1, -sizes[name], name)):
        chosen[name] = min(owners[name], key=lambda owner: (load.get(owner.rank, 0), owner.rank))
        load[chosen[name].rank] = load.get(chosen[name].rank, 0) + sizes[name]
    return chosen


def _tensor_group(name: str) -> dist.ProcessGroup:
    """The ranks over which the matrices of a parameter are split."""
    group: dist.ProcessGroup = (
        parallel_state.get_expert_tensor_parallel_group()
        if is_expert(name)
        else parallel_state.get_tensor_model_parallel_group()
    )
    return group


def _matrices(place: Place) -> dict[str, tuple[list[Matrix], bool]]:
    """The matrices of each parameter of this rank, by its name, and whether other ranks have parts of them."""
    extents = FAMILIES[place.shape.family].hf_tensors(place.shape)
    mine = _by_parameter(place, place.rank)
    found: dict[str, tuple[list[Matrix], bool]] = {}
    peers: dict[bool, list[dict[str, list[Shard]]]] = {}
    for name, shards in mine.items():
        of_expert = is_expert(name)
        is_split = sum(volume(shard.hf_box) for shard in shards) != sum(
            prod(extents[hf_name]) for hf_name in {shard.hf_name for shard in shards}
        )
        if is_split and of_expert not in peers:
            ranks = dist.get_process_group_ranks(_tensor_group(name))
            peers[of_expert] = [_by_parameter(place, rank) for rank in ranks]
        held = [of_peer[name] for of_peer in peers[of_expert]] if is_split else [shards]
        parts: dict[str, list[Part]] = {}
        for peer, of_peer in enumerate(held):
            for shard in of_peer:
                parts.setdefault(shard.hf_name, []).append(Part(peer, shard.hf_box, shard.local_box))
        found[name] = [Matrix(extents[hf_name], listed) for hf_name, listed in parts.items()], is_split
    return found


def _by_parameter(place: Place, rank: int) -> dict[str, list[Shard]]:
    found: dict[str, list[Shard]] = {}
    for shard in megatron_shards(place.shape, place.mesh, rank, place.fused_norms):
        if is_matrix(shard.local_name, len(shard.local_box)):
            found.setdefault(shard.local_name, []).append(shard)
    return found
