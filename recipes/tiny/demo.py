"""`make demo`: a language model learns addition by reinforcement learning, on two CPU cores, in a few minutes.

It writes the task's files and runs GRPO. The model begins with the weights of a supervised warm start, which are in
recipes/tiny/data/warm_start. `megatron-rl demo --from-scratch` makes them first, and so does every seed but 0. A part
whose result exists already is skipped, and an interrupted run continues where it stopped. `megatron-rl demo --fresh`
starts again from the beginning.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.commands.launch import entry, quiet_environment
from megatron_rl.commands.screen import console

quiet_environment()
# The numbers of RECORD.md were seen with one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

HOME = Path("runs/tiny")
WARM_START = Path(__file__).parent / "data" / "warm_start"
"""The model that `megatron-rl demo --from-scratch` makes with seed 0, as it was made once."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the seed of the task, the data's order and the sampling")
    parser.add_argument("--from-scratch", action="store_true", help="make the warm start first")
    parser.add_argument("--fresh", action="store_true", help="delete runs/tiny and start from the beginning")
    options = parser.parse_args(arguments)
    if options.fresh:
        shutil.rmtree(HOME, ignore_errors=True)

    from megatron_rl.commands import grpo, sft
    from megatron_rl.recipes.tiny.task import write_task

    home = HOME / f"seed_{options.seed}{'_from_scratch' if options.from_scratch else ''}"
    task, run = home / "task", home / "grpo"
    console.rule("addition of 3-digit numbers: 8,000 sums to learn from, 500 held out")
    if not (task / "model" / "model.safetensors").is_file():
        write_task(task, seed=options.seed)
    common = [f"run.folder={home}", f"run.seed={options.seed}"]
    model = WARM_START
    if options.seed or options.from_scratch:
        model = home / "warm_start" / "hf"
        if not model.is_dir():
            console.rule("supervised warm start on imperfect demonstrations")
            status = sft.main(
                ["configs/run/tiny_sft.yaml", *common, "run.name=warm_start"]
                + [f"model.path={task}/model", f"sft.rows={task}/demonstrations.jsonl", "--resume", "auto"]
            )
            if status:
                return status
    if (run / "hf").is_dir():  # the run is finished, so the demo shows a new one
        shutil.rmtree(run)
    console.rule("reinforcement learning: Megatron TP2 trains, vLLM answers, the bridge reshards")
    given = ["configs/run/tiny_grpo.yaml", f"model.path={model}"]
    given += [f"data.train={task}/train.jsonl", f"data.eval={task}/eval.jsonl"]
    status = grpo.main([*given, *common, "run.name=grpo", "--resume", "auto"])
    if status == 0:
        tell_more(given, run)
    return status


def tell_more(given: Sequence[str], run: Path) -> None:
    """Print what a user may try next, as commands for his working folder."""
    again = shlex.join(given)
    plan = "configs/model/qwen3_32b.yaml configs/cluster/h100_8n8g.yaml configs/run/gsm8k_32b.yaml"
    console.print(
        f"""
Three things to try next:
  1. another algorithm, and both in one report: the engines a step ahead of the trainer, with the loss of GSPO
     {entry()} grpo {again} run.folder={run.parent} run.name=gspo rollout.max_lag=1 "algorithm.loss={{kind: gspo}}"
     {entry()} report {run} {run.parent}/gspo
  2. a real model, SmolLM2-135M-Instruct (a download of 93 MB)
     {entry()} demo-real
  3. the plan of Qwen3-32B on 64 GPUs, without a GPU
     {entry()} grpo {plan} --dry-run""",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    sys.exit(main())
