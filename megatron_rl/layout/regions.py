"""What all ranks of a side hold, as integer arrays, and what two sides have in common.

A rank holds the same cut of a row in many layers and for many experts. So each pair of cuts is intersected only once,
and the result is combined with arrays that say which rank holds which layers and experts. The interval of experts is
one more dim in front of an HF rectangle; it is [0, 1) if the row has no experts. Invariant (tests/unit/layout): the
regions of a destination rank partition what it holds, or an error names the tensor and what is missing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from megatron_rl.models.placement import Placed, Placement
from megatron_rl.models.shards import Box, extents, translate, volume


@dataclass(frozen=True, slots=True)
class Cut:
    """One piece of a row, which is the same in every layer."""

    kind: str
    """The HF name without the layer's prefix; `{}` stands for the expert."""
    box: Box
    """The interval of experts, then the HF rectangle."""
    local_name: str
    local_box: Box
    per_expert: bool
    float32: bool

    def wire_dtype(self, dtype: str) -> str:
        """The dtype of the cut when it is sent; `dtype` is the plan's."""
        return "float32" if self.float32 else dtype

    def local(self, prefix: str, part: Box, expert: int) -> tuple[str, Box]:
        """The local name and box of a part of one expert's HF rectangle."""
        box = translate(part, self.box[1:], self.local_box)
        if not self.per_expert:
            return prefix + self.local_name, box
        index = expert - self.box[0][0]
        if "{}" in self.local_name:
            return prefix + self.local_name.format(index), box
        return prefix + self.local_name, ((index, index + 1), *box)


@dataclass(frozen=True)
class Side:
    """What all ranks of the trainer, or of an engine, hold."""

    cuts: tuple[Cut, ...]
    hf_prefixes: tuple[str, ...]
    prefixes: tuple[str, ...]
    held: np.ndarray
    """int32 [N, 4]: the numbers of rank, HF prefix, local prefix and cut. Rows are sorted by rank, then by depth."""

    @classmethod
    def of(cls, ranks: Iterable[Iterable[Placed]]) -> Side:
        cuts: dict[Cut, int] = {}
        numbers: dict[Placement, int] = {}
        cuts_of: list[list[int]] = []
        hf_prefixes: dict[str, int] = {}
        prefixes: dict[str, int] = {}
        rows = array("i")
        for rank, all_placed in enumerate(ranks):
            seen: dict[int, tuple[Placement, int]] = {}  # layers share placements, so each is hashed once per rank
            for placement, hf_prefix, prefix in all_placed:
                known = seen.get(id(placement))
                if known is None:
                    number = numbers.setdefault(placement, len(numbers))
                    if number == len(cuts_of):
                        cuts_of.append([cuts.setdefault(cut, len(cuts)) for cut in _cuts(placement)])
                    known = seen[id(placement)] = placement, number
                layer = hf_prefixes.setdefault(hf_prefix, len(hf_prefixes))
                rows.extend((rank, layer, prefixes.setdefault(prefix, len(prefixes)), known[1]))
        placed = np.frombuffer(rows, np.int32).reshape(-1, 4) if rows else np.zeros((0, 4), np.int32)
        counts = np.array([len(ids) for ids in cuts_of], np.int64)
        row, index = expand(_starts(counts)[placed[:, 3]], counts[placed[:, 3]])
        held = placed[row]
        held[:, 3] = np.array([cut for ids in cuts_of for cut in ids], np.int32)[index]
        return cls(tuple(cuts), tuple(hf_prefixes), tuple(prefixes), held)


def _cuts(placement: Placement) -> Iterable[Cut]:
    for kind, hf_box, local_box in placement.pieces:
        box = (placement.experts or (0, 1), *hf_box)
        if volume(box):  # a rank with only padding rows holds nothing
            yield Cut(kind, box, placement.local_name, local_box, placement.experts is not None, placement.float32)


