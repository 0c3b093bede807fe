"""Compare a training step with TRL's GRPOTrainer on the same machine: the same model, prompts, number of answers and
largest length, in turn.

There are three jobs. `demo` is the demo's: answers of about 30 tokens, at most 64, by its warm-started model; the
reward is 1 for a right answer. `long` has answers with a long tail: the demo's model with its first weights ends an
answer with a probability of 1/64 at each token, so the longest of 256 answers has about 6 times the mean length. Its
reward is the share of digits in the answer, because no answer is right. `sums` has the same reward, and the real model
of `make demo-real`, which must have run: 4 prompts of 34 tokens x 8 answers of at most 16. TRL generates with its own
engine (Hugging Face) and uses as many threads as there are cores, or `--threads`; here two engines generate, and one or
two trainer ranks train. For `sums` one engine and one rank take turns with all threads.

TRL is not among this project's packages. `make test-trl` installs it into .venv-trl; or name another Python that has it
(`pip install trl==1.16.0 accelerate`):

    python tools/bench/against_trl.py
    python tools/bench/against_trl.py --trl-python TRL_ENVIRONMENT/bin/python --jobs long --rounds 1 --json
    python tools/bench/against_trl.py --jobs sums --steps 9 --threads 1
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TRL = ROOT / ".venv-trl"
SAMPLES, WARM_UP = 8, 5
"""The number of answers to a prompt, and of steps before the measurement."""
TWO_ENGINES = ["rollout.num_engines=2", "policy.parallel.tensor=1"]
MODES = {
    "max_lag 0": [*TWO_ENGINES, "rollout.max_lag=0", "policy.parallel.data=2"],
    "max_lag 1": [*TWO_ENGINES, "rollout.max_lag=1", "policy.parallel.data=1"],
}
"""In turns, both cores generate and then both train. Otherwise one rank trains while the engines answer."""
SUMS = [(a, b) for a in range(1, 10) for b in range(1, 10)]
WARM_START = ROOT / "recipes/tiny/data/warm_start"
"""The model that the demo begins with."""
REAL_MODEL = ROOT / "runs/smollm2/SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class ComparedJob:
    model: Path
    train: Path
    max_tokens: int
    reward: str
    """The name of the reward function in this module."""
    num_prompts: int = 32
    recipe: str = "configs/run/tiny_grpo.yaml"

    @property
    def modes(self) -> dict[str, list[str]]:
        return MODES if self.recipe == "configs/run/tiny_grpo.yaml" else {"in turns": []}


def right_answer(prompts: list[str], completions: list[str], ground_truth: list[str], **columns: Any) -> list[float]:
    answers = [text.rpartition("</think>")[2].strip() for text in completions]
    return [float(answer == right) for answer, right in zip(answers, ground_truth, strict=True)]


def share_of_digits(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [sum(character.isdigit() for character in text) / max(len(text), 1) for text in texts]


def prepare(folder: Path, names: Sequence[str]) -> dict[str, ComparedJob]:
    """Write the task and the model of the long answers."""
    task = folder / "task"
    make_task = [sys.executable, "-m", "megatron_rl.recipes.tiny.task", str(task)]
    subprocess.run(make_task, check=True, cwd=ROOT, stdout=sys.stderr)  # stdout is for the result
    jobs = {}
    if "demo" in names:
        jobs["demo"] = ComparedJob(WARM_START, task / "train.jsonl", 64, "right_answer")
    if "long" in names:
        config = json.loads((task / "model/config.json").read_text()) | {"max_position_embeddings": 1024}
        (task / "model/config.json").write_text(json.dumps(config))
        jobs["long"] = ComparedJob(task / "model", task / "train.jsonl", 640, "share_of_digits")
    if "sums" in names:
        turns = [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."} for a, b in SUMS]
        (folder / "sums.jsonl").write_text("".join(json.dumps({"prompt": [turn]}) + "\n" for turn in turns))
        recipe = "configs/run/smollm2_sums.yaml"
        jobs["sums"] = ComparedJob(REAL_MODEL, folder / "sums.jsonl", 16, "share_of_digits", 4, recipe)
    return jobs


def ours(job: ComparedJob, steps: int, folder: Path, options: Sequence[str]) -> list[float]:
    """The seconds of each step after the first ones."""
    command = [
        *(sys.executable, "-m", "megatron_rl", "grpo", str(ROOT / job.recipe)),
        *("run.name=ours", f"run.folder={folder}", f"run.steps={steps}", "checkpoint.every=0", "data.eval=null"),
        *(f"model.path={job.model}", f"data.train={job.train}", f"rollout.max_response_tokens={job.max_tokens}"),
        *(f"rollout.prompts_per_step={job.num_prompts}", f"rollout.samples_per_prompt={SAMPLES}"),
        *options,
        f"rewards=[{{kind: function, path: 'megatron_rl.tools.bench.against_trl:{job.reward}'}}]",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    records = [json.loads(line) for line in (folder / "ours/metrics.jsonl").read_text().splitlines()]
    return [record["time/total_s"] for record in records[WARM_UP:steps]]


def trl(job: ComparedJob, steps: int, folder: Path, python: str) -> list[float]:
    """The seconds of each step after the first ones."""
    command = [python, __file__, "--trl-job", json.dumps(asdict(job), default=str), "--steps", str(steps)]
    environment = os.environ if python != sys.executable else os.environ | {"PYTHONPATH": str(TRL)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment)
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds[WARM_UP:]


def run_trl(job: ComparedJob, steps: int) -> None:
    """What TRL's Python runs: train, and print the seconds of each step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    rows = [json.loads(line) for line in Path(job.train).read_text().splitlines()]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(job.model, padding_side="left"),
        reward_funcs=globals()[job.reward],
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
        args=GRPOConfig(
            output_dir="trl",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=job.num_prompts * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=job.max_tokens,
            learning_rate=2e-4,
            warmup_steps=5,
            max_steps=steps,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    trainer.train()
    print(json.dumps([b - a for a, b in zip(ends, ends[1:], strict=False)]))


def measure(python: str, names: Sequence[str], rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """The mean seconds of a step in each round, by job and by trainer."""
    with tempfile.TemporaryDirectory() as name:
        jobs = prepare(Path(name), names)
        seconds = {key: {who: list[float]() for who in ("TRL", *job.modes)} for key, job in jobs.items()}
        for key, job in jobs.items():
            for _ in range(rounds):
                for who, found in seconds[key].items():
                    with tempfile.TemporaryDirectory(dir=name) as folder:
                        given = job, steps, Path(folder)
                        found.append(fmean(trl(*given, python) if who == "TRL" else ours(*given, job.modes[who])))
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", help="a Python that can import trl (default: this one, with .venv-trl)")
    parser.add_argument("--jobs", nargs="+", default=["demo", "long"], choices=["demo", "long", "sums"])
    parser.add_argument("--rounds", type=int, default=3, help="how often each of them runs, in turn")
    parser.add_argument("--steps", type=int, default=25, help=f"of each run; the first {WARM_UP} are not measured")
    parser.add_argument("--threads", type=int, help="of each process; by default as many as there are cores")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--trl-job", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.trl_job:
        run_trl(ComparedJob(**json.loads(args.trl_job)), args.steps)
        return 0
    if args.trl_python is None and not (TRL / "trl").is_dir():
        parser.error("TRL is not here: run `make test-trl`, or give --trl-python, a Python that can import trl")
    if "sums" in args.jobs and not REAL_MODEL.is_dir():
        parser.error(f"--jobs sums trains {REAL_MODEL}, which is not here: run `make demo-real` first")
    if args.steps <= WARM_UP:
        parser.error(f"--steps must be above {WARM_UP}, the number of steps that are not measured")
    if args.threads:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
    results = measure(args.trl_python or sys.executable, args.jobs, args.rounds, args.steps)
    if args.json:
        print(json.dumps(results))
        return 0
    for job, rows in results.items():
        for who, seconds in rows.items():
            ratios = " ".join(f"{ours / theirs:.2f}" for ours, theirs in zip(seconds, rows["TRL"], strict=True))
            print(f"{job:5} {who:10} {' '.join(f'{s:.2f}' for s in seconds)} s a step, {ratios} of TRL's time")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
