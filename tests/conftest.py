"""No test asserts speed: a busy machine is no fault of the code."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import cover
from hypothesis import settings

from megatron_rl.config import machine
from megatron_rl.preflight.devices import has_cpu_torch

pytest_plugins = ["leaks", "costs", "due", "deadlines"]

# PyTorch's store asks for the name of each address that it connects to, and some machines have no name server that
# answers for their own addresses: a joining then takes the resolver's 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# GPUs that this torch cannot use change no configuration of a test.
if has_cpu_torch():
    machine.DEVICES = Path(os.devnull)

# A script starts jobs in the background (make test &) with Ctrl-C ignored; all that the tests start would ignore it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


# What is imported and collected lasts until the end: no search for garbage there, neither now nor later.
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()  # some libraries tell at the end what is still there


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="every combination where otherwise a pairwise cover runs")


def pytest_configure(config):
    cover.everything = config.getoption("--all")
