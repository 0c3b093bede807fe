"""A run as one page: report.html, self-contained, with its curves; the curves also as curves.png.

Invariant: the page loads nothing from elsewhere, and text from rows and answers is escaped.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterMathtext, MaxNLocator, NullLocator, StrMethodFormatter

from megatron_rl.observe.records import SAMPLES, pace, read_lines, read_metrics, series, time_split

Records = Sequence[Mapping[str, float]]

INK, MUTED, GRID = "#1f2430", "#6b7280", "#e8eaee"
BLUE, ORANGE, GREEN, GREY = "#2f6fde", "#e4813a", "#2b9a66", "#c3c8d1"
PHASES = ("#2f6fde", "#2b9a66", "#e4813a", "#8b5fc7", "#d6486b", "#21a5b5", "#b59b21", "#7a4a2b", "#2f3e63")
STYLE = {"linewidth": 1.8, "solid_capstyle": "round"}


def write_report(run_folder: Path) -> Path:
    """Write `report.html` and `curves.png` from the run folder's metrics.jsonl, samples.jsonl and
    config.json.

    Raises:
        ValueError: no step was logged.
    """
    metrics = read_metrics(run_folder)
    if not metrics:
        raise ValueError(f"{run_folder} holds no metrics.jsonl with a step: nothing to report")
    curves = run_folder / "curves.png"
    draw_curves(metrics).savefig(curves, dpi=160)
    config_path = run_folder / "config.json"
    templates = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=templates, autoescape=True, trim_blocks=True)
    page = environment.get_template("report.html.jinja").render(
        name=run_folder.name,
        tiles=_tiles(metrics),
        curves=base64.b64encode(curves.read_bytes()).decode(),
        samples=read_lines(run_folder / SAMPLES)[-3:],
        provenance=json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else None,
    )
    path = run_folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _tiles(metrics: Records) -> list[dict[str, Any]]:
    """The headline numbers: label, value, and a remark."""
    tiles = []
    for label, name in (("Held-out accuracy", "eval/accuracy"), ("Reward", "reward/mean")):
        _, values = series(metrics, name)
        if values:
            tiles.append({"label": label, "value": f"{values[-1]:.3f}", "remark": f"from {values[0]:.3f}"})
    seconds = sum(time_split(metrics).values())
    steps, each = pace(metrics)
    tiles.append({"label": "Steps", "value": f"{steps}", "remark": f"{each:.2f} s a step"})
    tiles.append({"label": "Time", "value": duration(seconds), "remark": "evaluations and checkpoints too"})
    _, speeds = series(metrics, "rollout/tokens_per_s")
    if speeds:
        mean = sum(speeds) / len(speeds)
        tiles.append({"label": "Rollout", "value": f"{mean:,.0f}", "remark": "tokens a second, mean"})
    return tiles


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def draw_curves(metrics: Records) -> Figure:
    """The panels for which something was logged, two a row. A run with rewards shows no loss: a policy loss
    says little about learning."""
    panels: list[tuple[str, str, Callable[[Axes, Records], None]]] = [
        ("Reward and held-out accuracy", "reward/mean", _draw_reward),
        ("Length, tokens", "length/response_mean", _draw_lengths),
        ("Time of a step, seconds", "time/total_s", _draw_time),
        ("Rollout, tokens a second", "rollout/tokens_per_s", _line("rollout/tokens_per_s", GREEN)),
        ("Mismatch, mean |logp_old \N{MINUS SIGN} logp_rollout|", "mismatch/mean_abs", _draw_mismatch),
        ("Gradient norm", "grad_norm", _line("grad_norm", BLUE)),
        ("Entropy, nats a token", "entropy", _line("entropy", GREEN)),
        ("Share of tokens that the clip flattens", "pg_clipfrac", _line("pg_clipfrac", ORANGE)),
        ("KL to the reference", "kl", _line("kl", BLUE)),
    ]
    if not series(metrics, "reward/mean")[0]:
        panels[0] = ("Loss", "loss", _line("loss", BLUE))
    present = [panel for panel in panels if series(metrics, panel[1])[0]]
    rows = max(1, -(-len(present) // 2))
    figure = Figure(figsize=(11, 2.9 * rows), layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, hspace=0.04, wspace=0.04)
    for index, (title, _, draw) in enumerate(present):
        axes = figure.add_subplot(rows, 2, index + 1)
        _dress(axes, title)
        draw(axes, metrics)
    return figure


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, color=INK, fontweight="bold", pad=10)
    axes.set_xlabel("step", fontsize=8.5, color=MUTED)
    axes.grid(axis="y", color=GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8.5, length=0)
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_color(GREY)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.margins(x=0.02)


def _legend(axes: Axes, **placing: Any) -> None:
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, handlelength=1.2, **placing)


def _line(name: str, colour: str) -> Callable[[Axes, Records], None]:
    def draw(axes: Axes, metrics: Records) -> None:
        axes.plot(*series(metrics, name), color=colour, **STYLE)
        axes.set_ylim(bottom=0)

    return draw


def _draw_reward(axes: Axes, metrics: Records) -> None:
    axes.plot(*series(metrics, "reward/mean"), color=BLUE, label="reward", **STYLE)
    steps, accuracy = series(metrics, "eval/accuracy")
    if steps:
        axes.plot(steps, accuracy, color=ORANGE, label="held-out accuracy", marker="o", ms=4.5, **STYLE)
    low, high = axes.get_ylim()
    if low > -0.1 and high < 1.1:  # a share of right answers: always the same scale
        axes.set_ylim(0, 1.03)
    _legend(axes, loc="lower right")


def _draw_lengths(axes: Axes, metrics: Records) -> None:
    axes.plot(*series(metrics, "length/response_mean"), color=BLUE, label="response", **STYLE)
    steps, thought = series(metrics, "length/thought_mean")
    if steps:
        axes.plot(steps, thought, color=ORANGE, label="thought", **STYLE)
    axes.set_ylim(bottom=0)
    _legend(axes, loc="lower right")


def _draw_time(axes: Axes, metrics: Records) -> None:
    records = [record for record in metrics if "time/total_s" in record]
    phases = list(time_split(records))
    stacks = [[record.get(f"time/{phase}_s", 0.0) for record in records] for phase in phases]
    colours = [GREY if phase == "other" else PHASES[i % len(PHASES)] for i, phase in enumerate(phases)]
    steps = [record["step"] for record in records]
    bottom = [0.0] * len(steps)
    for phase, stack, colour in zip(phases, stacks, colours, strict=True):
        axes.bar(steps, stack, width=1.0, bottom=bottom, color=colour, label=phase, linewidth=0)
        bottom = [low + height for low, height in zip(bottom, stack, strict=True)]
    axes.set_ylim(top=max(bottom) * 1.4 or 1.0)  # room for the legend
    _legend(axes, loc="upper left", ncols=4, columnspacing=1.2, borderaxespad=0)


def _draw_mismatch(axes: Axes, metrics: Records) -> None:
    steps, values = series(metrics, "mismatch/mean_abs")
    axes.plot(steps, values, color=ORANGE, **STYLE)
    if min(values) > 0:
        # Whole decades, so that rounding does not look like a trend.
        axes.set_yscale("log")
        axes.set_ylim(10 ** floor(log10(min(values))), 10 ** ceil(log10(max(values)) + 1e-9))
        axes.yaxis.set_major_formatter(LogFormatterMathtext())
        axes.yaxis.set_minor_locator(NullLocator())
