"""A run's output and terminal are only a view."""

from __future__ import annotations

import io
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import cover
import pytest
from rich.console import Console

from megatron_rl.commands.interrupt import Interrupt
from megatron_rl.commands.launch import entry, full
from megatron_rl.commands.screen import Output, waiting
from megatron_rl.processes import piped

WRITES = """
import logging, os, sys
logging.basicConfig(filename=sys.argv[1])
from megatron_rl.commands.screen import screen
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


SHOWS = """
import logging, os, sys
logging.basicConfig(filename=sys.argv[1])
from megatron_rl.observe.live import LiveView
from megatron_rl.commands.screen import never_wait, screen
console = screen()
never_wait()
view = LiveView(console, 100)
for step in range(1 if sys.argv[2] == "hung up" else 100):
    view.update({"step": step, "loss": 1.0, "time/total_s": 1.0})
    view.tell("a line " * 100)
    print("what others print " * 100)
    print("and where errors are printed " * 100, file=sys.stderr)
if sys.argv[2] == "hung up":
    os.read(int(sys.argv[3]), 1)
    view.tell("to nobody")
    print("to nobody")
view.stop()
console.print("the end")
print("the end", file=sys.stderr)
"""


@pytest.mark.deep
@pytest.mark.parametrize(
    "reader", cover.essential(["stopped", "away", "stopped pipe", "hung up"], "stopped", "hung up")
)
def test_who_shows_a_run_goes_on_when_nobody_reads_the_terminal(tmp_path, reader):
    log = tmp_path / "log.txt"
    ours, its = os.pipe() if "pipe" in reader else os.openpty()
    told, tell = os.pipe()
    if reader == "stopped":
        os.write(ours, b"\x13")  # Ctrl-S
    writer = subprocess.Popen(
        [sys.executable, "-c", SHOWS, log, reader, str(told)],
        stdin=its if "pipe" not in reader else None,
        stdout=its,
        stderr=its,
        pass_fds=[told],
        env=os.environ | {"TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(its)
    if reader == "hung up":
        os.read(ours, 1)  # the live view runs
        os.close(ours)
        os.write(tell, b"1")
    assert writer.wait(60) == 0
    words = "the output cannot be written any more" if reader == "hung up" else "nobody reads the output"
    assert log.read_text().count(words) == 2, "once for each stream"
    if reader != "hung up":
        os.close(ours)
    os.close(told)
    os.close(tell)


def test_a_reader_who_comes_back_is_shown_what_follows(caplog):
    reading, writing = os.pipe()
    with open(writing, "w") as stream:
        output = Output()
        assert output.never_wait(stream)
        for _ in range(3):
            output.write("x" * (1 << 17))
        taken = os.read(reading, 1 << 18)
        output.write("é\ud800")
        assert os.read(reading, 99).decode() == "é\\ud800" and set(taken) == {ord("x")} and len(taken) < 1 << 17
    os.close(reading)
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("nobody reads the output")


HUNG_UP = "the terminal has hung up (SIGHUP): the run goes on without it"


def test_a_hang_up_is_told_from_the_start_and_ends_nothing(caplog):
    caplog.set_level(logging.WARNING)
    before = signal.getsignal(signal.SIGHUP)
    interrupt = Interrupt()
    with interrupt.listening():
        os.kill(os.getpid(), signal.SIGHUP)
        assert caplog.messages == [HUNG_UP]
        with interrupt.training():
            os.kill(os.getpid(), signal.SIGHUP)
            assert caplog.messages == [HUNG_UP] * 2
        assert not interrupt()
    assert signal.getsignal(signal.SIGHUP) == before


STARTS = """
import os, signal, subprocess, sys
from pathlib import Path
from megatron_rl.commands.interrupt import Interrupt
from megatron_rl.commands.launch import log_to_file
from megatron_rl.commands.screen import console
with Interrupt().listening():
    os.kill(os.getpid(), signal.SIGHUP)
    console.print("to nobody")
    print("to nobody")
    log_to_file(Path(sys.argv[1]))
    show = "grep SigIgn /proc/self/status"
    ignored = subprocess.run(show, shell=True, capture_output=True, text=True, preexec_fn=lambda: None).stdout
    assert int(ignored.split()[1], 16) & 1, "Ray's processes are started in this way, and a hang-up ends none of them"
    subprocess.run("echo from a program; echo a fault >&2", shell=True, check=True)
    assert os.fstat(1).st_rdev == os.stat(os.devnull).st_rdev
"""


def test_streams_that_are_closed_and_a_hang_up_before_the_log_is_open_are_told_in_the_log(tmp_path):
    command = shlex.join([sys.executable, "-c", STARTS, str(tmp_path)])
    done = subprocess.run(f"exec {command} <&- >&-", shell=True, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "a fault\n")
    told = (tmp_path / "driver.log").read_text()
    assert "stdin was closed when the run began: it goes on without it" in told and "stdout was closed" in told
    assert told.count(HUNG_UP) == 1 and "from a program" not in told


def test_what_the_output_cannot_show_is_escaped():
    shows = "from megatron_rl.commands.screen import screen; screen().print(chr(0xD800), chr(0xE9))"
    for encoding, expected in (("utf-8", "\\ud800 \u00e9\n"), ("ascii", "\\ud800 \\xe9\n")):
        done = subprocess.run(
            [sys.executable, "-c", shows], capture_output=True, env=os.environ | {"PYTHONIOENCODING": encoding}
        )
        assert done.stdout.decode(encoding) == expected, done.stderr


@pytest.mark.parametrize("command", [["config", "--markdown"], [], ["algorithms"]])
def test_a_command_whose_output_is_read_in_part_ends_without_a_word(command):
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": str(root)}
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl", *command],
        stdout=writing,
        stderr=subprocess.PIPE,
        cwd=root,
        env=environment,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_ctrl_c_before_a_command_listens_ends_it_without_a_traceback(tmp_path):
    (tmp_path / "slow_import.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    command = "import sys\nfrom megatron_rl.processes import piped\nsys.exit(piped(lambda: __import__('slow_import')))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])}
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "stopped by Ctrl-C\n")


def test_a_full_disk_is_named(tmp_path):
    assert full([Path("/proc"), tmp_path, tmp_path / "none"]) == [Path("/proc")], "/proc has no room"


def test_another_broken_pipe_is_an_error():
    def command() -> int:
        raise BrokenPipeError("the server has gone")

    with pytest.raises(BrokenPipeError, match="the server has gone"):
        piped(command)


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


def test_the_command_that_continues_works_from_where_the_user_stands(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert entry() == "megatron-rl"
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.chdir(tmp_path)
    python, *rest = shlex.split(entry())
    assert Path(python).is_file() and rest == ["-m", "megatron_rl"]
