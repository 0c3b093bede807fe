"""The panels of a run, or of several runs, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterMathtext, MaxNLocator, NullLocator, StrMethodFormatter

from megatron_rl.observe.panels import GREY, Curve, Experiment, Panel, Records, comparison_panels, run_panels

INK, MUTED, GRID, SILVER = "#1f2430", "#6b7280", "#e8eaee", "#c3c8d1"
COLOURS = ("#2f6fde", "#2b9a66", "#e4813a", "#8b5fc7", "#d6486b", "#21a5b5", "#b59b21", "#7a4a2b", "#2f3e63")
STYLE: dict[str, Any] = {"linewidth": 1.8, "solid_capstyle": "round"}


def draw_curves(metrics: Records, resumed_at: Sequence[int] = ()) -> Figure:
    """Draw the panels of one run, two in each row.

    Args:
        resumed_at: the first steps after each resume; a dotted line is before each of them.
    """
    return draw(run_panels(metrics), resumed_at)


def draw_comparison(experiments: Sequence[Experiment]) -> Figure:
    """Draw the panels of several runs, with one legend for all of them."""
    figure = draw(comparison_panels(experiments))
    for axes in figure.axes:
        legend = axes.get_legend()
        if legend:
            legend.remove()
    if figure.axes:
        entries = [dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)) for axes in figure.axes]
        known: Mapping[str, Any] = {label: handle for one in entries for label, handle in one.items()}
        figure.legend(
            list(known.values()),
            list(known),
            loc="outside upper left",
            ncols=max(1, min(4, len(known))),
            frameon=False,
            fontsize=9,
            labelcolor=INK,
        )
    return figure


def draw(panels: Sequence[Panel], resumed_at: Sequence[int] = ()) -> Figure:
    rows = max(1, -(-len(panels) // 2))
    figure = Figure(figsize=(11, 2.9 * rows), layout="constrained", facecolor="white")
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.12, h_pad=0.12, hspace=0.04, wspace=0.04)
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(rows, 2, index + 1)
        _dress(axes, panel.title)
        if panel.kind == "stack":
            _draw_stack(axes, panel.lines)
        else:
            _draw_lines(axes, panel)
        for step in resumed_at:
            axes.axvline(step - 0.5, color=SILVER, linestyle=":", linewidth=1.2)
    return figure


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, color=INK, fontweight="bold", pad=10)
    axes.set_xlabel("step", fontsize=8.5, color=MUTED)
    axes.grid(axis="y", color=GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8.5, length=0)
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_color(SILVER)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.margins(x=0.02)


def _draw_lines(axes: Axes, panel: Panel) -> None:
    for band in panel.bands:
        axes.fill_between(band.steps, band.low, band.high, color=_colour(band.colour), alpha=0.15, linewidth=0)
    for line in panel.lines:
        style = {"linewidth": 0.8, "alpha": 0.55} if line.is_thin else STYLE
        markers: dict[str, Any] = {"marker": "o", "ms": 4.5} if line.has_markers else {}
        # Matplotlib has no legend entry for a label that begins with an underscore.
        label = f"_{line.label}" if line.is_thin else line.label
        axes.plot(line.steps, line.values, color=_colour(line.colour), label=label, **markers, **style)
    if panel.scale == "log":
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(LogFormatterMathtext())
    axes.set_ylim(bottom=panel.low, top=panel.high)
    if panel.scale == "linear" and axes.get_ylim()[0] < 0:
        axes.axhline(0, color=SILVER, linewidth=1, zorder=1)
    if any(line.label and not line.is_thin for line in panel.lines):
        _legend(axes, loc="best")


def _draw_stack(axes: Axes, layers: Sequence[Curve]) -> None:
    bottom = [0.0] * len(layers[0].steps)
    for layer in layers:
        colour = _colour(layer.colour)
        axes.bar(layer.steps, layer.values, width=1.0, bottom=bottom, color=colour, label=layer.label, linewidth=0)
        bottom = [low + height for low, height in zip(bottom, layer.values, strict=True)]
    axes.set_ylim(top=max(bottom) * 1.4 or 1.0)  # room for the legend
    _legend(axes, loc="upper left", ncols=4, columnspacing=1.2, borderaxespad=0)


def _legend(axes: Axes, **placing: Any) -> None:
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, handlelength=1.2, **placing)


def _colour(index: int) -> str:
    return SILVER if index == GREY else COLOURS[index]
