"""Check on one GPU what a CPU cannot show, in one command of less than fifteen minutes (parts.py), or
on all GPUs of a node (node.py), or the whole loop on one GPU (loop.py).

The parts compare loss and gradient with a CPU's, log-probs in chunks with log-probs of whole logits, and kernels of
attention with padded calls in fp32; they push weights between two processes through CUDA IPC, resume a checkpoint,
offload the optimizer's state, and measure memory, time, FLOPs and rates for the planner. `--parts` chooses some, in its
order. Every part runs in a process of its own, which is ended at its deadline; what fails, crashes or hangs does not
stop the others. Numbers are printed as they come. FOLDER gets RECORD.md and record.json, which are rewritten after each
part, the log of each part, and calibration.json, the measured rates for `cluster.calibration`. Ctrl-C and SIGTERM end
the part that runs, and the record says what was not run. The exit status is 0 if all parts have passed, and 130 after
Ctrl-C.

    megatron-rl gpu-day --out runs/gpu_day
    megatron-rl gpu-day --out runs/gpu_day --device cpu
    megatron-rl gpu-day --out runs/gpu_day --parts rates "ragged rows"
    megatron-rl gpu-day --node models/Qwen3-0.6B --out runs/gpu_node
    megatron-rl gpu-day --loop models/SmolLM2-135M-Instruct --out runs/gpu_loop

Without a GPU the parts run with tiny sizes over gloo and shared memory, which takes a minute on a quiet core. The
parts for a node then train the real model for two steps, and the parts of the loop for three.

Nothing starts on a GPU whose memory is not free, or without a driver for torch's CUDA; a part that finds another
program on the GPU later ends with one sentence, and the others run. The loop needs vLLM, Ray and transformers, and
takes less than fifteen minutes, too.

On a single GPU it needs torch and the packages below. vLLM, Ray, transformers and Transformer Engine are not needed. If
the GPU machine has no network, download the wheels (22 MB) elsewhere, with the GPU machine's Python version and
platform in this command:

    pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \\
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64 -d wheels \\
        megatron-core==0.16.1 pydantic==2.14.3 pydantic-core==2.50.4 annotated-types typing-inspection \\
        typing-extensions numpy packaging pyyaml psutil rich safetensors

and on the GPU machine, in the clone, with the folder `wheels` in it:

    pip install --no-index --no-deps --target gpu_packages wheels/*.whl
    PYTHONPATH=$PWD:$PWD/gpu_packages python -m megatron_rl.tools.bench.gpu_day.command --out runs/gpu_day
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from threading import Event
from typing import Any

import torch

from megatron_rl.commands.gpus import fault_of_memory, fault_of_torch, visible_ids
from megatron_rl.config.machine import count_gpus
from megatron_rl.tools.bench.gpu_day.loop import LOOP_PARTS, LoopPart, measure_loop
from megatron_rl.tools.bench.gpu_day.node import NODE_PARTS, NodePart
from megatron_rl.tools.bench.gpu_day.parts import PARTS, GpuPart
from megatron_rl.tools.bench.gpu_day.sizes import Found

ROOT = Path(__file__).resolve().parents[3]
CPU_PATIENCE = 10
"""A part may take this many times as long on a CPU, because other processes may use it too."""
FREED_S = 20.0
"""How long the memory of a GPU may take to be free when the part before has ended."""
TICK_S = 0.2
"""How often a running part's deadline, and a request to stop, are looked at."""


@dataclass(frozen=True, slots=True)
class PartJob:
    """A part as a process. It leaves `found.json` in the folder of its name."""

    name: str
    command: Sequence[str]
    limit_s: float


