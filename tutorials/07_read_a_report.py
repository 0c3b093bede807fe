"""Read what a run has left: its metrics, its time, its answers, and a report that compares it with another run.

    python tutorials/07_read_a_report.py                  # makes a short run, and reads it
    python tutorials/07_read_a_report.py                  # again: makes a second one, and compares the two
    python tutorials/07_read_a_report.py runs/a runs/b    # reads your own runs of `grpo`, one or several

You will learn where each number is, which of them tell that a run is healthy, and how two runs are compared. You need
two CPU cores, no GPU and no download. A start that makes a run takes about a minute.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from megatron_rl import Run, grpo
from megatron_rl.observe.records import time_split
from megatron_rl.recipes.tiny.task import write_model


def digits(completions, **others):
    """The share of digits. Answers of less than four characters get none, so that there are reasons to read."""
    return [sum(map(str.isdigit, text)) / len(text) if len(text) >= 4 else None for text in completions]


# 1. A run is a folder, and everything below reads its files. So it does not matter who has started the run, whether it
# is still running, and whether it has failed. The two runs of this script differ in the learning rate; each start makes
# the first one that is missing.
RATES = {"slow": 1e-4, "fast": 3e-3}
if len(sys.argv) > 1:
    runs = [Run(Path(folder)) for folder in sys.argv[1:]]
else:
    runs = [Run(Path("runs/tutorial_07", name)) for name in RATES]
    missing = [run.folder.name for run in runs if run.model is None]  # a run that has done all its steps has a model
    if missing:
        write_model(Path("models/tutorial_sums"), seed=0)
        grpo(
            "models/tutorial_sums",
            [{"prompt": f"{a}+{a}="} for a in range(10, 90)],
            digits,
            steps=5,
            name=missing[0],
            run={"folder": "runs/tutorial_07"},
            policy={"optimizer": {"lr": RATES[missing[0]]}},
            rollout={"prompts_per_step": 8, "samples_per_prompt": 8, "max_prompt_tokens": 8, "max_response_tokens": 24},
        )
    runs = [run for run in runs if run.model is not None]
run = runs[-1]

# 2. metrics.jsonl has one record for each step, and `run.metrics` has them as rows. A DataFrame takes them as they are.
# `run.evaluations` has the ones with held-out rows. docs/metrics.md explains the names; a prefix says where a number
# comes from.
steps = run.metrics
print(f"\n{run.folder}\n{len(steps)} steps, {len(steps[0])} numbers in the first one, by their prefixes:")
prefixes = [name.partition("/")[0] for name in steps[0] if "/" in name]
print("  " + ", ".join(f"{prefix} ({prefixes.count(prefix)})" for prefix in dict.fromkeys(prefixes)))

# 3. Is it learning? `reward/mean` should rise. `grad_norm` should be neither 0 nor jump by orders of magnitude. With
# `samples/active` near 0 there is nothing to learn from: the answers of each group have got equal rewards.
NAMES = ("reward/mean", "grad_norm", "samples/active", "length/response_mean", "mismatch/mean_abs", "mismatch/max_abs")
print("\n" + "".join(f"{name:>22}" for name in ("step", *NAMES)))
for record in steps:
    print(f"{record['step']:>22}" + "".join(f"{record.get(name, float('nan')):22.3g}" for name in NAMES))

# 4. Do trainer and engine agree? `mismatch/mean_abs` is the mean difference, in nats, of the log-probs that
# Megatron-Core and vLLM give to the same sampled tokens. The weights are the same, so what is left is rounding: tiny
# models showed 2e-7 in float32, and 8e-3 in bfloat16. If it is large, the engine does not hold the trainer's weights,
# or the two compute different models. The run stops by itself above `algorithm.max_mismatch`.
worst = max((record.get("mismatch/mean_abs", 0.0) for record in steps), default=0.0)
print(f"\nlargest mean mismatch of a step: {worst:.1e} nats a token")

# 5. Where does the time go? The phases of a step do not overlap, and together with `other` they add up to its total.
seconds = time_split(steps)
print("\nseconds of all steps, by phase:")
for phase, spent in seconds.items():
    print(f"  {phase:<12}{spent:7.2f}  {'#' * round(40 * spent / sum(seconds.values()))}")

# 6. What has the model written, and what was it worth? Read answers before you believe a curve. An answer without a
# reward has a reason, and `finish` says whether the length cut it.
print("\nanswers:")
for sample in [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()][-6:]:
    reward = sample["reason"] if sample["reward"] is None else f"reward {sample['reward']:.2f}"
    text = (sample["thought"] + sample["answer"])[:60]
    print(f"  step {sample['step']}, {sample['finish']:<6} {sample['prompt']} {text!r}: {reward}")

# 7. The report of a run is written whenever it ends. `megatron-rl report RUN` writes it for a run that is still going
# on, and with several runs it compares them: curves, headline numbers, and every key of the configuration that differs.
print(f"\nreport of this run: {run.report}")
if len(runs) == 1:
    print("Give several folders to compare them here. A second start without arguments makes a second run.")
else:
    command = [sys.executable, "-m", "megatron_rl", "report", *(str(one.folder) for one in runs)]
    page = subprocess.run([*command, "--out", "comparison"], check=True, capture_output=True, text=True).stdout.strip()
    print(f"comparison: {Path(page).absolute()}\nits curves: {Path(page).with_suffix('.png').absolute()}")
