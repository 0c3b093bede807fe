"""The first process in a sandbox. It carries out what it reads from its standard input, a JSON object in each line, and
answers with one line. It runs in a bare Python, from its text, so it imports only the standard library.

It ends when its input is closed, and everything here with it.

Invariants (tests/unit/environments): no process outlives the command that started it; an answer is never longer than
the limits allow.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import selectors
import signal
import stat
import struct
import subprocess
import sys
import time
from typing import IO, Any

POLL_S = 0.05
FAULTS = (OSError, ValueError, TypeError, RuntimeError, MemoryError, OverflowError, subprocess.SubprocessError)
"""What a call may raise here by its arguments, or by what a program has left. It is this call's error."""
MOUNTED = ("/tmp", "/logs", "/tests")
SEGMENTS = "/proc/sysvipc/shm"
LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_DUMPABLE, PR_SET_SECCOMP, IPC_RMID, CLONE_NEWUSER = 4, 22, 0, 0x10000000
CALLS = {
    "x86_64": (0xC000003E, 56, 272, (319, 447, 68, 435)),
    "aarch64": (0xC00000B7, 220, 97, (279, 447, 186, 435)),
}
"""Machine -> its AUDIT_ARCH, the numbers of clone and unshare, and those of memfd_create, memfd_secret, msgget, clone3.
A filter cannot read the flags of clone3; without it, the C library uses clone."""


def passed(limits: dict[str, Any]) -> str:
    """The limit that the processes here have passed; empty if none."""
    memory, page = {}, resource.getpagesize()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (1, os.getpid()):
            with contextlib.suppress(OSError, IndexError):  # it has ended meanwhile
                for thread in os.listdir(f"/proc/{name}/task"):
                    at = f"/proc/{name}/task/{thread}"
                    with open(f"{at}/stat") as file:
                        state, *numbers = file.read().rpartition(")")[2].split()
                    if state not in "ZX":  # the first thread shows no memory once it has ended
                        memory[at] = int(numbers[20]) * page
                        break
        if len(memory) > limits["num_processes"]:
            return "too many processes"
    most = limits["memory_bytes"] - sum(int(segment[14]) for segment in segments())
    if sum(memory.values()) > most:  # only then, because it takes longer: what several share counts once
        for at in memory:
            with contextlib.suppress(PermissionError):  # a process may hide this number
                memory[at] = shared_bytes(at)
    return "out of memory" if sum(memory.values()) > most else ""


def shared_bytes(at: str) -> int:
    """The memory of a process, of which a page that several have counts in parts. 0 if it has ended."""
    try:
        with open(f"{at}/smaps_rollup") as file:
            return int(file.read().partition("\nPss:")[2].split()[0]) << 10
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return 0


def segments() -> list[list[str]]:
    """The shared memory of System V: the columns of the kernel's list."""
    if not os.path.exists(SEGMENTS):  # a kernel may have none
        return []
    with open(SEGMENTS) as file:
        return [line.split() for line in file.readlines()[1:]]


