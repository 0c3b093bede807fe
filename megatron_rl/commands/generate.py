"""Answer the prompts of the first steps of a run, without training: engines and verifiers alone.

Pass the arguments of the run that will train: YAML files and overrides, merged from left to right. The engines
load the weights of `model.path`, and answer the prompts of the run's first steps with the seeds of a synchronous run.
OUT gets a file for each step, as `rollout.dump` writes them, and a run with `rollout.replay=OUT` trains on them. The
answers of step 0 equal the answers of such a run, up to rounding; later steps differ, because its weights would have
changed.

    MODEL="configs/model/qwen3_32b.yaml configs/cluster/h100_8n8g.yaml"
    megatron-rl generate $MODEL configs/run/gsm8k_32b.yaml rollout.num_engines=8 --steps 20 --out rollouts/qwen3_32b
    megatron-rl grpo $MODEL configs/run/gsm8k_32b.yaml run.steps=20 data.eval=null rollout.replay=rollouts/qwen3_32b
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from megatron_rl.commands.engines_alone import (
    check_settings,
    config_without_trainers,
    engines_alone,
    run_tool,
    settings_of,
)
from megatron_rl.commands.interrupt import Interrupt
from megatron_rl.commands.launch import log_to_file, quiet_environment
from megatron_rl.commands.screen import console
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data.saved_rollouts import path_of
from megatron_rl.loop.run_lock import run_lock
from megatron_rl.processes import piped

quiet_environment()

SYNCHRONOUS = ("rollout.max_lag=0", "rollout.active_sampling=false", "rollout.late=wait")


def generate(config: GrpoRunConfig, out: Path, interrupt: Interrupt) -> None:
    """Write the steps that `out` does not have yet."""
    from megatron_rl.cluster.stream import BatchStream
    from megatron_rl.commands.grpo import read_prompts
    from megatron_rl.data.tokenizer import open_tokenizer
    from megatron_rl.loop.engine_source import BatchSource
    from megatron_rl.loop.replay import dump
    from megatron_rl.loop.rollouts import verdicts_of
    from megatron_rl.loop.stopping import NEVER
    from megatron_rl.ports import Ports

    values = config.rollout.prefix_values
    if values is not None and values.by == "trainer":
        raise ValueError(
            "rollout.prefix_values.by is trainer, and there are no trainers here; set it to engine, or take the "
            "rollouts of a run with rollout.dump=true"
        )
    prompts = read_prompts(config, open_tokenizer(config.model.path))
    none: Any = None
    sink: Any = SimpleNamespace(phase=nullcontext, warn=lambda message, *about: console.print(message))
    with engines_alone(config, out / "logs", interrupt.check) as (engines, verifiers):
        ports = Ports(none, none, BatchStream(config, engines, verifiers))
        source = BatchSource(config, ports, prompts, sink, NEVER)
        for step in range(config.run.steps):
            if path_of(out, step).exists():
                prompts.train.take(config.rollout.prompts_per_step)
                continue
            source.pushed(step)
            rollouts = source.next(step)
            dump(config, out, ports.stream, rollouts, step)
            speed = f"{rollouts.metrics['rollout/tokens_per_s']:,.0f} tokens/s"
            scores = [verdict.score for verdict in verdicts_of(rollouts.groups) if verdict.score is not None]
            reward = f"reward {fmean(scores):.3f}" if scores else "no score"
            console.print(f"step {step}: {len(rollouts.groups)} prompts, {reward}, {speed}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configuration", nargs="+", metavar="FILE.yaml | section.key=value")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the rollouts")
    parser.add_argument("--steps", type=int, required=True, help="the number of steps")
    options = parser.parse_intermixed_args(arguments)
    sys.path.insert(0, os.getcwd())  # the module of a reward function may be in the working folder
    interrupt, out = Interrupt(), options.out.absolute()

    def work() -> None:
        config = config_without_trainers(
            [*options.configuration, f"run.steps={options.steps}", "data.eval=null", *SYNCHRONOUS], out
        )
        own = {
            "prompts_per_step": config.rollout.prompts_per_step,
            "algorithm": config.algorithm.model_dump(mode="json"),
        }
        settings = settings_of(config) | own
        with run_lock(out):
            log_to_file(out / "logs")
            results = [path_of(out, step) for step in range(options.steps)]
            check_settings(out / "settings.json", settings, results)
            generate(config, out, interrupt)
        console.print(f"{out} has the rollouts of {options.steps} steps; rollout.replay={out} trains on them")

    return run_tool(interrupt, work, lambda: f"{out} has the steps that are done")


if __name__ == "__main__":
    sys.exit(piped(main))
