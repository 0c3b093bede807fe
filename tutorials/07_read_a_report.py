"""Read what a run has left: its metrics, its time, its answers, and a report that compares it with another run.

    python tutorials/07_read_a_report.py                  # makes two short runs, and reads them
    python tutorials/07_read_a_report.py runs/a runs/b    # reads your own; one folder is enough

You will learn where each number is, which of them tell that a run is healthy, and how two runs are compared. You need
two CPU cores, no GPU and no download. Without arguments the script takes about a minute, most of it for the start of
two runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from megatron_rl import Run, grpo
from megatron_rl.recipes.tiny.task import write_model


def digits(completions, **others):
    """The share of digits. It abstains on answers of less than four characters, so that there are reasons to read."""
    return [sum(map(str.isdigit, text)) / len(text) if len(text) >= 4 else None for text in completions]


def short_run(name, lr):
    done = Run(Path("runs/tutorial_07", name))
    if done.model is not None:  # the script has been started before
        return done
    return grpo(
        "models/tutorial_sums",
        [{"prompt": f"{a}+{a}="} for a in range(10, 90)],
        digits,
        steps=5,
        name=name,
        run={"folder": "runs/tutorial_07"},
        policy={"optimizer": {"lr": lr}},
        rollout={"prompts_per_step": 8, "samples_per_prompt": 8, "max_prompt_tokens": 8, "max_response_tokens": 24},
    )


# 1. A run is a folder, and everything below reads its files. So it does not matter who has started the run, whether it
# is still running, and whether it has failed.
if len(sys.argv) > 1:
    runs = [Run(Path(folder)) for folder in sys.argv[1:]]
else:
    write_model(Path("models/tutorial_sums"), seed=0)
    runs = [short_run("slow", 1e-4), short_run("fast", 3e-3)]
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
seconds: dict[str, float] = {}
for record in steps:
    for name, value in record.items():
        if name.startswith("time/") and name != "time/total_s":
            phase = name.removeprefix("time/").removesuffix("_s")
            seconds[phase] = seconds.get(phase, 0.0) + value
print("\nseconds of all steps, by phase:")
for phase, spent in sorted(seconds.items(), key=lambda item: -item[1]):
    print(f"  {phase:<12}{spent:7.2f}  {'#' * round(40 * spent / sum(seconds.values()))}")

# 6. What has the model written, and what was it worth? Read answers before you believe a curve. An answer without a
# reward has a reason, and `finish` says whether the length cut it.
print("\nanswers:")
for sample in [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()][-6:]:
    reward = f"reward {sample['reward']:.2f}" if sample["reward"] is not None else sample["reason"].rpartition(":")[2]
    text = (sample["thought"] + sample["answer"])[:60]
    print(f"  step {sample['step']}, {sample['finish']:<6} {sample['prompt']} {text!r}: {reward}")

# 7. The report of a run is written whenever it ends. `megatron-rl report RUN` writes it for a run that is still going
# on, and with several runs it compares them: curves, headline numbers, and every key of the configuration that differs.
print(f"\nreport of this run: {run.report}")
if len(runs) > 1:
    command = [sys.executable, "-m", "megatron_rl", "report", *(str(one.folder) for one in runs)]
    page = subprocess.run([*command, "--out", "comparison"], check=True, capture_output=True, text=True).stdout.strip()
    print(f"comparison: {Path(page).absolute()}\nits curves: {Path(page).with_suffix('.png').absolute()}")
