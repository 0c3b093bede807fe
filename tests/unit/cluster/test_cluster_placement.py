"""The placement of a run, by hand on small clusters, and its invariants on random ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_rl.cluster.demands import demands_of
from megatron_rl.cluster.placement import (
    Demand,
    Node,
    NoRoom,
    Placement,
    place,
    place_again,
    smallest_cluster,
)
from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig, SftRunConfig


def node(number: int, free: float = 8, gpus: float = 8, cpus: float = 64, pool: str | None = None) -> Node:
    return Node(f"id{number}", f"10.0.0.{number}", cpus, gpus, cpus, free, pool)


def trainer(world: int, tensor: int, cpus: float = 4, gpus: float = 1, pool: str | None = None) -> Demand:
    return Demand("trainer", 1, world, tensor, cpus, gpus, "lower policy.parallel", pool)


def engines(number: int, tensor: int, gpus: float = 1, pool: str | None = None) -> Demand:
    return Demand("engine", number, tensor, tensor, 0, gpus, "lower rollout.num_engines", pool, can_span=True)


VERIFIER = Demand("verifier", 1, 1, 1, 0, 0)


def shown(placement: Placement, role: str) -> list[str]:
    """The nodes of each group, by the last number of their addresses, with the number of consecutive ranks."""
    groups = []
    for group in placement.groups[role]:
        counts = Counter(rank.node.name.rpartition(".")[2] for rank in group)
        groups.append(" ".join(f"{name}x{count}" for name, count in counts.items()))
    return groups


def test_eight_nodes_of_which_trainers_and_engines_fill_four_each():
    plan = place([trainer(32, 4), engines(8, 4), VERIFIER], [node(i) for i in range(8)])
    assert shown(plan, "trainer") == ["0x8 1x8 2x8 3x8"]
    assert shown(plan, "engine") == ["4x4", "4x4", "5x4", "5x4", "6x4", "6x4", "7x4", "7x4"]
    assert shown(plan, "verifier") == ["4x1"], "all GPUs are in use, and this node has more free CPUs than a trainer's"
    assert [rank.node.id for rank in plan.groups["trainer"][0][:9]] == ["id0"] * 8 + ["id1"], "ranks are in mesh order"


def test_unequal_nodes_and_gpus_that_others_use():
    """Two of node 1's GPUs are free, which no tensor-parallel group of four can use."""
    nodes = [node(0, free=6), node(1, free=2), node(2, free=8), node(3, gpus=4, free=4), node(4, gpus=0, free=0)]
    plan = place([trainer(12, 4), engines(3, 2), VERIFIER], nodes)
    assert shown(plan, "trainer") == ["2x8 3x4"], "the largest room first, then the smallest that holds the rest"
    assert shown(plan, "engine") == ["0x2", "0x2", "0x2"]
    assert shown(plan, "verifier") == ["4x1"], "the node without GPUs"


def test_the_picture_in_the_readme():
    plan = place([trainer(24, 4), engines(2, 16), VERIFIER], [node(i, free=6 if i == 5 else 8) for i in range(1, 9)])
    assert shown(plan, "engine") == ["1x8 2x8", "3x8 4x8"] and shown(plan, "trainer") == ["6x8 7x8 8x8"]
    assert shown(plan, "verifier") == ["5x1"]


def test_an_engine_that_an_empty_node_could_hold_is_not_split():
    """Eight GPUs are free, four in each node. An engine spans nodes only if it is wider than an empty node."""
    with pytest.raises(NoRoom):
        place([engines(1, 8)], [node(0, free=4), node(1, free=4)])


