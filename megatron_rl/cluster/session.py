"""Starts and stops a local Ray, or joins a Ray cluster that is already running.

Ray listens on all addresses of a machine, and every client that it admits can run any code. So it admits only clients
with its token: a local Ray gets one for this session unless the user has one, and a cluster gets the user's token.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import worker as ray_worker
from ray._private.authentication import authentication_token_setup as ray_token
from ray._private.node import Node
from ray._private.utils import read_ray_address
from ray._raylet import AuthenticationTokenLoader, GcsClient
from ray.core.generated.gcs_pb2 import GcsNodeInfo
from ray.exceptions import AuthenticationError, RayError

from megatron_rl.cluster import waiting
from megatron_rl.cluster.network import find_interface, network_environment
from megatron_rl.config.cluster import ClusterConfig
from megatron_rl.ports import StopRequested
from megatron_rl.processes import descendants, status_of

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 256 * 2**20
"""The size of a local Ray's object store, which holds the tokens of two steps of a small run. A Ray cluster has its own
setting."""

END_S = 10.0
"""The time limit for killed processes to disappear, and for a thread to leave Ray."""
CONNECT_S = 10.0
"""The time limit for connecting to the port of a running Ray."""


SLOW = "timed out during startup"
"""Part of Ray's error if a node does not start within 30 s, which no setting changes: a busy machine takes longer."""
ATTEMPTS = 3
"""How often a Ray that was too slow is started."""

UNNEEDED = ("start_monitor", "start_log_monitor", "start_api_server")
"""The methods of Ray's node that start processes which a local run does not need: the autoscaler, the log monitor, and
the dashboard's server, which `ray.init` waits for. Each costs a second of CPU time."""

VITAL = ("gcs_server", "raylet")
"""The names of the processes of a local Ray without which no call is answered."""
STOPPED_S = 20.0
"""How long one of them may be stopped."""
WATCH_S = 0.5


