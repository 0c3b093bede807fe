"""Kill the processes of a run while it trains, and compare its numbers with an undisturbed run.

    python tools/bench/chaos.py [--steps 150] [--every 30] [--mirror | --shared] [--json]

Every few seconds a random process of the run gets SIGKILL or SIGSTOP: an engine, a trainer rank, the verifier, a
mirror, or one of Ray's own; or the driver gets SIGINT, SIGTERM or SIGUSR1, and must end with a checkpoint of the newest
step. If the run ends because it was asked to, or because Ray itself was lost, it is started again with `--resume auto`,
as Slurm does it. The exit status is 0 if every check holds.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from megatron_rl.processes import command_line
from megatron_rl.tools.bench.run_process import IS_STEP, ROOT, RunProcess

PATTERNS = {
    "engine": "ray::EngineRank",
    "trainer rank": "ray::TrainerRank",
    "verifier": "ray::VerifierRank",
    "mirror": "ray::MirrorHolder",
    "Ray's node": "/raylet/raylet ",
    "Ray's control": "/gcs/gcs_server ",
}
"""Text in the command lines of the processes that are disturbed."""
DRIVER = "driver"
STOPS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
PROMPTS, SAMPLES = 16, 8
POLL_S = 0.05
ATTEMPTS = 20
"""How often the run is started again at most."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    kind: str
    signal: str
    at_step: int
    """The number of steps that were finished."""
    recovered_s: float | None
    """The seconds until a step was finished that was not finished before; None if the run ended first."""
    restarted: bool
    """Whether the run itself had to be started again meanwhile."""


def configuration(folder: Path, steps: int, mirror: bool, shared: bool) -> list[str]:
    """The configuration of a run with the demo's task, which is in `folder / "task"`."""
    return [
        str(ROOT / "configs/run/tiny_grpo.yaml"),
        f"run.steps={steps}",
        f"model.path={folder}/task/model",
        f"data.train={folder}/task/train.jsonl",
        "data.eval=null",
        "policy.parallel={tensor: 2}",
        "rollout.num_engines=2",
        f"rollout.prompts_per_step={PROMPTS}",
        f"rollout.samples_per_prompt={SAMPLES}",
        "rollout.max_response_tokens=48",
        "rewards=[{kind: function, path: 'megatron_rl.recipes.tiny.rewards:digits_in_answer', timeout_s: 15}]",
        "checkpoint={every: 10, keep: 2}",
        f"cluster={json.dumps({'mirror': mirror, 'colocate': shared, 'restarts_per_hour': 1000})}",
        "cluster.start_timeout_s=90",
        "cluster.step_timeout_s=15",
        "bridge.timeout_s=15",
    ]


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def disturb(
    run: RunProcess, every_s: float, generator: random.Random, most: float = inf
) -> tuple[list[Disturbance], list[str], list[psutil.Process]]:
    """Start the run, and disturb it until it is finished, at most `most` times; returns also the stops that ended
    otherwise than they should, and every process that the run ever had."""
    done: list[Disturbance] = []
    wrong: list[str] = []
    seen: set[psutil.Process] = set()
    run.start()
    pending: tuple[str, str, int, float, int] | None = None
    next_at = time.monotonic() + every_s
    while True:
        time.sleep(POLL_S)
        assert run.process is not None
        now, ended = time.monotonic(), run.process.poll()
        num_done = run.num_done()
        if pending is not None and num_done > pending[2]:
            kind, name, at_step, since, starts = pending
            done.append(Disturbance(kind, name, at_step, now - since, run.num_starts > starts))
            pending = None
        if ended == 0 or (ended is not None and run.num_starts == ATTEMPTS):
            if pending is not None:
                done.append(Disturbance(*pending[:3], None, False))
            return done, wrong, list(seen)
        if ended is not None:
            if pending is not None and pending[0] == DRIVER:
                right = 128 + signal.Signals[pending[1]]
                if ended != right or run.saved != num_done:
                    wrong.append(f"{pending[1]} after {num_done} steps: status {ended}, step {run.saved} is saved")
            run.start()
        elif now >= next_at and pending is None and num_done and len(done) < most:
            family = run.family()
            seen.update(family)
            kind = generator.choice([*PATTERNS, DRIVER])
            chosen = generator.choice(STOPS if kind == DRIVER else [signal.SIGKILL, signal.SIGSTOP])
            if kind == DRIVER:
                victims = [psutil.Process(run.process.pid)]
            else:
                victims = [process for process in family if PATTERNS[kind] in f"{command_line(process)} "]
            if victims:
                pending = kind, chosen.name, num_done, now, run.num_starts
                next_at = now + every_s
                try:
                    generator.choice(victims).send_signal(chosen)
                except psutil.NoSuchProcess:
                    pending = None