def test_the_stages_of_an_engine_that_spans_nodes_stay_whole():
    """Four stages of four. In a node of sixteen they stay together; in nodes of six there is one in each; if no node
    holds a stage, the ranks fill the nodes."""
    staged = replace(engines(1, 16), stage=4)
    assert shown(place([staged], [node(0), node(1, gpus=16, free=16)]), "engine") == ["1x16"]
    assert shown(place([staged], [node(i) for i in range(3)]), "engine") == ["0x8 1x8"]
    assert shown(place([staged], [node(i, gpus=6, free=6) for i in range(4)]), "engine") == ["0x4 1x4 2x4 3x4"]
    assert shown(place([staged], [node(i, gpus=3, free=3) for i in range(6)]), "engine") == ["0x3 1x3 2x3 3x3 4x3 5x1"]
    with pytest.raises(NoRoom):
        place([staged], [node(i, gpus=6, free=free) for i, free in enumerate((6, 5, 3, 3))])
    given = config(
        cluster={"gpus_per_trainer": 1, "gpus_per_engine_rank": 1},
        rollout={"parallel": {"tensor": 4, "pipeline": 3}},
    )
    [asked] = [demand for demand in demands_of(given) if demand.role == "engine"]
    assert (asked.group_size, asked.block, asked.stage) == (12, 12, 4)
    shared = config(
        cluster={"gpus_per_trainer": 1, "gpus_per_engine_rank": 1, "colocate": True},
        policy={"parallel": {"data": 8}},
        rollout={"parallel": {"pipeline": 4}, "num_engines": 2},
    )
    assert demands_of(shared)[0].block == 4, "an engine that shares its GPUs is in one node"


def test_the_engines_of_a_cluster_without_gpus_are_spread_by_free_cpus():
    nodes = [node(0, gpus=0, free=0, cpus=4), node(1, gpus=0, free=0, cpus=2), node(2, gpus=0, free=0, cpus=2)]
    plan = place([trainer(4, 2, cpus=1, gpus=0), engines(3, 2, gpus=0), VERIFIER], nodes)
    assert shown(plan, "trainer") == ["0x4"], "the smallest room that holds all"
    assert shown(plan, "engine") == ["1x2", "2x2", "1x2"]
    assert shown(plan, "verifier") == ["2x1"]


def test_a_node_whose_only_gpu_is_in_use_is_the_last_choice_for_a_verifier():
    nodes = [node(0, free=1, gpus=1, cpus=64), node(1, free=0, gpus=0, cpus=2)]
    assert shown(place([trainer(1, 1), VERIFIER], nodes), "verifier") == ["1x1"]


def test_pools_keep_roles_on_their_nodes():
    nodes = [node(0, pool="rollout"), node(1, pool="rollout"), node(2), node(3, pool="train")]
    plan = place([trainer(8, 4, pool="train"), engines(4, 4, pool="rollout"), VERIFIER], nodes)
    assert shown(plan, "trainer") == ["3x8"] and shown(plan, "engine") == ["0x4", "0x4", "1x4", "1x4"]
    assert shown(plan, "verifier") == ["2x1"], "it has no pool, and this node has free GPUs"
    with pytest.raises(ValueError, match="trainer needs nodes of the pool fast, but no node of it is alive; start "):
        place([trainer(8, 4, pool="fast")], nodes)


def test_verifiers_have_nodes_without_gpus_as_their_pool():
    """The other nodes have more CPUs, which the verifiers leave alone. A lost node's verifiers stay in the pool."""
    given = config(
        cluster={"gpus_per_trainer": 1, "gpus_per_engine_rank": 1, "verifiers": 4, "pools": {"verifier": "cpu"}},
        policy={"parallel": {"data": 8}},
        rollout={"num_engines": 8},
    )
    cpu_nodes = [node(i, free=0, gpus=0, cpus=32, pool="cpu") for i in (2, 3)]
    nodes = [node(0, cpus=128), node(1, cpus=128), *cpu_nodes]
    plan = place(demands_of(given), nodes)
    assert shown(plan, "verifier") == ["2x1", "3x1", "2x1", "3x1"], "the same number on equal nodes"
    assert shown(plan, "trainer") == ["0x8"] and shown(plan, "engine") == ["1x1"] * 8
    moved = place_again(plan, "verifier", 2, [*nodes[:2], cpu_nodes[1]])
    assert shown(moved, "verifier") == ["2x1", "3x1", "3x1", "3x1"]
    with pytest.raises(ValueError, match="the verifier needs nodes of the pool cpu, but no node of it is alive"):
        place_again(plan, "verifier", 2, nodes[:2])
    with pytest.raises(ValueError, match="^Ray was lost: none of its nodes is alive, so that the verifier has"):
        place_again(plan, "verifier", 2, [])


