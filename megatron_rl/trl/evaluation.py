"""An evaluation of rows that are no part of a training: a run that stops when it has evaluated its model."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from megatron_rl.api import Inputs, start
from megatron_rl.trl.rewards import GivenRewards
from megatron_rl.trl.sections import Given


def evaluated(given: Given, rewards: GivenRewards, model: Path, output: Path) -> dict[str, float]:
    """The record of the evaluation, by our names.

    Args:
        given: of a trainer, with the rows as `heldout`.
        model: the folder of the model.
        output: the trainer's folder. Its folder `evaluations` has the runs.

    Raises:
        ValueError, RuntimeError: the run is refused, or has failed.
    """
    folder = next(one for i in count(1) if not (one := output / "evaluations" / str(i)).exists())
    args: Any = replace(given.args, max_steps=given.sizes.updates, eval_strategy="no", save_strategy="no")
    given = replace(given, args=args, train=given.heldout)
    inputs = Inputs(model, given.train, given.heldout, rewards.entries(folder / "reward_models"))
    run = start("grpo", inputs, folder.name, (), given.sections(folder), lambda run: bool(run.evaluations))
    return run.evaluations[0]
