"""Commands in processes of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from patience import deadline

from megatron_rl.processes import command_line, descendants

ROOT = Path(__file__).parents[2]


class Recipe:
    """Starts commands as a person would, in a working folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.deadline_s = deadline(240)
        """Of a run, or of what is waited for in it."""
        self.own_metrics: set[str] = set()
        """The metrics that a test's own loss reports."""
        for name in ("configs", "recipes"):
            (folder / name).symlink_to(ROOT / name)
        shutil.copyfile(Path(__file__).parent / "rewards.py", folder / "rewards.py")

    def command(self, *arguments: str) -> list[str]:
        """
        Args:
            arguments: a command of `megatron-rl` with its own ones, or the path of a program.
        """
        if arguments[0].endswith(".py"):
            return [sys.executable, str(ROOT / arguments[0]), *arguments[1:]]
        return [sys.executable, "-m", "megatron_rl", *arguments]

    def start(self, *arguments: str, log: str = "out.txt") -> subprocess.Popen:
        with (self.folder / log).open("w") as file:
            return subprocess.Popen(
                self.command(*arguments),
                cwd=self.folder,
                env=self.environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def process(self, run: subprocess.Popen, name: str) -> psutil.Process:
        """One of the run's processes with `name` in its command line."""
        return next(process for process in descendants(psutil.Process(run.pid)) if name in command_line(process))

    def wait_until(self, run: subprocess.Popen | None, holds: Callable[[], bool]) -> None:
        """Until a condition holds, while the run, if one is given, goes on."""
        end = time.monotonic() + self.deadline_s
        while not holds():
            assert run is None or run.poll() is None, (self.folder / "out.txt").read_text()
            assert time.monotonic() < end, (self.folder / "out.txt").read_text()
            time.sleep(0.02)

    def run(self, *arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=self.deadline_s,
        )
