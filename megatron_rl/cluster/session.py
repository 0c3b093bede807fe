"""Ray, started and stopped: a local one of our own, or a running cluster that we join."""

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

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 256 * 2**20
"""Of a local Ray: tokens of two steps at laptop scale. A cluster's Ray has its own setting."""

END_S = 10.0
"""The longest that killed processes may take to vanish."""
CONNECT_S = 10.0
"""The longest that connecting to a running Ray's port may take."""


@contextmanager
def ray_session(
    cluster: ClusterConfig, num_trainers: int, logs: Path, on_tick: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Ray for the body's time. A Ray that we started is stopped, one that we joined is left running.

    Ray replaces the process's handlers of SIGTERM; they are put back once it has started.

    Args:
        num_trainers: a local Ray offers the CPUs that they ask for; these are accounting, no pinning.
        logs: the vendors' output goes there.
        on_tick: called before Ray starts and several times a second while the driver waits; what it raises ends the
            wait. From its first call on, a signal's handler must not raise itself: it may interrupt Ray anywhere.

    Raises:
        ValueError: there is no Ray at `cluster.ray_address`.
    """
    logs.mkdir(parents=True, exist_ok=True)
    environment = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        # The processes import what the driver can: a reward function's module in its working folder.
        "PYTHONPATH": os.pathsep.join(path for path in [os.getcwd(), os.environ.get("PYTHONPATH")] if path),
    }
    local: dict[str, Any] = {}
    if cluster.ray_address is None:
        num_cpus = ceil(num_trainers * cluster.cpus_per_trainer)
        local = {"num_cpus": num_cpus, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    else:
        _check_address(cluster.ray_address)
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Ray explains a death on the terminal at length, whatever log_to_driver says; `waiting.told` says what is known.
    ray_worker.print_to_stdstream = _to_log
    waiting.on_tick = on_tick
    on_tick()
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
    except SystemExit as error:  # Ray's answer to SIGTERM while it starts
        raise StopRequested from error
    for number, handler in handlers.items():
        signal.signal(number, handler)
    try:
        yield
    finally:
        family = psutil.Process().children(recursive=True)
        ray.shutdown()
        if cluster.ray_address is None:
            _end(family)


def _end(processes: Sequence[psutil.Process]) -> None:
    """Two agents of Ray would stay for a minute, and vLLM's processes until they notice."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=END_S)


def _to_log(data: dict[str, Any], ignore_prefix: bool) -> None:
    log.info("Ray: %s", " ".join(data["lines"]))


def _check_address(address: str) -> None:
    """Ray itself would try for minutes."""
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
            f"cluster.ray_address {found}: there is no Ray ({error}); start it, or correct the address (host:port)"
        ) from error