def expand(starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each entry i, list the pairs (i, starts[i]), (i, starts[i] + 1), ..., `counts[i]` of them. Returns the first
    and the second elements of all pairs."""
    entry = np.repeat(np.arange(len(counts)), counts)
    return entry, np.arange(len(entry)) - _starts(counts)[entry] + starts[entry]


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.cumsum(counts) - counts


@dataclass(frozen=True)
class Regions:
    """What source and destination have in common, as a list of items. Every replica of the destination needs all items.

    A block is a rectangle in one layer that some source ranks hold completely. A group is such a set of source ranks.
    """

    source: Side
    destination: Side
    block_keys: np.ndarray
    """int64 [num_blocks], ascending: the HF prefix's index * the number of boxes + the box's index."""
    holders: np.ndarray
    """The ranks that hold block 0, ascending, then the ranks that hold block 1, and so on."""
    holdings: np.ndarray
    """The row of `source.held` for each entry of `holders`."""
    holders_start: np.ndarray
    """int64 [num_blocks + 1]: the index of each block's first entry in `holders`."""
    boxes: np.ndarray
    """int64 [num_overlaps, dims, 2]: rectangles with the interval of experts in front; missing dims are [0, 1)."""
    item_block: np.ndarray
    item_held: np.ndarray
    """The row of `destination.held` that each item belongs to, ascending."""
    item_box: np.ndarray
    """The rectangle of each item, as an index into `boxes`."""

    @cached_property
    def groups(self) -> tuple[tuple[tuple[int, ...], ...], np.ndarray]:
        """The distinct sets of ranks that hold a block, and for each block the index of its set."""
        known: dict[bytes, int] = {}
        of_block = np.empty(len(self.block_keys), np.int32)
        ends = self.holders_start.tolist()
        for block, (start, stop) in enumerate(zip(ends, ends[1:], strict=False)):
            of_block[block] = known.setdefault(self.holders[start:stop].tobytes(), len(known))
        return tuple(tuple(np.frombuffer(ranks, np.int32).tolist()) for ranks in known), of_block

    def locate(self, items: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """For each item, its row in `source.held` on the source rank `rank`, and its row in `destination.held`."""
        key = self.item_block[items].astype(np.int64) * self._num_ranks + rank
        found = np.searchsorted(self._holder_keys, key)
        assert (self._holder_keys[found] == key).all(), f"rank {rank} does not hold all of these items"
        return self.holdings[found], self.item_held[items]

    @cached_property
    def _num_ranks(self) -> int:
        return int(self.holders.max(initial=0)) + 1

    @cached_property
    def _holder_keys(self) -> NDArray[np.int64]:
        blocks = np.repeat(np.arange(len(self.block_keys)), np.diff(self.holders_start))
        keys: NDArray[np.int64] = blocks * self._num_ranks + self.holders
        return keys


def intersect_sides(source: Side, destination: Side) -> Regions:
    """All regions of the destination's ranks.

    Raises:
        ValueError: the sources hold a destination rectangle only in part or not at all; the error names it.
    """
    kinds = {kind: i for i, kind in enumerate(sorted({cut.kind for cut in (*source.cuts, *destination.cuts)}))}
    dims = max((len(cut.box) for cut in (*source.cuts, *destination.cuts)), default=1)
    box_of, box_kind, box = _distinct_boxes(source, kinds, dims)
    other_of, other_kind, other_box = _distinct_boxes(destination, kinds, dims)

    # Intersect each pair of boxes of the same kind once. The overlaps are in the order of the destination's boxes.
    order = np.argsort(box_kind, kind="stable")
    first = np.searchsorted(box_kind[order], other_kind, "left")
    other, index = expand(first, np.searchsorted(box_kind[order], other_kind, "right") - first)
    one = order[index]
    start = np.maximum(box[one, :, 0], other_box[other, :, 0])
    stop = np.minimum(box[one, :, 1], other_box[other, :, 1])
    some = (start < stop).all(axis=1)
    one, other, overlap = one[some], other[some], np.stack([start[some], stop[some]], axis=2)

    keys = source.held[:, 1].astype(np.int64) * len(box) + box_of[source.held[:, 3]]
    order = np.lexsort((source.held[:, 0], keys))
    ranks, keys = source.held[order, 0], keys[order]
    new = np.ones(len(keys), bool)  # a rank may hold a block twice; only the first is used
    new[1:] = (keys[1:] != keys[:-1]) | (ranks[1:] != ranks[:-1])
    order, ranks, keys = order[new], ranks[new], keys[new]
    block_keys, holders_start = np.unique(keys, return_index=True)

    numbers = {prefix: i for i, prefix in enumerate(source.hf_prefixes)}
    layer = np.array([numbers.get(prefix, -1) for prefix in destination.hf_prefixes], np.int64)
    wanted = other_of[destination.held[:, 3]]
    first = np.searchsorted(other, wanted, "left")
    held, index = expand(first, np.searchsorted(other, wanted, "right") - first)
    held_layer = layer[destination.held[held, 1]]
    key = held_layer * len(box) + one[index]
    block = np.minimum(np.searchsorted(block_keys, key), max(len(block_keys) - 1, 0))
    there = (held_layer >= 0) & (block_keys[block] == key) if len(block_keys) else np.zeros(len(key), bool)
    regions = Regions(
        source,
        destination,
        block_keys,
        ranks,
        order.astype(np.int32),
        np.append(holders_start, len(ranks)),
        overlap,
        block[there].astype(np.int32),
        held[there].astype(np.int32),
        index[there].astype(np.int32),
    )
    _check_cover(regions)
    return regions


def _distinct_boxes(side: Side, kinds: dict[str, int], dims: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Number the distinct boxes of a side. Returns (box of each cut, kind of each box, boxes [num_boxes, dims, 2])."""
    known: dict[tuple[int, Box], int] = {}
    box_of = np.array([known.setdefault((kinds[cut.kind], cut.box), len(known)) for cut in side.cuts], np.int64)
    boxes = np.array([(*box, *(((0, 1),) * (dims - len(box)))) for _, box in known], np.int64).reshape(-1, dims, 2)
    return box_of, np.array([kind for kind, _ in known], np.int64), boxes


def _check_cover(regions: Regions) -> None:
    """Check that the volumes of a rectangle's regions add up to its own. This is enough, because two rectangles of the
    source are either equal or disjoint."""
    side = regions.destination
    sizes = (regions.boxes[..., 1] - regions.boxes[..., 0]).prod(axis=1)
    # The sums are floats, which are exact below 2^53 elements.
    found = np.bincount(regions.item_held, sizes[regions.item_box].astype(float), len(side.held))
    needed = np.array([prod(extents(cut.box)) for cut in side.cuts], float)[side.held[:, 3]]
    for row in np.flatnonzero(found != needed)[:1]:
        rank, hf_prefix, prefix, number = side.held[row]
        cut = side.cuts[number]
        experts = f" of experts {cut.box[0][0]} to {cut.box[0][1] - 1}" if cut.per_expert else ""
        raise ValueError(
            f"{side.hf_prefixes[hf_prefix]}{cut.kind} {cut.box[1:]}{experts}: the sources hold {found[row]:.0f} of the "
            f"{needed[row]:.0f} elements that {side.prefixes[prefix]}{cut.local_name} on rank {rank} needs"
        )
