"""A sandbox of one answer: a tree of files in memory, and commands that run in it.

bubblewrap makes it from namespaces of the kernel: no network, no process and no file of the machine but its programs,
which are read-only, and a user without rights. With an `image`, Podman, Docker or Apptainer makes it instead, and the
tree is in the image's own files. A process in it (`inside.py`) carries out commands until it is closed.

    with Box({"main.py": "print(6 * 7)"}) as box:
        box.run("python3 main.py")      # Ran(output='42\\n', status=0, why='')
        box.run("sleep 9", 0.1)         # Ran(output='', status=None, why='timed out')

What remains possible: a program uses a CPU until its time is over, sees which programs the machine has, and notices how
busy it is. It can also disable its own sandbox, by limits for the first process; then the answer is a failure without a
reward. The kernel's own memory (sockets, pipes, empty files) and pages of a shared mapping that a program has given up
are not counted. A fault of the kernel is not contained.

Invariants (tests/unit/environments): a command that hangs, floods, forks or fills its disk ends within its time and its
limits, and the next one works; nothing of a sandbox is left when it is closed, or when its owner is killed.
"""

from __future__ import annotations

import base64
import json
import os
import selectors
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self

FOLDER = "/tree"
START_S = 60.0
"""How long a sandbox may take to be ready; it needs about 0.1 s on an idle machine."""
PULL_S = 900.0
"""The same for an image, which may have to be fetched first."""
RUNTIMES = ("podman", "docker", "apptainer")
"""The programs that run images, the first one on PATH."""
NAMESPACES = (
    "allow unprivileged user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
    "kernel.apparmor_restrict_unprivileged_userns; in a container its seccomp profile)"
)
LATE_S = 30.0
"""How much later than the limit of a command the answer may come before the sandbox counts as lost."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
END_S = 10.0
MAX_LINE, SMALL_BYTES = 256 << 20, 16 << 20


class BoxError(RuntimeError):
    """A sandbox could not be made, or was lost: nothing is known about the answer."""


@dataclass(frozen=True, slots=True)
class BoxLimits:
    """What the commands of a sandbox may use."""

    timeout_s: float = 30.0
    """The longest time of a command. Then it gets SIGTERM, and after `grace_s` SIGKILL."""
    grace_s: float = 1.0
    memory_bytes: int = 1 << 30
    """The memory of all processes together, and the address space of each. Pages that several share count once."""
    files_bytes: int = 256 << 20
    """The size of the tree, which is in memory, and of `/tmp`."""
    output_bytes: int = 64 << 10
    num_processes: int = 64


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command did."""

    output: str
    """Standard output and errors, up to the limit."""
    status: int | None
    """The exit status of the command; minus the number of the signal that ended it. None: a limit ended it."""
    why: str = ""
    """`timed out`, `out of memory` or `too many processes`, if a limit ended it: an exit status of 124 or 137 is the
    program's own."""
    num_more: int = 0
    """The number of bytes of output that were left out."""

    @property
    def end(self) -> str:
        """How the command ended, as a text."""
        return self.why or f"exit status {self.status}"


@dataclass(eq=False)
class Box:
    """
    Args:
        files: the tree, texts or bytes by their paths.

    Raises:
        BoxError: it cannot be made.
    """

    files: Mapping[str, str | bytes] = field(default_factory=dict)
    limits: BoxLimits = BoxLimits()
    folder: str = FOLDER
    """The absolute path of the tree in the sandbox, and the working directory of its commands."""
    image: str | None = None
    """The name of an image with a `python3`."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        if self.image is None:
            command = bubblewrap(self.limits, self.folder)
        else:
            command = container(self.image, self.limits, self.folder)
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            raise BoxError(f"a sandbox could not be started: {error}") from error
        self._unread, self._why_lost = b"", ""
        try:
            self._answer(START_S if self.image is None else PULL_S)
            for path, content in self.files.items():
                self.write(path, content)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def run(self, command: str, timeout_s: float | None = None) -> Ran:
        """Run a command of a shell in the tree. Everything that it has started ends with it.

        Raises:
            BoxError: the sandbox is lost.
        """
        longest = self.limits.timeout_s if timeout_s is None else timeout_s
        asked = {
            "command": command,
            "timeout_s": longest,
            "grace_s": self.limits.grace_s,
            "limits": asdict(self.limits),
        }
        told = self._ask("run", asked, longest + self.limits.grace_s + LATE_S)
        return Ran(told["output"], told["status"], told["why"], told["num_more"])

    def write(self, path: str, content: str | bytes, is_program: bool = False, by_force: bool = True) -> None:
        """Write a file, and the folders above it.

        Args:
            path: an absolute path, or one in the tree.
            is_program: whether it may be executed.
            by_force: whether it takes the place of anything. If not, it takes the place of a file, whose rights it
                keeps, and not of a folder, or of a file that is in the place of one.

        Raises:
            OSError: it cannot be written.
            BoxError: the sandbox is lost.
        """
        data = content.encode(errors="replace") if isinstance(content, str) else content
        asked = {"path": path, "data": base64.b64encode(data).decode(), "mode": 0o755 if is_program else 0o644}
        self._ask("write", asked | {"by_force": by_force}, LATE_S)

    def read(self, path: str, most: int = 1 << 20) -> bytes:
        """The first bytes of a file.

        Raises:
            OSError: it cannot be read.
            BoxError: the sandbox is lost.
        """
        return base64.b64decode(self._ask("read", {"path": path, "most": most}, LATE_S)["data"])

    def close(self) -> None:
        """End all that runs in it, and drop its files."""
        self._end()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _end(self) -> None:
        """The first process ends when its input does, and everything with it."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, do: str, asked: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        with self._lock:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps({"do": do, "folder": self.folder, **asked}).encode() + b"\n")
                self._process.stdin.flush()
            except (OSError, ValueError) as error:  # a ValueError: it was closed
                raise self._lost() from error
            told = self._answer(within_s)
        if "error" in told:
            raise OSError(told["error"])
        return told

    def _answer(self, within_s: float) -> dict[str, Any]:
        """
        Raises:
            BoxError: there is none in time.
        """
        pipe, deadline = self._process.stdout, time.monotonic() + within_s
        assert pipe is not None
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self._lost(f"it did not answer in {within_s:g} s")
                part = os.read(pipe.fileno(), 1 << 20)
                if not part or len(self._unread) > MAX_LINE:
                    raise self._lost()
                self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        told: dict[str, Any] = json.loads(line)
        return told

    def _lost(self, why: str = "") -> BoxError:
        """The error of every call from now on, with the first cause."""
        if not self._why_lost:
            self._end()
            pipe = self._process.stderr
            words = "" if pipe is None or pipe.closed else pipe.read().decode(errors="replace").strip()[-300:]
            words += f"; {NAMESPACES}" * words.startswith("bwrap: ")
            self._why_lost = why or words or "it said nothing"
        return BoxError(f"the sandbox has ended: {self._why_lost}")


