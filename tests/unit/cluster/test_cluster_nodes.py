"""A placement on Ray itself: nodes of one machine that say they have GPUs, and real processes on them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest
import ray
import waiting_environments
from patience import deadline, patiently
from ray.cluster_utils import Cluster
from waiting_environments import Node

from megatron_rl.cluster.environments import RemoteSessions
from megatron_rl.cluster.nodes import RayPlacement, read_nodes
from megatron_rl.cluster.placement import NoRoom
from megatron_rl.cluster.process import Process, locate
from megatron_rl.config.environment import ClassEnvironment
from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.environments import EnvironmentFault

PRINTS_GPUS = """
import os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""
from megatron_rl.config.schema import SftRunConfig
from megatron_rl.commands.defaults import read_config
print(read_config(SftRunConfig, sys.argv[1:]).cluster.gpus_per_trainer)
"""
OBJECT_STORE_BYTES = 80 * 2**20
# Ray learns of a killed node after 5 checks of 1 s, not after the usual 15 s. A check may take 10 s on a busy machine.
HEALTH = {"health_check_period_ms": 1000, "health_check_failure_threshold": 5, "health_check_timeout_ms": 10_000}


class Nodes:
    def __init__(self) -> None:
        self.cluster = Cluster()
        self.added = [self.add(0, include_dashboard=False, _system_config=HEALTH)]

    def add(self, num_gpus: int, **options):
        resources = {"num_cpus": 8, "num_gpus": num_gpus, "object_store_memory": OBJECT_STORE_BYTES}
        return patiently(lambda: self.cluster.add_node(**resources, **options))


@pytest.fixture
def cluster(monkeypatch):
    """A head without GPUs; ends with all nodes."""
    monkeypatch.setenv("RAY_prestart_worker_first_driver", "0")  # otherwise eight idle workers on each node
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    nodes = Nodes()
    variables = {"PYTHONPATH": os.pathsep.join(path for path in [os.getcwd(), os.environ.get("PYTHONPATH")] if path)}
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(address=nodes.cluster.address, log_to_driver=False, runtime_env={"env_vars": variables})
    signal.signal(signal.SIGTERM, handler)  # Ray replaces it, and other tests of this process look at it
    yield nodes
    ray.shutdown()
    nodes.cluster.shutdown()


def rank_class() -> type:
    class Rank:  # local, so that Ray sends its code
        def locate(self):
            return locate()

        def gpus(self) -> list[int]:
            return ray.get_gpu_ids()

        def bundles(self) -> dict[int, str]:
            """The node of each bundle of the placement group in which this process is."""
            return ray.util.placement_group_table(ray.util.get_current_placement_group())["bundles_to_node_id"]

    return Rank


def config(engines: int, engine_width: int, trainer: dict, pools: dict | None = None) -> GrpoRunConfig:
    rollout = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_prompt_tokens": 8, "max_response_tokens": 8}
    return validate(
        GrpoRunConfig,
        {
            "run": {"name": "x", "steps": 1},
            "model": {"path": "m"},
            "balance": {"max_tokens_per_microbatch": 16},
            "data": {"train": "rows"},
            "policy": {"parallel": trainer},
            "rollout": rollout | {"num_engines": engines, "parallel": {"tensor": engine_width}},
            "cluster": {"gpus_per_trainer": 1, "gpus_per_engine_rank": 1, "pools": pools or {}},
        },
    )


def start(placement: RayPlacement, role: str, index: int) -> ray.actor.ActorHandle:
    return ray.remote(rank_class()).options(**placement.group_options(role, index)).remote()


def wait_for(seconds: float, *names: str, address: str) -> subprocess.CompletedProcess[str]:
    """Run the command that a Slurm job waits with."""
    command = [sys.executable, "-m", "megatron_rl.cluster.wait_for_nodes", str(seconds), *names]
    return subprocess.run(command, env=os.environ | {"RAY_ADDRESS": address}, capture_output=True, text=True)


@pytest.mark.deep
def test_processes_are_where_the_plan_says_and_a_lost_node_is_left(cluster):
    """Two trainer nodes and three for engines. One GPU of a trainer node is in use already."""
    for _ in range(2):
        cluster.add(3, labels={"pool": "train"})
    for _ in range(2):
        cluster.add(2, labels={"pool": "rollout"})
    other = ray.remote(rank_class()).options(num_gpus=1, label_selector={"pool": "train"}).remote()
    ray.get(other.gpus.remote())
    end = time.monotonic() + deadline(60)
    while sorted(node.free_gpus for node in read_nodes()) != [0, 2, 2, 2, 3]:  # Ray counts a moment later
        assert time.monotonic() < end
    names = [one["NodeName"] for one in ray.nodes()]
    assert wait_for(60, *names, address=cluster.cluster.address).returncode == 0
    ended = wait_for(0.5, *names, "elsewhere", address=cluster.cluster.address)
    assert ended.returncode == 1
    assert ended.stderr.startswith("1 of 6 nodes did not join Ray within 0.5 s: elsewhere; their logs")
    left_out = ["run={name: x, steps: 1}", "model.path=m", "sft={rows: r, max_tokens: 8}"]
    left_out += ["balance.max_tokens_per_microbatch=16", f"cluster.ray_address={cluster.cluster.address}"]
    done = subprocess.run([sys.executable, "-c", PRINTS_GPUS, *left_out], capture_output=True, text=True)
    assert done.stdout == "1.0\n", done.stderr  # Ray's nodes have GPUs, this machine need not
    given = config(2, 2, {"tensor": 2, "data": 2}, {"trainer": "train", "engine": "rollout"})

    placement = RayPlacement(given)
    planned = placement.plan.groups
    remote = ray.remote(rank_class())
    ranks = [remote.options(**placement.rank_options("trainer", 0, rank)).remote() for rank in range(4)]
    engines = {i: Process(f"engine {i}", None, start(placement, "engine", i)) for i in range(2)}
    verifier = remote.options(**placement.rank_options("verifier", 0, 0)).remote()
    nodes = [location.node for location in ray.get([rank.locate.remote() for rank in ranks])]
    assert nodes == [place.node.id for place in planned["trainer"][0]]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    for i, process in engines.items():
        assert ray.get(process.actor.locate.remote()).node == planned["engine"][i][0].node.id
        assert sorted(ray.get(process.actor.gpus.remote())) == [0, 1]
    for pair, taken in ((ranks[:2], nodes[0]), (ranks[2:], nodes[2])):
        gpus = [ray.get(rank.gpus.remote())[0] for rank in pair]
        assert len(set(gpus)) == 2 and set(gpus) <= {0, 1, 2} and taken in nodes
    [head] = [node for node in read_nodes() if not node.gpus]
    assert ray.get(verifier.locate.remote()).node == head.id

    # The node of engine 1 is killed, and the engine is started again before Ray knows that.
    lost = planned["engine"][1][0].node.id
    [raylet] = [one for one in cluster.cluster.list_all_nodes() if one.node_id == lost]
    raylet.kill_raylet()
    tried = []

    def create(index: int) -> ray.actor.ActorHandle:
        tried.append(placement.plan.groups["engine"][index][0].node.id)
        return start(placement, "engine", index)

    with pytest.raises(NoRoom, match="engine 1 .*1 engine of 2 GPUs"):
        placement.start_again("engine", {1: engines[1]}, create, deadline(120))
    assert tried == [lost]
    spare = cluster.add(2, labels={"pool": "rollout"})
    placement.start_again("engine", {1: engines[1]}, create, deadline(120))
    assert engines[1].location.node == spare.node_id == placement.plan.groups["engine"][1][0].node.id
    assert placement.plan.groups["engine"][0] == planned["engine"][0]
    assert ray.get(engines[0].actor.locate.remote()).node == planned["engine"][0][0].node.id, "it was left alone"


@pytest.mark.deep
def test_an_engine_wider_than_a_node_has_a_bundle_for_each_rank_in_the_order_of_the_ranks(cluster):
    for _ in range(3):
        cluster.add(2)
    placement = RayPlacement(config(1, 4, {"tensor": 2}))
    engine = start(placement, "engine", 0)
    planned = [rank.node.id for rank in placement.plan.groups["engine"][0]]
    assert placement.spans_nodes("engine", 0) and len(set(planned)) == 2
    assert ray.get(engine.bundles.remote()) == dict(enumerate(planned))
    assert ray.get(engine.locate.remote()).node == planned[0] and ray.get(engine.gpus.remote()) == []
    trainer = {rank.node.id for rank in placement.plan.groups["trainer"][0]}
    assert len(trainer) == 1 and not trainer & set(planned)

    ray.kill(engine)
    process = Process("engine 0", None, engine)
    placement.start_again("engine", {0: process}, lambda i: start(placement, "engine", i), deadline(120))
    assert ray.get(process.actor.bundles.remote()) == dict(enumerate(planned)), "its bundles are still reserved"


@pytest.mark.deep
@pytest.mark.deadline(900)
def test_a_host_of_environments_dies_among_500_episodes_and_each_has_its_end(cluster, tmp_path):
    """An episode whose host is gone begins again once, on another host."""
    lost = cluster.add(0)
    cluster.add(0)
    path = f"{waiting_environments.__file__}:{Node.__name__}"
    cfg = ClassEnvironment(path=path, processes=6, spread=True, step_timeout_s=deadline(60))

    async def play() -> tuple[list[int], set[str]]:
        sessions = RemoteSessions(cfg, "", "hermes", tmp_path, "engine 0")
        nodes, ended, slots = set(), [], asyncio.Semaphore(64)

        async def once() -> None:
            session = sessions.new()
            try:
                await session.begin({})
                for _ in range(3):
                    reaction = await session.react("x")
                    assert reaction.reward == 1.0
                    nodes.add(reaction.messages[0]["content"])
            finally:
                await session.end()

        async def episode(number: int) -> None:
            async with slots:
                for attempt in range(2):
                    try:
                        await once()
                        ended.append(attempt)
                        break
                    except EnvironmentFault as fault:
                        assert "has died" in str(fault) and attempt == 0, fault
            if len(ended) == 100:
                assert lost.node_id in nodes and len(nodes) == 3
                nodes.clear()
                cluster.cluster.remove_node(lost, allow_graceful=False)

        await asyncio.gather(*map(episode, range(500)))
        return ended, nodes

    ended, nodes = asyncio.run(play())
    assert len(ended) == 500 and 0 < sum(ended) <= 64
    assert len(nodes - {lost.node_id}) == 2
