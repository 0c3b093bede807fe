"""What the curves of one run, or of several runs, show. The page and the picture draw the same panels.

Invariant: a panel shows the numbers that were logged, and a panel without numbers is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from math import ceil, floor, log10
from statistics import fmean, median
from typing import Any, Literal

from megatron_rl.observe.provenance import flat
from megatron_rl.observe.records import heldout, reward_names, series, time_split

Records = Sequence[Mapping[str, float]]
BLUE, GREEN, ORANGE = 0, 1, 2
NUM_COLOURS = 9
GREY = -1
SPIKE = 30.0
"""If the maximum exceeds the median by this factor, the axis is logarithmic, so that the other values remain
visible."""
OWN_KEYS = ("config.run.seed", "config.run.name", "config.run.folder")
"""The keys of the configuration that may differ between the seeds of one experiment."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve; in a stack, the heights of one layer."""

    label: str
    colour: int
    """The index of a colour, or GREY."""
    steps: Sequence[int]
    values: Sequence[float]
    has_markers: bool = False
    is_thin: bool = False
    """Whether it is one of the runs that a band summarises. It has no entry in the legend."""


@dataclass(frozen=True, slots=True)
class Band:
    """The range of several runs, at the steps that all of them have logged."""

    colour: int
    steps: Sequence[int]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    lines: Sequence[Curve]
    bands: Sequence[Band] = ()
    kind: Literal["lines", "stack"] = "lines"
    """`stack`: the lines are layers on top of each other, the first one at the bottom."""
    scale: Literal["linear", "log"] = "linear"
    low: float | None = None
    """The lower end of the axis of values; None means that it follows the values. So for `high`."""
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Experiment:
    """Runs that have the same configuration but for their seeds."""

    label: str
    runs: Mapping[str, Records]
    """The metrics of each run by its name."""


def run_panels(metrics: Records) -> list[Panel]:
    """The panels of one run. A run with rewards shows no loss, because a policy loss says little about learning."""
    panels = _reward_panels(metrics)
    if not series(metrics, "reward/mean")[0]:
        panels.append(_positive("Loss", [_line(metrics, "loss", BLUE)]))
    lengths = [
        _line(metrics, "length/response_mean", BLUE, "response"),
        _line(metrics, "length/thought_mean", ORANGE, "thought"),
    ]
    mismatch = [_line(metrics, "mismatch/mean_abs", ORANGE)]
    panels += [
        Panel("Length, tokens", lengths, low=0),
        Panel("Time of a step, seconds", _time_layers(metrics), kind="stack", low=0),
        _positive("Rollout, tokens a second", [_line(metrics, "rollout/tokens_per_s", GREEN)]),
        _decades("Mismatch, mean |logp_old \N{MINUS SIGN} logp_rollout|", mismatch),
    ]
    panels += [
        _positive(title, [_line(metrics, name, colour)])
        for title, name, colour in (
            ("Lag of the answers, steps", "lag/mean", ORANGE),
            ("Gradient norm", "grad_norm", BLUE),
            ("Entropy, nats a token", "entropy", GREEN),
            ("Share of tokens that the clip flattens", "pg_clipfrac", ORANGE),
            ("KL to the reference", "kl", BLUE),
        )
    ]
    return _with_numbers(panels)


def comparison_panels(experiments: Sequence[Experiment]) -> list[Panel]:
    """The panels of several runs: one for each metric, and one colour for each experiment. An experiment of several
    runs has their mean as its line, a band from the smallest to the largest value, and a thin line for each run."""
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
    logged = {name for one in experiments for run in one.runs.values() for record in run for name in record}
    hidden = {"loss"} if "reward/mean" in logged else set()
    if "eval/accuracy" in logged:
        hidden.add("eval/reward_mean")
    return _with_numbers([_compared(title, name, experiments) for title, name in panels if name not in hidden])


def experiments_of(runs: Mapping[str, Records], configs: Mapping[str, Mapping[str, Any] | None]) -> list[Experiment]:
    """The runs, together with the other seeds of the same experiment, in the order of their first runs.

    Args:
        configs: the content of each run's config.json; a run without it is an experiment of its own.
    """
    members: dict[Any, list[str]] = {}
    for name in runs:
        leaves = flat({"config": (configs[name] or {}).get("config", {})})
        same = frozenset((key, repr(value)) for key, value in leaves.items() if key not in OWN_KEYS)
        members.setdefault(same if configs[name] else name, []).append(name)
    return [Experiment(_joint_name(names), {name: runs[name] for name in names}) for names in members.values()]


def colour_of(index: int) -> int:
    """The colour of the experiment or layer with this index."""
    return index % NUM_COLOURS


