"""Training on rows without engines, with the same Megatron actor as reinforcement learning: supervised training on
completions, training on preferences (commands/dpo.py), and of reward models (commands/reward_model.py).

megatron-rl sft FILE.yaml ... section.key=value ... [--dry-run] [--resume auto]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.console import Console

from megatron_rl.commands.interrupt import Interrupt
from megatron_rl.commands.launch import launch, note, quiet_environment, show
from megatron_rl.commands.screen import console

quiet_environment()

from megatron_rl.commands.dry_run import (  # noqa: E402
    check_memory,
    describe_memory,
    describe_placement,
    describe_policy,
)
from megatron_rl.commands.screen import waiting  # noqa: E402
from megatron_rl.config.machine import num_cores, threads_of_ranks  # noqa: E402
from megatron_rl.config.schema import DpoRunConfig, OfflineRunConfig, SftRunConfig  # noqa: E402
from megatron_rl.loop.checkpoints import Checkpoints  # noqa: E402
from megatron_rl.models import check_model, read_shape  # noqa: E402
from megatron_rl.planning.shapes import trained_shape  # noqa: E402
from megatron_rl.types import Tokenizer, TrainingRow  # noqa: E402

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatron_rl.algorithms import Objective
    from megatron_rl.data import ShuffledStream


def run(config: OfflineRunConfig, checkpoints: Checkpoints, interrupt: Interrupt) -> int:
    """Connect the packages and train; returns the number of steps that are done."""
    shape = read_shape(config.model.path)
    if config.model.weights is None:
        check_model(config.model.path, config.policy.adapted(shape).base, config.policy.parallel.mesh)

    # These imports take seconds. They are here so that a dry run, or an error in the configuration, does not wait.
    from megatron_rl.actor.spec import ActorSpec
    from megatron_rl.cluster.models import Models
    from megatron_rl.cluster.nodes import RayPlacement
    from megatron_rl.cluster.policy import PolicyGroup
    from megatron_rl.cluster.restarts import Restarts
    from megatron_rl.cluster.session import ray_session
    from megatron_rl.cluster.visibility import check_nodes
    from megatron_rl.cluster.watchers import observe_run
    from megatron_rl.data.tokenizer import open_tokenizer
    from megatron_rl.loop.reference import with_reference
    from megatron_rl.loop.supervised import train_supervised
    from megatron_rl.observe import RunSink, open_trackers, write_provenance

    folder, logs = config.run_folder, config.run_folder / "logs"
    write_provenance(folder, config, checkpoints.first_step)
    spec = ActorSpec(
        shape=trained_shape(config, shape),
        model=config.model,
        policy=config.policy,
        objective=_objective(config),
        temperature=1.0,
        total_steps=config.run.steps,
        seed=config.run.seed,
        collective_timeout=config.cluster.collective_timeout,
    )
    num_trainers = config.policy.parallel.mesh.world_size
    num_threads = threads_of_ranks(config, num_cores())
    with ExitStack() as cleaning:
        with waiting(console, "Ray starts") as tell:
            cleaning.enter_context(
                ray_session(
                    config.cluster, num_trainers, logs, interrupt.check, interrupt.on_loss, num_threads=num_threads
                )
            )
            tell("the processes of the trainer ranks start")
            placement, restarts = RayPlacement(config), Restarts(config.cluster.restarts_per_hour)
            if config.cluster.ray_address is not None:  # the preflight has looked at this machine
                check_nodes(config, placement.plan)
            policy = PolicyGroup(spec, config.cluster, logs, placement)
            models = Models(policy, restarts)
            # While the ranks import their libraries, the driver imports its own and reads the rows.
            tell("the driver reads tokenizer and rows")
            tokenizer = open_tokenizer(config.model.path)
            rows, heldout = read_rows(config, tokenizer)
            decoder = cast(Tokenizer, tokenizer)  # it gives one text for one list of tokens
            sink = RunSink(folder, config.run, console, decoder, "", checkpoints.resume_at)
            sink.feed(open_trackers(config, checkpoints.resume_at))
            tell("the trainer ranks import Megatron-Core and load the weights (logs/trainer_0.log)")
            is_resumed = checkpoints.first_step > 0
            models.start(is_resumed=is_resumed)
            if isinstance(config, DpoRunConfig) and config.dpo.loss.has_reference:

                def told(progress: str) -> None:
                    interrupt.check()
                    tell(progress)

                given = rows, heldout
                rows, heldout = (with_reference(config, spec.shape, models, one, is_resumed, told) for one in given)
            stream = _stream(config, rows)
            observe_run(config, sink, models.groups)
        with sink, interrupt.training():
            done = train_supervised(config, spec.shape, models, stream, heldout, (sink, checkpoints), interrupt)
        if done == config.run.steps:
            policy.export_hf(folder / "hf")
    if done == config.run.steps:
        show(folder)
    return done


def _objective(config: OfflineRunConfig) -> Objective:
    from megatron_rl.algorithms import PreferenceObjective, SupervisedObjective

    return PreferenceObjective(config.preferences) if config.preferences else SupervisedObjective()


def read_rows(
    config: OfflineRunConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[TrainingRow], list[TrainingRow]]:
    """The rows, and the held-out rows. Prints how many rows of each source there are."""
    from megatron_rl.data.rows import counted
    from megatron_rl.data.supervised import load_training_rows

    section, offline = config.section, config.offline

    def load(key: str, source: Path | str) -> list[TrainingRow]:
        rows, skipped = load_training_rows(config, source, tokenizer)
        if skipped:
            note(f"{key}: {source}: {skipped:,} of {counted(skipped + len(rows), 'row')} skipped")
        else:
            told = f"{key}: {source}: {counted(len(rows), 'row')}"
            console.print(told, markup=False, highlight=False, soft_wrap=True)
        return rows

    rows = load(f"{section}.rows", offline.rows)
    return rows, [] if offline.eval is None else load(f"{section}.eval", offline.eval)


def _stream(config: OfflineRunConfig, rows: Sequence[TrainingRow]) -> ShuffledStream[TrainingRow]:
    from megatron_rl.data import ItemSource, RowsDigest, ShuffledStream

    digest = RowsDigest()
    for row in rows:
        for tokens in row.samples:
            digest.add(row.name, tokens.ids)
    source = ItemSource(rows, str(digest))
    return ShuffledStream({f"{config.section}.rows": source}, config.offline.rows_per_step, config.run.seed)


def describe(config: OfflineRunConfig, console: Console) -> None:
    shape = describe_policy(config, console)
    describe_placement(config, console)
    if config.cluster.gpus_per_trainer:
        check_memory(describe_memory(config, shape, console))


def main(arguments: Sequence[str] | None = None) -> int:
    return launch(SftRunConfig, arguments, program="sft", describe=describe, run=run)


if __name__ == "__main__":
    sys.exit(main())
