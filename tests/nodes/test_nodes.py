"""Three nodes with their own addresses, host names, processes and memory: a run spreads over them, and a node that is
lost costs neither the run nor a bit of its numbers."""

from __future__ import annotations

import re
import subprocess
import sys

import cover
import psutil
import pytest
from patience import deadline
from ray_nodes import ENGINE, STAGE, TRAINER, Cluster, Run

from megatron_rl.processes import command_line, descendants
from megatron_rl.tools.bench.namespaces import NetworkNode


def stop(cluster: Cluster, index: int, name: str) -> None:
    """Stop the processes of a node with `name` in their command lines (SIGSTOP)."""
    found = [p for p in descendants(psutil.Process(cluster.nodes[index].pid)) if name in command_line(p)]
    assert found
    for process in found:
        process.suspend()


def gated(cluster: Cluster, name: str, *arguments: str) -> Run:
    """A run that stands in the rewards of step 1."""
    (cluster.folder / "gate").touch()
    run = Run(cluster, name, *cluster.arguments, *arguments)
    run.wait_until((cluster.folder / "waiting").exists)
    return run


def open_gate(cluster: Cluster) -> None:
    for name in ("gate", "waiting"):
        (cluster.folder / name).unlink()


def alone(cluster: Cluster, name: str, *arguments: str) -> Run:
    """The same run on the first node alone, with a Ray of its own."""
    return Run(cluster, f"{name}_alone", *arguments)


def hosts(run: Run, name: str) -> list[str]:
    """The nodes on which a process was started, in order."""
    return re.findall(r" is process \d+ on (node\d)", run.log(name))


def numbers(run: Run) -> list[tuple[float, float, float]]:
    steps = run.metrics[:-1]  # the last record is the final push
    return [(step["loss"], step["grad_norm"], step["reward/mean"]) for step in steps]


@pytest.mark.deep
def test_a_rollout_node_that_is_lost_in_a_push_costs_nothing(cluster):
    """The paths are relative and no variable names an interface. The cable of the engine's node, where the verifier is
    too, is pulled while the trainers push, and a new node joins."""
    run = gated(cluster, "nodes", "cluster.pools={engine: rollout, verifier: rollout}")
    assert [hosts(run, name) for name in ("trainer_0", "trainer_1", "engine_0")] == [["node1"], ["node2"], ["node3"]]
    assert hosts(run, "verifier") == ["node3"], "a pool of nodes can judge"
    assert "talks to other nodes through eth0 (10.77.0.2)" in run.log("trainer_1")
    stop(cluster, 2, "ray::EngineRank")  # so that the push stands in the middle
    open_gate(cluster)
    run.wait_until(lambda: run.log("trainer_0").count("update 0: ") == 2)
    cluster.nodes[2].pull()
    cluster.add(ENGINE)
    single = alone(cluster, "nodes")
    assert (run.end(), single.end()) == (0, 0), run.text + single.text
    assert re.match(r"version 2: engine 0 \(process \d+ on node3\) is lost with its node", run.log("bridge")), run.log(
        "bridge"
    )
    assert hosts(run, "engine_0") == ["node3", "node4"]
    assert [record["sync/replaced_engines"] for record in run.metrics] == [0, 0, 1]
    assert max(step["mismatch/mean_abs"] for step in run.metrics[:-1]) < 1e-4  # as in one process, see the tiny recipe
    assert numbers(run) == numbers(single)


WITH_GPUS = """
from megatron_rl.preflight import devices
from megatron_rl.commands.grpo import main
devices.has_cpu_torch = lambda: False
raise SystemExit(main())
"""
"""The recipe on nodes whose GPUs are only a number of Ray's."""


