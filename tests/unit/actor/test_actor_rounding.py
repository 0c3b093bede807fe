"""Dithered rounding: golden values, the mean, and one draw for each element in every layout."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import cover
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered import SHAPES

from megatron_rl.actor.optimizer.rounding import Dither, round_up_above
from megatron_rl.models import megatron_shards, slices
from megatron_rl.models.shards import Shard, local_extents
from megatron_rl.types import Adapters, Mesh

MESHES = {
    "one": Mesh(),
    "tp2_pp2": Mesh(tensor=2, pipeline=2),
    "tp4": Mesh(tensor=4),
    "tp8": Mesh(tensor=8),
    "vpp2": Mesh(pipeline=3, virtual=2),
    "ep4": Mesh(data=4, expert=4),
    "tp2_ep4_etp1": Mesh(tensor=2, data=2, expert=4, expert_tensor=1),
}
"""With tp8 two ranks share a KV head, and models without experts have no ep."""


def rounded(numbers, draws, dtype=torch.bfloat16):
    return round_up_above(torch.tensor(numbers), torch.tensor(draws, dtype=torch.int32), dtype).float().tolist()


@pytest.mark.parametrize(
    ("base", "distance", "dtype"),
    [(1, 2**-7, torch.bfloat16), (1, 2**-10, torch.float16), (3 * 2**-24, 2**-24, torch.float16)],
    ids=str,
)
def test_golden_quarter_of_the_way(base, distance, dtype):
    quarter, above = base + distance / 4, base + distance
    draws = [0, 20_000, 49_151, 49_152, 60_000]
    assert rounded([quarter] * 5, draws, dtype) == [base, base, base, above, above]
    assert rounded([-quarter] * 5, draws, dtype) == [-base, -base, -base, -above, -above]


@pytest.mark.parametrize(
    ("dtype", "largest", "relative", "absolute"),
    [(torch.bfloat16, 2.0**99, 2**-7, 2**-133), (torch.float16, 65_504.0, 2**-10, 2**-24)],
    ids=str,
)
@given(data=st.data(), draw=st.integers(0, 2**16 - 1))
@settings(deadline=None)
def test_a_number_becomes_one_of_its_two_neighbours_and_numbers_of_the_type_stay(
    dtype, largest, relative, absolute, data, draw
):
    exponent = data.draw(st.integers(-40, 0)) if data.draw(st.booleans()) else 0
    number = data.draw(st.floats(-largest, largest, width=32, allow_subnormal=False)) * 2.0**exponent
    number = float(np.float32(number))
    (got,) = rounded([number], [draw], dtype)
    assert abs(got - number) < max(abs(number) * relative, absolute)
    assert rounded([got], [draw], dtype) == [got]
    below, above = rounded([number] * 2, [0, 2**16 - 1], dtype)
    assert got in (below, above) and abs(below) <= abs(number) <= abs(above) + (absolute * 2**-12)


def dither_of(shards: list[Shard]) -> Dither:
    return Dither(shards, local_extents(shards))


def test_the_mean_of_many_weights_follows_their_copies():
    """A move by a twelfth of the distance between two numbers moves a twelfth of 100,000 weights."""
    shard = Shard("w", ((0, 500), (0, 200)), "w", ((0, 500), (0, 200)))
    copies = torch.full((100_000,), 1 + 2**-7 / 12)
    moved = dither_of([shard]).rounded(copies, "w", 0) != 1
    # Three deviations of a binomial share; the second sum looks for rows and columns that move together.
    assert moved.float().mean().item() == pytest.approx(1 / 12, abs=3 * (1 / 12 / 100_000) ** 0.5)
    for sums, size in ((moved.view(500, 200).sum(0), 500), (moved.view(500, 200).sum(1), 200)):
        assert sums.float().var().item() == pytest.approx(size * 11 / 144, rel=0.3)


def test_an_interval_has_the_draws_of_its_place():
    shard = Shard("w", ((3, 10), (5, 16)), "v", ((0, 7), (0, 11)))
    whole = dither_of([shard]).draws("v", 0, 77)
    for start, size in ((0, 5), (4, 30), (11, 11), (70, 7), (13, 0)):
        assert dither_of([shard]).draws("v", start, size).tolist() == whole[start : start + size].tolist()
    assert len(whole.unique()) > 70 and whole.min() >= 0 and whole.max() < 2**16


def draws_by_element(shape, mesh: Mesh, fused: bool) -> dict[str, np.ndarray]:
    """The draw of every HF element; the ranks that hold one agree."""
    found: dict[str, np.ndarray] = {}
    ranks = [megatron_shards(shape, mesh, rank, fused) for rank in range(mesh.world_size)]
    for shard in (shard for shards in ranks for shard in shards):
        wanted = tuple(stop for _, stop in shard.hf_box)
        known = found.setdefault(shard.hf_name, np.full(wanted, -1))
        if any(a < b for a, b in zip(known.shape, wanted, strict=True)):
            grown = np.full(tuple(map(max, known.shape, wanted)), -1)
            grown[tuple(slice(0, size) for size in known.shape)] = known
            found[shard.hf_name] = grown
    for shards in ranks:
        dither, extents = dither_of(shards), local_extents(shards)
        local = {name: dither.draws(name, 0, prod(shape)).view(shape).numpy() for name, shape in extents.items()}
        for shard in shards:
            target = found[shard.hf_name][slices(shard.hf_box)]
            mine = local[shard.local_name][slices(shard.local_box)]
            assert ((target == -1) | (target == mine)).all(), f"{shard}: another rank has other draws"
            target[...] = mine
    return found


@pytest.mark.parametrize("name", cover.essential([*SHAPES, "qwen3_adapted"], "qwen3_moe", "gpt_oss", "qwen3_adapted"))
def test_every_layout_has_the_same_draws(name):
    shape = SHAPES.get(name) or replace(SHAPES["qwen3"], adapters=Adapters(3, 6.0))
    expected = draws_by_element(shape, Mesh(), False)
    for mesh in MESHES.values():
        for fused in (False, True):
            if (mesh.expert > 1 and shape.mixture is None) or (mesh.tensor == 8 and name not in ("qwen3", "llama")):
                continue
            found = draws_by_element(shape, mesh, fused)
            assert found.keys() == expected.keys()
            for tensor, draws in found.items():
                np.testing.assert_array_equal(draws, expected[tensor], tensor)
