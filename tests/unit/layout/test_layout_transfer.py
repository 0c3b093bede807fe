"""The plan's promises, over random families, meshes, engines and links: coverage, balance, nearness, chains, digest.

Elements carry their own number through the plan. What this does not cover: the execution, which is the bridge's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import cover
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered import SHAPES, carry_out, cut, numbered, plan_shards
from random_layouts import engines, enlarged, links, meshes, served

from megatron_rl.layout import Copy, Engines, Links, plan_weights
from megatron_rl.layout.replicas import fill_up
from megatron_rl.models import FAMILIES, Shard, megatron_shards, vllm_shards, volume
from megatron_rl.models.shards import Box, intersect, translate
from megatron_rl.types import Mesh, ModelShape


def engine_shards(shape: ModelShape, engines: Engines, rank: int):
    return vllm_shards(shape, engines.tensor, rank, engines.expert_parallel, engines.pipeline)


@pytest.mark.parametrize("part", cover.essential(range(4), 0))  # each has examples of its own
@given(st.data(), engines(), links, st.booleans(), st.integers(1, 300))
@settings(max_examples=cover.examples(50))
def test_every_element_of_every_engine_is_written_once_from_its_own_source(
    part, data, engines, links, fused, max_bytes
):
    """Each side reads the plan by itself, and both get the same pieces for any bound on their size."""
    shape = data.draw(served(engines))
    mesh, hf = data.draw(meshes(shape)), numbered(shape)
    plan = plan_weights(shape, mesh, engines, fused_norms=fused, links=links)
    sources = [cut(megatron_shards(shape, mesh, rank, fused), hf) for rank in range(mesh.world_size)]
    wanted = [cut(engine_shards(shape, engines, rank), hf) for rank in range(engines.world_size)]
    carry_out(plan, sources, wanted, max_bytes)


@pytest.mark.parametrize("part", cover.essential(range(4), 0))  # each has examples of its own
@given(st.data(), engines(), links, st.sampled_from(["bfloat16", "float32"]))
@settings(max_examples=12, deadline=None)
def test_sums_of_bytes_are_those_of_the_copies(part, data, engines, links, dtype):
    shape = data.draw(served(engines))
    mesh = data.draw(meshes(shape))
    plan = plan_weights(shape, mesh, engines, links=links, dtype=dtype)
    assert len(plan.routes) == plan.num_routes
    sent = np.zeros(mesh.world_size)
    for (source, _), copies in plan.routes.items():
        sent[source] += sum(copy.num_bytes for copy in copies)
    np.testing.assert_array_equal(plan.sent_bytes, sent)
    for rank in range(plan.num_destinations):
        received = sum(copy.num_bytes for copies in plan.received_by(rank).values() for copy in copies)
        assert received == plan.engine_bytes[rank % engines.world_size]
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
        (source, destination, replace(copy, dtype="bfloat16"))
        for (source, destination), copies in plan.routes.items()
        for copy in copies
    }
    expected = {
        (source, destination, Copy(*there, local_name, box, "bfloat16"))
        for destination, local_name, box, replicas in direct(SHAPES[name], mesh, engines)
        for source, there in replicas.items()
    }
    assert found == expected


@pytest.mark.parametrize("part", cover.essential(range(4), 0))  # each has examples of its own
@given(st.data(), links)
@settings(max_examples=10, deadline=None)
def test_with_replicas_every_copy_is_a_part_of_the_slow_reference(part, data, links):
    engines = Engines(2, 2)
    shape = data.draw(served(engines))
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


@pytest.mark.parametrize("part", cover.essential(range(4), 0))  # each has examples of its own
@given(st.data(), engines())
@settings(max_examples=25, deadline=None)
def test_replicas_share_the_load(part, data, engines):
    """Ranks that hold the same parameters outside the experts send amounts within 5 % of each other, whichever experts
    they hold. A cut is at most one row off, and 5 % of these sizes are many rows."""
    shape = data.draw(served(engines))
    mesh, shape = data.draw(meshes(shape)), enlarged(shape)
    replicas: dict[object, list[float]] = {}
    for rank, sent in enumerate(plan_weights(shape, mesh, engines).sent_bytes):
        shards = megatron_shards(shape, mesh, rank)
        held = frozenset((s.hf_name, s.hf_box) for s in shards if ".experts." not in s.hf_name)
        replicas.setdefault(held, []).append(sent)
    assert all(len(loads) >= mesh.data * mesh.context for loads in replicas.values())
    for loads in replicas.values():
        assert max(loads) <= 1.05 * np.mean(loads) and min(loads) >= 0.95 * np.mean(loads)


def test_shared_bytes_even_out_the_bytes_of_single_ranks():
    """The first stage has 5 layers, the last has one, and both have the tied embedding: the last sends more of it."""
    shape = replace(SHAPES["qwen3_tied"], hidden_size=64, vocab_size=3000)
    plan = plan_weights(shape, Mesh(pipeline=2, layers=(5, 1)), Engines(1, 2))
    layer = sum(volume(s.hf_box) for s in megatron_shards(shape, Mesh(), 0) if "layers.0." in s.hf_name)
    assert 4 * layer < 3000 * 64, "otherwise the embedding is too small to even out the load"
    assert plan.sent_bytes == pytest.approx([plan.sent_bytes.mean()] * 2, abs=256)  # a row per engine rank


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(0, 300))
def test_fill_up_levels_the_lowest(load, amount):
    load = np.array(load)
    poured = fill_up(load, amount)
    assert poured.sum() == amount and (poured >= 0).all()
    filled = (load + poured)[poured > 0]
    if amount:
        assert filled.max() - filled.min() <= 1, "the entries that got a share are level"
        assert (load + poured).min() >= filled.max() - 1, "no lower entry was left out"


def test_a_rank_with_nothing_to_do_does_nothing():
    """In the first plan the middle stage has no layers. In the second one rank 3 of TP4 holds only padding rows of the
    vocabulary."""
    plan = plan_weights(SHAPES["qwen3"], Mesh(pipeline=3, layers=(3, 0, 3)), Engines(2, 2))
    assert plan.sent_by(1) == {} and plan.sent_bytes[1] == 0
    assert plan.sent_by(0) and plan.sent_by(2)
    rows = plan_weights(SHAPES["qwen3"], Mesh(tensor=4), Engines()).sent_by(3)[0]
    assert not any("embedding" in copy.source_name or "output" in copy.source_name for copy in rows)


def test_the_nearest_replica_sends():
    """Two nodes of two GPUs each have a whole trainer and a whole engine. No byte goes between nodes, and none between
    GPUs if the layouts are equal."""
    shape = SHAPES["llama"]
    inside = Links(gpus_per_node=2, colocated=True)
    plan = plan_weights(shape, Mesh(tensor=2, data=2), Engines(4, 1), links=inside)
    assert (plan.source // 2 == plan.destination // 2).all()
    away = plan_weights(shape, Mesh(tensor=2, data=2), Engines(4, 1), links=Links(gpus_per_node=2))
    np.testing.assert_array_equal(away.sent_bytes.sum(), plan.sent_bytes.sum())
    own = plan_weights(shape, Mesh(data=2), Engines(2, 1), links=inside)
    assert (own.source == own.destination).all()


def test_ranks_that_share_a_nic_share_its_load():
    """Trainer GPUs 0 and 1 share a NIC, and GPU 2 shares one with GPU 3. Each NIC carries half of what leaves the node.
    Engine 0 is GPU 3 in the same node, and engine 1 is outside."""
    shape = replace(SHAPES["qwen3"], hidden_size=64)
    plan = plan_weights(shape, Mesh(data=3), Engines(2, 1), links=Links(4, 2))
    shares = [np.bincount(plan.source, plan.bytes * (plan.destination == engine), 3) for engine in (0, 1)]
    total = plan.engine_bytes.sum()
    row = 128 / total  # a cut is off by less than a row of 64 elements, and a rank's part has few cuts
    assert shares[0] / total == pytest.approx([1 / 3] * 3, abs=2 * row)
    assert shares[1] / total == pytest.approx([0.25, 0.25, 0.5], abs=2 * row)


def test_chains_by_hand():
    """With 5 engines in 2 chains the trainer feeds engines 0 and 2, and engines feed the others. The trainer sends two
    fifths of what it would send without chains."""
    shape, mesh = SHAPES["qwen3"], Mesh(tensor=2)
    plan = plan_weights(shape, mesh, Engines(5, 2, num_chains=2))
    assert [tuple(feed) for feed in plan.engines.feeds] == [(1, 0, 1), (1, 2, 3), (2, 3, 4)]
    assert sorted(set((plan.destination // 2).tolist())) == [0, 2]
    alone = plan_weights(shape, mesh, Engines(5, 2))
    assert plan.sent_bytes.sum() * 5 == alone.sent_bytes.sum() * 2
    assert not alone.engines.feeds
    feeders = [(None, 2), (None, 3), (0, None), (1, None), (None, 6), (None, 7), (4, 8), (5, 9), (6, None), (7, None)]
    assert [(plan.upstream(rank), plan.downstream(rank)) for rank in range(10)] == feeders
    assert plan.received_by(9) == plan.received_by(7) == plan.received_by(5) != plan.received_by(4)
    assert [alone.upstream(rank) for rank in range(10)] == [alone.downstream(rank) for rank in range(10)] == [None] * 10


@pytest.mark.parametrize("part", cover.essential(range(4), 0))  # each has examples of its own
@settings(max_examples=25)
@given(engines())
def test_every_engine_is_fed_once_and_in_its_turn(part, engines):
    plan = plan_weights(SHAPES["qwen3"], Mesh(tensor=2), replace(engines, expert_parallel=False))
    ranks = range(plan.num_destinations)
    assert {plan.upstream(rank): rank for rank in ranks if plan.upstream(rank) is not None} == {
        rank: plan.downstream(rank) for rank in ranks if plan.downstream(rank) is not None
    }
    world = engines.world_size
    rounds = dict.fromkeys((chain[0] for chain in engines.chains), 0)
    for feed in engines.feeds:
        assert feed.destination not in rounds and rounds[feed.source] == feed.round - 1
        rounds[feed.destination] = feed.round
        for rank in range(world):
            assert plan.upstream(feed.destination * world + rank) == feed.source * world + rank
    assert sorted(rounds) == list(range(engines.num))
    fed_by_trainer = {rank for rank in ranks if plan.upstream(rank) is None}
    assert fed_by_trainer == set(plan.destination.tolist())
    lengths = [len(chain) for chain in engines.chains]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("rank", [-1, 10])
def test_a_rank_that_no_engine_has(rank):
    plan = plan_weights(SHAPES["qwen3"], Mesh(tensor=2), Engines(5, 2))
    for question in (plan.received_by, plan.upstream, plan.downstream):
        with pytest.raises(AssertionError, match="has no engine"):
            question(rank)


def test_the_routers_bias_stays_float32():
    shape = SHAPES["deepseek_v3"]
    copies = plan_weights(shape, Mesh(), Engines()).routes[0, 0]
    own = {copy.source_name.rpartition(".")[2] for copy in copies if copy.dtype == "float32"}
    assert own == {"expert_bias"}
    assert {copy.dtype for copy in copies if not copy.source_name.endswith("expert_bias")} == {"bfloat16"}
    wide = plan_weights(shape, Mesh(), Engines(), dtype="float32").sent_bytes.sum()
    narrow = plan_weights(shape, Mesh(), Engines()).sent_bytes.sum()
    biases = 4 * shape.mixture.num_experts  # 4 of the 6 layers have experts
    assert wide - narrow == (wide - 4 * biases) / 2


def test_a_rows_dtype_is_a_matter_of_its_table(monkeypatch):
    """If another row of the same model is float32, more bytes are sent, and the plan has another digest."""
    shape, family = SHAPES["qwen3"], FAMILIES["qwen3"]
    before = plan_weights(shape, Mesh(), Engines())
    monkeypatch.setitem(FAMILIES, "qwen3", replace(family, final_norm=replace(family.final_norm, float32=True)))
    after = plan_weights.__wrapped__(shape, Mesh(), Engines())  # bypasses the cache
    assert [copy.destination_name for copy in after.routes[0, 0] if copy.dtype == "float32"] == ["model.norm.weight"]
    assert after.sent_bytes.sum() - before.sent_bytes.sum() == 2 * shape.hidden_size
    assert after.digest != before.digest


def test_the_digest_tells_plans_apart():
    shape, mesh = SHAPES["mixtral"], Mesh(tensor=2, data=2)
    plans = [
        plan_weights(shape, mesh, Engines(2, 2)),
        plan_weights(shape, mesh, Engines(2, 2), fused_norms=True),
        plan_weights(shape, mesh, Engines(2, 2), dtype="float32"),
        plan_weights(shape, mesh, Engines(2, 2), dtype="float16"),  # as wide as the first
        plan_weights(shape, mesh, Engines(2, 2, num_chains=1)),
        plan_weights(shape, mesh, Engines(2, 2, expert_parallel=True)),
        plan_weights(shape, mesh, Engines(2, 2), links=Links(2, colocated=True)),
        plan_weights(shape, Mesh(tensor=2, data=2, expert=2), Engines(2, 2)),
        plan_weights(replace(shape, layers=shape.layers[:1] * 7), mesh, Engines(2, 2)),
    ]
    digests = [plan.digest for plan in plans]
    assert len(set(digests)) == len(plans)


@pytest.mark.deep
def test_the_digest_is_the_same_in_every_process():
    digest = plan_weights(SHAPES["mixtral"], Mesh(tensor=2, data=2), Engines(2, 2)).digest
    code = (
        "from numbered import SHAPES; from megatron_rl.layout import *; from megatron_rl.types import Mesh;"
        "print(plan_weights(SHAPES['mixtral'], Mesh(tensor=2, data=2), Engines(2, 2)).digest)"
    )
    for seed in ("1", "77"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
        assert said.stdout.strip() == digest


def test_a_plan_is_kept():
    shape, mesh = SHAPES["qwen3"], Mesh(tensor=2)
    assert plan_weights(shape, mesh, Engines()) is plan_weights(shape, replace(mesh), Engines())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Engines(0), "at least 1"),
        (lambda: Engines(2, num_chains=3), "between 1 and the 2 engines"),
        (lambda: Links(8, 3), "3 NICs per node do not divide 8 GPUs"),
        (lambda: Links(nic_gbps=0), "above 0"),
        (
            lambda: plan_weights(SHAPES["olmo3"], Mesh(), Engines(tensor=8)),
            "q_norm.weight: .* 8 tensor-parallel ranks, the model 4 KV heads.* set rollout.parallel.tensor to 4",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()


@pytest.mark.parametrize(("name", "found"), [("w", 6), ("x", 0)])
def test_what_no_source_holds_is_named(name, found):
    rows = [Shard("w", ((0, 3), (0, 2)), "a", ((0, 3), (0, 2)))]
    wanted = [Shard(name, ((0, 4), (0, 2)), "b", ((0, 4), (0, 2)))]
    with pytest.raises(ValueError, match=rf"{name}.*the sources hold {found} of the 8 elements that b on rank 0 needs"):
        plan_shards([rows], [wanted])
