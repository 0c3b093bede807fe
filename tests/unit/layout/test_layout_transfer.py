"""The plan's promises, over random families, meshes, engines and links: coverage, balance, nearness, chains, digest.

Elements carry their own number through the plan. What this does not cover: the execution, which is the bridge's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered import SHAPES, Tensors, cut, numbered

from megatron_rl.layout import (
    FAMILIES,
    Copy,
    Engines,
    Links,
    TransferPlan,
    megatron_shards,
    plan_weights,
    slices,
    vllm_shards,
    volume,
)
from megatron_rl.layout.shards import Box, intersect, translate
from megatron_rl.layout.transfer import fill_up
from megatron_rl.types import Mesh, ModelShape

SERVED = sorted(name for name, shape in SHAPES.items() if FAMILIES[shape.family].vllm_model)


@st.composite
def meshes(draw, shape: ModelShape) -> Mesh:
    """Layouts of 6 layers, replicas of every kind."""
    tensor, context, data = (draw(st.sampled_from(n)) for n in ((1, 2, 4), (1, 2), (1, 2, 3)))
    pipeline = draw(
        st.sampled_from(
            [
                dict(),
                dict(pipeline=3),
                dict(pipeline=3, layers=(1, 0, 5)),
                dict(pipeline=2, virtual=2, layers=(1, 2, 2, 1)),
            ]
        )
    )
    options = [(e, t) for e in (1, 2, 4) for t in (1, 2, 4) if tensor * context * data % (e * t) == 0]
    expert, expert_tensor = draw(st.sampled_from(options)) if shape.experts else (1, None)
    return Mesh(tensor, data=data, context=context, expert=expert, expert_tensor=expert_tensor, **pipeline)


@st.composite
def engines(draw) -> Engines:
    num = draw(st.integers(1, 4))
    return Engines(
        num,
        draw(st.sampled_from([1, 2, 4, 8])),
        draw(st.sampled_from([1, 2])),
        draw(st.booleans()),
        draw(st.none() | st.integers(1, num)),
    )


links = st.builds(
    lambda sizes, colocated: Links(*sizes, colocated=colocated),
    st.sampled_from([(1, None), (2, 1), (4, None), (4, 2), (3, None)]),
    st.booleans(),
)


def engine_shards(shape: ModelShape, engines: Engines, rank: int):
    return vllm_shards(shape, engines.tensor, rank, engines.expert_parallel, engines.pipeline)


def carried_out(plan: TransferPlan, engines: Engines, sources: list[Tensors], wanted: list[Tensors]) -> list[Tensors]:
    """Parameters of all engine ranks: what the trainer writes, then what the chains pass on."""
    written = [{n: np.full_like(a, -1) for n, a in one.items()} for _ in range(engines.num) for one in wanted]
    for (source, destination), copies in plan.routes.items():
        for copy in copies:
            target = written[destination][copy.destination_name][slices(copy.destination_box)]
            assert target.size and (target == -1).all(), f"{copy} writes nothing, or an element twice"
            target[...] = sources[source][copy.source_name][slices(copy.source_box)]
    for feed in plan.feeds:
        for rank in range(engines.world_size):
            target = written[feed.destination * engines.world_size + rank]
            for name, array in written[feed.source * engines.world_size + rank].items():
                assert (target[name] == -1).all(), f"{feed} writes {name} twice"
                target[name][...] = array
    return written


@given(st.data(), st.sampled_from(SERVED), engines(), links, st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_element_of_every_engine_is_written_once_from_its_own_source(data, name, engines, links, fused):
    shape = SHAPES[name]
    mesh, hf = data.draw(meshes(shape)), numbered(shape)
    plan = plan_weights(shape, mesh, engines, fused_norms=fused, links=links)
    sources = [cut(megatron_shards(shape, mesh, rank, fused), hf) for rank in range(mesh.world_size)]
    wanted = [cut(engine_shards(shape, engines, rank), hf) for rank in range(engines.world_size)]
    for rank, parameters in enumerate(carried_out(plan, engines, sources, wanted)):
        for local_name, want in wanted[rank % engines.world_size].items():
            np.testing.assert_array_equal(parameters[local_name], want, local_name)


@given(st.data(), st.sampled_from(SERVED), engines(), links)
@settings(max_examples=40, deadline=None)
def test_both_ends_read_the_same_copies_in_the_same_order(data, name, engines, links):
    shape = SHAPES[name]
    mesh = data.draw(meshes(shape))
    plan = plan_weights(shape, mesh, engines, links=links)
    received = {
        (source, rank): copies
        for rank in range(plan.num_destinations)
        for source, copies in plan.received_by(rank).items()
    }
    assert received == plan.routes
    assert len(received) == plan.num_routes
    sent = np.zeros(mesh.world_size)
    for (source, _), copies in received.items():
        sent[source] += sum(volume(copy.source_box) * (4 if copy.dtype else 2) for copy in copies)
    np.testing.assert_array_equal(plan.sent_bytes, sent)
    np.testing.assert_array_equal(plan.engine_bytes, plan.held_bytes(plan.regions.destination))


Overlap = tuple[int, str, Box, dict[int, tuple[str, Box]]]


def direct(shape: ModelShape, mesh: Mesh, engines: Engines) -> list[Overlap]:
    """The slow reference: (destination, its name, its box, {source rank: (name, box)}) of every overlap of shards."""
    holders: dict[str, dict[Box, dict[int, tuple[str, Box]]]] = {}
    for rank in range(mesh.world_size):
        for shard in megatron_shards(shape, mesh, rank):
            boxes = holders.setdefault(shard.hf_name, {})
            boxes.setdefault(shard.hf_box, {})[rank] = shard.local_name, shard.local_box
    overlaps = []
    for destination in range(engines.num * engines.world_size):
        for shard in engine_shards(shape, engines, destination % engines.world_size):
            for box, replicas in holders[shard.hf_name].items():
                if part := intersect(box, shard.hf_box):
                    here = translate(part, shard.hf_box, shard.local_box)
                    there = {rank: (name, translate(part, box, local)) for rank, (name, local) in replicas.items()}
                    overlaps.append((destination, shard.local_name, here, there))
    return overlaps


@pytest.mark.parametrize("engines", [Engines(1, 1), Engines(2, 2), Engines(1, 4, 2, True)], ids=str)
@pytest.mark.parametrize("pipeline", [dict(), dict(pipeline=2, virtual=2, layers=(1, 2, 2, 1))], ids=["pp1", "vpp"])
@pytest.mark.parametrize("name", ["qwen3", "mixtral", "deepseek_v3"])
def test_without_replicas_it_is_the_slow_reference_copy_by_copy(name, pipeline, engines):
    mesh = Mesh(**pipeline)
    plan = plan_weights(SHAPES[name], mesh, engines)
    found = {
        (source, destination, replace(copy, dtype=None))
        for (source, destination), copies in plan.routes.items()
        for copy in copies
    }
    expected = {
        (source, destination, Copy(*there, local_name, box))
        for destination, local_name, box, replicas in direct(SHAPES[name], mesh, engines)
        for source, there in replicas.items()
    }
    assert found == expected


@given(st.data(), st.sampled_from(["qwen2", "qwen3_moe", "deepseek_v3"]), links)
@settings(max_examples=40, deadline=None)
def test_with_replicas_every_copy_is_a_part_of_the_slow_reference(data, name, links):
    shape, engines = SHAPES[name], Engines(2, 2)
    mesh = data.draw(meshes(shape))
    overlaps: dict[tuple[int, str], list[Overlap]] = {}
    for overlap in direct(shape, mesh, engines):
        overlaps.setdefault(overlap[:2], []).append(overlap)
    for (source, destination), copies in plan_weights(shape, mesh, engines, links=links).routes.items():
        for copy in copies:
            parents = [
                (box, replicas)
                for _, _, box, replicas in overlaps[destination, copy.destination_name]
                if intersect(box, copy.destination_box) == copy.destination_box
            ]
            assert len(parents) == 1
            box, replicas = parents[0]
            source_name, source_box = replicas[source]
            front = len(box) - len(source_box)
            assert copy.source_name == source_name
            assert copy.source_box == translate(copy.destination_box[front:], box[front:], source_box)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("qwen3", Mesh(data=4)),
        ("qwen3", Mesh(tensor=2, pipeline=2, data=3, context=2)),
        ("mixtral", Mesh(tensor=2, data=4, expert=4, expert_tensor=1)),
        ("mixtral", Mesh(pipeline=2, data=8, expert=2)),
        ("deepseek_v3", Mesh(tensor=4, data=4, expert=4, expert_tensor=2)),
        ("deepseek_v3", Mesh(tensor=2, context=2, data=2, pipeline=3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("engines", [Engines(1, 2), Engines(3, 4, 1, True), Engines(5, 1, 2)], ids=str)
def test_replicas_share_the_load(name, mesh, engines):
    """Ranks that hold the same send within 5 % of even: a cut is less than a row of 64 elements off."""
    shape = replace(SHAPES[name], hidden_size=64, head_dim=8, ffn_size=128, vocab_size=300)
    plan = plan_weights(shape, mesh, engines)
    twins: dict[object, list[float]] = {}
    for rank, sent in enumerate(plan.sent_bytes):
        held = frozenset((s.hf_name, s.hf_box) for s in megatron_shards(shape, mesh, rank))
        twins.setdefault(held, []).append(sent)
    assert any(len(loads) > 1 for loads in twins.values())
    for loads in twins.values():
        assert max(loads) <= 1.05 * np.mean(loads) and min(loads) >= 0.95 * np.mean(loads)


def test_a_choice_levels_what_had_none():
    """5 layers on the first stage, one on the last, the tied embedding on both: the last one sends more of it."""
    shape = replace(SHAPES["qwen3_tied"], hidden_size=64, vocab_size=3000)
    plan = plan_weights(shape, Mesh(pipeline=2, layers=(5, 1)), Engines(1, 2))
    layer = sum(volume(s.hf_box) for s in megatron_shards(shape, Mesh(), 0) if "layers.0." in s.hf_name)
    assert 4 * layer < 3000 * 64, "else the embedding is too small to level them"
    assert plan.sent_bytes == pytest.approx([plan.sent_bytes.mean()] * 2, abs=256)  # two engine ranks, a row each


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(0, 300))
def test_fill_up_levels_the_lowest(load, amount):
    load = np.array(load)
    poured = fill_up(load, amount)
    assert poured.sum() == amount and (poured >= 0).all()
    filled = (load + poured)[poured > 0]
    if amount:
        assert filled.max() - filled.min() <= 1, "those that got some are level"
        assert (load + poured).min() >= filled.max() - 1, "nobody lower was left out"


def test_a_rank_with_nothing_to_do_does_nothing():
    """The middle stage has no layers; the third of 3 ranks of 70 rows padded to 96 each has no row of its own."""
    plan = plan_weights(SHAPES["qwen3"], Mesh(pipeline=3, layers=(3, 0, 3)), Engines(2, 2))
    assert plan.sent_by(1) == {} and plan.sent_bytes[1] == 0
    assert plan.sent_by(0) and plan.sent_by(2)
    rows = plan_weights(SHAPES["qwen3"], Mesh(tensor=4), Engines()).sent_by(3)[0]
    assert not any("embedding" in copy.source_name or "output" in copy.source_name for copy in rows)


def test_the_nearest_replica_sends():
    """Two nodes of two GPUs, each with a whole trainer and a whole engine: no byte between nodes, then none between
    GPUs when the layouts are the same."""
    shape = SHAPES["llama"]
    inside = Links(gpus_per_node=2, colocated=True)
    plan = plan_weights(shape, Mesh(tensor=2, data=2), Engines(4, 1), links=inside)
    assert (plan.source // 2 == plan.destination // 2).all()
    away = plan_weights(shape, Mesh(tensor=2, data=2), Engines(4, 1), links=Links(gpus_per_node=2))
    np.testing.assert_array_equal(away.sent_bytes.sum(), plan.sent_bytes.sum())
    own = plan_weights(shape, Mesh(data=2), Engines(2, 1), links=inside)
    assert (own.source == own.destination).all()


def test_ranks_that_share_a_nic_share_its_load():
    """Trainer GPUs 0 and 1 have one NIC, GPU 2 another: half of what leaves the node each, not a third and two thirds.
    Engine 0 is GPU 3 and in their node, engine 1 outside."""
    shape = replace(SHAPES["qwen3"], hidden_size=64)
    plan = plan_weights(shape, Mesh(data=3), Engines(2, 1), links=Links(4, 2))
    shares = [np.bincount(plan.source, plan.bytes * (plan.destination == engine), 3) for engine in (0, 1)]
    total = plan.engine_bytes.sum()
    row = 128 / total  # a cut is less than a row of 64 elements off; each rank's part has two cuts in each of few lines
    assert shares[0] / total == pytest.approx([1 / 3] * 3, abs=2 * row)
    assert shares[1] / total == pytest.approx([0.25, 0.25, 0.5], abs=2 * row)


def test_chains_by_hand():
    """5 engines in 2 chains: the trainer feeds 0 and 2, engines the rest; it sends two fifths of what it would."""
    shape, mesh = SHAPES["qwen3"], Mesh(tensor=2)
    plan = plan_weights(shape, mesh, Engines(5, 2, num_chains=2))
    assert [tuple(feed) for feed in plan.feeds] == [(1, 0, 1), (1, 2, 3), (2, 3, 4)]
    assert sorted(set((plan.destination // 2).tolist())) == [0, 2]
    alone = plan_weights(shape, mesh, Engines(5, 2))
    assert plan.sent_bytes.sum() * 5 == alone.sent_bytes.sum() * 2
    assert not alone.feeds


def test_the_routers_bias_stays_float32():
    shape = SHAPES["deepseek_v3"]
    copies = plan_weights(shape, Mesh(), Engines()).routes[0, 0]
    own = {copy.source_name.rpartition(".")[2] for copy in copies if copy.dtype == "float32"}
    assert own == {"expert_bias"}
    assert all(copy.dtype is None for copy in copies if not copy.source_name.endswith("expert_bias"))
    wide = plan_weights(shape, Mesh(), Engines(), dtype="float32").sent_bytes.sum()
    narrow = plan_weights(shape, Mesh(), Engines()).sent_bytes.sum()
    biases = 4 * shape.experts.num_experts  # 4 of the 6 layers have experts
    assert wide - narrow == (wide - 4 * biases) / 2


def test_the_digest_tells_plans_apart_and_is_the_same_in_every_process():
    shape, mesh = SHAPES["mixtral"], Mesh(tensor=2, data=2)
    plans = [
        plan_weights(shape, mesh, Engines(2, 2)),
        plan_weights(shape, mesh, Engines(2, 2), fused_norms=True),
        plan_weights(shape, mesh, Engines(2, 2), dtype="float32"),
        plan_weights(shape, mesh, Engines(2, 2, num_chains=1)),
        plan_weights(shape, mesh, Engines(2, 2, expert_parallel=True)),
        plan_weights(shape, mesh, Engines(2, 2), links=Links(2, colocated=True)),
        plan_weights(shape, Mesh(tensor=2, data=2, expert=2), Engines(2, 2)),
        plan_weights(replace(shape, num_layers=7), mesh, Engines(2, 2)),
    ]
    digests = [plan.digest for plan in plans]
    assert len(set(digests)) == len(plans)
    code = (
        "from numbered import SHAPES; from megatron_rl.layout import *; from megatron_rl.types import Mesh;"
        "print(plan_weights(SHAPES['mixtral'], Mesh(tensor=2, data=2), Engines(2, 2)).digest)"
    )
    for seed in ("1", "77"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.path.dirname(__file__)}
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
        assert said.stdout.strip() == digests[0]


def test_a_plan_is_kept():
    shape, mesh = SHAPES["qwen3"], Mesh(tensor=2)
    assert plan_weights(shape, mesh, Engines()) is plan_weights(shape, replace(mesh), Engines())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Engines(0), "at least 1"),
        (lambda: Engines(2, num_chains=3), "2 engines make at most 2 chains"),
        (lambda: Links(8, 3), "3 NICs a node do not divide 8 GPUs"),
        (lambda: Links(nic_gbps=0), "above 0"),
        (lambda: plan_weights(SHAPES["olmo2"], Mesh(), Engines()), "the family olmo2"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()
