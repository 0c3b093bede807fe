"""Measure the placement of a run on Ray's nodes. The nodes are Ray processes of this machine that only say that they
have GPUs, and every trainer rank, engine and verifier is a real process that does nothing.

In each trial all processes are placed and ended again. For comparison, Ray alone places as many bundles of one GPU as
there are trainer ranks (strategy PACK) in each trial, and it is counted how many tensor-parallel groups span nodes.
A layout whose nodes and processes do not fit into this machine's memory is only planned.

    python tools/bench/placement.py --layout 8x8 --trials 20 --json
    python tools/bench/placement.py --layout 64x8
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from megatron_rl.cluster.nodes import RayPlacement, read_nodes
from megatron_rl.cluster.placement import Node, demands_of, place
from megatron_rl.cluster.process import Process, locate
from megatron_rl.cluster.waiting import locate_all
from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.types import Mesh

NODE_BYTES, PROCESS_BYTES = 0.35e9, 0.08e9
"""The memory of an idle Ray node with its agents, and of an idle actor: what was seen with Ray 2.60, rounded up."""
OBJECT_STORE_BYTES = 80 * 2**20
CPUS = 64
TIMEOUT_S = 600.0

# Nodes x GPUs: the trainer's mesh, and the number and width of the engines. Together they need all GPUs.
LAYOUTS = {
    "2x4": (Mesh(tensor=2, pipeline=2), 2, 2),
    "8x8": (Mesh(tensor=4, pipeline=4, data=2), 8, 4),
    "16x8": (Mesh(tensor=8, pipeline=2, data=2), 12, 8),
    "64x8": (Mesh(tensor=8, pipeline=4, data=4), 48, 8),
}


class Rank:
    def locate(self):
        return locate()

    def num_gpus(self) -> int:
        return len(ray.get_gpu_ids())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="8x8", choices=LAYOUTS, help="nodes x GPUs of a node")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    args = parser.parse_args(arguments)
    report = measure(args.layout, args.trials)
    if args.json:
        print(json.dumps(report))
    else:
        print(*(f"{name}: {value}" for name, value in report.items()), sep="\n")
    return 0


def measure(layout: str, num_trials: int) -> dict[str, Any]:
    num_nodes, num_gpus = map(int, layout.split("x"))
    config = configuration(layout)
    nodes = [Node(str(i), f"node {i}", CPUS, num_gpus, CPUS, num_gpus) for i in range(num_nodes)]
    start = time.perf_counter()
    plan = place(demands_of(config), nodes)
    report: dict[str, Any] = {"layout": layout, "plan_s": round(time.perf_counter() - start, 4)}
    used = sum(rank.gpus for groups in plan.groups.values() for group in groups for rank in group)
    report["planned_idle_gpus"] = num_nodes * num_gpus - used
    num_processes = config.policy.parallel.mesh.world_size + config.rollout.num_engines + 1
    needed, free = num_nodes * NODE_BYTES + num_processes * PROCESS_BYTES, psutil.virtual_memory().available
    if needed > free:
        reason = f"{num_nodes} nodes and {num_processes} processes need about {needed / 1e9:.0f} GB"
        return report | {"ray": f"not run: {reason}, and {free / 1e9:.0f} GB are free"}
    return report | on_ray(config, num_nodes, num_gpus, num_trials)


def configuration(layout: str) -> GrpoRunConfig:
    mesh, num_engines, width = LAYOUTS[layout]
    rollout = {"prompts_per_step": 1, "samples_per_prompt": 2, "max_prompt_tokens": 8, "max_response_tokens": 8}
    return validate(
        GrpoRunConfig,
        {
            "run": {"name": "placement", "steps": 1},
            "model": {"path": "none"},
            "data": {"train": "none"},
            "balance": {"max_tokens_per_microbatch": 16},
            "policy": {"parallel": {"tensor": mesh.tensor, "pipeline": mesh.pipeline, "data": mesh.data}},
            "rollout": rollout | {"num_engines": num_engines, "tensor": width},
            "cluster": {"gpus_per_trainer": 1, "gpus_per_engine_rank": 1},
        },
    )


def on_ray(config: GrpoRunConfig, num_nodes: int, num_gpus: int, num_trials: int) -> dict[str, Any]:
    """The trials on a Ray cluster of this machine."""
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    logging.getLogger("ray").setLevel(logging.ERROR)
    start = time.perf_counter()
    cluster = Cluster()
    try:
        for _ in range(num_nodes):
            cluster.add_node(
                num_cpus=CPUS, num_gpus=num_gpus, object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False
            )
        ray.init(address=cluster.address, log_to_driver=False)
        report: dict[str, Any] = {"nodes_up_s": round(time.perf_counter() - start, 1), "trials": num_trials}
        trials = [trial(config, num_nodes * num_gpus) for _ in range(num_trials)]
    finally:
        ray.shutdown()
        cluster.shutdown()
    report |= {name: [one[name] for one in trials] for name in trials[0]}
    return report | {"cores": os.cpu_count(), "ray": ray.__version__}


def trial(config: GrpoRunConfig, num_gpus: int) -> dict[str, float]:
    """Place all processes and end them again."""
    mesh = config.policy.parallel.mesh
    start = time.perf_counter()
    placement = RayPlacement(config)
    planned = placement.plan.groups
    remote = ray.remote(Rank)
    ranks = [remote.options(**placement.rank_options("trainer", 0, i)).remote() for i in range(mesh.world_size)]
    engines = [remote.options(**placement.group_options("engine", i)).remote() for i in range(len(planned["engine"]))]
    verifier = remote.options(**placement.rank_options("verifier", 0, 0)).remote()
    processes = [Process("", Path(), actor) for actor in (*ranks, *engines, verifier)]
    locate_all(processes, TIMEOUT_S, "a part of a node")
    placed_s = time.perf_counter() - start
    expected = [rank.node.id for rank in planned["trainer"][0]]
    expected += [group[0].node.id for group in planned["engine"]] + [planned["verifier"][0][0].node.id]
    nodes = [process.location.node for process in processes]
    held = sum(ray.get([process.actor.num_gpus.remote() for process in processes]))
    for process in processes:
        ray.kill(process.actor)
    wait_until_free(num_gpus)
    return {
        "placed_s": round(placed_s, 2),
        "tensor_groups_that_span": spanning(nodes[: mesh.world_size], mesh.tensor),
        "not_as_planned": sum(a != b for a, b in zip(nodes, expected, strict=True)),
        "idle_gpus": num_gpus - held,
        "tensor_groups_that_span_with_pack": packed_by_ray(mesh, num_gpus),
    }


def packed_by_ray(mesh: Mesh, num_gpus: int) -> int:
    """The tensor-parallel groups that span nodes if Ray places the trainer's ranks alone."""
    group = ray.util.placement_group([{"CPU": 1, "GPU": 1}] * mesh.world_size, strategy="PACK")
    assert group.wait(TIMEOUT_S)
    where = ray.util.placement_group_table(group)["bundles_to_node_id"]
    ray.util.remove_placement_group(group)
    wait_until_free(num_gpus)
    return spanning([where[rank] for rank in range(mesh.world_size)], mesh.tensor)


def spanning(nodes: Sequence[str], tensor: int) -> int:
    return sum(len(set(nodes[i : i + tensor])) > 1 for i in range(0, len(nodes), tensor))


def wait_until_free(num_gpus: int) -> None:
    """Wait until Ray counts all GPUs as free, which it does a moment after processes have ended."""
    end = time.monotonic() + TIMEOUT_S
    while sum(node.free_gpus for node in read_nodes()) < num_gpus:
        if time.monotonic() > end:
            raise RuntimeError(f"Ray has not freed the GPUs of ended processes in {TIMEOUT_S:g} s")
        time.sleep(0.05)


if __name__ == "__main__":
    raise SystemExit(main())