@dataclass(frozen=True, slots=True)
class PartOutcome:
    name: str
    status: str = "not run"
    """`passed`, `failed`, `stopped` (by Ctrl-C or SIGTERM), or `not run`."""
    why: str = ""
    seconds: float = 0.0
    numbers: Mapping[str, Any] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Record:
    """RECORD.md, record.json and calibration.json, but for the outcomes."""

    device: str
    command: str
    commit: str
    begun: str
    purposes: Mapping[str, str] = field(default_factory=dict)
    """What each part does, by its name."""

    def write(self, folder: Path, outcomes: Sequence[PartOutcome]) -> None:
        """Write the files. Each is replaced as a whole, so that a kill leaves the one before."""
        content = {**asdict(self), "parts": [asdict(outcome) for outcome in outcomes]}
        rates = {name: rate for one in outcomes if one.status == "passed" for name, rate in one.rates.items()}
        texts = {"record.json": json.dumps(content, indent=1), "RECORD.md": self.text(outcomes)}
        if rates:
            texts["calibration.json"] = json.dumps(rates, indent=1)
        for name, text in texts.items():
            path = folder / f"{name}.new"
            path.write_text(text + "\n")
            path.replace(folder / name)

    def text(self, outcomes: Sequence[PartOutcome]) -> str:
        passed = sum(outcome.status == "passed" for outcome in outcomes)
        where = "one GPU" if self.device == "cuda" else "a CPU, with tiny sizes"
        rows = [
            "# GPU checks",
            "",
            f"**{passed} of {len(outcomes)} parts have passed** on {where}. The command was `{self.command}`, begun "
            f"{self.begun}, at the commit `{self.commit}`.",
            "",
            "| part | what it does | result | seconds | why |",
            "|---|---|---|---|---|",
        ]
        for one in outcomes:
            purpose = self.purposes.get(one.name, "")
            rows.append(f"| {one.name} | {purpose} | {one.status} | {one.seconds:.1f} | {_cell(one.why)} |")
        for one in outcomes:
            if one.numbers:
                rows += ["", f"## {one.name}", "", "| | |", "|---|---|"]
                rows += [f"| {_cell(name)} | {_cell(_shown(value))} |" for name, value in one.numbers.items()]
        return "\n".join(rows)


def _cell(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def run_jobs(
    jobs: Sequence[PartJob], folder: Path, environment: Mapping[str, str], record: Record, stop: Event
) -> list[PartOutcome]:
    """Run the jobs one after another, until `stop` is set, and write the record after each."""
    outcomes = {job.name: PartOutcome(job.name) for job in jobs}
    record.write(folder, [*outcomes.values()])
    for job in jobs:
        if stop.is_set():
            break
        print(f"{job.name} ...", flush=True)
        outcomes[job.name] = outcome = run_job(job, folder / job.name, environment, stop)
        numbers = [f"\n    {name}: {_shown(value)}" for name, value in outcome.numbers.items()]
        result = f"{job.name}: {outcome.status} in {outcome.seconds:.1f} s. {outcome.why}".rstrip()
        print(result + "".join(numbers), flush=True)
        record.write(folder, [*outcomes.values()])
    return [*outcomes.values()]


def run_job(job: PartJob, folder: Path, environment: Mapping[str, str], stop: Event) -> PartOutcome:
    """Run a job to its end, to its deadline, or until `stop` is set. No process that it has started outlives it.

    Args:
        folder: gets the log of the job, and what the job itself leaves.
    """
    folder.mkdir(parents=True)
    log, found, start = folder / "log.txt", folder / "found.json", time.monotonic()
    # A process that dies may still write while its folder is removed.
    with log.open("wb") as output, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        process = subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, "TMPDIR": temporary},
            start_new_session=True,  # Ctrl-C goes to this process alone, and a job can be ended as one group
        )
        while process.poll() is None and not stop.is_set() and time.monotonic() < start + job.limit_s:
            with suppress(subprocess.TimeoutExpired):
                process.wait(TICK_S)
        ended = process.poll() is not None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    seconds = time.monotonic() - start
    if not ended and stop.is_set():
        return PartOutcome(job.name, "stopped", "Ctrl-C or SIGTERM ended it.", seconds)
    if not ended:
        why = f"It was ended at its deadline of {job.limit_s:g} s; {log} has the stacks of its main process."
        return PartOutcome(job.name, "failed", why, seconds)
    if process.returncode or not found.exists():
        return PartOutcome(job.name, "failed", _ending(process.returncode, log), seconds)
    content = json.loads(found.read_text())
    problems, status = " ".join(content["problems"]), "failed" if content["problems"] else "passed"
    return PartOutcome(job.name, status, problems, seconds, content["numbers"], content.get("rates", {}))


def _ending(status: int, log: Path) -> str:
    """How a process ended that has found nothing."""
    lines = log.read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return f"It ended with {how}; the last line of {log} is: {last}"


@dataclass(frozen=True, slots=True)
class DayKind:
    """Which parts there are: for one GPU, for a node, or for the loop."""

    option: str = ""
    """`--node` or `--loop`; empty for one GPU."""
    model: Path | None = None
    """The folder of the model that the option names."""

    @property
    def parts(self) -> Mapping[str, GpuPart | NodePart | LoopPart]:
        kinds: dict[str, Mapping[str, GpuPart | NodePart | LoopPart]] = {"--node": NODE_PARTS, "--loop": LOOP_PARTS}
        return kinds.get(self.option, PARTS)

    @property
    def gpus(self) -> list[str]:
        """The GPUs that must be free, as `fault_of_memory` takes them; none means all."""
        return visible_ids() if self.option == "--node" else visible_ids()[:1] or ["0"]


