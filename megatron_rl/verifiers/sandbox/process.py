"""Runs a program that nobody trusts in a process of its own, under limits that the kernel enforces.

Each run starts new processes of a bare Python (`-I -S`: the standard library alone), which confine themselves before
they run anything (`confinement.py`); what they then do is in `script.py` and `program_tests.py`. bubblewrap and nsjail
are not used, even where they are installed: they make the same namespaces with the same permission of the kernel, and
the processes that they would kill as a tree cannot exist here.

Invariants: a program's process ends with its run, and leaves no process, file, shared memory or socket; the functions
may be called from any thread and from many processes at once; a sandbox that does not work raises SandboxError. A
program can cause this error only by using memory that its limits grant and that the machine does not have.

What remains possible: a program sees the inputs of its tests, uses the CPU until a limit ends it, may add the base
interpreter's site-packages to its path and import what is there, may write in all of its own file system with `user`,
notices how busy the machine is, which another program could vary, and sees which files exist (not their contents) where
`isolation().means` is `landlock`. A fault of the kernel is not contained: use virtual machines against attackers. This
sandbox is made against what a model learns to try.
"""

from __future__ import annotations

import io
import json
import logging
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron_rl.processes import signal_name
from megatron_rl.verifiers.sandbox.classes import classes_of
from megatron_rl.verifiers.sandbox.confinement import ARCHITECTURES, WORK, Confinement
from megatron_rl.verifiers.sandbox.pipes import file_of, pipe, read, temporary_directory

log = logging.getLogger(__name__)

START_S = 120.0
"""How long a process may take to confine itself; it needs about 0.1 s on an idle machine."""

MAX_ERROR_BYTES = 64 << 10
MAX_REPORT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What one process may use. The tests of a program have a second process, with the same limits."""

    cpu_s: int = 10
    wall_s: float = 60.0
    memory_bytes: int = 1 << 30
    """The size of the address space."""
    files_bytes: int = 16 << 20
    """The size of its directory."""
    output_bytes: int = 1 << 20
    """The size of its standard output. The output of a program whose functions are tested is not read."""
    num_files: int = 64
    """How many files may be open."""
    num_threads: int = 64


@dataclass(frozen=True, slots=True)
class Isolation:
    """How this machine can isolate a program."""

    means: str
    """`root`, `user` or `landlock`: see confinement.py."""
    missing: tuple[str, ...]
    """What is not contained, one sentence each."""


class SandboxError(RuntimeError):
    """A program could not be run, and nothing is known about it."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How the run of a program ended."""

    output: bytes
    reason: str
    """Why the run counts as a failure; empty if the program ended with the exit status 0."""


@dataclass(slots=True)
class TestRun:
    """The verdicts on the first tests of a list."""

    __test__ = False

    verdicts: list[tuple[str, str]]
    """(`passed`, `failed`, `raised` (an assert, or another error) or `broken`, reason) for each test that has ended."""
    cut: str = ""
    """Why the next test did not; empty if all tests ran."""


def isolation() -> Isolation:
    """The strongest means that this machine permits. It is found by trying, once for each process.

    Raises:
        SandboxError: this machine permits none.
    """
    with _ONCE:
        return _isolation()


_ONCE = threading.Lock()


@cache
def _isolation() -> Isolation:
    if sys.platform != "linux" or platform.machine() not in ARCHITECTURES:
        raise SandboxError(
            f"programs can be isolated on Linux on {' or '.join(ARCHITECTURES)}, but this machine is {sys.platform} on "
            f"{platform.machine()}"
        )
    refused = []
    for means in ("root", "user", "landlock"):
        found = Isolation(means, _missing(means))
        try:
            ended = _run_script(found, "print('ready')", "", Limits())
        except SandboxError as error:
            refused.append(f"{means}: {error}")
            continue
        if ended != Ended(b"ready\n", ""):
            refused.append(f"{means}: a program that prints one word ended with {ended}")
            continue
        for sentence in found.missing:
            log.warning("The sandbox of programs (%s) is incomplete on this machine: %s", means, sentence)
        return found
    raise SandboxError(
        "this machine permits no way to isolate a program; it needs unprivileged user namespaces, or Landlock (Linux "
        f"5.13). Refused were {'; '.join(refused)}"
    )


def _missing(means: str) -> tuple[str, ...]:
    files = (
        "The size of each file is limited, but not their number: a program can fill the disk of the temporary "
        "directory until its run ends.",
        "A program can see which files exist and how large they are, but it cannot read them.",
    )
    threads = ("The number of a program's threads is limited by its memory alone.",)
    if means == "landlock":
        return files + threads
    return () if _counts_threads(means) else threads