@contextmanager
def ray_session(
    cluster: ClusterConfig,
    num_trainers: int,
    logs: Path,
    on_tick: Callable[[], None] = lambda: None,
    on_loss: Callable[[str], None] | None = None,
    *,
    num_threads: int = 1,
) -> Iterator[None]:
    """Run the body with Ray. A Ray that this function started is stopped at the end; one that it joined keeps running.

    Ray replaces the process's signal handlers; they are restored as soon as Ray has started.

    Args:
        num_trainers: the number of trainer ranks. A local Ray offers the CPUs that they ask for; it only counts these
            and pins nothing.
        logs: the folder for logs; it is created.
        on_tick: called before Ray starts and several times a second while the driver waits. If it raises, the wait
            ends. From its first call on, a signal handler must not raise: it might interrupt Ray anywhere.
        on_loss: called in another thread, with the cause, if the Ray that this function started is lost. Afterwards all
            its processes and the driver are ended, because the driver may be inside a call of Ray that never returns.
        num_threads: the number of compute threads of each process, unless the shell has OMP_NUM_THREADS or
            `cluster.environment` has.

    Raises:
        ValueError: there is no Ray at `cluster.ray_address`, it does not admit this process, or a local one does not
            start, because the machine is too busy.
        StopRequested: SIGTERM arrived while Ray started.
    """
    logs.mkdir(parents=True, exist_ok=True)
    python_path = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    environment = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(num_threads)),
        "TOKENIZERS_PARALLELISM": "false",
        # The processes must import what the driver can import, such as a reward function in the working folder.
        # They have another working folder, so all folders are absolute.
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, [".", *python_path])),
    } | network_environment(cluster, os.environ)
    log.info("variables of all processes: %s", " ".join(f"{name}={value}" for name, value in environment.items()))
    local: dict[str, Any] = {}
    if cluster.ray_address is None:
        num_cpus = ceil(num_trainers * cluster.cpus_per_trainer)
        local = {"num_cpus": num_cpus, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
        # By Ray's own setting, 15, any other busy process of the machine would take 97 % of a core from a trainer.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # Ray would start an idle worker for every CPU, which cannot become one of ours, because ours have variables.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        if not AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # Ray would write one that all users can read
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
    start = partial(
        ray.init,
        address=cluster.ray_address or "local",
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
        runtime_env={"env_vars": environment},
        **local,
    )
    try:
        _start(start, lambda: [process for process in descendants(driver) if process not in others])
    except SystemExit as error:  # Ray's answer to SIGTERM while it starts; the handler before Ray's has not seen it
        handler = handlers[signal.SIGTERM]
        if callable(handler):
            handler(signal.SIGTERM, None)
        raise StopRequested from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    own = [process for process in descendants(driver) if process not in others]
    has_ended = threading.Event()
    if on_loss is not None and cluster.ray_address is None:
        vital = {process: process.name() for process in own if process.name() in VITAL}
        threading.Thread(target=_watch, args=(vital, own, has_ended, on_loss), daemon=True).start()
    try:
        log.info("the driver talks to other nodes through %s", find_interface(environment))
        yield
    finally:
        has_ended.set()
        for process in own:
            with suppress(psutil.NoSuchProcess):
                process.resume()  # Ray's shutdown would wait for ever for a process that somebody has stopped
        family = [member for process in own for member in [process, *descendants(process)]]
        session = ray_worker._global_node.get_session_dir_path()
        waiting.leave(END_S)
        ray.shutdown()
        _kill(family)
        if cluster.ray_address is None:
            _kill(_users_of(session))  # on a busy machine Ray may have started an agent since `family` was read


def _start(start: Callable[[], object], started: Callable[[], Sequence[psutil.Process]]) -> None:
    """
    Args:
        started: the processes that attempts have left.

    Raises:
        ValueError: Ray has been too slow in all attempts.
    """
    for attempt in range(ATTEMPTS):
        try:
            with _without_unneeded():
                start()
            return
        except Exception as error:
            if SLOW not in str(error):
                raise
            log.warning("Ray has not started in its time, attempt %d of %d: %s", attempt + 1, ATTEMPTS, error)
            ray.shutdown()
            _kill(started())
    raise ValueError(
        f"Ray has not started on this machine in {ATTEMPTS} attempts of half a minute, because other programs keep the "
        "machine busy; end them, and start the run again"
    )


@contextmanager
def _without_unneeded() -> Iterator[None]:
    """A local Ray that starts in the body has no process of `UNNEEDED`. Joining a cluster starts none of them."""
    starts = {name: getattr(Node, name) for name in UNNEEDED if hasattr(Node, name)}
    try:
        for name in starts:
            setattr(Node, name, lambda self, **options: None)
        yield
    finally:
        for name, value in starts.items():
            setattr(Node, name, value)


def _watch(
    vital: Mapping[psutil.Process, str],
    own: Sequence[psutil.Process],
    has_ended: threading.Event,
    on_loss: Callable[[str], None],
) -> None:
    """End the driver if one of the vital processes dies, or is stopped for too long."""
    stopped_since: dict[psutil.Process, float] = {}
    while not has_ended.wait(WATCH_S):
        for process, name in vital.items():
            status = status_of(process)
            if status == psutil.STATUS_STOPPED:
                seconds = time.monotonic() - stopped_since.setdefault(process, time.monotonic())
            else:
                stopped_since.pop(process, None)
                seconds = 0.0
            is_dead = status in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE)
            if is_dead or seconds > STOPPED_S:
                how = "died" if is_dead else f"has been stopped (SIGSTOP) for {seconds:.0f} s"
                family = [member for one in own for member in [one, *descendants(one)]]
                on_loss(f"Ray was lost: its process {name} ({process.pid}) {how}")
                _kill([*family, *own])
                os._exit(1)


def _users_of(folder: str) -> list[psutil.Process]:
    """The processes with an open file in a folder, such as their log."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError):  # it has ended, or belongs to another user
            links = Path(f"/proc/{process.pid}/fd").iterdir()
            if any(os.readlink(link).startswith(f"{folder}/") for link in links):
                found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def _kill(processes: Sequence[psutil.Process]) -> None:
    """Kill what is left of the Ray that this process started. Otherwise two of its agents would stay for a minute, and
    vLLM's processes until they notice that their owner is gone."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=END_S)


def _to_log(data: dict[str, Any], ignore_prefix: bool) -> None:
    log.info("Ray: %s", " ".join(data["lines"]))


def count_gpus_of_ray(address: str) -> float:
    """The GPUs of all nodes of a running Ray.

    Args:
        address: as in `cluster.ray_address`.

    Raises:
        ValueError: see `ray_session`.
    """
    nodes = _check_address(address).get_all_node_info(timeout=CONNECT_S).values()
    return float(sum(node.resources_total.get("GPU", 0.0) for node in nodes if node.state == GcsNodeInfo.ALIVE))


def _check_address(address: str) -> GcsClient:
    """Check that a Ray listens at the address that admits this process. Ray itself would try to connect for minutes.
    Returns a client of this Ray.

    Raises:
        ValueError: there is no Ray at the address, or it wants another token.
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
    ray_token.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        return GcsClient(address=f"{host}:{port}")
    except AuthenticationError as error:
        raise ValueError(
            f"cluster.ray_address {found}: this Ray wants another token; give this process the one with which it was "
            "started, in RAY_AUTH_TOKEN, in the file RAY_AUTH_TOKEN_PATH or in ~/.ray/auth_token"
        ) from error
    except RayError as error:
        raise ValueError(f"cluster.ray_address {found}: what listens there is no Ray ({error}); correct it") from error
