from __future__ import annotations

import getpass
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from patience import deadline

from megatron_rl.observe.records import METRICS, read_lines
from megatron_rl.processes import command_line

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NOT_COMPARED = (
    "time/",
    "perf/",
    "memory/",
    "machine/",
    "sync/transfer_s",
    "rollout/tokens_per_s",
    "rollout/idle",
    "stream/asked_again",
    "reward/share_of_digits/seconds",
    "verifier/restarts",
    "slowest_rank/",
    "sync/re",
)
"""The beginnings of the metrics that depend on the machine or on what happened to the run."""


class Slurm:
    """A Slurm on this machine, with the nodes n1, n2 and n3, and a working folder with the tiny task."""

    ON_TWO_NODES = ("slurm={nodes: 1, rollout_nodes: 1, time_limit_h: 1}", "checkpoint.every=1")

    def __init__(self, folder: Path, task: Path) -> None:
        self.daemons = folder / "slurm"
        self.folder = folder / "a working folder"
        self.folder.mkdir()
        for name in ("configs", "recipes"):
            (self.folder / name).symlink_to(ROOT / name)
        shutil.copyfile(ROOT / "tests" / "e2e" / "rewards.py", self.folder / "rewards.py")
        self.task = task
        self.deadline_s = deadline(240)
        """Of whatever is waited for."""
        self.environment = os.environ | {
            "SLURM_CONF": str(self.daemons / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            # A dead node is found sooner than in a job for users.
            "RAY_health_check_period_ms": "2000",
            "RAY_health_check_timeout_ms": "5000",
            "RAY_health_check_failure_threshold": "3",
        }

    def start(self) -> None:
        """Start the daemons that do not run."""
        subprocess.run([HERE / "slurm_up.sh", self.daemons], check=True, timeout=self.deadline_s)

    def stop(self) -> None:
        subprocess.run([HERE / "slurm_down.sh", self.daemons], check=True, timeout=self.deadline_s)

    def call(self, *command: str | Path) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=self.deadline_s
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def recipe(self, name: str, *changes: str) -> list[str]:
        """The arguments of a small run of the tiny task."""
        return [
            "configs/run/tiny_grpo.yaml",
            f"run.name={name}",
            "run.steps=4",
            f"model.path={self.task}/model",
            f"data.train={self.task}/train.jsonl",
            "data.eval=null",
            "rollout.prompts_per_step=8",
            "rollout.samples_per_prompt=4",
            "rollout.max_response_tokens=24",
            "rewards=[{kind: function, path: 'rewards:share_of_digits'}]",
            *changes,
        ]

    def submit(self, *arguments: str, under: Sequence[str] = ()) -> int:
        """Submit `megatron-rl ... --slurm`, under a command that begins the line; returns the job's number."""
        said = self.call(*under, sys.executable, "-m", "megatron_rl", *arguments, "--slurm")
        assert "is submitted" in said, said
        return int(said.partition("Job ")[2].split()[0])

    def job(self, number: int | str) -> dict[str, str]:
        """What Slurm knows of a job, or of a task of an array."""
        text = self.call("scontrol", "--oneliner", "show", "job", str(number)).splitlines()[0]
        return dict(re.findall(r"([\w:/]+)=(.*?)(?= [\w:/]+=|$)", text))

    def wait_until(self, holds: Callable[[], bool], number: int | str) -> None:
        end = time.monotonic() + self.deadline_s
        while not holds():
            assert time.monotonic() < end, f"{self.job(number)}\n{self.output(number)}"
            time.sleep(0.1)

    def ends(self, number: int | str) -> tuple[str, str]:
        """The state and the exit status of a job when it has ended."""
        self.wait_until(lambda: self.has_ended(number), number)
        job = self.job(number)
        return job["JobState"], job["ExitCode"].partition(":")[0]

    def has_ended(self, number: int | str) -> bool:
        living = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD"}
        return self.job(number)["JobState"] not in living

    def newest_job(self) -> int:
        return max(map(int, self.call("squeue", "--noheader", "--states=all", "--format=%A").split()))

    def output(self, number: int | str) -> str:
        path = Path(self.job(number)["StdOut"])
        return path.read_text() if path.exists() else ""

    def processes(self, number: int, variable: str = "SLURM_JOB_ID") -> list[psutil.Process]:
        """The living processes with this variable in their environment."""
        return [p for p in psutil.process_iter() if _variable(p, variable) == str(number)]

    def unused_shared_memory(self) -> set[str]:
        """The files in /dev/shm that no process has mapped: what has outlived its processes."""
        names = set(os.listdir("/dev/shm"))
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with suppress(OSError):  # the process has ended
                text = maps.read_text()
                names = {name for name in names if f"/dev/shm/{name}" not in text}
        return names

    def nodes_of(self, number: int, title: str) -> set[str]:
        """The nodes on which those processes of a job run that have a word in their titles."""
        found = [p for p in self.processes(number) if title in command_line(p)]
        return {_variable(process, "SLURMD_NODENAME") for process in found}

    def metrics(self, name: str) -> list[dict]:
        records = read_lines(self.folder / "runs" / name / METRICS)
        return [{k: v for k, v in record.items() if not k.startswith(NOT_COMPARED)} for record in records]

    # A reward that waits while the file `gate` is there holds a run between two steps: see tests/e2e/rewards.py.
    def close_gate(self) -> None:
        (self.folder / "waiting").unlink(missing_ok=True)
        (self.folder / "gate").touch()

    def open_gate(self) -> None:
        (self.folder / "gate").unlink(missing_ok=True)

    def wait_at_gate(self, number: int) -> None:
        waiting = self.folder / "waiting"
        self.wait_until(lambda: waiting.exists() or self.has_ended(number), number)
        assert waiting.exists(), self.output(number)

    def kill_node(self, name: str) -> None:
        """Kill the daemon of a node, and all processes of jobs on it, as when the machine dies."""
        os.kill(int((self.daemons / "run" / f"slurmd.{name}.pid").read_text()), signal.SIGKILL)
        for process in self.processes(name, "SLURMD_NODENAME"):
            process.kill()


def _variable(process: psutil.Process, name: str) -> str | None:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return process.environ().get(name)
    except psutil.Error:
        return None


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    from megatron_rl.recipes.tiny.task import write_task

    if os.geteuid() != 0 and not shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin:/sbin"):
        pytest.skip("Slurm is not installed, and root installs it: apt-get install slurm-wlm munge")
    task = tmp_path_factory.mktemp("task")
    write_task(task)
    # A short path, because the sockets of munge and Ray have paths of 107 characters at most.
    cluster = Slurm(tmp_path_factory.mktemp("s"), task)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(autouse=True)
def _no_job_outlives_its_test(slurm) -> Iterator[None]:
    yield
    slurm.open_gate()
    slurm.call("scancel", f"--user={getpass.getuser()}")
    slurm.start()
    newest = slurm.newest_job()
    slurm.wait_until(lambda: not slurm.call("squeue", "--noheader"), newest)
    # Slurm 22.05 goes on counting what a job had when one of its nodes died; this makes it count again.
    slurm.call("scontrol", "reconfigure")


@pytest.fixture(scope="module")
def whole(slurm) -> list[dict]:
    """The metrics of a run that nothing disturbs: the first node trains, and the second one rolls out."""
    before = slurm.unused_shared_memory()
    slurm.close_gate()
    number = slurm.submit("grpo", *slurm.recipe("whole", *slurm.ON_TWO_NODES))
    slurm.wait_at_gate(number)
    assert slurm.nodes_of(number, "ray::TrainerRank") == {"n1"}
    assert slurm.nodes_of(number, "ray::EngineRank") == {"n2"}
    assert ",mem=16000M," in slurm.job(number)["TRES"], "all memory of both nodes"
    token = next(filter(None, (process.environ().get("RAY_AUTH_TOKEN") for process in slurm.processes(number))))
    lines = [command_line(process) for process in slurm.processes(number)]
    assert len(token) == 64 and not any(token in line for line in lines)
    slurm.open_gate()
    assert slurm.ends(number) == ("COMPLETED", "0"), slurm.output(number)

    run = slurm.folder / "runs" / "whole"
    assert (run / "report.html").exists() and (run / "hf" / "model.safetensors").exists()
    logs = {path.name for path in (run / "slurm").iterdir()}
    expected = {f"{number}.log", f"{number}_ray_train_n1.log", f"{number}_ray_rollout_n2.log", "train.sbatch"}
    assert expected <= logs
    texts = [path for path in run.rglob("*") if path.suffix in (".log", ".json", ".jsonl", ".sbatch", ".html")]
    assert len(texts) > 8 and not any(token in path.read_text() for path in texts)
    assert token not in slurm.call("scontrol", "show", "job", str(number))
    assert slurm.processes(number) == [] and slurm.unused_shared_memory() <= before
    records = slurm.metrics("whole")
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4]
    assert records[0]["loss"] != records[1]["loss"] and max(r.get("mismatch/mean_abs", 0) for r in records) < 1e-4
    return records