def _counts_threads(means: str) -> bool:
    """Whether the kernel can limit the threads of one sandbox. It counts the processes of a user: with `root` each
    sandbox has its own user, and since Linux 5.14 they are counted in each user namespace."""
    if means == "user" and os.getuid() != 0:
        release = re.match(r"(\d+)\.(\d+)", platform.release())
        return release is not None and tuple(map(int, release.groups())) >= (5, 14)
    return means == "root"


def run_script(program: str, text: str, limits: Limits) -> Ended:
    """Run a program with its standard input.

    Args:
        text: what the program reads from its standard input.

    Raises:
        SandboxError: the program could not be run.
    """
    return _run_script(isolation(), program, text, limits)


def _run_script(means: Isolation, program: str, text: str, limits: Limits) -> Ended:
    with ExitStack() as stack:
        stdin = stack.enter_context(file_of(text.encode(errors="replace")))
        output, stdout = stack.enter_context(pipe())
        errors, stderr = stack.enter_context(pipe())
        confined = _confined(means, limits, "script.run_script", program, stdin=stdin, stdout=stdout, stderr=stderr)
        process = stack.enter_context(confined)
        stdout.close()
        stderr.close()
        process.wait_until_ready()
        deadline = time.monotonic() + limits.wall_s
        printed, last = read([output, errors], [limits.output_bytes, MAX_ERROR_BYTES], deadline)
        if len(printed) > limits.output_bytes:
            return Ended(b"", f"the output is longer than {limits.output_bytes} bytes")
        if not process.ends_before(deadline):
            return Ended(b"", f"the program ran for more than {limits.wall_s:g} s")
        reason = process.reason()
        message = last.decode(errors="replace").strip().rpartition("\n")[2]
        return Ended(printed, f"{reason}: {message[:300]}" if reason and message else reason)


def run_tests(program: str, tests: Sequence[str], limits: Limits, imports: bool = False) -> TestRun:
    """Run tests one after the other on one instance of a program, until one of them ends its process.

    Args:
        tests: Python texts, which call the functions of the program and judge the results with `assert`.
        imports: whether the program may use `script.IMPORTED` without an import.

    Raises:
        SandboxError: the program or its tests could not be run.
    """
    means = isolation()
    with ExitStack() as stack:
        requests, ask = stack.enter_context(pipe())
        replies, reply = stack.enter_context(pipe())
        report, results = stack.enter_context(pipe())
        texts = [[test, sorted(classes_of(test))] for test in tests]
        role, text = f"program_tests.serve_{'solution' if imports else 'program'}", json.dumps(texts)
        runner = stack.enter_context(_confined(means, limits, role, program, requests, reply))
        judge = stack.enter_context(_confined(means, limits, "program_tests.run_tests", text, replies, ask, results))
        for end in (requests, ask, replies, reply, results):
            end.close()
        runner.wait_until_ready()
        judge.wait_until_ready()
        deadline = time.monotonic() + limits.wall_s
        [said] = read([report], [MAX_REPORT_BYTES], deadline)
        # A reason has what the program raised. A half of a surrogate pair in it could be written to no log.
        lines = map(json.loads, said.decode().splitlines())
        verdicts = [(str(verdict), str(reason).encode(errors="replace").decode()) for verdict, reason in lines]
        if verdicts and verdicts[-1][0] == "ended":
            # The program's process ends a moment after its pipes; what ended it says more than the tests can know.
            runner.ends_before(min(deadline, time.monotonic() + 1.0))
            return TestRun(verdicts[:-1], runner.reason() or f"the program stopped answering: {verdicts[-1][1]}")
        if len(verdicts) == len(tests):
            return TestRun(verdicts)
        if not judge.ends_before(deadline):
            return TestRun(verdicts, f"the test ran for more than {limits.wall_s:g} s")
        return TestRun(verdicts, f"the process of the tests ended: {judge.reason() or 'exit status 0'}")


def run_idle(rows: Sequence[Sequence[str]], limits: Limits) -> list[str | None]:
    """For each row of tests, the result that lets all pass if every function that they call returns it (`idle.py`), or
    None; for as many rows as the limits allow.

    Raises:
        SandboxError: the tests could not be run.
    """
    with ExitStack() as stack:
        report, results = stack.enter_context(pipe())
        process = stack.enter_context(_confined(isolation(), limits, "idle.run_idle", json.dumps(rows), results))
        results.close()
        process.wait_until_ready()
        [said] = read([report], [MAX_REPORT_BYTES], time.monotonic() + limits.wall_s)
        return [json.loads(line) for line in said.decode().splitlines()]