def measure(name: str, device: str, kind: DayKind, path: Path) -> None:
    """What a part's process does."""
    part = kind.parts[name]
    limit = limit_s(part.limit_s, device)
    faulthandler.dump_traceback_later(0.9 * limit)  # for the log of a part that hangs
    try:
        found = _found(part, device, kind, path.parent, limit)
    finally:  # Python would wait for them at its end
        for child in multiprocessing.active_children():
            child.kill()
    path.write_text(json.dumps(asdict(found)))


def _found(part: GpuPart | NodePart | LoopPart, device: str, kind: DayKind, folder: Path, limit: float) -> Found:
    if device == "cuda" and (fault := fault_of_memory(kind.gpus, FREED_S)):
        return Found({}, [fault])
    if isinstance(part, GpuPart):
        return part.measure(device)
    assert kind.model is not None, "the other kinds have a model"
    if isinstance(part, NodePart):
        return part.measure(device, kind.model)
    return measure_loop(part, device, kind.model, folder, limit)


def limit_s(on_gpu: float, device: str) -> float:
    return on_gpu if device == "cuda" else CPU_PATIENCE * on_gpu


def commit() -> str:
    """The commit of the clone, with `-dirty` if files differ from it; or that there is none."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(FileNotFoundError):
        if (done := subprocess.run(command, capture_output=True, text=True)).returncode == 0:
            return done.stdout.strip()
    return "unknown, because this is no clone"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_day"), help="a new folder (default: runs/gpu_day)")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="the default is the GPU if there is one")
    models = parser.add_mutually_exclusive_group()
    models.add_argument("--node", type=Path, metavar="MODEL", help="check the whole node, with this model's folder")
    models.add_argument("--loop", type=Path, metavar="MODEL", help="check the whole loop on one GPU, with this model")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="these parts alone, in this order")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    kind = DayKind("--node" if args.node else "--loop" if args.loop else "", args.node or args.loop)
    if args.part:
        measure(args.part, args.device, kind, args.out)
        return 0
    device = args.device or ("cuda" if torch.cuda.is_available() or count_gpus() else "cpu")
    if fault := refusal(kind, device, args.out, args.parts or ()):
        print(fault, file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    stop = Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # an exception at any moment could leave a part behind
        signal.signal(number, lambda *unused: stop.set())
    outcomes = run_jobs(
        [job_of(name, device, args.out, kind) for name in dict.fromkeys(args.parts or kind.parts)],
        args.out,
        environment_of(device),
        Record(
            device,
            shlex.join(sys.argv),
            commit(),
            f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z}",
            {name: part.purpose for name, part in kind.parts.items()},
        ),
        stop,
    )
    print(f"the record is {args.out / 'RECORD.md'}")
    statuses = {outcome.status for outcome in outcomes}
    return 130 if stop.is_set() else 0 if statuses == {"passed"} else 1


def refusal(kind: DayKind, device: str, out: Path, parts: Sequence[str]) -> str:
    """Why no part can start; empty if they can."""
    known = list(kind.parts)
    if unknown := [name for name in parts if name not in known]:
        return f"there is no part {', '.join(unknown)}; the parts are: {'; '.join(known)}"
    if out.exists() and any(out.iterdir()):
        return f"{out} is not empty, and a record is never mixed with another; give a new folder"
    if kind.model is not None and not (kind.model / "config.json").is_file():
        return f"{kind.model} is no folder of a model; give one with config.json, weights and a tokenizer"
    if device != "cuda":
        return ""
    if fault := fault_of_torch():
        return f"{fault}; or give --device cpu, which runs tiny sizes"
    return fault_of_memory(kind.gpus)


def job_of(name: str, device: str, folder: Path, kind: DayKind = DayKind()) -> PartJob:
    """A part as a job of `run_job` in the folder `folder / name`."""
    found = str(folder / name / "found.json")
    module = "megatron_rl.tools.bench.gpu_day.command"
    command = [sys.executable, "-m", module, "--part", name, "--device", device, "--out", found]
    command += [kind.option, str(kind.model)] if kind.option else []
    return PartJob(name, command, limit_s(kind.parts[name].limit_s, device))


def environment_of(device: str) -> dict[str, str]:
    """The environment of a part's process."""
    return dict(os.environ) if device == "cuda" else {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


if __name__ == "__main__":
    sys.exit(main())