def bubblewrap(limits: BoxLimits, folder: str) -> list[str]:
    """The command that makes a sandbox and its first process.

    Raises:
        BoxError: bubblewrap is not installed.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise BoxError(
            "sandboxes need bubblewrap, which is not installed on this machine: install the package bubblewrap, and "
            f"{NAMESPACES}"
        )
    python = os.path.realpath(sys.executable)
    binds = [part for path in _visible() for part in ("--ro-bind", path, path)]
    return [
        *(bwrap, "--unshare-all", "--new-session", "--cap-drop", "ALL", "--as-pid-1"),
        *("--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--clearenv"),
        *("--setenv", "PATH", f"{os.path.dirname(python)}:/usr/local/bin:/usr/bin:/bin"),
        *("--setenv", "HOME", folder, "--setenv", "LANG", "C.UTF-8", "--setenv", "PYTHONDONTWRITEBYTECODE", "1"),
        *binds,
        *("--proc", "/proc", "--dev", "/dev", "--size", str(SMALL_BYTES), "--tmpfs", "/dev/shm"),
        *("--size", str(SMALL_BYTES), "--tmpfs", "/logs", "--size", str(SMALL_BYTES), "--tmpfs", "/tests"),
        *("--size", str(limits.files_bytes), "--tmpfs", "/tmp", "--size", str(limits.files_bytes), "--tmpfs", folder),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", folder),
        *(python, *_first_process()),
    ]


def container(image: str, limits: BoxLimits, folder: str) -> list[str]:
    """The command that makes a sandbox from an image. Its user is the image's, with no rights beyond its own files.

    Raises:
        BoxError: nothing that runs images is installed.
    """
    runtime = next(filter(None, map(shutil.which, RUNTIMES)), None)
    if runtime is None:
        raise BoxError(f"the image {image} needs one of {', '.join(RUNTIMES)}, and none is installed on this machine")
    settings = {"HOME": folder, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    variables = [part for item in settings.items() for part in ("--env", "=".join(item))]
    if runtime.endswith("apptainer"):
        name = image if "://" in image or image.endswith(".sif") else f"docker://{image}"
        alone = ("--containall", "--no-home", "--net", "--network", "none", "--writable-tmpfs", "--drop-caps", "all")
        return [runtime, "exec", *alone, *variables, "--pwd", folder, name, "python3", *_first_process()]
    small, size = f"size={SMALL_BYTES}", f"size={limits.files_bytes}"
    return [
        *(runtime, "run", "--rm", "--interactive", "--network", "none", "--cap-drop", "ALL"),
        *("--security-opt", "no-new-privileges", "--pids-limit", str(limits.num_processes + 2)),
        *("--tmpfs", f"/tmp:exec,mode=1777,{size}", "--tmpfs", f"/logs:{small}", "--tmpfs", f"/tests:exec,{small}"),
        *(*variables, "--workdir", folder, "--entrypoint", "python3", image, *_first_process()),
    ]


def _first_process() -> tuple[str, ...]:
    return "-I", "-S", "-c", Path(__file__).with_name("inside.py").read_text()


@cache
def _visible() -> tuple[str, ...]:
    """The folders of the machine's programs, and of this Python's standard library."""
    paths = [path for path in (*SYSTEM, os.path.realpath(sys.base_prefix)) if os.path.exists(path)]
    return tuple(dict.fromkeys(paths))


def is_free(folder: str) -> bool:
    """Whether the tree of a sandbox of bubblewrap can be there: not at a folder of every sandbox, in or above one."""
    here = folder.rstrip("/") + "/"
    taken = [f"{path}/" for path in (*_visible(), "/proc", "/dev", "/logs", "/tests")]
    return not any(here.startswith(path) or path.startswith(here) for path in taken)
