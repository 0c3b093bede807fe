"""The summary at the end of a run on the screen: values before and after, the time of each phase, three answers.

Invariant: answers are printed literally and never interpreted as markup.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megatron_rl.observe.live import split_text
from megatron_rl.observe.records import (
    SAMPLES,
    heldout,
    pace,
    read_lines,
    read_metrics,
    reward_names,
    series,
    time_split,
)
from megatron_rl.observe.report import duration


def print_summary(run_folder: Path, console: Console) -> None:
    """Print the summary of a run folder.

    Raises:
        ValueError: no step was logged.
    """
    metrics = read_metrics(run_folder)
    if not metrics:
        raise ValueError(f"{run_folder} has no metrics.jsonl with a step, so there is nothing to summarise")
    for sample in read_lines(run_folder / SAMPLES, last=3):
        console.print(_answer(sample))
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bright_black")
    for column in ("", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    names = reward_names(metrics)
    own = [int(record["step"]) for record in metrics if any(key.startswith(("reward/", "length/")) for key in record)]
    abstaining = [name for name in names if any(series(metrics, f"reward/{name}/abstained")[1])]
    for label, name, form in (
        (*heldout(metrics), "{:.3f}"),
        ("reward", "reward/mean", "{:.3f}"),
        *((f"  {name}", f"reward/{name}/mean", "{:.3f}") for name in (names if len(names) > 1 else [])),
        *((f"  {name}, no reward", f"reward/{name}/abstained", "{:.1%}") for name in abstaining),
        ("response, tokens", "length/response_mean", "{:,.1f}"),
        ("reasoning, tokens", "length/thought_mean", "{:,.1f}"),
        ("loss", "loss", "{:.4f}"),
    ):
        found, values = series(metrics, name)
        if values:
            first, last = form.format(values[0]), form.format(values[-1])
            if name.startswith("reward/"):  # a step without any score has none
                first, last = (
                    (first if found[0] == own[0] else "no score"),
                    (last if found[-1] == own[-1] else "no score"),
                )
            table.add_row(Text(label), first, Text(last, "bold green"))
    split = time_split(metrics)
    steps, each = pace(metrics)
    total = sum(split.values())
    _, speeds = series(metrics, "rollout/tokens_per_s")
    speed = f", rollout {sum(speeds) / len(speeds):,.0f} tokens/s" if speeds else ""
    console.print()
    console.print(table)
    console.print()
    told = f"{steps} steps in {duration(total)}, {each:.2f} s per step without evaluations and checkpoints{speed}"
    console.print(Text(told, "bold"))
    _, mismatches = series(metrics, "mismatch/mean_abs")
    _, ratio_errors = series(metrics, "on_policy/ratio_error")
    if mismatches:
        agreed = f"the log-probs of trainer and engine differ by at most {max(mismatches):.1e} (mean of a step)"
        exact = f"; on policy, the ratio is 1 within {max(ratio_errors):.1e}" if ratio_errors else ""
        console.print(agreed + exact, style="bright_black")
    console.print(split_text(split))


def _answer(sample: dict[str, Any]) -> Panel:
    reward = "no verdict" if sample["reward"] is None else f"reward {sample['reward']:g}"
    reward += f": {sample['reason']}" if sample.get("reason") else ""
    colour = "green" if (sample["reward"] or 0) > 0 else "red"
    body = Text.assemble(
        (sample["prompt"], "bold"),
        "\n",
        (sample["thought"], "yellow"),
        (sample["answer"], "bold cyan"),
    )
    title = Text.assemble((f"step {sample['step']}  ", "bright_black"), (reward, colour))
    return Panel(body, title=title, title_align="left", border_style="bright_black")
