"""A run of `megatron-rl grpo` as a process: how it is started, watched, killed and asked to stop, and how it ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from megatron_rl.loop.checkpoints import find_checkpoints
from megatron_rl.observe.records import METRICS, read_lines
from megatron_rl.processes import descendants

ROOT = Path(__file__).resolve().parents[2]
IS_STEP = "rollout/num_samples"
"""The record of a finished step has this metric."""
EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): .+", re.MULTILINE)
"""The last line of a traceback."""
POLL_S = 0.02
"""How often a run is looked at."""
KILLED_S = 30.0
"""How long killed processes may take to end."""


class RunProcess:
    """A run of `megatron-rl grpo` in a process of its own."""

    def __init__(self, folder: Path, name: str, arguments: Sequence[str]) -> None:
        """
        Args:
            folder: gets `NAME.log`, what the run prints, and `runs/NAME`.
            arguments: the run's configuration, without its name and its folder; paths are absolute.
        """
        self.folder, self.name = folder, name
        self.arguments = [*arguments, f"run.name={name}", f"run.folder={folder / 'runs'}"]
        self.num_starts = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / self.name

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def start(self) -> None:
        more = ["--resume", "auto"] if self.num_starts else []
        self.num_starts += 1
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megatron_rl", "grpo", *self.arguments, *more],
                cwd=self.folder,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )

    @property
    def records(self) -> list[dict[str, Any]]:
        path = self.run_folder / METRICS
        return list(read_lines(path)) if path.exists() else []

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint; 0 if there is none."""
        return max(find_checkpoints(self.run_folder / "checkpoints"), default=0)

    def num_done(self) -> int:
        """The number of finished steps that are on record."""
        return sum(IS_STEP in record for record in self.records)

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait()

    def family(self) -> list[psutil.Process]:
        assert self.process is not None
        try:
            return descendants(psutil.Process(self.process.pid))
        except psutil.NoSuchProcess:
            return []


def faults_of_stop(status: int | None, saved: int, done: int, printed: str) -> list[str]:
    """What is wrong with the end of a run that got SIGUSR1.

    Args:
        status: its exit status; None if it did not end in time.
        saved: the step of its newest checkpoint.
        done: the steps that were finished.
        printed: all that the run has printed.
    """
    right = 128 + signal.SIGUSR1
    if status is None:
        return ["The run did not end after SIGUSR1."]
    if status != right:
        return [f"After SIGUSR1 the run ended with status {status} in place of {right}: {last_error(printed)}"]
    faults = (
        [] if saved == done else [f"SIGUSR1 came after {done} steps, but the newest checkpoint is of step {saved}."]
    )
    if "SIGUSR1: stopping now" not in " ".join(printed.split()):
        faults.append("SIGUSR1 came when no answers were under way, so that this was not seen; run the part again.")
    return faults


def wait_until(run: RunProcess, holds: Callable[[], bool], ends_at: float) -> bool:
    """Whether a condition holds before the run or the time has ended."""
    assert run.process is not None, "it was started"
    while not holds():
        if run.process.poll() is not None or time.monotonic() > ends_at:
            return False
        time.sleep(POLL_S)
    return True


def ended(run: RunProcess, ends_at: float) -> int | None:
    """The exit status of a run; None if it has not ended in time and was killed."""
    assert run.process is not None, "it was started"
    try:
        return run.process.wait(max(0.0, ends_at - time.monotonic()))
    except subprocess.TimeoutExpired:
        kill(run)
        return None


def finished(run: RunProcess, ends_at: float) -> str:
    """Wait for the end of a run. Returns why it did not end well; empty if it did."""
    status = ended(run, ends_at)
    if status is None:
        return f"The run was ended after {run.num_done()} steps, because the part's time was over."
    if not status:
        return ""
    message = last_error(run.log.read_text())
    engine = run.run_folder / "logs" / "engine_0.log"
    if "died" in message and engine.exists() and (causes := EXCEPTION.findall(engine.read_text(errors="replace"))):
        message += f"; the last exception in {engine} is {causes[-1]}"
    return f"The run ended with status {status}: {message}"


def last_error(printed: str) -> str:
    """The message of the error that a run has printed, in one line; without one its last line."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.startswith("error:")]
    if not starts:
        return lines[-1] if lines else "it printed nothing"
    message = lines[starts[-1] :]
    end = next((i for i, line in enumerate(message) if line.startswith(("traceback:", "report:"))), len(message))
    return " ".join(message[:end]).removeprefix("error: ")


def kill(run: RunProcess) -> None:
    """Kill the driver of a run and all that it has started, and wait until they have ended."""
    assert run.process is not None, "it was started"
    family = run.family()
    run.process.kill()  # first, so that it starts nothing again
    for process in family:
        if process.is_running():
            process.kill()
    run.process.wait()
    psutil.wait_procs(family, timeout=KILLED_S)  # where nobody waits for orphans, they stay in the table
