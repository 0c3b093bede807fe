"""The verified groups of a step in a file, so that the same step can be trained again without engines.

A file is a sequence of records as in the journal (`journal.py`). The first one is JSON: the step, the settings that
made the rollouts, the prompts, the metrics of the rollouts, and the rewards of the greedy answers, if the estimator
needs them. Each other one is a group, in the order of the prompts.

Invariants (tests/unit/data): what is read equals what was written; a file that was cut off or changed is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.data.journal import decode, encode, framed, read_records
from megatron_rl.types import Rollouts, Tokens


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.groups"


def write_step(
    folder: Path, step: int, rollouts: Rollouts, tokens: Iterable[Sequence[Tokens]], settings: Mapping[str, Any]
) -> None:
    """Write the file of a step, in place of an earlier one.

    Args:
        settings: the keys of the configuration that training on these rollouts depends on, with their values in JSON's
            types.
        tokens: the tokens of each group, which are taken one group after the other.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    greedy = rollouts.greedy_rewards
    head: dict[str, Any] = {
        "step": step,
        "settings": settings,
        "prompts": [[group.prompt.messages, group.prompt.columns] for group in rollouts.groups],
        "greedy_rewards": None if greedy is None else greedy.tolist(),
        "metrics": rollouts.metrics,
    }
    partial = path_of(folder, step).with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(framed(json.dumps(head).encode()))
        for number, (group, payload) in enumerate(zip(rollouts.groups, tokens, strict=True)):
            file.write(framed(encode(number, replace(group, payload=payload))))
    os.replace(partial, path_of(folder, step))


def keep_step(folder: Path, step: int) -> None:
    """Let `remove_step` leave the file of a step."""
    path_of(folder, step).with_suffix(".kept").touch()


def remove_step(folder: Path, step: int) -> None:
    """Remove the file of a step, if there is one that is not kept."""
    path = path_of(folder, step)
    if not path.with_suffix(".kept").exists():
        path.unlink(missing_ok=True)


def require_step(folder: Path, step: int) -> Path:
    """The file of a step.

    Raises:
        ValueError: it does not exist.
    """
    path = path_of(folder, step)
    if not path.exists():
        steps = sorted(int(file.stem.removeprefix("step_")) for file in folder.glob("step_*.groups"))
        found = f"it has the steps {steps[0]} to {steps[-1]}" if steps else "it has no step"
        raise ValueError(f"rollout.replay: {folder} has no rollouts of step {step}: {found}")
    return path


def read_step(folder: Path, step: int, settings: Mapping[str, Any] | None = None) -> Rollouts:
    """The rollouts of a step. The payload of a group is its tokens.

    Args:
        settings: what `write_step` must have got; None means that it does not matter.

    Raises:
        ValueError: the file does not exist, is not whole, is another step's, or was written with other settings.
    """
    path = require_step(folder, step)
    head, *blobs = list(read_records(path)) or [b"{}"]
    given = json.loads(head)
    if len(blobs) != len(given.get("prompts", ())) or not blobs:
        raise ValueError(f"rollout.replay: {path} was cut off or changed; write it again with rollout.dump")
    if given.get("step") != step:
        raise ValueError(f"rollout.replay: {path} has the rollouts of step {given.get('step')}; give it its own name")
    for key, value in (settings or {}).items():
        if (before := given["settings"].get(key)) != value:
            raise ValueError(
                f"rollout.replay: {path} was written with {key} {before!r}, but this run has {value!r}; "
                f"give it the settings of the run that wrote the file"
            )
    groups = []
    for blob, (messages, columns) in zip(blobs, given["prompts"], strict=True):
        _, group = decode(blob)
        messages = messages if isinstance(messages, str) else tuple(messages)
        groups.append(replace(group, prompt=replace(group.prompt, messages=messages, columns=columns)))
    greedy = given["greedy_rewards"]
    return Rollouts(groups, None if greedy is None else np.array(greedy, np.float64), given["metrics"])
