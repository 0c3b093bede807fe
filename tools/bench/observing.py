"""Measure what watching a run costs: the demo with nothing that watches it, as it is by default, and with everything.

    off        nothing; not even the machines are read
    default    memory and machines as metrics
    all        these, the endpoint for Prometheus with vLLM's own metrics, and a trace of every step

The modes take turns, in an order that changes from round to round. All runs of a mode do the same work to the bit, so a
round's ratio compares equal steps. The first two are left out. The ratio needs a quiet machine. `watching` is what
the driver itself spends on watching, as a share of the step, which is about the same on a busy one.

    python tools/bench/observing.py
    python tools/bench/observing.py --json --rounds 5 --steps 12
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TypeVar

from megatron_rl.observe import RunSink
from megatron_rl.observe.records import read_metrics
from megatron_rl.observe.sink import Watcher
from megatron_rl.types import Metrics

Result = TypeVar("Result")

ROOT = Path(__file__).resolve().parents[2]
MODES = ("off", "default", "all")
NUM_WARM = 2
"""The number of first steps that are left out."""
PORT = 19400
WATCHING = "watching.json"
"""The file with the seconds that the driver spent on watching in each step."""


class Timed:
    """A watcher of the sink that measures another one."""

    def __init__(self, watcher: Watcher, seconds: list[float]) -> None:
        """
        Args:
            seconds: what it spends in each step is added here.
        """
        self._watcher, self._seconds = watcher, seconds
        self.close = watcher.close

    def begin(self, step: int) -> None:
        self._spend(step, self._watcher.begin)

    def end(self, step: int) -> Metrics:
        return self._spend(step, self._watcher.end)

    def _spend(self, step: int, work: Callable[[int], Result]) -> Result:
        start = time.perf_counter()
        result = work(step)
        self._seconds.extend([0.0] * (step + 1 - len(self._seconds)))
        self._seconds[step] += time.perf_counter() - start
        return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="the number of runs of each mode")
    parser.add_argument("--steps", type=int, default=12, help="the number of steps of a run, %(default)s by default")
    parser.add_argument(
        "--modes", nargs="+", default=list(MODES), choices=MODES, help="`off` and what is compared to it"
    )
    parser.add_argument("--settings", nargs="*", default=[], metavar="section.key=value", help="changes of the demo")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.mode is not None:
        return run(options.mode, options.folder, options.steps, options.settings)
    if "off" not in options.modes:
        parser.error("--modes must have `off`, to which the others are compared")
    if options.steps <= NUM_WARM:
        parser.error(f"--steps must be above {NUM_WARM}, the number of steps that are left out")
    with tempfile.TemporaryDirectory() as folder:
        given = ["--steps", str(options.steps), "--settings", *options.settings]
        rounds = [measured(Path(folder), number, options.modes, given) for number in range(options.rounds)]
    ratios = {mode: sorted(one[mode] / one["off"] for one in rounds) for mode in options.modes}
    seconds = {mode: median(one[mode] for one in rounds) for mode in options.modes}
    watching = {mode: median(one[f"{mode} watching"] / one[mode] for one in rounds) for mode in options.modes}
    if options.json:
        told = {
            mode: {"seconds_of_a_step": seconds[mode], "watching": watching[mode], "ratios": ratios[mode]}
            for mode in options.modes
        }
        print(json.dumps(told))
    else:
        for mode, own in ratios.items():
            spread = f"{own[0]:.4f} to {own[-1]:.4f}"
            print(
                f"{mode:<8} {seconds[mode]:.4f} s a step, {watching[mode]:.2%} of it for watching, {median(own):.4f} "
                f"times off ({spread})"
            )
    return 0


def measured(folder: Path, number: int, modes: Sequence[str], given: Sequence[str]) -> dict[str, float]:
    """The mean seconds of a step in each mode, in one round, and under `MODE watching` the driver's for watching.

    Args:
        given: the other options of each run.
    """
    order = [*modes[number % len(modes) :], *modes[: number % len(modes)]]
    found = {}
    for mode in order:
        home = folder / f"{number}_{mode}"
        command = [sys.executable, __file__, "--mode", mode, "--folder", str(home), *given]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the run {mode} failed:\n{done.stdout}{done.stderr}")
        seconds = [record["time/total_s"] for record in read_metrics(home / "grpo") if "time/update_s" in record]
        found[mode] = sum(seconds[NUM_WARM:]) / len(seconds[NUM_WARM:])
        spent = json.loads((home / WATCHING).read_text())[NUM_WARM : len(seconds)]
        found[f"{mode} watching"] = sum(spent) / len(seconds[NUM_WARM:])
    return found


def run(mode: str, folder: Path, steps: int, settings: Sequence[str]) -> int:
    """The demo in this process, in one mode."""
    from megatron_rl.cluster import watchers
    from megatron_rl.commands import grpo
    from megatron_rl.recipes.tiny.demo import WARM_START
    from megatron_rl.recipes.tiny.task import write_task

    write_task(folder / "task")
    observe = "[]"
    if mode == "off":
        watchers.observe_run = lambda config, sink, groups: None
    elif mode == "all":
        traced = ", ".join(map(str, range(steps)))
        observe = f"[{{kind: prometheus, port: {PORT}, engines: true}}, {{kind: trace, steps: [{traced}]}}]"
    spent: list[float] = []
    watch = RunSink.watch
    RunSink.watch = lambda self, watchers: watch(self, [Timed(one, spent) for one in watchers])  # type: ignore[method-assign]
    status = grpo.main(
        [
            "configs/run/tiny_grpo.yaml",
            f"run.folder={folder}",
            "run.name=grpo",
            f"run.steps={steps}",
            f"model.path={WARM_START}",
            f"data.train={folder}/task/train.jsonl",
            "data.eval=null",
            "checkpoint.every=0",
            f"observe={observe}",
            *settings,
        ]
    )
    (folder / WATCHING).write_text(json.dumps(spent))
    return status


if __name__ == "__main__":
    sys.exit(main())
