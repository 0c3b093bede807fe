"""Reinforcement learning with group-relative advantages: Megatron trains, vLLM rolls out, the bridge joins them.

python recipes/grpo.py FILE.yaml ... section.key=value ... [--dry-run] [--resume auto]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from megatron_rl.recipes.launch import Interrupt, console, launch, quiet_environment, show

quiet_environment()

from megatron_rl.config.schema import GrpoRunConfig  # noqa: E402
from megatron_rl.layout import check_model, read_shape  # noqa: E402
from megatron_rl.recipes.dry_run import describe_policy, describe_rollout  # noqa: E402
from megatron_rl.types import Prompt  # noqa: E402

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatron_rl.loop.train import Prompts


def run(config: GrpoRunConfig, resume: bool, interrupt: Interrupt) -> int:
    """Wire the rooms together and train; returns the steps that are done."""
    shape = read_shape(config.model.path)
    check_model(config.model.path, shape, config.policy.parallel.mesh)

    # Imported here: a dry run, and a configuration or model that is refused, answer without waiting for the vendors.
    from transformers import AutoTokenizer

    from megatron_rl.actor.spec import ActorSpec
    from megatron_rl.algorithms import PolicyObjective
    from megatron_rl.cluster.bridge import RayBridge
    from megatron_rl.cluster.engines import EngineGroup
    from megatron_rl.cluster.policy import PolicyGroup
    from megatron_rl.cluster.session import ray_session
    from megatron_rl.cluster.verifier import RayVerifier
    from megatron_rl.loop.checkpoints import Checkpoints
    from megatron_rl.loop.train import Ports, train
    from megatron_rl.observe import RunSink, write_provenance

    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    prompts = read_prompts(config, tokenizer)
    folder, logs = config.run_folder, config.run_folder / "logs"
    checkpoints = Checkpoints(folder / "checkpoints", keep=config.checkpoint.keep, resume=resume)
    resume_at = checkpoints.first_step if resume else None
    sink = RunSink(folder, config.run.steps, console, tokenizer, config.rollout.delimiter, resume_at)
    write_provenance(folder, config)
    spec = ActorSpec(
        shape=shape,
        model=config.model,
        policy=config.policy,
        objective=PolicyObjective(config.algorithm),
        temperature=config.rollout.sampling.temperature,
        total_steps=config.run.steps * config.algorithm.updates_per_step,
        seed=config.run.seed,
    )
    with ray_session(config.cluster, num_trainers=config.policy.parallel.mesh.world_size, logs=logs):
        with console.status("starting Ray, Megatron and vLLM"):
            engines = EngineGroup(config, logs)
            policy = PolicyGroup(spec, config.cluster, logs)
            verifier = RayVerifier(config, logs)
            policy.start()
            engines.wait()
            bridge = RayBridge(config, spec, policy, engines, logs)
        with sink:
            done = train(
                config, shape, Ports(policy, engines, bridge, verifier), prompts, (sink, checkpoints), interrupt
            )
        if done == config.run.steps:
            policy.export_hf(folder / "hf")
    show(folder, finished=done == config.run.steps)
    return done


def read_prompts(config: GrpoRunConfig, tokenizer: PreTrainedTokenizerBase) -> Prompts:
    """Training prompts as a stream, held-out prompts as a list; tells how many rows were skipped."""
    from megatron_rl.data import ShuffledStream, load_prompts
    from megatron_rl.loop.train import Prompts
    from megatron_rl.verifiers import RewardSet

    data, rollout = config.data, config.rollout
    required = RewardSet(config.rewards, tokenizer, config.rollout.delimiter).required_columns

    def read(path: Path) -> list[Prompt]:
        rows, skipped = load_prompts(path, tokenizer, rollout.max_prompt_tokens, data.on_bad_row, required)
        if skipped:
            console.print(f"[yellow]{path}: {skipped} of {skipped + len(rows)} rows skipped[/]")
        return rows

    stream = ShuffledStream(read(data.train), rollout.prompts_per_step, config.run.seed)
    return Prompts(stream, read(data.eval)[: config.eval.num_prompts] if data.eval else [])


def dry_run(config: GrpoRunConfig, console: Console) -> None:
    shape = describe_policy(config, console)
    describe_rollout(config, shape, console)


def main(arguments: Sequence[str] | None = None) -> int:
    return launch(GrpoRunConfig, arguments, program="recipes/grpo.py", dry_run=dry_run, run=run)


if __name__ == "__main__":
    sys.exit(main())