def test_a_role_without_a_pool_leaves_room_for_those_that_have_one():
    plan = place([trainer(8, 8), engines(2, 4, pool="rollout")], [node(0, pool="rollout"), node(1)])
    assert shown(plan, "trainer") == ["1x8"] and shown(plan, "engine") == ["0x4", "0x4"]


def test_a_shortfall_says_what_is_needed_what_is_free_and_what_to_change():
    nodes = [node(0), node(1), node(2, free=2), *(node(i) for i in range(3, 8))]
    with pytest.raises(NoRoom) as caught:
        place([trainer(32, 4), engines(8, 4), VERIFIER], nodes)
    assert str(caught.value).splitlines() == [
        "the run needs 32 trainer ranks of 4 CPUs and 1 GPU each, with the 4 ranks of a tensor-parallel group in one "
        "node, and 8 engines of 4 GPUs in one node each. There is room for 6 of 8 engines:",
        "  10.0.0.0, 10.0.0.1, 10.0.0.3, 10.0.0.4 and 3 more: 8 of 8 GPUs and 64 of 64 CPUs free",
        "  10.0.0.2: 2 of 8 GPUs and 64 of 64 CPUs free",
        "To make it fit, lower rollout.num_engines, add nodes, or free what others use (`ray status` shows it)",
    ]
    assert caught.value.demand.role == "engine"


def test_cpus_can_be_what_is_missing():
    with pytest.raises(NoRoom, match="There is room for 4 of 8 trainer ranks:\n  10.0.0.0: 8 of 8 GPUs and 20 of 20"):
        place([trainer(8, 4)], [node(0, cpus=20)])


def test_tensor_parallel_groups_wider_than_every_node_are_refused():
    with pytest.raises(
        ValueError,
        match="^trainer: 16 ranks of 4 CPUs and 1 GPU each must be in one node, but no node has "
        "more than 64 CPUs and 8 GPUs; lower policy.parallel$",
    ) as caught:
        place([trainer(32, 16)], [node(i) for i in range(8)])
    assert not isinstance(caught.value, NoRoom), "more nodes would not help"


def test_a_lost_engine_goes_to_a_free_node_and_all_others_stay():
    plan = place([trainer(16, 4), engines(4, 4)], [node(i) for i in range(5)])
    assert shown(plan, "engine") == ["2x4", "2x4", "3x4", "3x4"]
    alive = [node(i) for i in (0, 1, 2, 4)]
    once = place_again(plan, "engine", 2, alive)
    twice = place_again(once, "engine", 3, alive)
    assert shown(twice, "engine") == ["2x4", "2x4", "4x4", "4x4"]
    assert twice.groups["trainer"] == plan.groups["trainer"]
    assert place_again(twice, "engine", 3, alive) == twice, "a process that died on a node that lives stays there"
    with pytest.raises(NoRoom) as caught:
        place_again(twice, "engine", 3, [node(i) for i in range(3)])
    assert str(caught.value).splitlines()[:3] == [
        "engine 3 must be placed again: 1 engine of 4 GPUs in one node. There is room for 0 of 1 engine:",
        "  10.0.0.0, 10.0.0.1: 0 of 8 GPUs and 32 of 64 CPUs free",
        "  10.0.0.2: 0 of 8 GPUs and 64 of 64 CPUs free",
    ]


def test_trainers_are_placed_again_around_the_engines():
    plan = place([trainer(16, 4), engines(1, 4)], [node(i) for i in range(4)])
    assert shown(plan, "trainer") == ["0x8 1x8"] and shown(plan, "engine") == ["2x4"]
    # What Ray says to be free on a known node is not asked, because it lags behind the deaths.
    alive = [node(1, free=0), node(2, free=4), node(3), node(9, free=4)]
    assert shown(place_again(plan, "trainer", 0, alive), "trainer") == ["1x8 3x8"]
    assert shown(place_again(plan, "trainer", 0, alive[:2] + alive[3:]), "trainer") == ["1x8 2x4 9x4"]


