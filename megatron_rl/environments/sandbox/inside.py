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
import json
import os
import resource
import select
import selectors
import shutil
import signal
import subprocess
import sys
import time
from typing import IO, Any

POLL_S = 0.05
MOUNTED = ("/tmp", "/logs", "/tests")
PR_SET_DUMPABLE = 4


def memory_of_all() -> int:
    """The bytes of memory that all processes here but this one have, by their own count."""
    total, page = 0, resource.getpagesize()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) > 2:
            try:
                with open(f"/proc/{name}/statm") as file:
                    total += int(file.read().split()[1]) * page
            except (OSError, IndexError):  # it has ended meanwhile
                pass
    return total


def end_all() -> None:
    """Kill every process but this one. It is the first one here, so that nothing can run on without it."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
        except InterruptedError:
            continue


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
                if not why and memory_of_all() > limits["memory_bytes"]:
                    why, kill_at = "out of memory", now
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
    """Write a file, in the place of whatever a program has put there to keep it out."""
    *folders, name = os.path.normpath(asked["path"]).split("/")
    at = "/" if asked["path"].startswith("/") else asked["folder"]
    for folder in folders:
        at = os.path.join(at, folder)
        if at not in ("/", asked["folder"], *MOUNTED):
            if os.path.islink(at) or not os.path.isdir(at):
                remove(at)
                os.mkdir(at)
            os.chmod(at, 0o755)
    path = os.path.join(at, name)
    remove(path)
    with open(path, "wb") as file:
        file.write(base64.b64decode(asked["data"]))
    os.chmod(path, asked["mode"])
    return {}


def remove(path: str) -> None:
    if os.path.islink(path) or not os.path.isdir(path):
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
        return
    os.chmod(path, 0o755)
    for folder, folders, _ in os.walk(path):
        for one in folders:
            if not os.path.islink(os.path.join(folder, one)):
                os.chmod(os.path.join(folder, one), 0o755)
    shutil.rmtree(path)


def read(asked: dict[str, Any]) -> dict[str, Any]:
    with open(os.path.join(asked["folder"], asked["path"]), "rb") as file:
        data = file.read(asked["most"] + 1)
    return {"data": base64.b64encode(data[: asked["most"]]).decode(), "is_cut": len(data) > asked["most"]}


def main() -> None:
    # No program may answer in this one's place through /proc/1/fd, read its memory, or interrupt it.
    if ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError("prctl PR_SET_DUMPABLE failed")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            os.chmod(asked["folder"], 0o755)  # a program may have taken all rights away
            answer = {"run": run, "write": write, "read": read}[asked.pop("do")](asked)
        except OSError as error:
            answer = {"error": f"{error.strerror}: {asked.get('path', '')}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
