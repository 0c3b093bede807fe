"""What a program can do to the machine: nothing. Each attack is made with all means that this machine permits."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import platform
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import cover
import psutil
import pytest
from hostile import ATTACKS, LIMITS, ONLY_OWN_FILE_SYSTEM, SLEEPS, THREADS, program_of
from patience import deadline

from megatron_rl.verifiers.sandbox import confinement
from megatron_rl.verifiers.sandbox import process as sandbox
from megatron_rl.verifiers.sandbox.process import Ended, Isolation, Limits, SandboxError, isolation, run_script

MEANS = ("root", "user", "landlock")
COMPUTES = {name for name, (_, reason) in LIMITS.items() if "used the CPU" in reason}
"""Each of these programs takes a second of the CPU."""
TIGHT = Limits(cpu_s=1, wall_s=60, memory_bytes=1 << 29, files_bytes=1 << 20, output_bytes=100_000)


@cache
def refusal(means: str) -> str:
    """Why this machine does not permit the means; empty if it does."""
    try:
        ended = sandbox._run_script(Isolation(means, ()), "print('here')", "", Limits())
    except SandboxError as error:
        return str(error)
    return "" if ended == Ended(b"here\n", "") else str(ended)


def permitted(means: str) -> Isolation:
    if refusal(means):
        pytest.skip(refusal(means))
    return Isolation(means, ())


@pytest.fixture(autouse=True)
def temporary_files(tmp_path, monkeypatch):
    """The temporary directories of this test alone; at its end there are none."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert not list(tmp_path.glob("megatron-rl-program-*"))


