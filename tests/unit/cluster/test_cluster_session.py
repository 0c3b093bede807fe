"""How the driver waits for real Ray processes: the first failure ends the wait with an error of its type that names the
process; a deadline ends it with an error that says what the silent process is doing."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import ray
from leaks import lasting
from patience import deadline

from megatron_rl.cluster import waiting
from megatron_rl.cluster.nodes import RayPlacement
from megatron_rl.cluster.process import Process, begin_process, last_error, locate
from megatron_rl.cluster.session import ray_session
from megatron_rl.cluster.waiting import ProcessLost, gather, locate_all
from megatron_rl.config.cluster import ClusterConfig
from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.ports import StopRequested
from megatron_rl.processes import command_line, descendants


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts processes in a Ray of this module."""
    logs = tmp_path_factory.mktemp("run") / "logs"

    class Rank:  # local, so that Ray sends its code
        def __init__(self, name):
            begin_process(logs / f"{name}.log", name)

        def locate(self):
            return locate()

        def answer(self, value=None):
            return value

        def refuse(self):
            raise ValueError("the disk is full")

        def refuse_bytes(self):
            bytes([255]).decode()

        def fail(self):
            raise KeyError("lost")

        def die(self):
            print("CudaError: out of memory", flush=True)
            os._exit(1)

        def wait_for_ever(self):
            threading.Event().wait()

    def start(count: int, **options) -> list[Process]:
        names = [f"rank {i}" for i in range(count)]
        actors = [ray.remote(Rank).options(**{"num_cpus": 0, **options}).remote(name) for name in names]
        return [Process(name, logs / f"{name}.log", actor) for name, actor in zip(names, actors, strict=True)]

    before = set(descendants(psutil.Process()))
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    other = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    ray_init, num_starts = ray.init, 0

    def slow(**options) -> None:
        """The first Ray seems to start too slowly, as Ray says it on a busy machine."""
        nonlocal num_starts
        ray_init(**options)
        num_starts += 1
        if num_starts == 1:
            raise Exception("The current node timed out during startup.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "init", slow)
        session = ExitStack()
        session.enter_context(ray_session(ClusterConfig(), num_trainers=1, logs=logs))
    with session:
        assert num_starts == 2
        servers = [p for p in descendants(psutil.Process()) if "gcs_server" in command_line(p)]
        assert len(servers) == 1, "nothing of the first Ray is left"
        yield start
        family = descendants(psutil.Process())
        own = [p for p in family if p not in before and re.search("ray::|raylet|gcs_server", command_line(p))]
    assert own and not ray.is_initialized()
    assert [str(process) for process in own if process.is_running()] == []
    assert other.poll() is None, "a session ends its own processes and no other child of the driver"
    other.communicate()
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def ranks(start):
    """Starts processes that end with the test, whatever they wait for."""
    started: list[Process] = []

    def more(count: int, **options) -> list[Process]:
        processes = start(count, **options)
        started.extend(processes)
        return processes

    yield more
    for process in started:
        ray.kill(process.actor)


@pytest.fixture(scope="module")
def pair(start) -> list[Process]:
    """Two processes for the tests that leave them as they are."""
    processes = start(2)
    locate_all(processes, 600, "nothing")
    return processes


@pytest.fixture(scope="module")
def waiting_for_ever(start) -> Process:
    """A process for the tests in which one never answers."""
    return start(1)[0]


def wait(processes: list[Process], *methods: str, timeout_s: float = 600) -> list:
    calls = [getattr(process.actor, method).remote() for process, method in zip(processes, methods, strict=True)]
    return gather(calls, processes, "to answer", timeout_s)


def test_results_come_in_the_order_of_the_calls(pair):
    calls = [process.actor.answer.remote(i) for i, process in enumerate(pair)]
    assert gather(calls, pair, "to answer", 600) == [0, 1]


def test_many_results_cost_as_few_looks_as_one(pair, monkeypatch):
    looks, wait_for = [], ray.wait
    monkeypatch.setattr(ray, "wait", lambda *given, **more: looks.append(given) or wait_for(*given, **more))
    references = [ray.put(i) for i in range(64)]
    assert gather(references, pair * 32, "to answer", 600) == list(range(64)) and len(looks) == 2


def test_a_process_has_the_priority_of_its_driver(pair):
    for location in wait(pair, "locate", "locate"):
        assert psutil.Process(location.pid).nice() == psutil.Process().nice()


def test_ray_has_the_processes_that_it_needs_and_no_idle_ones(pair):
    wait(pair, "locate", "locate")
    driver = psutil.Process()
    lines = [command_line(process) for process in descendants(driver)]
    assert [sum(name in line for line in lines) for name in ("raylet/raylet", "gcs_server", "ray::Rank")] == [1, 1, 2]
    for name in ("log_monitor.py", "monitor.py", "dashboard/dashboard.py", "ray::IDLE"):
        assert not any(name in line for line in lines), name


def test_a_refusal_keeps_its_type_and_does_not_wait_for_the_others(pair, waiting_for_ever):
    with pytest.raises(ValueError, match="^rank 1: the disk is full$"):
        wait([waiting_for_ever, pair[1]], "wait_for_ever", "refuse")


def test_a_subclass_with_other_arguments_is_reported_too(pair):
    with pytest.raises(ValueError, match="^rank 0: 'utf-8' codec can't decode byte 0xff"):
        wait(pair[:1], "refuse_bytes")


def test_any_other_error_is_one_line_with_the_log(pair):
    with pytest.raises(RuntimeError, match=r"^rank 0: KeyError: 'lost' \(whole log: .*rank 0.log\)$"):
        wait(pair[:1], "fail")


def test_a_death_is_reported_with_the_last_error_of_its_log_and_without_rays_long_text(ranks):
    with pytest.raises(
        ProcessLost, match="^rank 1 died. Its log, .*rank 1.log, ends:\n  CudaError: out of memory\n"
    ) as e:
        wait(ranks(2), "wait_for_ever", "die")
    assert "raylet" not in str(e.value) and not e.value.silent


@pytest.mark.deep
def test_a_deadline_names_who_is_silent_and_what_it_is_doing(ranks):
    busy, stopped = processes = ranks(2)
    locate_all(processes, 600, "nothing")
    os.kill(stopped.location.pid, signal.SIGSTOP)
    try:
        # Ray keeps the worker whose task has looked at the two.
        with lasting("module"), pytest.raises(ProcessLost) as caught:
            wait(processes, "wait_for_ever", "answer", timeout_s=0.5)
    finally:
        os.kill(stopped.location.pid, signal.SIGKILL)
    first, second, third = str(caught.value).splitlines()
    assert first.startswith("the driver has waited for rank 1, rank 0 to answer for 0.5 s, since ")
    assert f"process {stopped.location.pid} is stopped (SIGSTOP)" in second and "kill -CONT" in second
    assert f"rank 0 (process {busy.location.pid} on {socket.gethostname()}): it is sleeping" in third
    assert caught.value.silent
    assert "wait_for_ever" in stacks_in(busy.log), "the stacks of the busy process are in its log"


def stacks_in(log: Path) -> str:
    """The log, once the signal handler of the other process has written the stacks."""
    end = time.monotonic() + 60
    while "Current thread" not in log.read_text() and "most recent call first" not in log.read_text():
        assert time.monotonic() < end
        time.sleep(0.01)
    return log.read_text()


def test_engines_that_no_node_can_hold_are_refused_at_once(ranks):
    config = validate(
        GrpoRunConfig,
        {
            "run": {"name": "x", "steps": 1},
            "model": {"path": "nowhere"},
            "data": {"train": "rows"},
            "rollout": {
                "prompts_per_step": 1,
                "samples_per_prompt": 2,
                "max_prompt_tokens": 8,
                "parallel": {"tensor": 4},
            }
            | {"max_response_tokens": 8, "num_engines": 2},
            "balance": {"max_tokens_per_microbatch": 16},
            "cluster": {"gpus_per_engine_rank": 1, "gpus_per_trainer": 1},
        },
    )
    with pytest.raises(ValueError, match="trainer: a rank of 1 CPU and 1 GPU"):
        RayPlacement(config)


def test_the_error_of_a_process_without_a_place_says_what_is_free(ranks):
    with pytest.raises(ProcessLost, match="started 1 of 1.*rank 0.*in 1.*needs 4 GPU"):
        locate_all(ranks(1, num_gpus=4), 1, "4 GPU")


def test_what_a_tick_raises_ends_a_wait(waiting_for_ever, monkeypatch):
    ticks = iter(range(3))

    def stop():
        if next(ticks) == 2:
            raise StopRequested

    monkeypatch.setattr(waiting, "on_tick", stop)
    with pytest.raises(StopRequested):
        wait([waiting_for_ever], "wait_for_ever")


def test_rays_handlers_do_not_stay(ranks):
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


WAITS_FOR_EVER = """
import functools, pathlib, sys, threading
from megatron_rl.cluster.session import ray_session
from megatron_rl.config.cluster import ClusterConfig
say = functools.partial(print, flush=True)
with ray_session(ClusterConfig(), num_trainers=1, logs=pathlib.Path(sys.argv[1]), on_loss=say):
    say("waits")
    threading.Event().wait()
"""


@pytest.mark.deep
def test_a_driver_that_waits_ends_with_status_1_when_its_ray_is_lost(tmp_path):
    """Nothing of its Ray is left either."""
    driver = subprocess.Popen([sys.executable, "-c", WAITS_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout.readline() == "waits\n"
    own = descendants(psutil.Process(driver.pid))
    [server] = [process for process in own if process.name() == "gcs_server"]
    server.kill()
    said, _ = driver.communicate(timeout=deadline(60))
    assert said == f"Ray was lost: its process gcs_server ({server.pid}) died\n"
    assert driver.returncode == 1
    assert [str(process) for process in own if process.is_running()] == []


@pytest.mark.parametrize(("address", "why"), [("127.0.0.1:1", "Connection refused"), ("nonsense", "invalid literal")])
def test_a_dead_address_is_reported_at_once(tmp_path, address, why):
    with pytest.raises(ValueError, match=f"cluster.ray_address {address}: there is no Ray .*{why}"):
        with ray_session(ClusterConfig(ray_address=address), num_trainers=1, logs=tmp_path):
            pass


def test_the_cause_in_a_vendors_log_is_not_its_announcement(tmp_path):
    log = tmp_path / "engine_0.log"
    log.write_text(
        "(EngineCore pid=7) ERROR core.py:1: ValueError: max_model_len (999) is too large\n"
        "Traceback (most recent call last):\n  File x\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert last_error(log) == "ValueError: max_model_len (999) is too large"
    log.write_text("one\ntwo\n\nthree\n")
    assert last_error(log, num_lines=2) == "two\nthree"
    assert last_error(tmp_path / "none.log") == ""