def config(kind=GrpoRunConfig, **changes):
    rollout = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_prompt_tokens": 8, "max_response_tokens": 8}
    common = {"run": {"name": "x", "steps": 1}, "model": {"path": "m"}, "balance": {"max_tokens_per_microbatch": 16}}
    own = (
        {"data": {"train": "rows"}, "rollout": rollout | changes.pop("rollout", {})}
        if kind is GrpoRunConfig
        else {"sft": {"rows": "rows", "max_tokens": 16}}
    )
    return validate(kind, common | own | changes)


def test_what_a_configuration_needs():
    parallel = {"parallel": {"tensor": 2, "data": 4, "expert": 2, "expert_tensor": 4}}
    cluster = {"cpus_per_trainer": 4, "gpus_per_trainer": 1, "gpus_per_engine_rank": 1, "pools": {"engine": "rollout"}}
    given = config(policy=parallel, cluster=cluster, rollout={"num_engines": 3, "parallel": {"tensor": 8}})
    train, engine, verifier = demands_of(given)
    assert (train.group_size, train.block) == (8, 4), "the ranks that share an expert are in one node too"
    assert (train.num_groups, train.cpus, train.gpus, train.pool) == (1, 4, 1, None)
    assert (engine.num_groups, engine.group_size, engine.block, engine.gpus) == (3, 8, 8, 1)
    assert engine.pool == "rollout" and engine.can_span and not train.can_span
    assert (verifier.role, verifier.cpus, verifier.gpus) == ("verifier", 0, 0)
    assert [demand.role for demand in demands_of(config(SftRunConfig))] == ["trainer"]


def test_a_critic_has_ranks_of_its_own():
    cluster = {"gpus_per_trainer": 1, "gpus_per_engine_rank": 1, "pools": {"trainer": "train", "critic": "value"}}
    algorithm, critic = {"adv_estimator": {"kind": "gae"}}, {"parallel": {"tensor": 4, "data": 3}}
    train, value, _, _ = demands_of(config(cluster=cluster, algorithm=algorithm, critic=critic))
    assert (train.role, train.pool) == ("trainer", "train")
    assert (value.role, value.group_size, value.block, value.gpus, value.pool) == ("critic", 12, 4, 1, "value")
    assert "lower critic.parallel" in value.advice


def test_the_smallest_cluster_by_hand():
    demands = [trainer(12, 4, pool="train"), engines(3, 4, pool="rollout"), VERIFIER]
    plan = smallest_cluster(demands, 8)
    assert [one.pool for one in plan.nodes] == ["train", "train", "rollout", "rollout"]
    assert shown(plan, "verifier") == ["node 4x1"], "on the rollout node with free GPUs"
    assert len(smallest_cluster([trainer(12, 4), engines(3, 4)], 8).nodes) == 3
    assert len(smallest_cluster([trainer(32, 4), engines(2, 16)], 8).nodes) == 8
    # Two engines of 3 GPUs and a trainer of 1 are 7 GPUs, but two engines do not fit into one node of 4.
    assert len(smallest_cluster([trainer(1, 1), engines(2, 3)], 4).nodes) == 2
    assert len(smallest_cluster([trainer(1, 1), engines(3, 5)], 8).nodes) == 3, "15 GPUs would fit into two"
    assert len(smallest_cluster([trainer(4, 2, gpus=0), engines(2, 2, gpus=0)], 8).nodes) == 1


WIDTHS = st.sampled_from([1, 2, 4, 8])


