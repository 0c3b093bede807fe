"""Starts and stops a local Ray, or joins a Ray cluster that is already running."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import ceil
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import worker as ray_worker
from ray._private.utils import read_ray_address

from megatron_rl.cluster import waiting
from megatron_rl.config.schema import ClusterConfig
from megatron_rl.ports import StopRequested
from megatron_rl.processes import descendants

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 256 * 2**20
"""The size of a local Ray's object store, which holds the tokens of two steps of a small run. A Ray cluster has its own
setting."""

END_S = 10.0
"""The time limit for killed processes to disappear."""
CONNECT_S = 10.0
"""The time limit for connecting to the port of a running Ray."""


@contextmanager
def ray_session(
    cluster: ClusterConfig, num_trainers: int, logs: Path, on_tick: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Run the body with Ray. A Ray that this function started is stopped at the end; one that it joined keeps running.

    Ray replaces the process's signal handlers; they are restored as soon as Ray has started.

    Args:
        num_trainers: the number of trainer ranks. A local Ray offers the CPUs that they ask for; it only counts these
            and pins nothing.
        logs: the folder for logs; it is created.
        on_tick: called before Ray starts and several times a second while the driver waits. If it raises, the wait
            ends. From its first call on, a signal handler must not raise: it might interrupt Ray anywhere.

    Raises:
        ValueError: there is no Ray at `cluster.ray_address`.
        StopRequested: SIGTERM arrived while Ray started.
    """
    logs.mkdir(parents=True, exist_ok=True)
    environment = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        # The processes must import what the driver can import, such as a reward function in the working folder.
        "PYTHONPATH": os.pathsep.join(path for path in [os.getcwd(), os.environ.get("PYTHONPATH")] if path),
    }
    local: dict[str, Any] = {}
    if cluster.ray_address is None:
        num_cpus = ceil(num_trainers * cluster.cpus_per_trainer)
        local = {"num_cpus": num_cpus, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    else:
        _check_address(cluster.ray_address)
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Despite log_to_driver=False, Ray prints long texts about a death to the terminal. `waiting.explain` replaces them.
    ray_worker.print_to_stdstream = _to_log
    waiting.on_tick = on_tick
    on_tick()
    driver = psutil.Process()
    others = set(descendants(driver))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(
            address=cluster.ray_address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            runtime_env={"env_vars": environment},
            **local,
        )
    except SystemExit as error:  # Ray's answer to SIGTERM while it starts; the handler before Ray's has not seen it
        handler = handlers[signal.SIGTERM]
        if callable(handler):
            handler(signal.SIGTERM, None)
        raise StopRequested from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    own = [process for process in descendants(driver) if process not in others]
    try:
        yield
    finally:
        family = [member for process in own for member in [process, *descendants(process)]]
        ray.shutdown()
        _kill(family)


def _kill(processes: Sequence[psutil.Process]) -> None:
    """Kill what is left of the Ray that this process started. Otherwise two of its agents would stay for a minute, and
    vLLM's processes until they notice that their owner is gone."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=END_S)


def _to_log(data: dict[str, Any], ignore_prefix: bool) -> None:
    log.info("Ray: %s", " ".join(data["lines"]))


def _check_address(address: str) -> None:
    """Check that something listens at the address. Ray itself would try to connect for minutes.

    Raises:
        ValueError: there is no Ray at the address.
    """
    found = address if address != "auto" else os.environ.get("RAY_ADDRESS") or read_ray_address()
    if not found:
        raise ValueError(
            "cluster.ray_address is auto, but no Ray runs on this machine and RAY_ADDRESS is not set; start one with "
            "`ray start --head`, or set cluster.ray_address to null"
        )
    host, _, port = found.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cluster.ray_address {found}: there is no Ray ({error}); start Ray, or correct the address (host:port)"
        ) from error
