"""Several nodes on one machine, each with its own address, host name, processes, /dev/shm and local folders.

A node is a set of Linux namespaces, and so is the switch that joins them. Each lives as long as its first process, and
that one dies with the process that started it: nothing is left of them, and nothing in them is seen from outside.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

FIRST_PROCESS = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print(flush=True); signal.pause()"
"""The kernel gives it the orphans of its node; it lets them go when they end."""
PATIENCE_S = 120.0
"""How long a command that sets a node up, or the end of a node, may take."""
LOCAL_FOLDERS = ("/dev/shm", "/var/tmp", "/tmp/ray")


def why_not(*programs: str) -> str | None:
    """Why this machine cannot have such nodes; None if it can.

    Args:
        programs: what is needed besides the programs that make the nodes.
    """
    needed = ("ip", "unshare", "nsenter", "setpriv", *programs)
    absent = [program for program in needed if shutil.which(program) is None]
    if absent:
        return f"the programs {', '.join(absent)} are not there"
    done = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "switch", "type", "bridge"], capture_output=True, text=True
    )
    return f"the kernel refuses: {done.stderr.strip()}" if done.returncode else None


class Namespaces:
    """The namespaces of one first process."""

    def __init__(self, *kinds: str) -> None:
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *kinds, "--kill-child", sys.executable, "-c", FIRST_PROCESS],
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout and self._process.stdout.readline() == b"\n"
        self.pid = psutil.Process(self._process.pid).children()[0].pid

    def inside(self, *words: str) -> list[str]:
        """The command that runs `words` in these namespaces."""
        return ["nsenter", f"--target={self.pid}", "--all", *words]

    def do(self, *words: str) -> None:
        """Run a command in these namespaces.

        Raises:
            RuntimeError: the command failed.
        """
        done = subprocess.run(self.inside(*words), capture_output=True, text=True, timeout=PATIENCE_S)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} failed: {(done.stderr or done.stdout).strip()}")

    def end(self) -> None:
        """End all processes in these namespaces at once."""
        self._process.kill()
        self._process.wait(PATIENCE_S)


class NetworkNode(Namespaces):
    """A node with its cable in a switch."""

    def __init__(self, switch: Namespaces, number: int) -> None:
        super().__init__("--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--mount-proc")
        self.name, self.address, self._switch, self._port = (
            f"node{number}",
            f"10.77.0.{number}",
            switch,
            f"port{number}",
        )
        self.do("hostname", self.name)
        for folder in LOCAL_FOLDERS:
            Path(folder).mkdir(exist_ok=True)
            self.do("mount", "-t", "tmpfs", self.name, folder)
        switch.do("ip", "link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid))
        switch.do("ip", "link", "set", self._port, "master", "switch", "up")
        self.do("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.do("ip", "link", "set", "eth0", "up")
        self.do("ip", "link", "set", "lo", "up")

    def pull(self) -> None:
        """Pull the cable out of the switch."""
        self._switch.do("ip", "link", "set", self._port, "down")

    def limit(self, rate: str) -> None:
        """Limit both directions of the cable.

        Args:
            rate: as tc writes it, such as `200mbit`; the headers of the frames count.
        """
        limited = ("root", "tbf", "rate", rate, "burst", "128kb", "latency", "50ms")
        self.do("tc", "qdisc", "replace", "dev", "eth0", *limited)
        self._switch.do("tc", "qdisc", "replace", "dev", self._port, *limited)

    def start(self, folder: Path, log: Path, environment: Mapping[str, str], *words: str) -> subprocess.Popen[bytes]:
        """Start a command in a working folder; its output goes to a file."""
        with log.open("ab") as file:
            return subprocess.Popen(
                self.inside("env", f"--chdir={folder}", *words), stdout=file, stderr=file, env=dict(environment)
            )


def make_switch() -> Namespaces:
    switch = Namespaces("--net", "--fork")
    switch.do("ip", "link", "add", "switch", "type", "bridge")
    switch.do("ip", "link", "set", "switch", "up")
    return switch