def shared_run(num_nodes: int, tensor: int, width: int, critic: int | None = None) -> tuple[Demand, ...]:
    """The demands of a run on whole nodes of 8 GPUs, which trainers and engines share, and a critic of this tensor
    parallelism, if there is one."""
    world = 8 * num_nodes
    cluster = {"colocate": True, "gpus_per_trainer": 1, "gpus_per_engine_rank": 1, "cpus_per_trainer": 4}
    changes = {"policy": {"parallel": {"tensor": tensor, "data": world // tensor}}, "cluster": cluster}
    rollout = {
        "num_engines": world // width,
        "parallel": {"tensor": width},
        "prompts_per_step": 64,
        "samples_per_prompt": 2,
    }
    tree = {
        "run": {"name": "x", "steps": 1},
        "model": {"path": "m"},
        "data": {"train": "t.jsonl"},
        "rollout": rollout | {"max_prompt_tokens": 8, "max_response_tokens": 8},
        "balance": {"max_tokens_per_microbatch": 16},
    }
    if critic is not None:
        tree |= {"critic": {"parallel": {"tensor": critic, "data": world // critic}}}
        tree |= {"algorithm": {"adv_estimator": {"kind": "gae"}}}
    return demands_of(validate(GrpoRunConfig, tree | changes))


@pytest.mark.parametrize(("tensor", "width"), [(4, 2), (2, 8), (1, 1), (8, 4)])
def test_shared_gpus_are_reserved_once_and_pair_ranks_on_one_node(tensor, width):
    demands, nodes = shared_run(3, tensor, width), [node(i) for i in range(4)]
    plan = place(demands, nodes)
    [trainers], engine_ranks = plan.groups["trainer"], [rank for group in plan.groups["engine"] for rank in group]
    assert len(plan.groups["engine"]) == 24 // width
    assert [rank.node for rank in trainers] == [rank.node for rank in engine_ranks]
    assert {(rank.cpus, rank.gpus) for rank in trainers} == {(4, 0)}
    assert {(rank.cpus, rank.gpus) for rank in engine_ranks} == {(0, 1)}
    assert all(len({rank.node for rank in group}) == 1 for group in plan.groups["engine"])
    assert set(Counter(rank.node.id for rank in trainers).values()) == {8}
    assert len(smallest_cluster(demands, 8).nodes) == 3
    with pytest.raises(NoRoom, match="room for"):
        place(demands, nodes[:2])


@pytest.mark.parametrize(("tensor", "critic"), [(2, 8), (4, 1)])
def test_a_critic_shares_the_gpus_of_the_policy_and_has_cpus_of_its_own(tensor, critic):
    demands, nodes = shared_run(2, tensor, 2, critic), [node(i, cpus=64) for i in range(3)]
    plan = place(demands, nodes)
    [trainers], [critics] = plan.groups["trainer"], plan.groups["critic"]
    assert [rank.node for rank in critics] == [rank.node for rank in trainers]
    assert {(rank.cpus, rank.gpus) for rank in (*trainers, *critics)} == {(4, 0)}
    blocks = [critics[i : i + critic] for i in range(0, 16, critic)]
    assert all(len({rank.node.id for rank in block}) == 1 for block in blocks)
    assert len(smallest_cluster(demands, 8).nodes) == 2
    with pytest.raises(NoRoom, match="8 CPUs and 1 GPU .*4 CPUs"):
        place(demands, nodes[:1])
    with pytest.raises(ValueError, match="CPU"):
        place(demands, [node(i, cpus=32) for i in range(2)])  # enough for the policy's ranks alone


def test_a_lost_node_of_shared_gpus_ends_the_run_with_what_to_do():
    plan = place(shared_run(2, 4, 4, critic=2), [node(0), node(1), node(2)])
    lives = [one for one in plan.nodes if one.id != "id1"]
    for role, index in (("trainer", 0), ("critic", 0), ("engine", 2)):
        assert place_again(plan, role, index, plan.nodes) == plan
        with pytest.raises(ValueError, match="node 10.0.0.1.*--resume auto"):
            place_again(plan, role, index, lives)


@st.composite
def clusters(draw) -> tuple[list[Demand], list[Node]]:
    frees = draw(st.lists(st.sampled_from([(8, 8), (8, 5), (4, 4), (4, 2), (2, 2), (0, 0)]), min_size=1, max_size=5))
    nodes = [node(i, gpus=gpus, free=free, cpus=1000) for i, (gpus, free) in enumerate(frees)]
    tensor, width = draw(WIDTHS), draw(WIDTHS)
    return [trainer(tensor * draw(st.integers(1, 3)), tensor), engines(draw(st.integers(1, 4)), width), VERIFIER], nodes


def attempt(demands: list[Demand], nodes: list[Node]) -> Placement | None:
    try:
        return place(demands, nodes)
    except ValueError:
        return None


@given(clusters())
def test_a_placement_holds_all_ranks_and_takes_no_more_than_is_free(cluster):
    demands, nodes = cluster
    plan = attempt(demands, nodes)
    assume(plan is not None)
    used = Counter()
    for demand in demands:
        groups = plan.groups[demand.role]
        assert [len(group) for group in groups] == [demand.group_size] * demand.num_groups
        for group in groups:
            used.update({rank.node.id: 0 for rank in group})
            for rank in group:
                assert (rank.cpus, rank.gpus) == (demand.cpus, demand.gpus)
                used[rank.node.id] += rank.gpus
    assert all(used[one.id] <= one.free_gpus for one in nodes)
    [ranks] = plan.groups["trainer"]
    block = demands[0].block
    assert all(len({rank.node.id for rank in ranks[i : i + block]}) == 1 for i in range(0, len(ranks), block))
    largest = max(one.gpus for one in nodes)
    for group in plan.groups["engine"]:
        assert len(group) > largest or len({rank.node.id for rank in group}) == 1
    assert attempt(demands, nodes) == plan, "a pure function"


def exists(widths: list[int], frees: list[int]) -> bool:
    """Whether blocks of these widths fit into these rooms, by trying everything."""

    @cache
    def fit(index: int, rooms: tuple[int, ...]) -> bool:
        if index == len(widths):
            return True
        return any(
            fit(index + 1, tuple(sorted((*rooms[:i], room - widths[index], *rooms[i + 1 :]))))
            for i, room in enumerate(rooms)
            if room >= widths[index]
        )

    return fit(0, tuple(sorted(frees)))


@given(clusters())
def test_a_placement_is_found_if_one_exists(cluster):
    demands, nodes = cluster
    train, engine, _ = demands
    largest = max(int(one.gpus) for one in nodes)
    assume(engine.block <= largest)
    blocks = [train.block] * (train.group_size // train.block) + [engine.block] * engine.num_groups
    assert (attempt(demands, nodes) is not None) == exists(blocks, [int(one.free_gpus) for one in nodes])


@given(st.integers(1, 6), WIDTHS, st.integers(1, 6), WIDTHS)
def test_whole_nodes_are_filled_and_no_smaller_cluster_would_do(num_blocks, tensor, num_engines, width):
    demands = [trainer(num_blocks * tensor, tensor), engines(num_engines, width), VERIFIER]
    plan = smallest_cluster(demands, 8)
    for role in ("trainer", "engine"):
        used = Counter(rank.node.id for group in plan.groups[role] for rank in group)
        assert sum(count < 8 for count in used.values()) <= 2, "one that is shared and one that is last"
    total = num_blocks * tensor + num_engines * width
    assert len(plan.nodes) == -(-total // 8), "widths that divide 8 leave no GPU idle but in the last node"


@given(clusters(), st.data())
def test_placing_again_touches_nothing_else_and_uses_nodes_that_live(cluster, data):
    demands, nodes = cluster
    plan = attempt(demands, nodes)
    assume(plan is not None)
    lost = data.draw(st.sampled_from(nodes))
    alive = [one for one in nodes if one != lost]
    assume(alive)
    for role in ("trainer", "engine"):
        for index, group in enumerate(plan.groups[role]):
            try:
                again = place_again(plan, role, index, alive)
            except ValueError:
                assert any(rank.node == lost for rank in group)
                continue
            assert all(rank.node != lost for rank in again.groups[role][index])
            for other, groups in plan.groups.items():
                kept = [g for i, g in enumerate(groups) if (other, i) != (role, index)]
                assert kept == [g for i, g in enumerate(again.groups[other]) if (other, i) != (role, index)]
            used = Counter()
            for groups in again.groups.values():
                for one in groups:
                    for rank in one:
                        used[rank.node.id] += rank.gpus
            assert all(used[one.id] <= one.free_gpus for one in nodes)