def end_all() -> None:
    """Kill every process but this one, which is the first one here, so that nothing can run on without it. Also remove
    the memory that they have left."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
        except InterruptedError:
            continue
    for segment in segments():
        LIBC.shmctl(int(segment[1]), IPC_RMID, None)


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """A command of a shell, with all that it starts."""
    limits, timeout_s = asked["limits"], asked["timeout_s"]

    def confine() -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for kind, value in (
            (resource.RLIMIT_AS, limits["memory_bytes"]),
            (resource.RLIMIT_FSIZE, limits["files_bytes"]),
            (resource.RLIMIT_NPROC, limits["num_processes"]),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(kind, (value, value))

    process = subprocess.Popen(
        ["/bin/sh", "-c", asked["command"]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=confine,
        cwd=asked["folder"],
    )
    assert process.stdout is not None
    output, most, why, num_more = bytearray(), limits["output_bytes"], "", 0
    deadline, kill_at, look_at = time.monotonic() + timeout_s, float("inf"), 0.0
    owner = select.poll()
    owner.register(0, select.POLLHUP)
    os.set_blocking(process.stdout.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while process.poll() is None and (now := time.monotonic()) < kill_at:
            if not why and now > deadline:
                why, kill_at = "timed out", now + asked["grace_s"]
                os.killpg(process.pid, signal.SIGTERM)
            if now >= look_at:
                look_at = now + POLL_S
                if not why and (why := passed(limits)):
                    kill_at = now
                if owner.poll(0):
                    os._exit(1)
            if selector.select(POLL_S):
                num_more += take(process.stdout, output, most)
    status = None if why else process.returncode
    end_all()
    num_more += take(process.stdout, output, most)
    process.stdout.close()
    return {"output": output.decode(errors="replace"), "num_more": num_more, "status": status, "why": why}


def take(pipe: IO[bytes], output: bytearray, most: int) -> int:
    """Append what the pipe has, up to the limit. Returns the number of bytes that were left out."""
    left_out = 0
    while True:
        try:
            part = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return left_out
        if not part:
            return left_out
        room = max(0, most - len(output))
        output += part[:room]
        left_out += len(part) - min(room, len(part))


def write(asked: dict[str, Any]) -> dict[str, Any]:
    """Write a file. By force it takes the place of whatever a program has put there to keep it out. Else a folder is an
    error, and a file keeps its rights."""
    path = "/" + os.path.normpath(os.path.join(asked["folder"], asked["path"])).lstrip("/")
    if holds_tree(path, asked["folder"]):
        raise ValueError("not a file")
    mode = asked["mode"]
    if asked["by_force"]:
        make_room(path, asked["folder"])
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.lexists(path):
            mode = stat.S_IMODE(os.stat(path).st_mode)
            os.remove(path)
    with open(path, "wb") as file:
        file.write(base64.b64decode(asked["data"]))
    os.chmod(path, mode)
    return {}


def make_room(path: str, tree: str) -> None:
    at = ""
    for folder in path.split("/")[1:-1]:
        at = f"{at}/{folder}"
        if not holds_tree(at, tree):
            if os.path.islink(at) or not os.path.isdir(at):
                remove(at)
                os.mkdir(at)
            os.chmod(at, 0o755)
    remove(path)


def holds_tree(path: str, folder: str) -> bool:
    """Whether it is a folder that the sandbox needs, or one above it."""
    return any(f"{one}/".startswith(path.rstrip("/") + "/") for one in (folder, *MOUNTED))


def remove(path: str) -> None:
    if os.path.islink(path) or not os.path.isdir(path):
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
    else:  # folders may be in each other more deeply than a path is long, and than Python can follow
        subprocess.run(["/bin/sh", "-c", 'chmod -R u+rwx "$0"; rm -rf "$0"', path], stderr=subprocess.DEVNULL)


def read(asked: dict[str, Any]) -> dict[str, Any]:
    def opened(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)  # a pipe would wait for its other end

    with open(os.path.join(asked["folder"], asked["path"]), "rb", opener=opened) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("not a file")
        return {"data": base64.b64encode(file.read(asked["most"])).decode()}


def forbid() -> None:
    """Take the system calls away from all that is started here whose memory no count shows. In a namespace of its own
    a program could mount more memory as files."""
    if os.uname().machine not in CALLS:
        return
    architecture, clone, unshare, missing = CALLS[os.uname().machine]
    load, equal, at_least, has_bits, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse, unknown = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, 1 << 30), (give, 0, 0, unknown)]  # the calls of the x32 interface
    for number in missing:
        code += [(equal, 0, 1, number), (give, 0, 0, unknown)]
    code += [(equal, 1, 0, clone), (equal, 0, 3, unshare), (load, 0, 0, 16)]
    code += [(has_bits, 0, 1, CLONE_NEWUSER), (give, 0, 0, refuse), (give, 0, 0, allow)]
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))
    if LIBC.prctl(PR_SET_SECCOMP, 2, struct.pack("HxxxxxxP", len(code), ctypes.addressof(text)), 0, 0):
        raise OSError(ctypes.get_errno(), "prctl PR_SET_SECCOMP failed")


def main() -> None:
    # No program may answer in this one's place through /proc/1/fd, read its memory, or interrupt it.
    if LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError("prctl PR_SET_DUMPABLE failed")
    forbid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            os.chmod(asked["folder"], 0o755)  # a program may have taken all rights away
            answer = {"run": run, "write": write, "read": read}[asked.pop("do")](asked)
        except FAULTS as error:
            end_all()
            shown = asked.get("path", "the command").encode(errors="backslashreplace").decode()
            answer = {"error": f"{getattr(error, 'strerror', None) or error}: {shown}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
