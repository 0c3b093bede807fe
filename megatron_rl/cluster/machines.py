"""The memory and the cores that the processes of a run use, as metrics of each step.

The driver reads /proc of its own node. On every other node of the run a small process does so; all of them are asked at
the end of a step, and answer within milliseconds.

Invariants (tests/unit/cluster): a process that a process of the run has started counts for the same role; the share of
core time that nobody used and the used one add up to 1 on each node.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_rl.cluster.process import Process
from megatron_rl.cluster.waiting import settle
from megatron_rl.config.machine import num_cores
from megatron_rl.types import Metrics

PROC, SHARED_MEMORY = Path("/proc"), Path("/dev/shm")
STAT_BYTES = 4096
"""More than the file `stat` of a process has."""
PAGE_BYTES, TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
ANSWER_S = 1.0
"""A node that does not answer within this time is missing from the step's metrics."""
STORE = "object_store_memory"
"""Ray's name for the room in an object store."""
DRIVER, RAY = "driver", "ray"
"""The role of the driver's process, and the role of what it has started and no other role has: Ray's own processes."""

log = logging.getLogger(__name__)

Processes = Callable[[], Mapping[str, Sequence[Process]]]
"""Gives the present processes of each role; processes are replaced when they are lost."""


@dataclass(frozen=True, slots=True)
class Usage:
    """One process."""

    role: str
    resident_bytes: int
    """Memory that it shares with other processes counts, too."""
    cpu_s: float
    """The CPU time that it has used since it began."""


@dataclass(frozen=True, slots=True)
class NodeReading:
    """One node at one moment."""

    at_s: float
    """The moment, by the node's clock."""
    cores: int
    shm_bytes: int
    """The used bytes of /dev/shm."""
    usages: Mapping[int, Usage] = field(default_factory=dict)
    """The processes of the run by their ids."""


def read_node(roots: Mapping[int, str], proc: Path = PROC) -> NodeReading:
    """Read this node.

    Args:
        roots: the role of each process by its id. What it has started, directly or not, has the same role, unless it is
            a root itself.
    """
    parents: dict[int, int] = {}
    used: dict[int, tuple[int, float]] = {}
    for name in filter(str.isdigit, os.listdir(proc)):
        try:
            file = os.open(f"{proc}/{name}/stat", os.O_RDONLY)  # much quicker than Python's files, for all processes
        except OSError:  # it has ended
            continue
        try:
            text = os.read(file, STAT_BYTES)
        except OSError:
            continue
        finally:
            os.close(file)
        fields = text.rpartition(b")")[2].split()  # the name in parentheses may have spaces; the state follows it
        parents[int(name)] = int(fields[1])
        used[int(name)] = int(fields[21]) * PAGE_BYTES, (int(fields[11]) + int(fields[12])) / TICKS
    usages = {pid: Usage(role, *used[pid]) for pid in used if (role := _role(pid, roots, parents)) is not None}
    return NodeReading(time.monotonic(), num_cores(), shutil.disk_usage(SHARED_MEMORY).used, usages)


def _role(pid: int, roots: Mapping[int, str], parents: Mapping[int, int]) -> str | None:
    ancestor = pid
    while ancestor not in roots:
        if ancestor not in parents:
            return None
        ancestor = parents[ancestor]
    return RAY if roots[ancestor] == DRIVER and ancestor != pid else roots[ancestor]


class NodeReader:
    """The process that reads another node."""

    def read(self, roots: Mapping[int, str]) -> NodeReading:
        return read_node(roots)


