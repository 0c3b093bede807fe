"""What the ranks of a trainer write is each element of the open form once, on every mesh and for every cut of the
parameters between data-parallel ranks."""

from __future__ import annotations

import numpy as np
import torch
from cover import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layouts import meshes, shapes
from small_models import model

from megatron_rl.convert.forms import is_expert, open_chunks
from megatron_rl.convert.pieces import Piece, clip, interval_boxes, interval_view, pieces_of, written_shards
from megatron_rl.models import slices
from megatron_rl.models.shards import extents, local_extents, volume
from megatron_rl.types import Mesh, ModelShape


def replicas(mesh: Mesh, rank: int, expert: bool) -> list[int]:
    """The ranks between which the distributed optimizer cuts the rank's parameters, in order."""
    stage = mesh.coordinates(rank)[1]
    peers = range(stage * mesh.stage_size, (stage + 1) * mesh.stage_size)
    if expert:
        return [peer for peer in peers if mesh.expert_coordinates(peer)[:2] == mesh.expert_coordinates(rank)[:2]]
    return [peer for peer in peers if mesh.coordinates(peer)[0] == mesh.coordinates(rank)[0]]


def pieces_by_rank(shape: ModelShape, mesh: Mesh, fused: bool, cuts: list[float]) -> list[list[Piece]]:
    """Every parameter is cut at the same shares of its elements."""
    chunks, result = open_chunks(shape), []
    for rank in range(mesh.world_size):
        shards = written_shards(shape, mesh, rank, fused)
        sizes, mine = local_extents(shards), []
        for name, pieces in pieces_of(shards, chunks).items():
            peers = replicas(mesh, rank, is_expert(name))
            size, place = int(np.prod(sizes[name])), peers.index(rank)
            ends = [0, *sorted(int(cut * size) for cut in cuts[: len(peers) - 1]), *[size] * len(peers)]
            mine += [part for piece in pieces for part in clip(piece, sizes[name], ends[place], ends[place + 1])]
        result.append(mine)
    return result


@given(st.data(), st.booleans(), st.lists(st.floats(0, 1), min_size=24, max_size=24))
@settings(max_examples=examples(60), deadline=None)
def test_every_element_is_written_once(data, fused, cuts):
    shape = data.draw(shapes())
    mesh = data.draw(meshes(shape))
    written = {chunk.tensor.name: np.zeros(chunk.tensor.extents, int) for chunk in open_chunks(shape)}
    for piece in (piece for pieces in pieces_by_rank(shape, mesh, fused, cuts) for piece in pieces):
        assert extents(piece.box) == extents(piece.local_box) and volume(piece.box)
        written[piece.tensor][slices(piece.box)] += 1
    assert all((count == 1).all() for count in written.values())


def test_heads_of_a_query_group_and_gate_and_up_are_whole_pieces():
    """4 query groups on 2 ranks: the rows of a rank follow each other in the open form. Gate and up do not."""
    shape = model("qwen3", 1, 8, 8, 4, 2, 12, 16)
    pieces = pieces_of(written_shards(shape, Mesh(tensor=2), 1, False), open_chunks(shape))
    prefix = "decoder.layers.0."
    (qkv,) = pieces[prefix + "self_attention.linear_qkv.weight"]
    assert qkv.local_box == ((0, 16), (0, 8)) and qkv.box == ((16, 32), (0, 8))
    gate, up = pieces[prefix + "mlp.linear_fc1.weight"]
    assert (gate.local_box, gate.box) == (((0, 6), (0, 8)), ((6, 12), (0, 8)))
    assert (up.local_box, up.box) == (((6, 12), (0, 8)), ((18, 24), (0, 8)))
    assert prefix + "input_layernorm.weight" not in pieces, "the first rank writes it"


def test_an_interval_is_a_part_of_a_row_whole_rows_and_a_part_of_a_row():
    assert interval_boxes((5, 4), 3, 14) == [((0, 1), (3, 4)), ((1, 3), (0, 4)), ((3, 4), (0, 2))]
    assert interval_boxes((5, 4), 5, 7) == [((1, 2), (1, 3))]
    assert interval_boxes((5, 4), 0, 20) == [((0, 5), (0, 4))] and interval_boxes((5, 4), 7, 7) == []
    assert interval_boxes((6,), 2, 5) == [((2, 5),)]


@given(st.data())
def test_views_of_an_interval_are_the_elements_of_the_whole_tensor(data):
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=2).map(tuple))
    whole = torch.arange(int(np.prod(sizes))).view(sizes)
    start, stop = sorted(data.draw(st.integers(0, whole.numel())) for _ in range(2))
    flat, seen = whole.flatten()[start:stop], []
    for box in interval_boxes(sizes, start, stop):
        view = interval_view(flat, start, sizes, box)
        assert torch.equal(view, whole[slices(box)])
        seen += view.flatten().tolist()
        if len(sizes) == 2 and box[0][1] - box[0][0] > 1:  # a part of the columns of whole rows
            part = (box[0], (0, 1))
            assert torch.equal(interval_view(flat, start, sizes, part), whole[slices(part)])
    assert seen == flat.tolist()
