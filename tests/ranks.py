"""Rank processes that live as long as the tests' process: they do one scenario after the other.

A scenario has a store and process groups of its own. After it a rank proves that it is as it was: groups, threads,
module globals, environment, working folder, signal handlers and limits. What a scenario leaves behind fails it
by name. A rank that raises, dies or is late ends all ranks, and the next scenario gets other ones. Scenarios that are
meant to die, or that change their process for good, run in fresh processes (`warm.together`).
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing.connection
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import leaks
import psutil
import warm

from megatron_rl.processes import descendants

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGXFSZ, signal.SIGCHLD)
LIMITS = (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_AS)


@dataclass(frozen=True)
class Rank:
    process: warm.WarmProcess
    pipe: Connection


_living: list[Rank] = []


def together(function: Callable[..., Any], calls: Sequence[tuple], limit_s: float) -> list[Any]:
    """What each call returns, each in a rank process, all at once.

    Raises:
        AssertionError: a call raised, with its traceback; or its process died; or it left something behind.
        TimeoutError: after `limit_s` seconds some are not done.
    """
    while len(_living) < len(calls):
        _living.append(_start())
    waiting, results = {}, {}
    try:
        for number, arguments in enumerate(calls):
            _living[number].pipe.send((function, arguments, dict(os.environ)))
            waiting[_living[number].pipe] = number
        end = time.monotonic() + limit_s
        while waiting:
            ready = multiprocessing.connection.wait(waiting, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"ranks {[*waiting.values()]} of {calls[0]} are not done after {limit_s:.0f} s")
            for pipe in ready:
                number = waiting.pop(pipe)
                try:
                    succeeded, results[number] = pipe.recv()
                except (EOFError, ConnectionError):
                    succeeded, results[number] = False, "it died"
                assert succeeded, f"process {number}: {results[number]}"
        return [results[number] for number in range(len(calls))]
    except BaseException:
        end_all()
        raise


def end_all() -> None:
    while _living:
        rank = _living.pop()
        with suppress(psutil.NoSuchProcess):
            for process in descendants(psutil.Process(rank.process.pid)):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        rank.process.kill()
        rank.process.join()
        rank.pipe.close()


def _start() -> Rank:
    context = warm.context()
    ours, theirs = context.Pipe()
    with leaks.lasting():
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
    theirs.close()
    return Rank(process, ours)


def _serve(pipe: Connection) -> None:
    """Do what the pipe asks until it closes."""
    import numpy as np
    import torch

    _die_with_parent()
    torch.set_num_threads(1)
    generators = torch.get_rng_state(), np.random.get_state(), random.getstate()
    before = _state()
    while True:
        try:
            function, arguments, environment = pipe.recv()
        except EOFError:
            return
        os.environ.clear()
        os.environ.update(environment)
        torch.set_rng_state(generators[0])
        np.random.set_state(generators[1])
        random.setstate(generators[2])
        try:
            answer = True, function(*arguments)
            reduction.ForkingPickler.dumps(answer)
        except BaseException:  # reported to the test, which fails with it
            answer = False, traceback.format_exc()
        if answer[0]:
            gc.collect()
            after = _state()
            left = [f"{name}: {value} -> {after[name]}" for name, value in before.items() if after[name] != value]
            if left:
                answer = False, f"{arguments[:1]} left its process changed: {'; '.join(left)}"
        pipe.send(answer)


def _die_with_parent() -> None:
    """The parent is the server, which ends with the tests' process; a rank may then be in a collective."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _state() -> dict[str, Any]:
    """What a scenario may not leave changed in this process."""
    import torch
    import torch.distributed as dist

    # A module that is imported later is not in the state before.
    numbers = {
        f"{name}.{key}": value
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == "megatron_rl" and module is not None
        for key, value in vars(module).items()
        if key.isupper() and isinstance(value, int | float | str | bool)
    }
    return numbers | {
        "process group": dist.is_initialized(),
        "groups that nobody needs any more": _groups(),
        "threads": sorted(thread.name for thread in threading.enumerate() if not thread.daemon),
        "folder": os.getcwd(),
        "signals": [signal.getsignal(number) for number in SIGNALS],
        "limits": [resource.getrlimit(limit) for limit in LIMITS],
        "children": _children(),
        "dtype": torch.get_default_dtype(),
        "device": str(torch.get_default_device()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "torch threads": torch.get_num_threads(),
    }


def _groups() -> int:
    """How many of gloo's groups still have their threads, but for the two devices that a process keeps: that of torch
    and that of the bridge (bridge/join.py)."""
    tasks = Path("/proc/self/task")
    names = [(tasks / name / "comm").read_text().strip() for name in os.listdir(tasks)]
    return max(0, names.count("gloo_tcp_loop") - 2)


def _children() -> int:
    return len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
