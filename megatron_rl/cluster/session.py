"""Ray, started and stopped: a local one of our own, or a running cluster that we join.

`gather` is how the driver waits: the first failure of any process ends the wait with its cause, because the
others may be inside a collective that will never complete.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from megatron_rl.config.schema import ClusterConfig

OBJECT_STORE_BYTES = 256 * 2**20
"""Of a local Ray: tokens of two steps at laptop scale. A cluster's Ray has its own setting."""


@contextmanager
def ray_session(cluster: ClusterConfig, num_trainers: int, logs: Path) -> Iterator[None]:
    """Ray for the body's time. A Ray that we started is stopped, one that we joined is left running.

    Args:
        num_trainers: a local Ray offers the CPUs that they ask for; these are accounting, no pinning.
        logs: the vendors' output goes there.
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
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray.init(
        address=cluster.ray_address or "local",
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
        runtime_env={"env_vars": environment},
        **local,
    )
    try:
        yield
    finally:
        ray.shutdown()


def redirect_output(path: Path) -> None:
    """Send this process's stdout and stderr, and those of its children, to a file: file descriptors, not
    sys.stdout, because vendors print from C++ and from subprocesses."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def gather(references: Sequence[ray.ObjectRef], names: Sequence[str]) -> list[Any]:
    """The results in order.

    Raises:
        ValueError, OSError: what a process raised, with its name; any other error comes with its traceback.
        RuntimeError: a process died; names it.
    """
    results: dict[ray.ObjectRef, Any] = {}
    waiting = list(references)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1)
        for reference in done:
            try:
                results[reference] = ray.get(reference)
            except RayError as error:
                raise told(error, names[references.index(reference)]) from error
    return [results[reference] for reference in references]


def settle(references: Sequence[ray.ObjectRef], timeout_s: float) -> list[Any | RayError]:
    """Wait for all, whatever becomes of them: results in order, or the errors in their places."""
    ray.wait(list(references), num_returns=len(references), timeout=timeout_s)
    outcomes: list[Any | RayError] = []
    for reference in references:
        try:
            outcomes.append(ray.get(reference, timeout=0))
        except RayError as error:
            outcomes.append(error)
    return outcomes


def told(error: RayError, name: str) -> Exception:
    """For people. ValueError and OSError were written for them; anything else keeps its traceback."""
    if isinstance(error, ActorDiedError):
        last = str(error).strip().splitlines()[-1]
        return RuntimeError(f"{name} died: {last}; its output is in the run's logs folder")
    if isinstance(error, RayTaskError):
        for kind in (ValueError, OSError):
            if isinstance(error.cause, kind):  # their subclasses take other arguments than a text
                return kind(f"{name}: {error.cause}")
    return error
