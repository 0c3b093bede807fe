"""Memory and cores of processes, from /proc."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pytest import approx

from megatron_rl.cluster.machines import PAGE_BYTES, TICKS, NodeReading, Usage, read_node, stored_bytes, summarised


def process(proc: Path, pid: int, parent: int, pages: int, ticks: tuple[int, int], name: str = "python") -> None:
    """Field 2 is the name, 4 the parent, 14 and 15 the CPU time, 24 the resident pages (man 5 proc)."""
    fields = ["S", str(parent), *["0"] * 9, str(ticks[0]), str(ticks[1]), *["0"] * 8, str(pages), "0"]
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")


def test_a_node_by_hand(tmp_path):
    """The driver has started Ray, Ray an engine, and the engine a worker whose name has a bracket and a space."""
    process(tmp_path, 1, 0, 1, (1, 1))
    process(tmp_path, 10, 1, 100, (TICKS, 0))
    process(tmp_path, 11, 10, 20, (0, 2 * TICKS), "raylet")
    process(tmp_path, 12, 11, 300, (3 * TICKS, TICKS))
    process(tmp_path, 13, 12, 500, (TICKS, TICKS), "VLLM) S 1 worker")
    (tmp_path / "self").mkdir()
    found = read_node({10: "driver", 12: "engine"}, tmp_path).usages
    assert found == {
        10: Usage("driver", 100 * PAGE_BYTES, 1.0),
        11: Usage("ray", 20 * PAGE_BYTES, 2.0),
        12: Usage("engine", 300 * PAGE_BYTES, 4.0),
        13: Usage("engine", 500 * PAGE_BYTES, 2.0),
    }


def test_this_node():
    code = "x = bytearray(64 << 20); print(len(x), flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    try:
        reading = read_node({os.getpid(): "driver", child.pid: "engine"})
    finally:
        child.communicate(b"\n")
    assert reading.usages[child.pid].role == "engine" and reading.usages[child.pid].resident_bytes > 64 << 20
    assert reading.usages[os.getpid()].role == "driver" and reading.usages[os.getpid()].cpu_s > 0
    assert reading.cores == len(os.sched_getaffinity(0)) and reading.shm_bytes >= 0


def test_the_metrics_of_two_nodes():
    """In 10 s the trainer of node a used 5 s of its 2 cores. Node b's engine was replaced: the new process has used 4 s
    of 2 cores."""
    before = {
        "a": NodeReading(100.0, 2, 50, {1: Usage("driver", 10, 1.0), 2: Usage("trainer", 20, 7.0)}),
        "b": NodeReading(7.0, 2, 70, {5: Usage("engine", 90, 100.0)}),
    }
    now = {
        "a": NodeReading(
            110.0, 2, 60, {1: Usage("driver", 15, 2.0), 2: Usage("trainer", 25, 12.0), 3: Usage("ray", 99, 1.0)}
        ),
        "b": NodeReading(17.0, 2, 40, {6: Usage("engine", 80, 4.0)}),
    }
    assert summarised(before, now) == {
        "memory/driver_resident_bytes": 15.0,
        "memory/trainer_resident_bytes": 25.0,
        "memory/engine_resident_bytes": 80.0,
        "memory/shm_bytes": 60.0,
        "machine/driver_cores": approx(0.1),
        "machine/trainer_cores": approx(0.5),
        "machine/ray_cores": approx(0.1),
        "machine/engine_cores": approx(0.4),
        "machine/waiting": approx(1 - 1.1 / 4),
    }


def test_a_node_that_is_seen_for_the_first_time_says_nothing_of_cores():
    found = summarised({}, {"a": NodeReading(1.0, 2, 5, {1: Usage("driver", 10, 1.0)})})
    assert found == {"memory/driver_resident_bytes": 10.0, "memory/shm_bytes": 5.0}


def test_what_the_object_stores_hold():
    nodes = [
        {"NodeID": "a", "Alive": True, "Resources": {"object_store_memory": 100.0}},
        {"NodeID": "b", "Alive": True, "Resources": {"object_store_memory": 100.0}},
        {"NodeID": "c", "Alive": False, "Resources": {}},
    ]
    assert stored_bytes(nodes, {"a": {"object_store_memory": 70.0}, "b": {}, "c": {}}) == 130.0