def numbers(records: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Step, loss, gradient norm and mean reward of each step. A step without any group with a signal has no loss."""
    return [(r["step"], r.get("loss"), r.get("grad_norm"), r["reward/mean"]) for r in records if IS_STEP in r]


def check(
    whole: Sequence[dict[str, Any]], disturbed: Sequence[dict[str, Any]], steps: int, num_samples: int
) -> dict[str, bool]:
    """What must hold for the records of the two runs.

    Args:
        num_samples: the answers of a step.
    """
    samples = [r[IS_STEP] == num_samples for r in disturbed if IS_STEP in r]
    return {
        "all steps are finished": len(samples) == steps,
        "losses, gradient norms and rewards are those of the undisturbed run": numbers(disturbed) == numbers(whole),
        "every prompt has all of its answers": all(samples),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="the steps of the run (default: 150)")
    parser.add_argument("--every", type=float, default=30, help="seconds between disturbances (default: 30)")
    parser.add_argument("--most", type=int, default=inf, help="the largest number of disturbances (default: no bound)")
    parser.add_argument("--seed", type=int, default=0, help="chooses processes and signals (default: 0)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--mirror", action="store_true", help="keep mirrors of the trainer's state")
    kind.add_argument("--shared", action="store_true", help="trainers and engines share their memory")
    parser.add_argument("--folder", type=Path, help="keep the runs in this folder (default: a temporary one)")
    parser.add_argument("--settings", nargs="*", default=[], metavar="section.key=value", help="changes of both runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        task = [sys.executable, str(ROOT / "recipes/tiny/task.py"), str(folder / "task")]
        subprocess.run(task, check=True, stdout=sys.stderr)  # stdout is for the result
        arguments = [*configuration(folder, given.steps, given.mirror, given.shared), *given.settings]
        whole = RunProcess(folder, "undisturbed", arguments)
        before = shared_memory()
        start = time.monotonic()
        whole.start()
        if whole.wait():
            raise SystemExit(f"the undisturbed run failed: {whole.log.read_text()[-2000:]}")
        whole_s = time.monotonic() - start
        run = RunProcess(folder, "disturbed", arguments)
        start = time.monotonic()
        disturbances, wrong, processes = disturb(run, given.every, random.Random(given.seed), given.most)
        seconds = time.monotonic() - start
        checks = check(whole.records, run.records, given.steps, PROMPTS * SAMPLES)
        psutil.wait_procs(processes, timeout=90)  # Ray's own agents end a minute after a driver that was killed
        orphans = [f"{p.pid} {command_line(p)[:80]}" for p in processes if p.is_running() and command_line(p)]
        checks["every stop had its status and a checkpoint of the newest step"] = not wrong
        checks["no process is left"] = not orphans
        checks["no shared memory is left"] = shared_memory() <= before
        result = {
            "mirror": given.mirror,
            "shared": given.shared,
            "steps": given.steps,
            "undisturbed_s": whole_s,
            "disturbed_s": seconds,
            "starts": run.num_starts,
            "checks": checks,
            "orphans": orphans,
            "wrong_stops": wrong,
            "disturbances": [asdict(one) for one in disturbances],
        }
        if given.json:
            print(json.dumps(result))
        else:
            tell(result, disturbances, Console())
    return 0 if all(checks.values()) else 1


def tell(result: dict[str, Any], disturbances: Sequence[Disturbance], console: Console) -> None:
    how = "with mirrors" if result["mirror"] else "with shared memory" if result["shared"] else "without mirrors"
    table = Table(title=f"seconds from a signal to the next finished step, {how}", title_justify="left")
    for heading in ("process", "signal", "times", "mean", "longest", "run started again"):
        table.add_column(heading)
    for kind, name in sorted({(one.kind, one.signal) for one in disturbances}):
        of_kind = [one for one in disturbances if (one.kind, one.signal) == (kind, name)]
        seconds = [one.recovered_s for one in of_kind if one.recovered_s is not None]
        mean, longest = (f"{fmean(seconds):.1f}", f"{max(seconds):.1f}") if seconds else ("", "")
        table.add_row(kind, name, str(len(of_kind)), mean, longest, str(sum(one.restarted for one in of_kind)))
    console.print(table)
    console.print(
        f"{result['steps']} steps took {result['undisturbed_s']:.0f} s without and {result['disturbed_s']:.0f} s with "
        f"{len(disturbances)} disturbances, in {result['starts']} starts"
    )
    for what, holds in result["checks"].items():
        console.print(f"{'yes' if holds else '[red]NO [/]'}  {what}")
    for stop in result["wrong_stops"]:
        console.print(f"     {stop}", markup=False)
    for orphan in result["orphans"]:
        console.print(f"     left: {orphan}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
