"""The descendants of a process, whatever happens to them or to the clock meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

from megatron_rl.processes import command_line, descendants

FAMILY = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "import sys; print(0, flush=True); sys.stdin.read()"])
"""
"""A process and its child, which end when their standard input is closed."""


def test_descendants_are_found_while_the_clock_is_set(monkeypatch):
    """Each reading of the time of the machine's start is a second before the last one, as while a clock is corrected.
    The ages that follow from it make each child older than its parent."""
    started = psutil.boot_time()
    times = iter(range(10_000))
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: started - next(times))
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == b"0\n"
        found = descendants(psutil.Process())
        family = [process for process in found if process.pid == parent.pid or process.ppid() == parent.pid]
        assert [process.ppid() == parent.pid for process in family] == [False, True]
        assert descendants(psutil.Process(parent.pid)) == family[1:]
        assert "stdin.read()" in command_line(family[1])
    assert descendants(family[0]) == []


def test_a_process_that_ended_has_no_command_line():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = psutil.Process(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.status() == psutil.STATUS_ZOMBIE and command_line(process) == ""
    child.wait()
    assert command_line(process) == ""
