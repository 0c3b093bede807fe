"""Processes that start with their imports done: forked from a server that has imported torch, Megatron-Core and vLLM.

A fresh process needs seven CPU seconds to import vLLM and four for Megatron-Core, and the tests start a hundred.
"""

from __future__ import annotations

import importlib
import multiprocessing.connection
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import leaks

from megatron_rl.rollout.start import look_at_classes_here, set_cpu_environment

IMPORTS = [
    "megatron_rl.actor.actor",
    "megatron_rl.bridge.sender",
    "megatron_rl.bridge.receiver",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "transformers",
]
STARTERS = ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor")
"""vLLM's modules that start processes; each has `get_mp_context` of its own."""


class WarmProcess(ForkServerProcess):
    """It has the environment of the process that starts it; plain forks have the server's."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        assert "frozen" in sys.modules, f"{IMPORTS} were not found by the server, and it leaves out what is not found"
        os.environ.clear()
        os.environ.update(self._environment)
        # What an engine core starts in its turn is forked from it: it has the imports, and no thread yet.
        for name in STARTERS:
            importlib.import_module(name).get_mp_context = lambda: multiprocessing.get_context("fork")
        look_at_classes_here()
        super().run()


class WarmContext(ForkServerContext):
    Process = WarmProcess


def context() -> WarmContext:
    """A `multiprocessing` context; its server starts with the first call and ends with this process."""
    warm, before = WarmContext(), dict(os.environ)
    if server_pid() is None:
        warm.set_forkserver_preload([*IMPORTS, "frozen"])
        with leaks.lasting():
            set_cpu_environment()  # vLLM reads it when it is imported
            # Python before 3.11.10 does not give its own search path to the server, and leaves out what is not found.
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
            try:
                forkserver.ensure_running()
            finally:
                os.environ.clear()
                os.environ.update(before)
    return warm


def server_pid() -> int | None:
    return forkserver._forkserver._forkserver_pid


def warm_engines() -> None:
    """Engines that this process starts from now on come from the server."""
    warm = context()
    for name in STARTERS:
        importlib.import_module(name).get_mp_context = lambda: warm


def together(function: Callable[..., Any], calls: Sequence[tuple], limit_s: float) -> list[Any]:
    """What each call returns, each in a process of its own, all at once.

    Raises:
        AssertionError: a call raised, or its process died; with its traceback. The others are ended.
        TimeoutError: after `limit_s` seconds some are not done.
    """
    warm, processes, waiting, results = context(), [], {}, {}
    try:
        for number, arguments in enumerate(calls):
            ours, theirs = warm.Pipe()
            processes.append(warm.Process(target=_answer, args=(theirs, function, arguments)))
            processes[-1].start()
            theirs.close()
            waiting[ours] = number
        end = time.monotonic() + limit_s
        while waiting:
            ready = multiprocessing.connection.wait(waiting, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"processes {[*waiting.values()]} of {function} are not done after {limit_s:.0f} s")
            for pipe in ready:
                number = waiting.pop(pipe)
                try:
                    succeeded, results[number] = pipe.recv()
                except EOFError:
                    succeeded, results[number] = False, "it died"
                assert succeeded, f"process {number}: {results[number]}"
        return [results[number] for number in range(len(calls))]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answer(pipe: Connection, function: Callable[..., Any], arguments: tuple) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send((True, function(*arguments)))
    except Exception:  # reported to the test, which fails with it
        pipe.send((False, traceback.format_exc()))
    pipe.poll(None)  # tensors travel as shared memory, which lives as long as this process
