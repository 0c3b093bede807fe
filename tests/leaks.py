"""A test that leaves something behind fails by name: a process, a listening port, shared memory, a changed environment
or working folder. (pytest plugin)

What a fixture of a module or a session starts may live until the end of that scope; so may what is started inside
`lasting`, and what a process of the module starts, as a daemon of Ray does. Processes are known by a variable of the
environment that they inherit, so an orphan is found too, at the end of its module at the latest.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

MARK = "MEGATRON_RL_TESTS"
os.environ[MARK] = _TAG = uuid.uuid4().hex
SHARED_MEMORY = Path("/dev/shm")
LISTEN = "0A"
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 1 << 18
GRACE_S = 5.0
"""How long what is being taken down may take to disappear: a process that was killed, a name that is removed next."""
RAY_S = 70.0
"""The same of Ray's own processes, which look once a minute whether the one that began them is still there."""

_allowed: dict[str, set] = {"module": set(), "session": set()}
"""What may live until the end of a module or of the session: (kind, which one)."""

NOT_OURS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")
"""The variables that pytest sets, and the ones that a library sets when the first test of a process imports it."""


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name: [0] is the state, [11:15] are clock ticks, [19] is the start."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def children() -> set:
    """The living descendants of this process."""
    found, asked = set(), [os.getpid()]
    while asked:
        pid = asked.pop()
        try:
            fields = stat(pid)
            tasks = os.listdir(f"/proc/{pid}/task")
            asked += [int(c) for t in tasks for c in Path(f"/proc/{pid}/task/{t}/children").read_text().split()]
        except OSError:  # it ended meanwhile
            continue
        if pid != os.getpid() and fields[0] not in "ZX":
            found.add(("process", pid, fields[19]))
    return found


_ours: dict[tuple[int, str], bool] = {}


def family() -> dict[int, list[str]]:
    """The fields of /proc/PID/stat behind the name, of every process that descends from this one, orphans too."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        pid = int(name)
        try:
            fields = stat(pid)
            key = pid, fields[19]
            if key not in _ours:
                _ours[key] = f"{MARK}={_TAG}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if _ours[key]:
                found[pid] = fields
        except OSError:
            continue
    return found


def listening() -> set:
    """The sockets of this process that listen."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # that of the listing itself
            continue
    return _listening(frozenset(link for link in links if link.startswith("socket:[")))


@lru_cache(maxsize=1)
def _listening(sockets: frozenset[str]) -> frozenset:
    """Those of some sockets that listen. The kernel's table is slow to read, and most tests open no socket."""
    found = set()
    for name in ("tcp", "tcp6") if sockets else ():
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and (link := f"socket:[{fields[9]}]") in sockets:
                found.add(("port", int(fields[1].rpartition(":")[2], 16), link))
    return frozenset(found)


