"""The curves of one run, or of several runs in the same panels.

Invariant: a panel shows the numbers that were logged, and a panel without numbers is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from math import ceil, floor, log10
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterMathtext, MaxNLocator, NullLocator, StrMethodFormatter

from megatron_rl.observe.records import heldout, reward_names, series, time_split

Records = Sequence[Mapping[str, float]]
Panel = tuple[str, Callable[[Axes, Records], None]]
"""The title of a panel, and the function that draws it."""

INK, MUTED, GRID = "#1f2430", "#6b7280", "#e8eaee"
BLUE, ORANGE, GREEN, GREY = "#2f6fde", "#e4813a", "#2b9a66", "#c3c8d1"
PHASES = ("#2f6fde", "#2b9a66", "#e4813a", "#8b5fc7", "#d6486b", "#21a5b5", "#b59b21", "#7a4a2b", "#2f3e63")
STYLE: dict[str, Any] = {"linewidth": 1.8, "solid_capstyle": "round"}
SPIKE = 30.0
"""If the maximum exceeds the median by this factor, the axis is logarithmic, so that the other values remain
visible."""


def draw_curves(metrics: Records, resumed_at: Sequence[int] = ()) -> Figure:
    """Draw the panels that have logged values, two in each row. A run with rewards shows no loss, because a
    policy loss says little about learning.

    Args:
        resumed_at: the first steps after each resume; a dotted line is before each of them.
    """
    panels: list[tuple[str, str, Callable[[Axes, Records], None]]] = [
        ("Loss", "loss", _line("loss", BLUE)),
        ("Length, tokens", "length/response_mean", _draw_lengths),
        ("Time of a step, seconds", "time/total_s", _draw_time),
        ("Rollout, tokens a second", "rollout/tokens_per_s", _line("rollout/tokens_per_s", GREEN)),
        ("Mismatch, mean |logp_old \N{MINUS SIGN} logp_rollout|", "mismatch/mean_abs", _draw_mismatch),
        ("Lag of the answers, steps", "lag/mean", _line("lag/mean", ORANGE)),
        ("Gradient norm", "grad_norm", _line("grad_norm", BLUE)),
        ("Entropy, nats a token", "entropy", _line("entropy", GREEN)),
        ("Share of tokens that the clip flattens", "pg_clipfrac", _line("pg_clipfrac", ORANGE)),
        ("KL to the reference", "kl", _line("kl", BLUE)),
    ]
    if series(metrics, "reward/mean")[0]:
        del panels[0]
    first = _reward_panels(metrics)
    shown = first + [(title, draw) for title, name, draw in panels if series(metrics, name)[0]]
    return _figure(metrics, shown, resumed_at)


def _figure(
    metrics: Any, panels: Sequence[tuple[str, Callable[[Axes, Any], None]]], resumed_at: Sequence[int] = ()
) -> Figure:
    rows = max(1, -(-len(panels) // 2))
    figure = Figure(figsize=(11, 2.9 * rows), layout="constrained", facecolor="white")
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.12, h_pad=0.12, hspace=0.04, wspace=0.04)
    for index, (title, draw) in enumerate(panels):
        axes = figure.add_subplot(rows, 2, index + 1)
        _dress(axes, title)
        draw(axes, metrics)
        for step in resumed_at:
            axes.axvline(step - 0.5, color=GREY, linestyle=":", linewidth=1.2)
    return figure


def _reward_panels(metrics: Records) -> list[Panel]:
    """The panels of reward and evaluation, which are one panel if both have the same scale, and the panels of the
    separate rewards and of abstentions."""
    if not series(metrics, "reward/mean")[0]:
        return []
    label, name = heldout(metrics)
    _, rewards = series(metrics, "reward/mean")
    one_scale = name != "eval/accuracy" or all(0 <= value <= 1 for value in rewards)
    if not series(metrics, name)[0]:
        panels = [("Reward", _draw_reward(None))]
    elif one_scale:
        panels = [(f"Reward and {label}", _draw_reward((label, name)))]
    else:
        other = ("held-out reward", "eval/reward_mean")
        panels = [
            ("Reward", _draw_reward(other if series(metrics, other[1])[0] else None)),
            (label.capitalize(), _draw_lines({label: name}, (ORANGE,))),
        ]
    names = reward_names(metrics)
    if len(names) > 1:
        panels.append(("Each reward alone", _draw_lines({name: f"reward/{name}/mean" for name in names}, PHASES)))
    if any(any(series(metrics, f"reward/{name}/abstained")[1]) for name in names):
        panels.append(("Abstentions, share of samples", _draw_abstentions(names)))
    return panels


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
        steps, values = series(metrics, name)
        axes.plot(steps, values, color=colour, **STYLE)
        _fit_positive(axes, values)

    return draw


def _fit_positive(axes: Axes, values: Sequence[float]) -> None:
    """Let the axis begin at 0, or make it logarithmic if one large value would hide the variation of the others."""
    if values and min(values) > 0 and max(values) > SPIKE * median(values):
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
    elif min(values, default=0.0) >= 0:
        axes.set_ylim(bottom=0)


def _draw_reward(evaluation: tuple[str, str] | None) -> Callable[[Axes, Records], None]:
    """Returns a function that draws the reward and the evaluations, which are given as (label, metric)."""

    def draw(axes: Axes, metrics: Records) -> None:
        axes.plot(*series(metrics, "reward/mean"), color=BLUE, label="reward", **STYLE)
        if evaluation:
            label, name = evaluation
            axes.plot(*series(metrics, name), color=ORANGE, label=label, marker="o", ms=4.5, **STYLE)
        _fit(axes)
        _legend(axes, loc="lower right")

    return draw


def _draw_lines(lines: Mapping[str, str], colours: Sequence[str]) -> Callable[[Axes, Records], None]:
    """Returns a function that draws a line for each label; `lines` maps labels to metrics."""

    def draw(axes: Axes, metrics: Records) -> None:
        for index, (label, name) in enumerate(lines.items()):
            steps, values = series(metrics, name)
            marker: dict[str, Any] = {"marker": "o", "ms": 4.5} if name.startswith("eval/") else {}
            axes.plot(steps, values, color=colours[index % len(colours)], label=label, **marker, **STYLE)
        _fit(axes)
        if len(lines) > 1:
            _legend(axes, loc="best")

    return draw


def _draw_abstentions(names: Sequence[str]) -> Callable[[Axes, Records], None]:
    """Returns a function that draws a line for each reward that abstained, in the colour of the reward."""

    def draw(axes: Axes, metrics: Records) -> None:
        for name, colour in zip(names, cycle(PHASES)):
            steps, values = series(metrics, f"reward/{name}/abstained")
            if any(values):
                axes.plot(steps, values, color=colour, label=name, **STYLE)
        axes.set_ylim(bottom=0)
        _legend(axes, loc="best")

    return draw


def _fit(axes: Axes) -> None:
    """Give shares the scale from 0 to 1, so that runs can be compared, and draw a line at 0 if there are values
    below."""
    drawn: list[Any] = [line.get_ydata() for line in axes.lines]
    values = [value for ys in drawn for value in ys]
    if values and min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(0, 1.03)
    elif values and min(values) < 0:
        axes.axhline(0, color=GREY, linewidth=1, zorder=1)


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
    _fit_decades(axes, values)


def _fit_decades(axes: Axes, values: Sequence[float]) -> None:
    """Let the axis span whole decades, so that rounding does not look like a trend."""
    if min(values) > 0:
        axes.set_yscale("log")
        axes.set_ylim(10 ** floor(log10(min(values))), 10 ** ceil(log10(max(values)) + 1e-9))
        axes.yaxis.set_major_formatter(LogFormatterMathtext())
        axes.yaxis.set_minor_locator(NullLocator())


def draw_comparison(runs: Mapping[str, Records]) -> Figure:
    """Draw the curves of several runs, with one panel for each metric and one colour for each run."""
    panels = [
        ("Held-out accuracy", "eval/accuracy"),
        ("Held-out reward", "eval/reward_mean"),
        ("Reward", "reward/mean"),
        ("Loss", "loss"),
        ("Response length, tokens", "length/response_mean"),
        ("Entropy, nats a token", "entropy"),
        ("Gradient norm", "grad_norm"),
        ("KL to the reference", "kl"),
        ("Mismatch, mean |logp_old \N{MINUS SIGN} logp_rollout|", "mismatch/mean_abs"),
        ("Rollout, tokens a second", "rollout/tokens_per_s"),
        ("Lag of the answers, steps", "lag/mean"),
        ("Time of a step, seconds", "time/total_s"),
    ]
    logged = {name for metrics in runs.values() for record in metrics for name in record}
    hidden = {"loss"} if "reward/mean" in logged else set()
    if "eval/accuracy" in logged:
        hidden.add("eval/reward_mean")
    figure = _figure(runs, [(title, _over(name)) for title, name in panels if name in logged - hidden])
    if figure.axes:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside upper left",
            ncols=min(4, len(runs)),
            frameon=False,
            fontsize=9,
            labelcolor=INK,
        )
    return figure


def colour_of(index: int) -> str:
    """The colour of the run with this index, in the given order of the runs."""
    return PHASES[index % len(PHASES)]


def _over(name: str) -> Callable[[Axes, Mapping[str, Records]], None]:
    def draw(axes: Axes, runs: Mapping[str, Records]) -> None:
        everything: list[float] = []
        for index, (label, metrics) in enumerate(runs.items()):
            steps, values = series(metrics, name)
            marker: dict[str, Any] = {"marker": "o", "ms": 4} if name.startswith("eval/") else {}
            axes.plot(steps, values, color=colour_of(index), label=label, alpha=0.9, **marker, **STYLE)
            everything += values
        if name.startswith(("eval/", "reward/")):
            _fit(axes)
        elif name.startswith("mismatch/"):
            _fit_decades(axes, everything)
        else:
            _fit_positive(axes, everything)

    return draw
