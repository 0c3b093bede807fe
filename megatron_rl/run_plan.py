"""What a dry run says, from Python; see docs/api.md."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from megatron_rl.api import Model, merged, model_section
from megatron_rl.commands.defaults import with_defaults
from megatron_rl.config.load import merge, validate
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.planning.memory import RunMemory, run_memory
from megatron_rl.planning.shapes import planned_shape
from megatron_rl.planning.transfer import planned_transfer
from megatron_rl.types import ModelShape


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a dry run prints, as values; `print(plan)` prints its tables."""

    shape: ModelShape
    memory: RunMemory
    """The bytes on the fullest GPUs, by phase; `memory.problems` says what does not fit."""
    trainer_ranks: int
    engine_ranks: int
    pushed_bytes: int
    """The bytes that a push brings into the fullest engine rank."""
    tables: str

    def __str__(self) -> str:
        return self.tables


def plan(model: Model | None = None, *, files: Sequence[str | os.PathLike[str]] = (), **sections: Any) -> RunPlan:
    """The sizes of a run of GRPO, which needs neither GPUs nor weights nor rows.

    For example:

        plan(files=["configs/model/qwen3_32b.yaml", "configs/cluster/h100_8n8g.yaml", "configs/run/gsm8k_32b.yaml"])

    Raises:
        ValueError: the configuration is refused. A run that does not fit is no error; see `RunPlan.memory`.
    """
    from megatron_rl.commands import dry_run

    given = {
        "run": {"name": "plan", "steps": 1},
        "data": {"train": "rows.jsonl"},
    }  # required, but nothing is planned by them
    merge(given, merged(files, sections, {} if model is None else {"model": model_section(model)}))
    config = with_defaults(validate(GrpoRunConfig, given))
    # Not in a cell, which would show each table at once, and again when the plan is printed.
    console = Console(record=True, width=120, force_jupyter=False, file=open(os.devnull, "w"))  # noqa: SIM115  it lives as long as the call
    shape = planned_shape(config)
    memory = run_memory(config, shape)
    dry_run.describe_policy(config, console)
    dry_run.describe_rollout(config, shape, console)
    dry_run.describe_placement(config, console)
    if config.cluster.gpus_per_trainer:
        dry_run.describe_memory(config, shape, console)
        dry_run.describe_hours(config, shape, memory, console)
    return RunPlan(
        shape=shape,
        memory=memory,
        trainer_ranks=config.num_trainer_ranks,
        engine_ranks=config.rollout.num_engines * config.rollout.engine_ranks,
        pushed_bytes=int(planned_transfer(config, shape, config.policy.parallel.mesh).engine_bytes.max()),
        tables=console.export_text(),
    )
