"""A run's output and terminal are only a view."""

from __future__ import annotations

import io
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.recipes.launch import Interrupt, command_of
from megatron_rl.recipes.screen import waiting

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


def test_off_a_terminal_each_thing_that_is_waited_for_has_a_line():
    out = io.StringIO()
    with waiting(Console(file=out, width=40), "Ray starts") as tell:
        tell("the engines start vLLM [logs/engine_0.log], which takes long")
    assert [line[8:] for line in out.getvalue().splitlines()] == [
        " Ray starts",
        " the engines start vLLM [logs/engine_0.log], which takes long",
        " started",
    ]
    assert all(re.fullmatch(r" *\d+\.\d s ", line[:8]) for line in out.getvalue().splitlines())


@pytest.mark.parametrize(
    "typed, expected", [("megatron-rl grpo", "megatron-rl grpo"), ("/x/grpo.py", "recipes/grpo.py")]
)
def test_the_command_that_continues_works_from_where_the_user_stands(monkeypatch, tmp_path, typed, expected):
    monkeypatch.setattr(sys, "argv", [typed])
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert command_of("recipes/grpo.py").endswith(expected)
    monkeypatch.chdir(tmp_path)
    python, *rest = shlex.split(command_of("recipes/grpo.py"))
    if rest[-1].endswith(".py"):
        assert Path(rest[-1]).is_file() and shutil.which(python)