def _joint_name(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{names[0]} and {len(names) - 1} more seed{'s' if len(names) > 2 else ''}"


def _with_numbers(panels: Sequence[Panel]) -> list[Panel]:
    drawn = [replace(panel, lines=[line for line in panel.lines if line.steps]) for panel in panels]
    return [panel for panel in drawn if panel.lines]


def _line(metrics: Records, name: str, colour: int, label: str = "", is_thin: bool = False) -> Curve:
    steps, values = series(metrics, name)
    return Curve(label, colour, steps, values, has_markers=name.startswith("eval/") and not is_thin, is_thin=is_thin)


def _reward_panels(metrics: Records) -> list[Panel]:
    """The panels of reward and evaluation, which are one panel if both have the same scale, and the panels of the
    separate rewards and of abstentions."""
    label, name = heldout(metrics)
    reward = _line(metrics, "reward/mean", BLUE, "reward")
    if not reward.steps:
        return []
    evaluation = _line(metrics, name, ORANGE, label)
    one_scale = name != "eval/accuracy" or all(0 <= value <= 1 for value in reward.values)
    if not evaluation.steps:
        panels = [_shares("Reward", [reward])]
    elif one_scale:
        panels = [_shares(f"Reward and {label}", [reward, evaluation])]
    else:
        other = _line(metrics, "eval/reward_mean", ORANGE, "held-out reward")
        panels = [_shares("Reward", [reward, other]), _shares(label.capitalize(), [evaluation])]
    colours = dict(zip(reward_names(metrics), cycle(range(NUM_COLOURS))))
    each = [_line(metrics, f"reward/{name}/mean", colour, name) for name, colour in colours.items()]
    if len(each) > 1:
        panels.append(_shares("Each reward alone", each))
    abstained = [_line(metrics, f"reward/{name}/abstained", colour, name) for name, colour in colours.items()]
    abstained = [line for line in abstained if any(line.values)]
    return [*panels, Panel("No reward, share of samples", abstained, low=0)]


def _time_layers(metrics: Records) -> list[Curve]:
    """The seconds of each phase in the steps that have a total, the longest phase first and `other` last."""
    records = [record for record in metrics if "time/total_s" in record]
    steps = [int(record["step"]) for record in records]
    return [
        Curve(
            phase,
            GREY if phase == "other" else colour_of(i),
            steps,
            [record.get(f"time/{phase}_s", 0.0) for record in records],
        )
        for i, phase in enumerate(time_split(records))
    ]


def _compared(title: str, name: str, experiments: Sequence[Experiment]) -> Panel:
    lines: list[Curve] = []
    bands: list[Band] = []
    for index, experiment in enumerate(experiments):
        colour = colour_of(index)
        runs = [_line(run, name, colour, label) for label, run in experiment.runs.items()]
        if len(runs) == 1:
            lines += runs
            continue
        lines += [replace(line, is_thin=True, has_markers=False) for line in runs]
        at = [dict(zip(line.steps, line.values, strict=True)) for line in runs if line.steps]
        common = sorted(set.intersection(*(set(one) for one in at))) if len(at) > 1 else []
        columns = [[one[step] for one in at] for step in common]
        mean = Curve(experiment.label, colour, common, [fmean(values) for values in columns])
        lines.append(replace(mean, has_markers=name.startswith("eval/")))
        if common:
            bands.append(Band(colour, common, [min(values) for values in columns], [max(values) for values in columns]))
    if name.startswith(("eval/", "reward/")):
        return replace(_shares(title, lines), bands=bands)
    return replace((_decades if name.startswith("mismatch/") else _positive)(title, lines), bands=bands)


def _shares(title: str, lines: Sequence[Curve]) -> Panel:
    """A panel where shares have the scale from 0 to 1, so that runs can be compared."""
    values = _values(lines)
    are_shares = bool(values) and min(values) >= 0 and max(values) <= 1
    return Panel(title, lines, low=0 if are_shares else None, high=1.03 if are_shares else None)


def _positive(title: str, lines: Sequence[Curve]) -> Panel:
    """A panel whose axis begins at 0, or is logarithmic if one large value would hide the variation of the others."""
    values = _values(lines)
    if values and min(values) > 0 and max(values) > SPIKE * median(values):
        return Panel(title, lines, scale="log")
    return Panel(title, lines, low=0 if min(values, default=0.0) >= 0 else None)


def _decades(title: str, lines: Sequence[Curve]) -> Panel:
    """A panel whose axis spans whole decades, so that rounding does not look like a trend."""
    values = _values(lines)
    if not values or min(values) <= 0:
        return Panel(title, lines)
    ends = 10.0 ** floor(log10(min(values))), 10.0 ** ceil(log10(max(values)) + 1e-9)
    return Panel(title, lines, scale="log", low=ends[0], high=ends[1])


def _values(lines: Sequence[Curve]) -> list[float]:
    return [value for line in lines for value in line.values]
