"""The descendants of a process, from the parents that the kernel names."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress

import psutil


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """The children of a process, their children, and so on; none if it has ended. Parents come before their children.

    `psutil.Process.children` leaves out a child that seems older than its parent. It computes ages from the time of the
    machine's start, which changes whenever the machine's clock is set.
    """
    children = defaultdict(list)
    for other in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            children[other.ppid()].append(other)
    found: list[psutil.Process] = []
    parents = [process.pid]
    while parents:
        born = children.pop(parents.pop(0), [])
        found += born
        parents += [child.pid for child in born]
    return found


def status_of(process: psutil.Process) -> str:
    """One of psutil's STATUS_...; STATUS_DEAD if it has ended."""
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD


def command_line(process: psutil.Process) -> str:
    """Its command line; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
