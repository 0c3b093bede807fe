"""Processes that start with their imports done: forked from a server that has imported torch, Megatron-Core and vLLM.

A fresh process needs seven CPU seconds to import vLLM and four for Megatron-Core, and the tests start a hundred.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess

from megatron_rl.rollout.engine import set_cpu_environment

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
        os.environ.clear()
        os.environ.update(self._environment)
        # What an engine core starts in its turn is forked from it: it has the imports, and no thread yet.
        for name in STARTERS:
            importlib.import_module(name).get_mp_context = lambda: multiprocessing.get_context("fork")
        super().run()


class WarmContext(ForkServerContext):
    Process = WarmProcess


def context() -> WarmContext:
    """A `multiprocessing` context; its server starts with the first call and ends with this process."""
    warm, before = WarmContext(), dict(os.environ)
    warm.set_forkserver_preload(IMPORTS)
    set_cpu_environment()  # vLLM reads it when it is imported
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return warm


def warm_engines() -> None:
    """Engines that this process starts from now on come from the server."""
    warm = context()
    for name in STARTERS:
        importlib.import_module(name).get_mp_context = lambda: warm
