"""The two files of a run, `metrics.jsonl` and `samples.jsonl`. Each line is a JSON object with a `step`.

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

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
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
