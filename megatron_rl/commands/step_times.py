"""Print where the time of a run's steps goes, who waits for whom, and what would help first.

megatron-rl step-times runs/mine           a table, for a finished or a running run
megatron-rl step-times runs/mine --json    the same for programs
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_rl.observe.records import METRICS, read_metrics, traces_of
from megatron_rl.observe.step_times import Resource, Where, where
from megatron_rl.observe.trace_path import PhaseWork, work_of_phases
from megatron_rl.processes import failed, piped


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, with its metrics.jsonl")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    try:
        if not (given.run / METRICS).exists():
            raise ValueError(f"{given.run} has no {METRICS}; give the folder of a run")
        found = where(read_metrics(given.run))
    except (ValueError, OSError) as error:
        return failed(error)
    traces = [str(path) for path in traces_of(given.run)]
    work = work_of_phases(json.loads(Path(traces[-1]).read_text(encoding="utf-8"))) if traces else []
    if given.json:
        phases = [dataclasses.asdict(one) for one in work]
        print(json.dumps(dataclasses.asdict(found) | {"traces": traces, "newest_trace": phases}, indent=2))
    else:
        show(found, traces, work)
    return 0


def show(found: Where, traces: Sequence[str], work: Sequence[PhaseWork]) -> None:
    table = Table("resource", "value", "share of the step", box=None)
    for resource in found.resources:
        share = "" if resource.share is None else f"{resource.share:.0%}"
        table.add_row(resource.name, _text(resource), share)
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False, markup=False)
    console.print(f"{found.num_steps} steps of {found.seconds:.2f} s each, as the mean")
    console.print(table)
    console.print(f"\npath: {found.path}\nfirst: {found.advice}")
    for path in traces:
        console.print(f"trace: {path} (open it in ui.perfetto.dev)")
    for one in work:  # of the newest trace
        busy = f"{one.process} works longest, {one.busy_s:.2f} s; " if one.process else ""
        console.print(
            f"  {one.phase} {one.seconds:.2f} s: {busy}for {one.nobody_s:.2f} s no other process than the driver"
        )


def _text(resource: Resource) -> str:
    if resource.unit == "share":
        return f"{resource.value:.0%}"
    digits = ",.0f" if resource.value >= 100 else ".2f"
    return f"{resource.value:{digits}} {resource.unit}"


if __name__ == "__main__":
    sys.exit(piped(main))
