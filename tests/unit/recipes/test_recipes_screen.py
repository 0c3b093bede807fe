"""A run's output and terminal are only a view."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys

from megatron_rl.recipes.launch import Interrupt

WRITES = """
import logging, os, sys
logging.basicConfig(filename=sys.argv[1])
from megatron_rl.recipes.screen import screen
console = screen()
for number in range(1000):
    console.print("a line", number)
print("what others print")
console.print("the end")
"""


def test_who_prints_on_goes_on_when_nobody_reads(tmp_path):
    log = tmp_path / "log.txt"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITES, log],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert writer.stdout.readline() == "a line 0\n"
    writer.stdout.close()
    _, said = writer.communicate()
    assert writer.returncode == 0 and said == ""
    assert log.read_text().count("the output cannot be written any more ([Errno 32] Broken pipe)") == 1


def test_a_hang_up_is_told_in_training_and_ignored_before(caplog):
    caplog.set_level(logging.WARNING)
    before = signal.getsignal(signal.SIGHUP)
    interrupt = Interrupt()
    with interrupt.listening():
        os.kill(os.getpid(), signal.SIGHUP)
        assert not caplog.messages
        with interrupt.training():
            os.kill(os.getpid(), signal.SIGHUP)
            assert caplog.messages == ["the terminal has hung up (SIGHUP): the run goes on without it"]
        assert not interrupt()
    assert signal.getsignal(signal.SIGHUP) == before