def _own_shared_memory() -> bool:
    """Give this process and what it starts a /dev/shm of their own, so that every name there is of these tests. It
    takes the right to mount; without it nobody looks at shared memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0:
        return False
    private = libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
    return private and libc.mount(b"tmpfs", str(SHARED_MEMORY).encode(), b"tmpfs", 0, None) == 0


def pytest_sessionstart(session):
    global _is_own
    if not hasattr(session.config, "workerinput") and session.config.getoption("numprocesses", None):
        return  # the tests run in other processes
    _is_own = sys.platform == "linux" and _own_shared_memory()
    resource_tracker.ensure_running()  # whoever needs it first would seem to leave it behind
    pid = resource_tracker._resource_tracker._pid
    _allowed["session"].add(("process", pid, stat(pid)[19]))


_is_own = False


def shared_memory_is_own() -> bool:
    return _is_own


def shared_memory() -> set:
    kept = {"libpod_lock"}  # Podman's, for all containers
    return {("shared memory", name) for name in {*os.listdir(SHARED_MEMORY)} - kept} if _is_own else set()


def surroundings() -> set:
    variables = {("variable", name, value) for name, value in os.environ.items() if name not in NOT_OURS}
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        folder = "that was deleted"
    return variables | {("working folder", folder)}


def deleted_variables(before: set) -> set:
    return {(kind, name, "deleted") for kind, name, *_ in before if kind == "variable" and name not in os.environ}


def take_back(before: set, left: set) -> None:
    """Undo what a test has left behind, so that it fails alone. An open port stays."""
    variables = {name: value for kind, name, *rest in before if kind == "variable" for value in rest}
    for kind, name, *_ in left:
        with suppress(OSError):
            if kind == "process":
                os.kill(name, signal.SIGKILL)
            elif kind == "shared memory":
                os.unlink(f"{SHARED_MEMORY}/{name}")
            elif kind == "working folder":
                [folder] = [folder for kind, folder, *_ in before if kind == "working folder"]
                os.chdir(folder)
            elif kind == "variable" and name in variables:
                os.environ[name] = variables[name]
            elif kind == "variable":
                os.environ.pop(name, None)


def everything() -> set:
    return children() | listening() | shared_memory() | surroundings()


@contextmanager
def lasting(until: str = "session") -> Iterator[None]:
    """What is started in this block, or changed in the environment, may live until the end of the module or of the
    session."""
    before = everything()
    try:
        yield
    finally:
        _allowed[until] |= everything() - before


def _left(before: set, look) -> set:
    """What is new, as soon as it does not go away any more."""
    start = time.monotonic()
    while True:
        new = look() - before - _allowed["module"] - _allowed["session"]
        new = {one for one in new if not _is_of_the_module(one)}
        is_rays = all(one[0] == "process" and _command(one[1]).startswith("ray::") for one in new)
        if not new or time.monotonic() - start > (RAY_S if is_rays else GRACE_S):
            return new
        gc.collect()
        time.sleep(0.05)


def _is_of_the_module(one: tuple) -> bool:
    """Whether it is a process that one which may live until the end of the module has started."""
    known = {other[1] for other in _allowed["module"] if other[0] == "process"}
    if one[0] != "process" or not known:
        return False
    pid = one[1]
    try:
        while pid > 1:
            pid = int(stat(pid)[1])
            if pid in known:
                return True
    except OSError:  # it ended meanwhile
        pass
    return False


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "ended meanwhile"


def described(left: set) -> str:
    def words(one: tuple) -> str:
        if one[0] == "process":
            return f"process {one[1]} ({_command(one[1])[:100]})"
        return f"{one[0]} {one[1]}" + (f"={one[2]}" if one[0] == "variable" else "")

    return ", ".join(sorted(map(words, left)))


_before = pytest.StashKey[set]()
_before_module: set = set()
_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


def _whole_family() -> set:
    return {("process", pid, fields[19]) for pid, fields in family().items() if fields[0] not in "ZX"}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    global _before_module
    item.stash[_before] = everything()
    if not _allowed["module"] and item.path not in _seen:
        _seen.add(item.path)
        _before_module = item.stash[_before] | _whole_family()


_seen: set[Path] = set()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    if fixturedef.scope in ("function", "class"):
        return (yield)
    with lasting("module" if fixturedef.scope == "module" else "session"):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item, nextitem):
    """Runs after the test's own teardown, and after that of its module if it was the last one there. The traceback of a
    test that failed may hold anything, so nothing more is said of it."""
    result = yield
    item.funcargs.clear()  # pytest keeps the values of fixtures for a moment longer
    if nextitem is None or nextitem.path != item.path:
        _allowed["module"].clear()
        before = _before_module
        left = _left(before, lambda: everything() | _whole_family())
    else:
        before = item.stash[_before]
        left = _left(before, everything)
    if nextitem is not None:  # at the end fixtures of the session take back what they have set
        left |= deleted_variables(before) - _allowed["session"]
    told = described(left)
    take_back(before, left)
    _allowed["session"] |= left  # it is told once
    if left and not item.stash.get(_failed, False):
        pytest.fail(f"{item.nodeid} leaves behind: {told}", pytrace=False)
    return result
