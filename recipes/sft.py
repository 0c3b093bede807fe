"""Supervised training on rows with completions, through the same Megatron actor.

python recipes/sft.py FILE.yaml ... section.key=value ... [--dry-run] [--resume auto]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from megatron_rl.recipes.launch import Interrupt, console, launch, quiet_environment, show

quiet_environment()

from megatron_rl.config.schema import SftRunConfig  # noqa: E402
from megatron_rl.layout import check_model, read_shape  # noqa: E402
from megatron_rl.recipes.dry_run import describe_policy  # noqa: E402
from megatron_rl.recipes.preflight import check_before_start  # noqa: E402


def run(config: SftRunConfig, resume: bool, interrupt: Interrupt) -> int:
    """Wire the rooms together and train; returns the steps that are done."""
    check_before_start(config, console, resume=resume)
    shape = read_shape(config.model.path)
    check_model(config.model.path, shape, config.policy.parallel.mesh)

    # Imported here: a dry run, and a configuration or model that is refused, answer without waiting for the vendors.
    from transformers import AutoTokenizer

    from megatron_rl.actor.spec import ActorSpec
    from megatron_rl.algorithms import SupervisedObjective
    from megatron_rl.cluster.policy import PolicyGroup
    from megatron_rl.cluster.session import ray_session
    from megatron_rl.data import ShuffledStream, load_supervised
    from megatron_rl.loop.checkpoints import Checkpoints
    from megatron_rl.loop.supervised import train_supervised
    from megatron_rl.observe import RunSink, open_trackers, write_provenance

    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    sft = config.sft
    rows, skipped = load_supervised(sft.rows, tokenizer, sft.max_tokens, sft.on_bad_row)
    if skipped:
        console.print(f"[yellow]{sft.rows}: {skipped} of {skipped + len(rows)} rows skipped[/]")
    stream = ShuffledStream(rows, sft.rows_per_step, config.run.seed)
    folder, logs = config.run_folder, config.run_folder / "logs"
    checkpoints = Checkpoints(folder / "checkpoints", keep=config.checkpoint.keep, resume=resume)
    resume_at = checkpoints.first_step if resume else None
    sink = RunSink(folder, config.run.steps, console, tokenizer, "", resume_at)
    write_provenance(folder, config)
    sink.feed(open_trackers(config, resume_at))
    spec = ActorSpec(
        shape=shape,
        model=config.model,
        policy=config.policy,
        objective=SupervisedObjective(),
        temperature=1.0,
        total_steps=config.run.steps,
        seed=config.run.seed,
    )
    with ray_session(config.cluster, num_trainers=config.policy.parallel.mesh.world_size, logs=logs):
        with console.status("starting Ray and Megatron"):
            policy = PolicyGroup(spec, config.cluster, logs)
            policy.start()
        with sink:
            done = train_supervised(config, shape, policy, stream, (sink, checkpoints), interrupt)
        if done == config.run.steps:
            policy.export_hf(folder / "hf")
    show(folder, finished=done == config.run.steps)
    return done


def dry_run(config: SftRunConfig, console: Console, resume: bool) -> None:
    describe_policy(config, console)
    check_before_start(config, console, resume=resume, planning=True)


def main(arguments: Sequence[str] | None = None) -> int:
    return launch(SftRunConfig, arguments, program="recipes/sft.py", dry_run=dry_run, run=run)


if __name__ == "__main__":
    sys.exit(main())