class Machines:
    """A watcher of the sink: the metrics of memory and machines.

    Workers that vLLM starts on other nodes, for an engine that spans nodes, are not known here and not counted.
    """

    def __init__(self, processes: Processes, run_folder: Path) -> None:
        self._processes, self._run_folder = processes, run_folder
        self._here = ray.get_runtime_context().get_node_id()
        self._readers: dict[str, Any] = {}
        """The actors on other nodes, by Ray's id of the node."""
        self._before: dict[str, NodeReading] = {}

    def begin(self, step: int) -> None:
        if not self._before:  # the first step of this process
            self._before = self._read()

    def end(self, step: int) -> Metrics:
        now = self._read()
        metrics = summarised(self._before, now)
        for process in (process for group in self._processes().values() for process in group):
            metrics |= {name: max(value, metrics.get(name, 0.0)) for name, value in process.memory.items()}
        metrics["machine/disk_free_bytes"] = float(shutil.disk_usage(self._run_folder).free)
        missing = len(self._readers) + 1 - len(now)
        if missing:
            metrics["machine/missing_nodes"] = float(missing)
        metrics["memory/object_store_bytes"] = stored_bytes(ray.nodes(), available_resources_per_node())
        self._before = now
        return metrics

    def close(self) -> None:
        for reader in self._readers.values():
            ray.kill(reader)

    def _read(self) -> dict[str, NodeReading]:
        """What is known of each node now, by Ray's id."""
        roots: dict[str, dict[int, str]] = {self._here: {os.getpid(): DRIVER}}
        for role, processes in self._processes().items():
            for location in (process.location for process in processes):
                if location is not None:
                    roots.setdefault(location.node, {})[location.pid] = role
        others = [node for node in roots if node != self._here]
        self._follow(others)
        calls = [self._readers[node].read.remote(roots[node]) for node in others]
        found = {self._here: read_node(roots[self._here])}
        for node, answer in zip(others, settle(calls, ANSWER_S) if calls else [], strict=True):
            if isinstance(answer, RayError):
                log.warning("node %s does not tell its memory: %s", node, str(answer).partition("\n")[0])
            else:
                found[node] = answer
        return found

    def _follow(self, nodes: Collection[str]) -> None:
        """Start a reader on each node that has none, and end the readers of nodes without processes of the run."""
        for node in nodes:
            if node not in self._readers:
                there = NodeAffinitySchedulingStrategy(node, soft=False)
                self._readers[node] = ray.remote(NodeReader).options(num_cpus=0, scheduling_strategy=there).remote()
        for node in self._readers.keys() - set(nodes):
            ray.kill(self._readers.pop(node))


def stored_bytes(nodes: Sequence[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]]) -> float:
    """The bytes in the object stores of all nodes together. Ray counts the room in a store as a resource of its node,
    and tells it some tenths of a second late.

    Args:
        nodes: what `ray.nodes` returned.
        free: the free resources of each node, by its id.
    """
    used: float = sum(
        node["Resources"].get(STORE, 0.0) - free[node["NodeID"]].get(STORE, 0.0)
        for node in nodes
        if node["Alive"] and node["NodeID"] in free
    )
    return used


def summarised(before: Mapping[str, NodeReading], now: Mapping[str, NodeReading]) -> Metrics:
    """The metrics of a step from the readings of all nodes at its beginning and at its end.

    memory/ROLE_resident_bytes  resident bytes of the largest process of a role
    memory/shm_bytes            used bytes of /dev/shm on the node that uses most
    machine/ROLE_cores          CPU seconds of all processes of a role by the seconds of the step
    machine/waiting             the share of all cores' time that no process of the run used
    """
    usages = [usage for reading in now.values() for usage in reading.usages.values()]
    largest: dict[str, int] = {}
    for usage in usages:
        largest[usage.role] = max(usage.resident_bytes, largest.get(usage.role, 0))
    metrics = {f"memory/{role}_resident_bytes": float(size) for role, size in largest.items() if role != RAY}
    metrics["memory/shm_bytes"] = float(max(reading.shm_bytes for reading in now.values()))
    cores: dict[str, float] = {}
    total = 0
    for node, reading in now.items():
        earlier = before.get(node)
        if earlier is None or reading.at_s <= earlier.at_s:
            continue
        total += reading.cores
        for pid, usage in reading.usages.items():
            began = earlier.usages[pid].cpu_s if pid in earlier.usages else 0.0
            rate = max(0.0, usage.cpu_s - began) / (reading.at_s - earlier.at_s)
            cores[usage.role] = cores.get(usage.role, 0.0) + rate
    metrics |= {f"machine/{role}_cores": rate for role, rate in cores.items()}
    if total:
        metrics["machine/waiting"] = max(0.0, 1 - sum(cores.values()) / total)
    return metrics