class _Process:
    """A confined process that has been started."""

    def __init__(self, process: subprocess.Popen[bytes], status: io.FileIO, limits: Limits) -> None:
        self._process, self._status, self._limits = process, status, limits
        self._cpu_s, self._started = 0.0, time.monotonic()

    def wait_until_ready(self) -> None:
        """Raises SandboxError if the process could not confine itself."""
        [status] = read([self._status], [MAX_ERROR_BYTES], time.monotonic() + START_S)
        if status != b"ready":
            said = status.decode(errors="replace") or "it ended, or was not ready in time"
            raise SandboxError(f"the process of a program could not be confined: {said}")

    def ends_before(self, deadline: float) -> bool:
        """Wait until the process has ended. `deadline` is in seconds of time.monotonic()."""
        # A pidfd would need no polling, but some builds of Python have none. Mostly the process ends at once, because
        # its pipes are closed already.
        pause_s = 0.0005
        while self._process.returncode is None:
            pid, status, used = os.wait4(self._process.pid, os.WNOHANG)
            if pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)
                self._cpu_s = used.ru_utime + used.ru_stime
            elif time.monotonic() >= deadline:
                return False
            else:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.02)
        return True

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def reason(self) -> str:
        """Why the process ended; empty if it has not ended, or with the exit status 0.

        Raises:
            SandboxError: it was killed from outside, and not by one of its own limits.
        """
        code = self._process.returncode
        if code is None or code >= 0:
            return f"exit status {code}" if code else ""
        # The kernel counts whole ticks. A program that sleeps before them uses less, but not less than passes.
        used_s = max(self._cpu_s, time.monotonic() - self._started)
        if code == -signal.SIGXCPU or code == -signal.SIGKILL and used_s >= self._limits.cpu_s:
            return f"the program used the CPU for more than {self._limits.cpu_s} s"
        if code == -signal.SIGKILL:  # no program can send a signal or change its limit, so it has not chosen this end
            raise SandboxError("the process of a program was killed from outside: has the machine no memory left?")
        return f"the program was ended by {signal_name(-code)}"


@contextmanager
def _confined(
    means: Isolation,
    limits: Limits,
    role: str,
    text: str,
    *files: io.FileIO,
    stdin: io.FileIO | int = subprocess.DEVNULL,
    stdout: io.FileIO | int = subprocess.DEVNULL,
    stderr: io.FileIO | int = subprocess.DEVNULL,
) -> Iterator[_Process]:
    """A process that plays a role, and is killed at the end.

    Args:
        role: the module and the name of a function, which gets the text and the numbers of the files.
    """
    with ExitStack() as stack:
        directory = stack.enter_context(temporary_directory()) if means.means == "landlock" else None
        confinement = Confinement(
            means=means.means,
            parent=os.getpid(),
            visible=_visible(),
            devices=[path for path in DEVICES if os.path.exists(path)],
            directory=directory,
            cpu_s=limits.cpu_s,
            memory_bytes=limits.memory_bytes,
            files_bytes=limits.files_bytes,
            num_files=limits.num_files,
            num_threads=limits.num_threads if _counts_threads(means.means) else None,
        )
        file = stack.enter_context(file_of(text.encode(errors="surrogatepass")))
        status, ready = stack.enter_context(pipe())
        numbers = [end.fileno() for end in (file, ready, *files)]
        role_module, _ = role.split(".")
        start = START.format(
            modules=MODULES[role_module].split(),
            folder=str(Path(__file__).parent),
            confinement=vars(confinement),
            role=role,
            numbers=numbers,
        )
        home = directory or WORK
        try:
            started = subprocess.Popen(
                [*COMMAND, start],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=numbers,
                env={"HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"the process of a program could not be started: {error}") from error
        file.close()
        ready.close()
        process = _Process(started, status, limits)
        try:
            yield process
        finally:
            process.end()


@cache
def _visible() -> list[str]:
    """What a program may read: the standard library and the shared libraries of the system."""
    pure, compiled = os.path.dirname(os.__file__), os.path.join(sys.base_exec_prefix, sys.platlibdir)
    standard = {os.path.dirname(os.path.realpath(pure)), os.path.realpath(compiled)}
    system = {"/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo"}
    paths = sorted(path for path in standard | system if os.path.exists(path))
    return [path for path in paths if not any(path.startswith(other + "/") for other in paths)]


MODULES = {
    "script": "confinement script",
    "idle": "confinement messages script operations remote program_tests idle",
    "program_tests": "confinement messages script operations remote program_tests",
}
"""For the module of a role, the modules to load, in order."""

START = """
import sys
from importlib.machinery import SourceFileLoader
for name in {modules!r}:
    full = "megatron_rl.verifiers.sandbox." + name
    sys.modules[full] = globals()[name] = module = type(sys)(full)
    SourceFileLoader(full, {folder!r} + "/" + name + ".py").exec_module(module)
confinement.main(confinement.Confinement(**{confinement!r}), {role}, *{numbers!r})
"""
"""Loads the modules from their files: a bare interpreter cannot import this package, which has dependencies."""

COMMAND = (os.path.realpath(sys.executable), "-I", "-S", "-X", "utf8", "-X", "int_max_str_digits=0", "-c")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
