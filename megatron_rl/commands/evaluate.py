"""Evaluate a model on rows with known answers: accuracy, pass@k and maj@n, each with its 95 % interval.

MODEL is a Hugging Face folder: of a hub, or `hf` of a run (`megatron-rl export` makes one of a checkpoint). ROWS are
read as `data.train` is. Overrides and YAML files, for instance of the run that trained the model, say how engines
sample, what an answer may cost, and which reward decides that it is right: `rollout.num_engines=8`,
`rollout.max_response_tokens=16384`, `rewards=[...]`, `eval.verifier=...`. Each prompt gets as many answers as the
largest K, so that pass@k is the mean over all subsets of k answers (Chen et al. 2021, arXiv:2107.03374).

OUT gets `answers.jsonl`, with a line for each prompt and all its answers, and at the end `result.json`. The same
command goes on where a stopped one ended.

    megatron-rl evaluate runs/tiny/grpo/hf runs/tiny/task/eval.jsonl --k 1 2 4 8
    megatron-rl evaluate models/qwen3_32b aime.jsonl rollout.num_engines=8 rollout.max_response_tokens=32768 --k 1 64
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_rl.commands.engines_alone import (
    answer_all,
    check_settings,
    configured,
    run_tool,
    settings_of,
    whole_lines,
)
from megatron_rl.commands.interrupt import Interrupt
from megatron_rl.commands.launch import log_to_file, quiet_environment
from megatron_rl.commands.screen import console
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.loop.evaluation import decide, describe_decided
from megatron_rl.loop.run_lock import run_lock
from megatron_rl.processes import piped
from megatron_rl.types import Group, Metrics, Tokenizer

quiet_environment()

ANSWERS, RESULT = "answers.jsonl", "result.json"


def record_of(config: GrpoRunConfig, group: Group, tokenizer: Tokenizer) -> dict[str, Any]:
    """A line of answers.jsonl: the prompt with the files of its images, and its answers, each with its text and its
    verdict. `is_right` is null if no deciding reward scored the answer."""
    answers = []
    for rollout, tokens in zip(group.rollouts, group.payload, strict=True):
        decided = decide(config, [rollout.verdict])
        is_right, final = decided[0] if decided else (None, None)
        answers.append(
            {
                "is_right": is_right,
                "final_answer": final,
                "score": rollout.verdict.score,
                "rewards": dict(zip([one.label for one in config.rewards], rollout.verdict.parts, strict=True)),
                "num_tokens": rollout.num_response_tokens,
                "is_cut": rollout.finish == "length",
                "text": tokenizer.decode(tokens.ids[rollout.num_prompt_tokens :].tolist(), skip_special_tokens=False),
            }
        )
    images = [str(config.pictures_folder / f"{picture.digest}.png") for picture in group.prompt.pictures]
    shown = {"images": images} if images else {}
    return {"uid": group.prompt.uid, "prompt": group.prompt.messages, **shown, "answers": answers}


def result_of(records: Sequence[dict[str, Any]], sizes: Sequence[int]) -> Metrics:
    """The metrics of `describe_heldout`, and `eval/response_cut`, the share of answers that the limit of their length
    cut.

    Args:
        sizes: each k.
    """
    answers = [answer for record in records for answer in record["answers"]]
    decided = [
        [(one["is_right"], one["final_answer"]) for one in record["answers"] if one["is_right"] is not None]
        for record in records
    ]
    scores = [answer["score"] for answer in answers if answer["score"] is not None]
    return {
        **describe_decided(decided, len(answers) // len(records), [k for k in sizes if k > 1]),
        **({"eval/reward_mean": fmean(scores)} if scores else {}),
        "eval/num_samples": float(len(answers)),
        "eval/abstained": float(len(answers) - len(scores)),
        "eval/response_mean": fmean(answer["num_tokens"] for answer in answers),
        "eval/response_cut": fmean(answer["is_cut"] for answer in answers),
    }


def show(result: Metrics, num_prompts: int, num_answers: int, sizes: Sequence[int], out: Path) -> None:
    """Print the accuracies, and what makes a reader doubt them."""
    console.print(f"{num_prompts} prompts, {num_answers} answers to each", highlight=False)
    named = [("pass@1 (accuracy)", "eval/accuracy"), *((f"pass@{k}", f"eval/pass@{k}") for k in sizes if k > 1)]
    for label, name in [*named, (f"maj@{num_answers}", f"eval/maj@{num_answers}")]:
        if name in result:
            low, high = result[f"{name}_low"], result[f"{name}_high"]
            console.print(f"  {label:<18} {result[name]:.3f}   95 %: {low:.3f} to {high:.3f}", highlight=False)
    cut, abstained = result["eval/response_cut"], result["eval/abstained"] / result["eval/num_samples"]
    console.print(f"  an answer has {result['eval/response_mean']:,.0f} tokens; {cut:.1%} are cut", highlight=False)
    if abstained:
        console.print(
            f"[yellow]{abstained:.1%} of the answers have no score, and do not count (logs/rewards.log)[/]",
            soft_wrap=True,
        )
    if cut > 0.05:
        console.print(
            f"[yellow]{cut:.1%} of the answers reach rollout.max_response_tokens, and a cut answer is rarely right: "
            "give it more[/]",
            soft_wrap=True,
        )
    if result.get("eval/accuracy") == 0:
        console.print(
            f"[yellow]no answer is right: look at some in {out / ANSWERS}. Is the reward the right one?[/]",
            soft_wrap=True,
        )


def evaluate(config: GrpoRunConfig, out: Path, sizes: Sequence[int], interrupt: Interrupt) -> None:
    """Answer the prompts that `out` does not have yet, and write and print the result."""
    done = {record["uid"] for record in whole_lines(out / ANSWERS)}
    with (out / ANSWERS).open("a", encoding="utf-8") as file:
        for group, tokenizer in answer_all(config, out, done, interrupt.check):
            file.write(json.dumps(record_of(config, group, tokenizer), ensure_ascii=False) + "\n")
            file.flush()
    records = whole_lines(out / ANSWERS)
    if not records:
        raise ValueError(f"{config.data.train} has no row that can be asked, so there is nothing to evaluate")
    result, num_answers = result_of(records, sizes), config.rollout.samples_per_prompt
    about = {"model": str(config.model.path), "rows": str(config.data.train), "num_prompts": len(records)}
    (out / RESULT).write_text(json.dumps({**about, "num_answers": num_answers, **result}, indent=1) + "\n")
    show(result, len(records), num_answers, sizes, out)
    console.print(f"result: {out / RESULT}", f"answers: {out / ANSWERS}", highlight=False, soft_wrap=True)


def num_answered(out: Path) -> int:
    """The number of answers to each prompt that the folder has; 0 if it has none. They are enough for any smaller k."""
    return next((len(record["answers"]) for record in whole_lines(out / ANSWERS)), 0)


def name_of(model: Path, rows: str) -> str:
    """The name of a result, from its model and its rows: `runs/sums/hf` and `task/eval.jsonl` are `sums-hf-eval`."""
    return "-".join([*model.absolute().parts[-2:], Path(rows).name.removesuffix(".jsonl")]).replace(":", "-")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("rows", metavar="ROWS")
    parser.add_argument("configuration", nargs="*", metavar="FILE.yaml | section.key=value")
    parser.add_argument("--k", nargs="+", default=["1"], help="the k of each pass@k (default: 1)")
    parser.add_argument("--out", type=Path, help="the folder of the results (default: below runs/evaluations)")
    options = parser.parse_intermixed_args(arguments)
    sys.path.insert(0, os.getcwd())  # the module of a reward function may be in the working folder
    numbers = [word for word in options.k if word.lstrip("-").isdecimal()]
    options.configuration += [word for word in options.k if word not in numbers]  # overrides may follow the numbers
    sizes = sorted(set(map(int, numbers)))
    interrupt = Interrupt()
    out = (options.out or Path("runs/evaluations") / name_of(options.model, options.rows)).absolute()

    def work() -> None:
        if not sizes:
            raise ValueError(f"--k needs a number, and {' '.join(options.k)} is none")
        if sizes[0] < 1:
            raise ValueError(f"--k {sizes[0]}: pass@k is about k answers, so k is 1 or more")
        own = [f"model.path={json.dumps(str(options.model))}", "model.weights=null", "data.eval=null"]
        data = f"data.train={json.dumps(options.rows)}"
        earlier = num_answered(out)
        if earlier and earlier < sizes[-1]:
            raise ValueError(
                f"{out} has {earlier} answers to each prompt, and --k {sizes[-1]} needs more; give another --out"
            )
        config = configured([*options.configuration, *own, data], out, samples=earlier or sizes[-1])
        if config.rollout.beams is not None:
            raise ValueError(
                "rollout.beams gives rankings, and pass@k is about independent answers; set it to null, or give the "
                "rows as data.eval of a run"
            )
        settings = settings_of(config)
        with run_lock(out):
            log_to_file(out / "logs")
            check_settings(out / "settings.json", settings, [out / ANSWERS])
            evaluate(config, out, sizes, interrupt)

    def stopped() -> str:
        return f"{out} has the answers to {len(whole_lines(out / ANSWERS))} prompts"

    return run_tool(interrupt, work, stopped)


if __name__ == "__main__":
    sys.exit(piped(main))
