"""Write rows of tasks of the library reasoning-gym, for rewards of the kind `reasoning_gym`.

Each task gives `--size` rows, in the order of the tasks. A row has the question in `messages`, `reasoning_gym/TASK` in
`dataset`, and in `ground_truth` what the task's scorer needs. The same arguments give the same file. The library is
needed: pip install 'megatron-rl[reasoning-gym]'.

    megatron-rl reasoning-gym-rows leg_counting mini_sudoku --size 1000 --out rows.jsonl
    megatron-rl reasoning-gym-rows leg_counting --config leg_counting.max_animals=5 --out rows.jsonl
    megatron-rl reasoning-gym-rows --list
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.processes import message_of, open_text, piped, read_text
from megatron_rl.verifiers.reasoning_gym import REFUSED, library, missing_package

HASH_SEED = "0"
"""Some tasks draw from sets, whose order depends on it."""


def task_names() -> list[str]:
    """The tasks that can be written."""
    library()
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS.keys() - REFUSED.keys())


def checked_tasks(tasks: Sequence[str]) -> list[str]:
    """
    Raises:
        ValueError: there is no task, or one of them is unknown, is refused, or is named twice.
    """
    known = task_names()
    for task in tasks:
        if task in REFUSED:
            raise ValueError(f"the task {task} has no rows: {REFUSED[task]}")
        if task not in known:
            raise ValueError(f"there is no task {task!r}{_nearest(task, known)}; --list prints all tasks")
        if tasks.count(task) > 1:
            raise ValueError(f"the task {task} is named twice; name it once, with a larger --size")
    if not tasks:
        raise ValueError("name one or more tasks; --list prints all tasks")
    return list(tasks)


def configurations(settings: Sequence[str], tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The settings of each task, from the values of `--config` in their order: `task.key=value`, or a YAML file with a
    mapping of settings for each task.

    Raises:
        ValueError: a setting cannot be read, or is one of a task that is not written.
    """
    found: dict[str, dict[str, Any]] = {task: {} for task in tasks}
    for setting in settings:
        name, equals, value = setting.partition("=")
        task, dot, key = name.partition(".")
        try:
            given = {task: {key: yaml.safe_load(value)}} if equals else yaml.safe_load(read_text(Path(setting)))
        except yaml.YAMLError as error:
            raise ValueError(f"--config {setting}: the value is not YAML: {error}") from error
        if equals and not (dot and key):
            raise ValueError(f"--config {setting} must have the form task.key=value, or be the name of a YAML file")
        if not (isinstance(given, dict) and all(isinstance(one, dict) for one in given.values())):
            raise ValueError(f"--config {setting}: the file must be a mapping from tasks to mappings of their settings")
        for task, own in given.items():
            if task not in found:
                raise ValueError(f"--config {setting}: {task} is none of the tasks {', '.join(tasks)}; remove it")
            found[task] |= own
    return found


def rows_of(task: str, config: Mapping[str, Any], size: int, seed: int) -> Iterator[dict[str, Any]]:
    """The rows of a task.

    Raises:
        ValueError: the task does not take this configuration, cannot make a row, or its row has no form in JSON.
    """
    package = library()
    from reasoning_gym.factory import DATASETS

    keys = {field.name for field in fields(DATASETS[task][1])} - {"size", "seed"}
    for key in config:
        if key in ("size", "seed"):
            raise ValueError(f"--config {task}.{key}: give it for all tasks, with --{key}")
        if key not in keys:
            raise ValueError(f"--config: {task} has no setting {key!r}{_nearest(key, keys)}; it has {sorted(keys)}")
    try:
        entries = package.create_dataset(task, size=size, seed=seed, **config)
    except Exception as error:  # each task has its own exceptions
        raise ValueError(f"{task} refuses its configuration: {_said(error)}; correct --config or --size") from error
    for index in range(size):
        try:
            entry = entries[index]
        except Exception as error:  # as above
            raise ValueError(f"{task} cannot make row {index + 1}: {_said(error)}; correct --config") from error
        truth = {"task": task, "answer": entry["answer"], "metadata": entry["metadata"], "config": dict(config)}
        try:
            json.dumps(truth, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{task}, row {index + 1}: its ground truth has no form in JSON: {error}") from error
        messages = [{"role": "user", "content": entry["question"]}]
        yield {"messages": messages, "dataset": f"reasoning_gym/{task}", "ground_truth": truth}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _nearest(name: str, known: Sequence[str] | set[str]) -> str:
    near = get_close_matches(name, sorted(known), n=1, cutoff=0)
    return f"; the nearest is {near[0]}" if near else ""


def write_rows(out: Path, rows: Iterator[Mapping[str, Any]]) -> int:
    """Write JSON lines, and return their number. The file has its name when it is complete."""
    part, num = out.with_name(f"{out.name}.part"), 0
    try:
        with open_text(part) as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
                num += 1
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    return num


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK")
    parser.add_argument("--size", type=int, default=500, help="the number of rows of each task (default: 500)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of each task (default: 0)")
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="TASK.KEY=VALUE | FILE.yaml",
        help="settings of the tasks; may be given several times",
    )
    parser.add_argument("--out", type=Path, help="the file of the rows")
    parser.add_argument("--list", action="store_true", help="print the tasks, and write nothing")
    options = parser.parse_args(arguments)
    if fault := missing_package():
        parser.error(fault)
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:  # Python reads it when it starts
        given = sys.argv[1:] if arguments is None else arguments
        again = [sys.executable, "-m", "megatron_rl.commands.reasoning_gym_rows", *given]
        return subprocess.run(again, env=os.environ | {"PYTHONHASHSEED": HASH_SEED}).returncode
    try:
        if options.list:
            print(*task_names(), sep="\n")
            return 0
        tasks = checked_tasks(options.tasks)
        if options.size < 1:
            raise ValueError(f"--size {options.size} must be 1 or more")
        if options.out is None:
            raise ValueError("give the file of the rows with --out")
        configs = configurations(options.config, tasks)
        rows = (row for task in tasks for row in rows_of(task, configs[task], options.size, options.seed))
        num = write_rows(options.out, rows)
    except (ValueError, OSError) as error:
        parser.error(message_of(error))
    print(f"{options.out}: {num} rows of {len(tasks)} tasks")
    return 0


if __name__ == "__main__":
    sys.exit(piped(main))
