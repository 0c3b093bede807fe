"""What one rank holds of a row. It is the same in every layer, and for every expert of the rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron_rl.models.rule import Rule
from megatron_rl.models.shards import Box, Shard
from megatron_rl.models.splits import Sizes, Split


@dataclass(frozen=True, slots=True)
class Placement:
    """What one rank holds of a row. It is the same in every layer, and for every expert of the rank."""

    local_name: str
    pieces: tuple[tuple[str, Box, Box], ...]
    """The pieces of the parameter: (HF name, HF box, local box)."""
    experts: tuple[int, int] | None
    """The interval [start, stop) of the rank's experts, by their numbers in the checkpoint; None if the row has no
    experts."""
    float32: bool = False

    @property
    def num_experts(self) -> int:
        """1 if the row has no experts."""
        return 1 if self.experts is None else self.experts[1] - self.experts[0]

    def shards(self, hf_prefix: str = "", prefix: str = "") -> Iterator[Shard]:
        local_name = prefix + self.local_name
        if self.experts is None:
            for hf_name, hf_box, local_box in self.pieces:
                yield Shard(hf_prefix + hf_name, hf_box, local_name, local_box)
            return
        stacked = "{}" not in local_name
        for index, expert in enumerate(range(*self.experts)):
            for hf_name, hf_box, local_box in self.pieces:
                box = ((index, index + 1), *local_box) if stacked else local_box
                yield Shard(hf_prefix + hf_name.format(expert), hf_box, local_name.format(index), box)


class Placed(NamedTuple):
    """A row's placement on one rank, in one layer or outside the layers."""

    placement: Placement
    hf_prefix: str
    prefix: str

    def shards(self) -> Iterator[Shard]:
        return self.placement.shards(self.hf_prefix, self.prefix)


def place_row(
    rule: Rule,
    split: Split,
    sizes: Sizes,
    where: tuple[int, int],
    local_name: str,
    experts: tuple[int, int] | None = None,
) -> Placement:
    """The placement of one row of the table on one rank.

    Args:
        where: (the number of ranks that share the row, this rank's number among them).
    """
    full = rule.extents(sizes)
    try:
        pieces = split(sizes, tuple(extents[rule.split.dim] for extents in full), *where)
    except ValueError as error:
        raise ValueError(f"{' and '.join(tensor.name for tensor in rule.hf)}: {error}") from error
    boxes = []
    for piece in pieces:
        extents, length = full[piece.tensor], piece.stop - piece.start
        hf_box = box_of(extents, piece.dim, piece.start, piece.stop)
        local_box = box_of(extents, piece.dim, piece.local_start, piece.local_start + length)
        boxes.append((rule.hf[piece.tensor].name, hf_box, local_box))
    return Placement(local_name, tuple(boxes), experts, rule.is_sent_as_float32)


def whole_tensor(name: str, extents: tuple[int, ...]) -> Placement:
    """The placement of an HF tensor that a rank has whole, under the same name."""
    box = tuple((0, length) for length in extents)
    return Placement(name, ((name, box, box),), None)


def box_of(extent: tuple[int, ...], dim: int, start: int, stop: int) -> Box:
    """The rectangle of a tensor that is the interval [start, stop) along one dim."""
    return tuple((start, stop) if d == dim else (0, length) for d, length in enumerate(extent))


def linear_experts(num_experts: int, ways: int, rank: int) -> tuple[int, int]:
    """The experts of a rank in vLLM's linear placement. If they do not divide evenly, the first ranks hold one more."""
    base, more = divmod(num_experts, ways)
    start = rank * base + min(rank, more)
    return start, start + base + (rank < more)


def engine_layers(num_layers: int, pipeline: int, stage: int) -> range:
    """The layers of an engine's pipeline stage, as vllm.distributed.utils.get_pp_indices distributes them. If they do
    not divide evenly, the stages just before the last one hold one more."""
    base, more = divmod(num_layers, pipeline)
    counts = [base + (pipeline - 1 - more <= s < pipeline - 1) for s in range(pipeline)]
    return range(sum(counts[:stage]), sum(counts[: stage + 1]))
