"""The rectangles of the open form that each trainer rank writes and reads. Everything here is pure.

A rank's parameter consists of rectangles of Hugging Face tensors, and so does each tensor of the open form
(`forms.open_chunks`), so what they have in common follows. The distributed optimizer gives each data-parallel rank a
flat interval of every parameter; an interval is at most a part of a row, whole rows, and a part of a row.

Invariant (tests/unit/convert): on every mesh, and for every cut of the parameters between data-parallel ranks, the
pieces of all ranks cover each element of the open form once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from megatron_rl.convert.forms import Chunk, is_expert
from megatron_rl.models import Box, Shard, megatron_shards, slices, volume
from megatron_rl.models.shards import intersect, translate
from megatron_rl.types import Mesh, ModelShape


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a rank's parameter that is a rectangle of a tensor of the open form."""

    local_name: str
    local_box: Box
    tensor: str
    """The name of the tensor in the open form."""
    box: Box


def written_shards(shape: ModelShape, mesh: Mesh, rank: int, fused_norms: bool) -> list[Shard]:
    """The shards that a rank and its data-parallel and context-parallel replicas write together.

    Of what several tensor-parallel ranks hold (norms, routers, some biases) the first one writes, and of a tied
    embedding the first stage.
    """
    tensor, stage, _ = mesh.coordinates(rank)
    expert_tensor, expert, _ = mesh.expert_coordinates(rank)
    elsewhere: set[tuple[str, Box]] = set()
    for other in {stage * mesh.stage_size, tensor} - {stage * mesh.stage_size + tensor}:
        held = megatron_shards(shape, mesh, other, fused_norms)
        elsewhere.update((shard.hf_name, shard.hf_box) for shard in held if not is_expert(shard.local_name))
    if expert_tensor:
        held = megatron_shards(shape, mesh, stage * mesh.stage_size + expert * mesh.expert_ways, fused_norms)
        elsewhere.update((shard.hf_name, shard.hf_box) for shard in held if is_expert(shard.local_name))
    mine = megatron_shards(shape, mesh, rank, fused_norms)
    return [shard for shard in mine if volume(shard.hf_box) and (shard.hf_name, shard.hf_box) not in elsewhere]


def pieces_of(shards: Iterable[Shard], chunks: Iterable[Chunk]) -> dict[str, list[Piece]]:
    """The pieces that the shards consist of, by the name of the parameter. Neighbours are joined."""
    known: dict[str, list[Shard]] = {}
    for chunk in chunks:
        for shard in chunk.tensor.shards:
            known.setdefault(shard.hf_name, []).append(shard)
    found: dict[str, list[Piece]] = {}
    for shard in shards:
        for whole in known[shard.hf_name]:
            if common := intersect(shard.hf_box, whole.hf_box):
                local_box = translate(common, shard.hf_box, shard.local_box)
                box = translate(common, whole.hf_box, whole.local_box)
                found.setdefault(shard.local_name, []).append(Piece(shard.local_name, local_box, whole.local_name, box))
    return {name: _joined(pieces) for name, pieces in found.items()}


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces that follow each other in both tensors become one: the heads of a query group, for example."""
    result: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: (piece.tensor, piece.local_box)):
        last = result[-1] if result else None
        if last is not None and last.tensor == piece.tensor:
            if _follows(last.local_box, piece.local_box) and _follows(last.box, piece.box):
                both = (_span(last.local_box, piece.local_box), _span(last.box, piece.box))
                result[-1] = Piece(piece.local_name, both[0], piece.tensor, both[1])
                continue
        result.append(piece)
    return result


def _follows(a: Box, b: Box) -> bool:
    return a[0][1] == b[0][0] and a[1:] == b[1:]


def _span(a: Box, b: Box) -> Box:
    return ((a[0][0], b[0][1]), *a[1:])


def clip(piece: Piece, extents: tuple[int, ...], start: int, stop: int) -> list[Piece]:
    """The parts of a piece that lie in the flat interval [start, stop) of its parameter.

    Args:
        extents: the parameter's.
    """
    return [
        Piece(piece.local_name, common, piece.tensor, translate(common, piece.local_box, piece.box))
        for box in interval_boxes(extents, start, stop)
        if (common := intersect(piece.local_box, box))
    ]


def interval_boxes(extents: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The rectangles that a flat interval [start, stop) of a tensor consists of."""
    if start == stop:
        return []
    if len(extents) == 1:
        return [((start, stop),)]
    rest, row = extents[1:], prod(extents[1:])
    (first, begin), (last, end) = divmod(start, row), divmod(stop, row)
    if first == last:
        return [((first, first + 1), *box) for box in interval_boxes(rest, begin, end)]
    boxes: list[Box] = []
    if begin:
        boxes += [((first, first + 1), *box) for box in interval_boxes(rest, begin, row)]
        first += 1
    if first < last:
        boxes.append(((first, last), *((0, length) for length in rest)))
    return boxes + [((last, last + 1), *box) for box in interval_boxes(rest, 0, end)]


def interval_view(flat: Tensor, start: int, extents: tuple[int, ...], box: Box) -> Tensor:
    """A view of a rectangle of a tensor, made from a flat interval of the tensor.

    Args:
        flat: the interval, one-dimensional.
        start: the index of its first element in the whole tensor.
        extents: the extents of the whole tensor.
        box: the rectangle: a part of one row, or rows that are whole in the interval.
    """
    if len(extents) == 1:
        return flat[box[0][0] - start : box[0][1] - start]
    row, (first, last) = prod(extents[1:]), box[0]
    if start <= first * row and last * row <= start + len(flat):
        rows = flat[first * row - start : last * row - start].view(last - first, *extents[1:])
        return rows[(slice(None), *slices(box[1:]))]
    assert last == first + 1, (extents, box)
    return interval_view(flat, start - first * row, extents[1:], box[1:])[None]
