"""The transfer plan: the rectangles that each trainer rank sends, and where each engine rank writes them.

A plan is only the intersection of source and destination. All bytes that the same set of replicas can send are put in
one sequence, engine by engine, and the replicas share this sequence: each of them sends one interval of it, for any
number of engines. Invariants (tests/unit/layout): every described destination element is written exactly once and from
its own source element; replicas send equally many bytes, within a row, unless one of them is nearer to the receiver;
the plan is a pure function of its inputs, so that each side computes it alone and both compare `digest`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from megatron_rl.layout.copies import WIDTHS, Copy
from megatron_rl.layout.engines import Engines
from megatron_rl.layout.links import Links
from megatron_rl.layout.recording import Recording
from megatron_rl.layout.regions import Regions, Side, intersect_sides
from megatron_rl.layout.replicas import Stream, group_segments, share_out
from megatron_rl.layout.route_order import Turn, order_routes
from megatron_rl.models.adapters import trains
from megatron_rl.models.families import FAMILIES
from megatron_rl.models.shards import volume
from megatron_rl.types import Mesh, ModelShape


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """The plan is a list of runs. A pair is a group of source ranks and one rank of an engine; its stream is the
    sequence of all items that this engine rank needs and these sources hold. A run says which source rank sends the
    bytes [start, stop) of a pair's stream."""

    regions: Regions
    dtype: str
    num_sources: int
    engines: Engines
    source: np.ndarray
    """int32 [num_runs]: the sending rank; runs are sorted by source, destination, pair, start."""
    destination: np.ndarray
    """int32 [num_runs]: the receiving rank, engine * engines.world_size + the engine's rank. Only engines that the
    trainer feeds occur."""
    pair: np.ndarray
    start: NDArray[np.int64]
    """[num_runs]: the first byte of each run in its pair's stream."""
    stop: NDArray[np.int64]
    stream: Stream
    stage_size: int | None = None
    """The number of consecutive source ranks that hold the same layers, if all routes from them to an engine are to
    advance together, layer by layer. None: no route waits for another one."""

    @cached_property
    def digest(self) -> str:
        """A digest of the plan. Two sides with different models, meshes or engines get different digests."""
        regions, sha = self.regions, hashlib.sha256()
        for side in (regions.source, regions.destination):
            sha.update(repr((side.cuts, side.hf_prefixes, side.prefixes)).encode())
        engines = self.engines
        ranks = (self.num_sources, self.stage_size, engines.num, engines.world_size, engines.chains)
        sha.update(repr((self.dtype, *ranks)).encode())
        arrays = (regions.source.held, regions.destination.held, regions.boxes, regions.item_block, regions.item_held)
        for array in (*arrays, regions.item_box, self.stream.items, self.stream.first):
            sha.update(np.ascontiguousarray(array, np.int64).tobytes())
        for array in (self.source, self.destination, self.pair, self.start, self.stop):
            sha.update(np.ascontiguousarray(array, np.int64).tobytes())
        return sha.hexdigest()[:16]

    @property
    def num_destinations(self) -> int:
        """The number of ranks of all engines, including engines that other engines feed."""
        return self.engines.num * self.engines.world_size

    @property
    def bytes(self) -> NDArray[np.int64]:
        """The number of bytes of each run, int64 [num_runs]."""
        return self.stop - self.start

    @property
    def num_routes(self) -> int:
        """The number of pairs of a trainer rank and an engine rank between which bytes pass."""
        return len(self.turns)

    @cached_property
    def turns(self) -> dict[tuple[int, int], list[Turn]]:
        """When each route is served, by (trainer rank, engine rank); see `turns.order_routes`."""
        keys, route = np.unique(
            self.source.astype(np.int64) * self.num_destinations + self.destination, return_inverse=True
        )
        num_bytes = np.zeros(len(keys), np.int64)
        np.add.at(num_bytes, route, self.bytes)
        source, destination = (ends.tolist() for ends in np.divmod(keys, self.num_destinations))
        groups = None
        if self.stage_size is not None:
            stages = -(-self.num_sources // self.stage_size)
            groups = [
                to // self.engines.world_size * stages + rank // self.stage_size
                for rank, to in zip(source, destination, strict=True)
            ]
        turns = order_routes(source, destination, num_bytes.tolist(), groups)
        return dict(zip(zip(source, destination, strict=True), turns, strict=False))

    @property
    def sent_bytes(self) -> np.ndarray:
        """The number of bytes that each trainer rank sends, float64 [num_sources], exact below 2^53."""
        return np.bincount(self.source, self.bytes, self.num_sources)

    @property
    def engine_bytes(self) -> np.ndarray:
        """The number of bytes that each rank of one engine receives, float64 [engines.world_size], exact below 2^53."""
        first = self.destination < self.engines.world_size  # engine 0 is always fed by the trainer
        return np.bincount(self.destination[first], self.bytes[first], self.engines.world_size)

    def held_bytes(self, side: Side) -> np.ndarray:
        """The number of bytes that each rank of `regions.source` or of `regions.destination` holds, float64, exact
        below 2^53."""
        sizes = np.array([volume(cut.box) * WIDTHS[cut.wire_dtype(self.dtype)] for cut in side.cuts], float)
        return np.bincount(side.held[:, 0], sizes[side.held[:, 3]])

    def sent_by(self, rank: int) -> dict[int, tuple[Copy, ...]]:
        """The copies that one trainer rank sends, in wire order, by destination rank. A destination without any is
        absent."""
        return self._routes(np.flatnonzero(self.source == rank), self.destination)

    def received_by(self, rank: int) -> dict[int, tuple[Copy, ...]]:
        """The copies that one engine rank receives, in wire order, by trainer rank. If another engine feeds it, these
        are the copies of the first engine of its chain, because `upstream` passes on the same copies."""
        engine, within = divmod(rank, self.engines.world_size)
        first = self.engines.chain_of(engine)[0] * self.engines.world_size + within
        return self._routes(np.flatnonzero(self.destination == first), self.source)

    def upstream(self, rank: int) -> int | None:
        """The rank of another engine that feeds this rank; None if the trainer feeds it."""
        engine = rank // self.engines.world_size
        return None if engine == self.engines.chain_of(engine)[0] else rank - self.engines.world_size

    def downstream(self, rank: int) -> int | None:
        """The rank of another engine that this rank feeds; None if its chain ends here."""
        engine = rank // self.engines.world_size
        return None if engine == self.engines.chain_of(engine)[-1] else rank + self.engines.world_size

    @cached_property
    def routes(self) -> dict[tuple[int, int], tuple[Copy, ...]]:
        """All copies that the trainer sends, in wire order, by (trainer rank, engine rank). This is for small plans; a
        rank asks for its own copies with `sent_by` or `received_by`."""
        every = {source: self.sent_by(source) for source in np.unique(self.source).tolist()}
        return {(source, to): copies for source, routes in every.items() for to, copies in routes.items()}

    def _routes(self, runs: np.ndarray, peers: np.ndarray) -> dict[int, tuple[Copy, ...]]:
        routes: dict[int, list[Copy]] = {}
        for run in runs.tolist():
            routes.setdefault(int(peers[run]), []).extend(self._copies(run))
        return {peer: tuple(copies) for peer, copies in routes.items()}

    def _copies(self, run: int) -> Iterable[Copy]:
        """The copies of a run. Its first and its last item may be cut between two rows of dim 0."""
        stream, regions, rank = self.stream, self.regions, int(self.source[run])
        first, last = stream.first[self.pair[run]], stream.first[self.pair[run] + 1]
        start, stop = self.start[run], self.stop[run]
        low = first + np.searchsorted(stream.offset[first:last], start, "right") - 1
        high = first + np.searchsorted(stream.offset[first:last], stop, "left")
        items, offset, row_bytes = stream.items[low:high], stream.offset[low:high], stream.row_bytes[low:high]
        first_row = np.maximum(start - offset, 0) // row_bytes
        last_row = np.minimum(stop - offset, stream.bytes[low:high]) // row_bytes
        held, other_held = regions.locate(items, rank)
        columns = (
            regions.source.held[held, 2:],
            regions.destination.held[other_held, 2:],
            regions.boxes[regions.item_box[items]],
            first_row,
            last_row,
        )
        for here, there, box, *rows in zip(*(column.tolist() for column in columns), strict=True):
            yield from self._cut(here, there, box, *rows)

    def _cut(self, here: list[int], there: list[int], box: list[list[int]], first: int, last: int) -> Iterable[Copy]:
        """The copies for rows [first, last) of an item, where rows are counted through its experts. `here` and `there`
        are (prefix, cut)."""
        source, destination = self.regions.source, self.regions.destination
        prefix, cut = source.prefixes[here[0]], source.cuts[here[1]]
        other_prefix, other = destination.prefixes[there[0]], destination.cuts[there[1]]
        dtype = cut.wire_dtype(self.dtype)
        (first_expert, _), (begin, end), *rest = box[: len(cut.box)]
        tail, rows_each = tuple((low, high) for low, high in rest), end - begin
        for expert in range(first // rows_each, -(-last // rows_each)):
            start, stop = max(first - expert * rows_each, 0), min(last - expert * rows_each, rows_each)
            part, number = ((begin + start, begin + stop), *tail), first_expert + expert
            yield Copy(*cut.local(prefix, part, number), *other.local(other_prefix, part, number), dtype)


@lru_cache(maxsize=2)
def plan_weights(
    shape: ModelShape,
    trainer: Mesh | tuple[Recording, ...],
    engines: Engines,
    *,
    fused_norms: bool = False,
    dtype: str = "bfloat16",
    links: Links = Links(),
    recorded: tuple[Recording, ...] = (),
    repacked: bool = False,
) -> TransferPlan:
    """The plan from a trainer to equal engines. A destination rank is engine * engines.world_size + the engine's rank.

    Args:
        fused_norms: the trainer has Transformer Engine's layers.
        dtype: the dtype of the bytes that are sent.
        trainer: the mesh of Megatron's ranks, or what each rank of another trainer holds.
        recorded: what the ranks of an engine hold. If it is empty, the family's table says so.
        repacked: the engines repack layers, and hold each of them a second time until all of its bytes have arrived. So
            the layers are to arrive one after the other.

    Raises:
        ValueError: the mesh does not divide heads, FFNs, experts or layers, or vLLM cannot split the family so widely.
    """
    family = FAMILIES[shape.family]
    tensor, pipeline = engines.tensor, engines.pipeline
    if isinstance(trainer, Mesh):
        num_sources, stage_size = trainer.world_size, trainer.stage_size
        held = [family.megatron_placed(shape, trainer, rank, fused_norms) for rank in range(num_sources)]
        held = [[row for row in rows if trains(shape, row.placement.local_name)] for rows in held]
    else:
        num_sources = stage_size = len(trainer)
        held = [rank.placed for rank in trainer]
    source = Side.of(held)
    if recorded:
        destination = Side.of(rank.placed for rank in recorded)
    else:
        destination = Side.of(
            family.vllm_placed(shape, tensor, rank, engines.expert_parallel, pipeline)
            for rank in range(tensor * pipeline)
        )
    regions = intersect_sides(source, destination)
    return plan_regions(regions, num_sources, engines, links, dtype, stage_size if repacked else None)


def plan_regions(
    regions: Regions,
    num_sources: int,
    engines: Engines,
    links: Links = Links(),
    dtype: str = "bfloat16",
    stage_size: int | None = None,
) -> TransferPlan:
    """Distribute the regions over the ranks that hold them. The destination of `regions` is one engine."""
    stream = Stream.of(regions, dtype)
    workloads = group_segments(stream, regions.groups[0], num_sources, engines, links)
    cut, sender = share_out(workloads, num_sources, links)
    if len(cut):  # move each cut down to the beginning of a row
        segment = np.searchsorted(workloads.end, np.minimum(cut, workloads.end[-1] - 1), "right") - 1
        total = np.append(0, np.cumsum(stream.bytes))
        within = total[stream.first[workloads.pair[segment]]] + cut - workloads.end[segment]
        item = np.minimum(np.searchsorted(total, within, "right"), len(stream.items)) - 1
        cut = cut - (within - total[item]) % stream.row_bytes[item]
    points = np.unique(np.concatenate([workloads.end, cut]))
    start, stop = points[:-1], points[1:]
    segment = np.searchsorted(workloads.end, start, "right") - 1
    source = sender[np.searchsorted(cut, start, "right") - 1]
    pair, destination = workloads.pair[segment], workloads.destination[segment]
    start, stop = start - workloads.end[segment], stop - workloads.end[segment]
    order = np.lexsort((start, pair, destination, source))
    return TransferPlan(
        regions,
        dtype,
        num_sources,
        engines,
        source[order].astype(np.int32),
        destination[order].astype(np.int32),
        pair[order].astype(np.int32),
        start[order],
        stop[order],
        stream,
        stage_size,
    )
