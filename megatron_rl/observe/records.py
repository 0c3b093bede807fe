"""The two files of a run, `metrics.jsonl` and `samples.jsonl`. Each line is a JSON object with a `step`.

Invariants: a number that is not finite is written as null, and read as missing. Cutting a file at a step leaves exactly
the lines of earlier steps, and removes a last line that a crash left incomplete.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from megatron_rl.processes import open_text

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"


def write_line(file: TextIO, record: Mapping[str, Any]) -> None:
    """Append one record and flush the file, so that a run that dies keeps what it has logged.

    Args:
        file: from `open_text`.
    """
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    file.write(json.dumps(finite, ensure_ascii=False) + "\n")
    file.flush()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete records of a file; an empty list if there is no file.

    Raises:
        ValueError: a complete line is not JSON. The message gives its number.
    """
    if not path.exists():
        return []
    records = []
    # The file is split only at line feeds, because an answer may contain other line separators. The last piece is
    # empty, or it is a line that is being written or that a crash cut, perhaps inside a character.
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number} is not JSON ({error}); remove this line to read the others") from error
    return records


def cut(path: Path, step: int) -> None:
    """Keep only the lines of steps before `step`."""
    kept = [record for record in read_lines(path) if record["step"] < step]
    replacement = path.with_suffix(".tmp")
    with open_text(replacement) as file:
        for record in kept:
            write_line(file, record)
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
