"""The files of a run's folder, which every view of a run reads here: `metrics.jsonl` and `samples.jsonl`, whose lines
are JSON objects with a `step`, `config.json`, the warnings and the traces.

Invariants: a number that is not finite is written as null, and read as missing. Cutting a file at a step leaves exactly
the lines of earlier steps, and removes a last line that a crash left incomplete.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

METRICS, SAMPLES, CONFIG = "metrics.jsonl", "samples.jsonl", "config.json"
TRACES, EXPLAINED = "traces", "explained"
WARNINGS = Path("logs", "warnings.log")
"""The file of warnings in the run folder, with lines like `step 12: what is wrong`."""
_STEP = re.compile(rb'\{"step": (\d+),')


def write_line(file: TextIO, record: Mapping[str, Any]) -> None:
    """Append one record and flush the file, so that a run that dies keeps what it has logged.

    Args:
        file: from `open_text`.
    """
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    file.write(json.dumps(finite, ensure_ascii=False) + "\n")
    file.flush()


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The complete lines of a file, each with the place of its first byte; none if there is no file. Only line feeds
    end a line, because an answer may contain other line separators. A last line that is being written, or that a crash
    cut, perhaps inside a character, is left out."""
    if not path.exists():
        return
    place = 0
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield place, line
            place += len(line)


def read_line(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """The record of one line; a number that is not finite is None.

    Args:
        number: counted from 1, for the message.

    Raises:
        ValueError: the line is not JSON, or no record of a step.
    """
    try:
        record: dict[str, Any] = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}:{number} is not JSON ({error}); remove this line to read the others") from error
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        raise ValueError(f"{path}:{number} has no step as a whole number; remove this line to read the others")
    return record


def step_of(line: bytes, path: Path, number: int) -> int:
    """The step of a line. A line that begins with its step, as all of a run do, is not read further.

    Args:
        number: see `read_line`.

    Raises:
        ValueError: see `read_line`.
    """
    begin = _STEP.match(line)
    return int(begin[1] if begin else read_line(line, path, number)["step"])


def read_lines(path: Path, last: int | None = None) -> list[dict[str, Any]]:
    """The complete records of a file; an empty list if there is no file.

    Args:
        last: read only this number of records at the end; None reads all.

    Raises:
        ValueError: a complete line is not JSON. The message gives its number.
    """
    numbered = deque(((number, line) for number, (_, line) in enumerate(lines(path), start=1)), maxlen=last)
    return [read_line(line, path, number) for number, line in numbered]


def cut(path: Path, step: int) -> None:
    """Keep only the lines of steps before `step`."""
    replacement = path.with_suffix(".tmp")
    with replacement.open("wb") as file:
        for number, (_, line) in enumerate(lines(path), start=1):
            if read_line(line, path, number)["step"] < step:
                file.write(line)
    os.replace(replacement, path)


def read_metrics(run_folder: Path) -> list[dict[str, float]]:
    """One record for each step, in ascending order. Lines of the same step are merged: times are added, and for other
    metrics the last value counts."""
    steps: dict[int, dict[str, float]] = {}
    for line in read_lines(run_folder / METRICS):
        merged = steps.setdefault(line["step"], {})
        for name, value in line.items():
            if value is not None:
                merged[name] = merged.get(name, 0.0) + value if name.startswith("time/") else value
    return [steps[step] for step in sorted(steps)]


def read_run(run_folder: Path) -> tuple[list[dict[str, float]], dict[str, Any] | None]:
    """The metrics of a run, and the content of its config.json, which is None if there is no such file.

    Raises:
        ValueError: a file is not JSON.
    """
    metrics = read_metrics(run_folder)
    path = run_folder / CONFIG
    try:
        return metrics, json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); remove it to get a report without it") from error


def read_warnings(run_folder: Path) -> list[dict[str, Any]]:
    """The warnings of a run, each with its `step` and its `text`. A line without a step has the step of the line before
    it."""
    path = run_folder / WARNINGS
    messages: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        begin = re.match(r"step (\d+): ", line)
        step = int(begin[1]) if begin else messages[-1]["step"] if messages else 0
        messages.append({"step": step, "text": line[begin.end() :] if begin else line})
    return messages


def traces_of(run_folder: Path) -> list[Path]:
    """The traces of a run's steps, in the order of the steps."""
    return sorted((run_folder / TRACES).glob("step_*.json"))


def explained_file(run_folder: Path, step: int) -> Path:
    """The file in which `megatron-rl explain` keeps the numbers of a step."""
    return run_folder / EXPLAINED / f"step_{step:06d}.json"


def series(metrics: Sequence[Mapping[str, float]], name: str) -> tuple[list[int], list[float]]:
    """The steps at which the metric was logged, and its values."""
    points = [(int(record["step"]), record[name]) for record in metrics if name in record]
    return [step for step, _ in points], [value for _, value in points]


def time_split(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The seconds of each phase over these steps, the longest first and `other` last. Their sum is the total time."""
    seconds: dict[str, float] = {}
    for record in metrics:
        for name, value in record.items():
            if name.startswith("time/") and name != "time/total_s":
                phase = name.removeprefix("time/").removesuffix("_s")
                seconds[phase] = seconds.get(phase, 0.0) + value
    return dict(sorted(seconds.items(), key=lambda item: (item[0] == "other", -item[1])))


def pace(metrics: Sequence[Mapping[str, float]]) -> tuple[int, float]:
    """The number of training steps, and the mean seconds of one step without evaluations and checkpoints, because how
    often these happen is a setting."""
    steps = sum("reward/mean" in record or "loss" in record for record in metrics)
    split = time_split(metrics)
    seconds = sum(split.values()) - split.get("evaluate", 0.0) - split.get("checkpoint", 0.0)
    return steps, seconds / max(steps, 1)


def heldout(metrics: Sequence[Mapping[str, float]]) -> tuple[str, str]:
    """The (label, metric) of evaluations: the accuracy if there is one, else the mean reward."""
    known = (("held-out accuracy", "eval/accuracy"), ("held-out reward", "eval/reward_mean"))
    return next((pair for pair in known if any(pair[1] in record for record in metrics)), known[0])


def reward_names(metrics: Sequence[Mapping[str, float]]) -> list[str]:
    """The names of the separate rewards, which are logged as `reward/<name>/mean`, in the order of their first record.
    `reward/mean` is the mean of their weighted sum."""
    found = [re.fullmatch("reward/(.+)/(?:mean|abstained)", name) for record in metrics for name in record]
    return list(dict.fromkeys(match[1] for match in found if match))