def traces() -> list[str]:
    """What an attack has left on this machine. All attacks use the same names."""
    places = [Path(place) for place in ("/tmp", "/dev/shm", "/dev/mqueue", os.path.dirname(os.__file__), os.getcwd())]
    found = [str(path) for place in places for path in place.glob("*hostile_marker*")]
    found += re.findall(r".*hostile_marker.*", Path("/proc/net/unix").read_text())
    return found + re.findall(rf"^ *{0x4D525348} .*", Path("/proc/sysvipc/shm").read_text(), re.MULTILINE)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def facts(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_mode, stat.st_uid, stat.st_nlink, stat.st_size, stat.st_mtime_ns


@pytest.mark.parametrize("means", cover.essential(MEANS, "user"))
def test_no_attack_does_harm(means, tmp_path):
    """Eight at a time, from threads, as verifiers call it."""
    secret = tmp_path / "canary"
    secret.write_text("a secret")
    os.chmod(secret, 0o644)
    before = facts(secret)
    attacks = ATTACKS if means == "landlock" else ATTACKS | ONLY_OWN_FILE_SYSTEM
    found, known = permitted(means), f"{secret}\n{os.getpid()}\n"
    limits = replace(TIGHT, cpu_s=60)  # the attacks take about 1 s of the CPU
    programs = [program_of(dict(list(attacks.items())[start::8])) for start in range(8)]
    gc.collect()  # what earlier tests left open
    descriptors, processes = set(os.listdir("/proc/self/fd")), children()
    with ThreadPoolExecutor(8) as threads:
        ends = list(threads.map(lambda program: sandbox._run_script(found, program, known, limits), programs))
    assert [end.reason for end in ends] == [""] * 8
    said = [line for end in ends for line in end.output.decode().splitlines()]
    assert len(said) == len(attacks)
    assert [line for line in said if not re.fullmatch(r".* (was refused: .*|failed)", line)] == []
    assert secret.read_text() == "a secret" and facts(secret) == before
    assert os.listdir(tmp_path) == ["canary"]
    assert traces() == []
    assert children() <= processes and set(os.listdir("/proc/self/fd")) <= descriptors


@pytest.mark.deep
def test_the_attacks_are_real(tmp_path):
    """Without the sandbox they succeed: here those that do no harm to a test."""
    secret = tmp_path / "canary"
    secret.write_text("a secret")
    for name in (
        "reads a file of its user",
        "reads a file through a link",
        "reads a file through /proc",
        "climbs out of its directory",
        "forks",
        "starts a shell",
        "signals its parent",
        "has the kernel signal its parent",
        "has a socket signal its parent",
        "reads its parent's environment",
        "sees processes",
        "takes its parent's files",
        "opens a socket",
        "fills memory without an address",
        "makes sockets for datagrams",
        "makes sockets for packets",
        "names the end of a pair",
        "hands on a file",
        "locks a library",
        "waits at a page of a library",
        "takes a library out of the memory",
        "lowers the limit of its time",
    ):
        known = f"{secret}\n{os.getpid()}\n".encode()
        command = [sys.executable, "-I", "-S", "-c", program_of({name: ATTACKS[name]})]
        done = subprocess.run(command, input=known, cwd=tmp_path, capture_output=True, check=True)
        assert b"did harm" in done.stdout, (name, done)


@pytest.mark.parametrize("means", MEANS)
def test_every_denied_system_call_is_refused(means):
    """The number of each call is tried with empty arguments, as a program can with ctypes."""
    column, _ = confinement.ARCHITECTURES[platform.machine()]
    refused = {name: numbers[column] for name, numbers in confinement.DENIED.items() if numbers[column] is not None}
    cases = [(name, number, 0, errno.EPERM) for name, number in refused.items()]
    cases += [
        ("clone", confinement.CLONE[column], int(signal.SIGCHLD), errno.EPERM),
        ("clone3", confinement.CLONE3[column], 0, errno.ENOSYS),
        ("prlimit64 of process 1", confinement.PRLIMIT[column], 1, errno.EPERM),
        ("prlimit64 of its CPU time", confinement.PRLIMIT[column], 0, errno.EPERM),
        ("setrlimit of its CPU time", confinement.SETRLIMIT[column], resource.RLIMIT_CPU, errno.EPERM),
        ("futex of a shared page", confinement.FUTEX[column], 0, errno.EAGAIN),
        ("a call of the future", confinement.LAST_SYSTEM_CALL + 1, 0, errno.ENOSYS),
        ("fork of the x32 interface", 2**30 + 57, 0, errno.ENOSYS),
    ]
    program = textwrap.dedent(f"""
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        for name, number, argument, expected in {cases!r}:
            ctypes.set_errno(0)
            result = libc.syscall(number, argument, 0, 0, 0, 0, 0)
            if (result, ctypes.get_errno()) != (-1, expected):
                print(name, result, ctypes.get_errno())
    """)
    assert sandbox._run_script(permitted(means), program, "", TIGHT) == Ended(b"", "")


def test_the_numbers_of_the_system_calls():
    """Golden: from the kernel's tables (asm/unistd_64.h and asm-generic/unistd.h), the ones that matter most."""
    golden = {"execve": (59, 221), "ptrace": (101, 117), "kill": (62, 129), "socket": (41, 198), "prctl": (157, 167)}
    assert {name: confinement.DENIED[name] for name in golden} == golden
    for column in (0, 1):
        numbers = [pair[column] for pair in confinement.DENIED.values() if pair[column] is not None]
        assert len(set(numbers)) == len(numbers) and max(numbers) <= confinement.LAST_SYSTEM_CALL


@pytest.mark.parametrize("means", MEANS)
def test_nothing_passes_between_a_program_and_others(means):
    """Neither through sockets, here to an abstract name, nor through locks on what all may open."""
    program = """
        import ctypes, fcntl, socket
        name = input()
        libc, address = ctypes.CDLL(None), b"\\1\\0\\0" + name.encode()
        for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
            ends = (ctypes.c_int * 2)()
            libc.socketpair(1, kind, 0, ends)
            for forget in (False, True):
                if forget:
                    libc.connect(ends[0], bytes(2), 2)
                libc.sendto(ends[0], b"a secret", 8, 0, address, len(address))
                libc.connect(ends[0], address, len(address))
                libc.send(ends[0], b"a secret", 8, 0)
        with open("/dev/null", "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print("done")
    """
    name = f"hostile {os.getpid()}"
    found = permitted(means)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver, open("/dev/null", "r+b") as shared:
        receiver.bind("\0" + name)
        fcntl.flock(shared, fcntl.LOCK_EX)
        fcntl.lockf(shared, fcntl.LOCK_EX)
        ended = sandbox._run_script(found, textwrap.dedent(program), name, TIGHT)
        assert ended == Ended(b"done\n", "")
        with pytest.raises(BlockingIOError):
            receiver.recv(100, socket.MSG_DONTWAIT)


@pytest.mark.parametrize("means", MEANS)
def test_threads_are_limited(means):
    found = permitted(means)
    if not sandbox._counts_threads(means):
        pytest.skip(str(sandbox._missing(means)))
    ended = sandbox._run_script(found, THREADS, "", Limits(num_threads=20))
    assert not ended.reason and 10 <= int(ended.output) < 20


@pytest.mark.parametrize("name", cover.essential(LIMITS, "computes without end", *(LIMITS.keys() - COMPUTES)))
def test_what_exceeds_a_limit_ends_with_its_reason(name):
    program, reason = LIMITS[name]
    ended = run_script(program, "", TIGHT)
    assert re.search(reason, ended.reason), ended


@pytest.mark.parametrize("name", SLEEPS)
def test_the_clock_ends_what_sleeps(name):
    processes = children()
    ended = run_script(SLEEPS[name], "", Limits(wall_s=0.5))
    assert ended == Ended(b"", "the program ran for more than 0.5 s")
    assert children() <= processes


def test_a_program_has_what_it_needs():
    program = """
        import asyncio, collections, dataclasses, decimal, fractions, hashlib, heapq, json, math, random, re, sqlite3
        import subprocess, sys, tempfile, threading, time, typing, zoneinfo, multiprocessing
        sys.setrecursionlimit(10 ** 6)
        threading.stack_size(1 << 27)

        @dataclasses.dataclass
        class Point:
            x: int

        def deep(n):
            return 0 if n == 0 else 1 + deep(n - 1)

        def main():
            assert __name__ == "__main__"
            async def later():
                await asyncio.sleep(0)
                return int(input()) + int(sys.stdin.readline())
            with tempfile.TemporaryFile() as file:
                file.write(b"x")
            with open("own", "w") as file:
                print("text", file=file)
            with sqlite3.connect("own.db") as base:
                base.execute("create table t (x)")
                base.execute("insert into t values (7)")
            assert sqlite3.connect("own.db").execute("select x from t").fetchall() == [(7,)]
            print(open("own").read().strip(), asyncio.run(later()), deep(50_000), Point(3), "é", hash("x") != 0)

        thread = threading.Thread(target=main)
        thread.start()
        thread.join()
    """
    ended = run_script(textwrap.dedent(program), "20\n22\n", Limits())
    assert ended == Ended("text 42 50000 Point(x=3) é True\n".encode(), "")


@pytest.mark.parametrize("means", MEANS)
def test_a_strict_umask_does_not_hide_the_standard_library(means):
    found = permitted(means)
    before = os.umask(0o077)
    try:
        ended = sandbox._run_script(found, "import sqlite3\nopen('own', 'w').close()\nprint('here')", "", Limits())
    finally:
        os.umask(before)
    assert ended == Ended(b"here\n", "")


def test_a_directory_that_nobody_may_read_is_removed(tmp_path):
    """By a user that the modes of files hold for. Root is none, so here it loses its right to ignore them."""
    permitted("landlock")
    script = """
        import ctypes, os, sys, tempfile
        from megatron_rl.verifiers.sandbox import process as sandbox
        if os.getuid() == 0:
            for capability in (1, 2):  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH; what is started here lacks them
                assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0  # PR_CAPBSET_DROP
        tempfile.tempdir = sys.argv[1]
        program = "import os; os.mkdir('a', 0o300); os.mkdir('a/b', 0o300); os.mkdir('a/b/c', 0); open('a/b/d', 'w')"
        print(sandbox._run_script(sandbox.Isolation("landlock", ()), program, "", sandbox.Limits()))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "Ended(output=b'', reason='')\n", done.stderr
    assert os.listdir(tmp_path) == []


def test_a_program_cannot_change_its_input_and_finds_no_third_party_package():
    program = "import os\ntry: os.write(0, b'x')\nexcept OSError: print('refused')\nimport numpy"
    ended = run_script(program, "text", Limits())
    assert ended.output == b"refused\n" and "No module named 'numpy'" in ended.reason


def test_a_program_ends_with_the_process_that_asked_for_it():
    asks = textwrap.dedent("""
        import sys
        from megatron_rl.verifiers.sandbox.process import Limits, isolation, run_script
        isolation()
        print("ready", flush=True)
        run_script("import threading; threading.Event().wait()", "", Limits(wall_s=1e4))
    """)
    with subprocess.Popen([sys.executable, "-c", asks], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
        end = time.monotonic() + deadline(60)
        listed = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        while not (pids := listed.read_text().split()):
            assert time.monotonic() < end
        [child] = [psutil.Process(int(pid)) for pid in pids]
        parent.kill()
    child.wait(deadline(60))  # it raises if the program still runs then


def test_a_program_that_the_kernel_ends_after_its_time_has_used_it_however_little_was_counted():
    """The kernel's limit counts ticks, so a program that sleeps between them has used less when it is killed."""
    with sandbox._confined(isolation(), Limits(cpu_s=1), "script.run_script", SLEEPS["sleeps"]) as process:
        process.wait_until_ready()
        assert not process.ends_before(time.monotonic() + 1.0)
        os.kill(process._process.pid, signal.SIGKILL)
        assert process.ends_before(time.monotonic() + deadline(60)) and process._cpu_s < 1.0
        assert process.reason() == "the program used the CPU for more than 1 s"
    with sandbox._confined(isolation(), Limits(cpu_s=600), "script.run_script", SLEEPS["sleeps"]) as process:
        process.wait_until_ready()
        os.kill(process._process.pid, signal.SIGKILL)
        assert process.ends_before(time.monotonic() + deadline(60))
        with pytest.raises(SandboxError, match="was killed from outside"):
            process.reason()


def test_a_signal_without_a_name_is_named_by_its_number():
    with sandbox._confined(isolation(), TIGHT, "script.run_script", SLEEPS["sleeps"]) as process:
        process.wait_until_ready()
        os.kill(process._process.pid, 40)
        assert process.ends_before(time.monotonic() + deadline(60))
        assert process.reason() == "the program was ended by signal 40"


def test_a_machine_that_isolates_nothing_is_named(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(SandboxError, match="x86_64 or aarch64.*riscv64"):
        sandbox._isolation.__wrapped__()


def test_a_sandbox_that_cannot_be_made_is_an_error(monkeypatch):
    isolation()
    processes = children()
    monkeypatch.setattr(sandbox, "COMMAND", (sys.executable, "-c", "raise SystemExit(0)"))
    with pytest.raises(SandboxError, match="could not be confined: it ended, or was not ready in time"):
        run_script("print(1)", "", Limits())
    monkeypatch.setattr(sandbox, "COMMAND", ("/no/such/python",))
    with pytest.raises(SandboxError, match="could not be started: .*No such file"):
        run_script("print(1)", "", Limits())
    assert children() <= processes


@pytest.mark.parametrize("means", MEANS)
def test_isolation_says_what_is_missing(means):
    assert isolation().means in MEANS and isolation() is isolation()
    missing = sandbox._missing(means)
    assert bool(missing) == (means == "landlock" or not sandbox._counts_threads(means))
