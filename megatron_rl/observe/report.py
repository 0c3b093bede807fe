"""The report of a run, and the comparison of several runs, as an HTML page with curves. The curves are also written as
a picture.

Invariants: a page loads nothing from elsewhere; text from rows and answers is escaped; the report of a run that
crashed, or that is still running, contains what is in its files.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from matplotlib.figure import Figure

from megatron_rl.observe.curves import Records, colour_of, draw_comparison, draw_curves
from megatron_rl.observe.provenance import flat
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
from megatron_rl.processes import open_text

NO_VALUE = "\N{EN DASH}"


def write_report(run_folder: Path, out: Path | None = None) -> Path:
    """Write `report.html` and `curves.png` from the run folder's metrics.jsonl, samples.jsonl and config.json, and
    return the path of the page.

    Args:
        out: the folder to write to; None means the run folder.

    Raises:
        ValueError: no step was logged, or a file is not JSON.
    """
    metrics, made_of = _read(run_folder)
    out = out or run_folder
    return _write(
        out / "report.html",
        "report.html.jinja",
        draw_curves(metrics, (made_of or {}).get("resumed_at", ())),
        out / "curves.png",
        name=run_folder.resolve().name,
        tiles=_tiles(metrics, _planned(made_of)),
        rewards=_rewards(metrics),
        samples=read_lines(run_folder / SAMPLES)[-3:],
        provenance=made_of,
    )


def write_comparison(run_folders: Sequence[Path], out: Path) -> Path:
    """Write `comparison.html` and `comparison.png` into the folder `out`, and return the path of the page. It shows the
    headline numbers, the curves of all runs, and the differences in configuration, versions and commit.

    Raises:
        ValueError: no step was logged in one of the runs, or a file is not JSON, or a run is given twice.
    """
    read = dict(zip(distinct_names(run_folders), map(_read, run_folders), strict=True))
    runs = {name: metrics for name, (metrics, _) in read.items()}
    headline = [_headline(metrics, _planned(made_of)) for metrics, made_of in read.values()]
    known = [label for label in headline[0] if any(row[label] != NO_VALUE for row in headline)]
    if "reward" in known and "loss" in known:  # a policy loss says little about learning
        known.remove("loss")
    return _write(
        out / "comparison.html",
        "comparison.html.jinja",
        draw_comparison(runs),
        out / "comparison.png",
        names=list(runs),
        colours=[colour_of(index) for index in range(len(runs))],
        headline=[{label: row[label] for label in known} for row in headline],
        differences=differences([flat(made_of or {}) for _, made_of in read.values()]),
    )


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ from each other.

    Raises:
        ValueError: a folder is given twice.
    """
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise ValueError("the same run is given twice; give each run once")
    for size in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-size:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def differences(leaves: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The dotted keys whose values differ between the runs, with the value in each run as text."""
    keys = sorted({key for one in leaves for key in one})
    rows = {key: [json.dumps(one[key]) if key in one else NO_VALUE for one in leaves] for key in keys}
    return {key.removeprefix("config."): row for key, row in rows.items() if len(set(row)) > 1}


def _read(run_folder: Path) -> tuple[Records, dict[str, Any] | None]:
    """The metrics of a run, and the content of its config.json, which is None if there is no such file."""
    metrics = read_metrics(run_folder)
    if not metrics:
        raise ValueError(f"{run_folder} has no metrics.jsonl with a step, so there is nothing to report")
    path = run_folder / "config.json"
    try:
        return metrics, json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); remove it to get a report without it") from error


def _write(page: Path, template: str, figure: Figure, picture: Path, **content: Any) -> Path:
    page.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=160)
    templates = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=templates, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    curves = base64.b64encode(picture.read_bytes()).decode()
    with open_text(page) as file:
        file.write(environment.get_template(template).render(curves=curves, **content))
    return page


def _planned(made_of: Mapping[str, Any] | None) -> int | None:
    """The configured number of steps; None if it is not known."""
    return made_of["config"]["run"]["steps"] if made_of else None


def _steps(steps: int, planned: int | None) -> str:
    return f"{steps} of {planned}" if planned and steps < planned else f"{steps}"


def _tiles(metrics: Records, planned: int | None) -> list[dict[str, str]]:
    """The headline numbers, each with a label, a value and a remark."""
    tiles = []
    accuracy, of_accuracy = heldout(metrics)
    for label, name in ((accuracy.capitalize(), of_accuracy), ("Reward", "reward/mean")):
        _, values = series(metrics, name)
        if values:
            tiles.append({"label": label, "value": f"{values[-1]:.3f}", "remark": f"first: {values[0]:.3f}"})
    seconds = sum(time_split(metrics).values())
    steps, each = pace(metrics)
    tiles.append({"label": "Steps", "value": _steps(steps, planned), "remark": f"{each:.2f} s a step"})
    tiles.append({"label": "Time", "value": duration(seconds), "remark": "with evaluations and checkpoints"})
    _, speeds = series(metrics, "rollout/tokens_per_s")
    if speeds:
        mean = sum(speeds) / len(speeds)
        tiles.append({"label": "Rollout", "value": f"{mean:,.0f}", "remark": "tokens a second, mean"})
    return tiles


def _rewards(metrics: Records) -> list[dict[str, str]]:
    """The table of the separate rewards. A reward has a row if there are several or if it abstained: its mean in the
    first and in the last step, and, as means over the steps, the share of samples on which it abstained and the seconds
    that it took."""
    names = reward_names(metrics)
    rows = []
    for name in names:
        means, abstained, seconds = (
            series(metrics, f"reward/{name}/{part}")[1] for part in ("mean", "abstained", "seconds")
        )
        if len(names) > 1 or any(abstained):
            rows.append(
                {
                    "name": name,
                    "first": f"{means[0]:.3f}" if means else NO_VALUE,
                    "last": f"{means[-1]:.3f}" if means else NO_VALUE,
                    "abstained": f"{sum(abstained) / len(abstained):.1%}" if abstained else NO_VALUE,
                    "seconds": f"{sum(seconds) / len(seconds):.2f} s" if seconds else NO_VALUE,
                }
            )
    return rows


def _headline(metrics: Records, planned: int | None) -> dict[str, str]:
    """The row of one run in a comparison, as values by their labels."""
    row = {}
    for label, name, form in (
        ("held-out accuracy", "eval/accuracy", "{:.3f}"),
        ("held-out reward", "eval/reward_mean", "{:.3f}"),
        ("reward", "reward/mean", "{:.3f}"),
        ("loss", "loss", "{:.4f}"),
        ("response, tokens", "length/response_mean", "{:,.1f}"),
    ):
        _, values = series(metrics, name)
        row[label] = f"{form.format(values[0])} \N{RIGHTWARDS ARROW} {form.format(values[-1])}" if values else NO_VALUE
    steps, each = pace(metrics)
    _, speeds = series(metrics, "rollout/tokens_per_s")
    row["steps"] = _steps(steps, planned)
    row["a step"] = f"{each:.2f} s"
    row["time"] = duration(sum(time_split(metrics).values()))
    row["rollout"] = f"{sum(speeds) / len(speeds):,.0f} tokens/s" if speeds else NO_VALUE
    return row


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
