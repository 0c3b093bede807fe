"""`make demo`: a language model learns addition by reinforcement learning, on two CPU cores, in a few minutes.

It writes the task's files, makes a supervised warm start, and then runs GRPO. A part whose result exists already is
skipped, and an interrupted run continues where it stopped. `megatron-rl demo --fresh` starts again from the beginning.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.recipes.launch import console, quiet_environment

quiet_environment()
# The numbers of RECORD.md were seen with one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

HOME = Path("runs/tiny")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the seed of the task, the data's order and the sampling")
    parser.add_argument("--fresh", action="store_true", help="delete runs/tiny and start from the beginning")
    options = parser.parse_args(arguments)
    if options.fresh:
        shutil.rmtree(HOME, ignore_errors=True)

    from megatron_rl.recipes import grpo, sft
    from megatron_rl.recipes.tiny.task import write_task

    home = HOME / f"seed_{options.seed}"
    task, warm_start, run = home / "task", home / "warm_start", home / "grpo"
    if not (task / "model" / "model.safetensors").is_file():
        console.rule("1/3 the task: 3-digit addition, 8,000 training and 500 held-out sums")
        write_task(task, seed=options.seed)
    common = [f"run.folder={home}", f"run.seed={options.seed}"]
    if not (warm_start / "hf").is_dir():
        console.rule("2/3 supervised warm start on imperfect demonstrations")
        status = sft.main(
            ["configs/run/tiny_sft.yaml", *common, "run.name=warm_start"]
            + [f"model.path={task}/model", f"sft.rows={task}/demonstrations.jsonl", "--resume", "auto"]
        )
        if status:
            return status
    if (run / "hf").is_dir():  # the run is finished, so the demo shows a new one
        shutil.rmtree(run)
    console.rule("3/3 reinforcement learning: Megatron TP2 trains, vLLM answers, the bridge reshards")
    return grpo.main(
        ["configs/run/tiny_grpo.yaml", *common, "run.name=grpo", f"model.path={warm_start}/hf"]
        + [f"data.train={task}/train.jsonl", f"data.eval={task}/eval.jsonl", "--resume", "auto"]
    )


if __name__ == "__main__":
    sys.exit(main())