@pytest.mark.deep
def test_the_stages_of_an_engine_are_on_two_nodes(cluster):
    """Each node has room for one rank of an engine. The hidden states, the weights and the tokens pass between nodes
    that have no memory in common."""
    for _ in range(2):
        cluster.add(STAGE)
    staged = ["rollout.parallel.pipeline=2", "cluster.device=auto", "cluster.pools={engine: stages}"]
    staged += ["cluster.gpus_per_engine_rank=1"]
    run = Run(cluster, "stages", cluster.arguments[0], *staged, program=["-c", WITH_GPUS])
    assert run.end() == 0, run.text
    names = [node.name for node in cluster.nodes[-2:]]
    assert f"engine 0 is placed on {', '.join(node.address for node in cluster.nodes[-2:])}" in run.log("driver")
    assert hosts(run, "engine_0") == names[:1]
    first, second, _ = run.metrics
    for step in (first, second):
        assert step["grad_norm"] > 0 and step["mismatch/mean_abs"] < 1e-5  # both sides compute in fp32


with_all = pytest.mark.skipif(not cover.everything, reason="it takes a minute; `make test-all` runs it")
MANY = ["rollout.prompts_per_step=32", "rollout.samples_per_prompt=8", "rollout.max_response_tokens=64"]
"""Answers that take long enough to be interrupted."""


@pytest.mark.deep
@with_all
@pytest.mark.parametrize("end", [NetworkNode.pull, NetworkNode.end], ids=["cable pulled", "node gone"])
def test_a_rollout_node_that_is_lost_while_it_answers_costs_nothing(shared, end):
    with Cluster(shared) as cluster:
        run = gated(cluster, f"answers_{end.__name__}", "run.steps=3", *MANY)
        open_gate(cluster)
        run.wait_until(lambda: "holds version 2" in run.log("engine_0"))
        stop(cluster, 2, "ray::EngineRank")
        assert "version 2: answered" not in run.log("engine_0")
        end(cluster.nodes[2])
        cluster.add(ENGINE)
        single = alone(cluster, f"answers_{end.__name__}", "run.steps=3", *MANY)
        assert (run.end(), single.end()) == (0, 0), run.text + single.text
        assert hosts(run, "engine_0") == ["node3", "node4"]
        assert numbers(run) == numbers(single)


@pytest.mark.deep
@with_all
@pytest.mark.parametrize("end", [NetworkNode.pull, NetworkNode.end], ids=["cable pulled", "node gone"])
def test_a_trainer_node_that_is_lost_in_a_step_costs_the_steps_since_the_checkpoint(shared, end):
    with Cluster(shared) as cluster:
        run = gated(cluster, f"step_{end.__name__}", "checkpoint.every=1")
        stop(cluster, 1, "ray::TrainerRank")  # so that the step stands in the middle
        open_gate(cluster)
        run.wait_until(lambda: run.log("verifier").count(" scored 32 of 32 answers") == 2)
        end(cluster.nodes[1])
        cluster.add(TRAINER)
        single = alone(cluster, f"step_{end.__name__}")
        assert (run.end(), single.end()) == (0, 0), run.text + single.text
        assert hosts(run, "trainer_1") == ["node2", "node4"]
        assert numbers(run) == numbers(single)


@pytest.mark.deep
def test_a_node_that_does_not_see_the_model_is_named(cluster):
    folder = cluster.folder / "task" / "model"
    cluster.nodes[1].do("mount", "-t", "tmpfs", "empty", str(folder))
    try:
        run = Run(cluster, "unseen", *cluster.arguments)
        assert run.end() == 1
    finally:
        cluster.nodes[1].do("umount", str(folder))
    assert f"node node2 (10.77.0.2) does not see {folder}; put it on a file system that all nodes share" in run.text
    assert "node1" not in run.text and not list(run.folder.glob(".seen*"))


@pytest.mark.deep
def test_another_token_is_refused_at_once(cluster):
    code = (
        "from pathlib import Path; from megatron_rl.cluster.session import ray_session; "
        "from megatron_rl.config.cluster import ClusterConfig\n"
        f"with ray_session(ClusterConfig(ray_address='{cluster.address}'), 1, Path('logs')): pass"
    )
    words = cluster.nodes[0].inside(
        "env", f"--chdir={cluster.folder}", "RAY_AUTH_TOKEN=" + 64 * "0", sys.executable, "-c", code
    )
    done = subprocess.run(words, env=cluster.environment, capture_output=True, text=True, timeout=deadline(60))
    assert done.returncode == 1
    assert f"cluster.ray_address {cluster.address}: this Ray wants another token" in done.stderr
