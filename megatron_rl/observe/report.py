"""The report of a run, and the comparison of several runs, as an HTML page with curves. The curves are also written as
a picture.

Invariants: a page is one file that loads nothing from elsewhere; text from rows and answers is escaped; the report of a
run that crashed, or that is still running, contains what is in its files.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from megatron_rl.observe.panels import Panel, Records, colour_of, comparison_panels, experiments_of, run_panels
from megatron_rl.observe.provenance import flat
from megatron_rl.observe.records import (
    CONFIG,
    EXPLAINED,
    METRICS,
    SAMPLES,
    WARNINGS,
    heldout,
    pace,
    read_run,
    read_warnings,
    reward_names,
    series,
    time_split,
)
from megatron_rl.observe.sample_choice import add_explained, shown_samples
from megatron_rl.processes import open_text
from megatron_rl.types import images_of_rollouts

NO_VALUE = "\N{EN DASH}"


def write_report(run_folder: Path, out: Path | None = None) -> Path:
    """Write `report.html` and `curves.png` from the run folder's files, and return the path of the page. It shows
    headline numbers, curves, warnings and answers.

    Args:
        out: the folder to write to; None means the run folder.

    Raises:
        ValueError: no step was logged, or a file is not JSON.
    """
    metrics, made_of = read_run(run_folder)
    if not metrics:
        raise _nothing_logged(run_folder)
    out = out or run_folder
    out.mkdir(parents=True, exist_ok=True)
    from megatron_rl.observe.curves import draw_curves  # matplotlib takes half a second, before every run

    draw_curves(metrics, (made_of or {}).get("resumed_at", ())).savefig(out / "curves.png", dpi=160)
    return _write(out / "report.html", run_page(run_folder))


def run_page(run_folder: Path, is_live: bool = False) -> str:
    """The page of a run, as HTML.

    Args:
        is_live: the page asks its server for new data (`megatron-rl watch`).

    Raises:
        ValueError: a file is not JSON.
    """
    version = data_version(run_folder)  # first: what is written while the files are read makes another version
    metrics, made_of = read_run(run_folder)
    return _render(
        "report.html.jinja",
        name=run_folder.resolve().name,
        provenance=made_of,
        is_live=is_live,
        overview=_overview(metrics, made_of),
        data=as_json(_run_data(run_folder, metrics, made_of) | {"version": version}),
    )


def live_data(run_folder: Path) -> str:
    """What a live page shows of a run now, as JSON.

    Raises:
        ValueError: a file is not JSON.
    """
    version = data_version(run_folder)
    metrics, made_of = read_run(run_folder)
    overview = _overview(metrics, made_of)
    return as_json(_run_data(run_folder, metrics, made_of) | {"version": version, "overview": overview})


def data_version(run_folder: Path) -> str:
    """A text that changes when the files of the page change."""
    paths = [run_folder / name for name in (METRICS, SAMPLES, WARNINGS, CONFIG, EXPLAINED)]
    return " ".join(f"{path.stat().st_mtime_ns}:{path.stat().st_size}" if path.exists() else "-" for path in paths)


def write_comparison(run_folders: Sequence[Path], out: Path) -> Path:
    """Write `comparison.html` and `comparison.png` into the folder `out`, and return the path of the page. It shows the
    headline numbers, the curves of all runs with the seeds of one experiment together, and the differences in
    configuration, versions and commit.

    Raises:
        ValueError: no step was logged in one of the runs, or a file is not JSON, or a run is given twice.
    """
    folders = dict(zip(distinct_names(run_folders), run_folders, strict=True))
    read = {name: read_run(folder) for name, folder in folders.items()}
    for name, (metrics, _) in read.items():
        if not metrics:
            raise _nothing_logged(folders[name])
    configs = {name: made_of for name, (_, made_of) in read.items()}
    experiments = experiments_of({name: metrics for name, (metrics, _) in read.items()}, configs)
    colours = {name: colour_of(i) for i, experiment in enumerate(experiments) for name in experiment.runs}
    # The runs of an experiment are next to each other.
    names = list(colours)
    headline = [_headline(read[name][0], _planned(configs[name])) for name in names]
    known = [label for label in headline[0] if any(row[label] != NO_VALUE for row in headline)]
    if "reward" in known and "loss" in known:  # a policy loss says little about learning
        known.remove("loss")
    messages = [
        message | {"text": f"{name}: {message['text']}"} for name in names for message in read_warnings(folders[name])
    ]
    out.mkdir(parents=True, exist_ok=True)
    from megatron_rl.observe.curves import draw_comparison

    draw_comparison(experiments).savefig(out / "comparison.png", dpi=160)
    page = _render(
        "comparison.html.jinja",
        names=names,
        colours=[colours[name] for name in names],
        experiments=[one for one in experiments if len(one.runs) > 1],
        headline=[{label: row[label] for label in known} for row in headline],
        differences=differences([flat(configs[name] or {}) for name in names]),
        data=as_json(_curve_data(comparison_panels(experiments), messages)),
    )
    return _write(out / "comparison.html", page)


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


def as_json(data: Mapping[str, Any]) -> str:
    """JSON that may stand inside an HTML element: `<`, which could end the element, is written as an escape."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _nothing_logged(run_folder: Path) -> ValueError:
    if not run_folder.is_dir():
        return ValueError(f"there is no folder {run_folder}; give the folder of a run, such as runs/first")
    return ValueError(f"{run_folder} has no metrics.jsonl with a step, so there is nothing to report")


def _run_data(run_folder: Path, metrics: Records, made_of: Mapping[str, Any] | None) -> dict[str, Any]:
    samples, left_out = shown_samples(run_folder / SAMPLES)
    add_explained(samples, run_folder)
    config = (made_of or {}).get("config", {})
    rewards = config.get("rewards", [])
    cache, replayed = config.get("data", {}).get("cache"), config.get("rollout", {}).get("replay")
    pictures = images_of_rollouts(Path(replayed)) if replayed and not cache else Path(cache or run_folder) / "images"
    for sample in samples:
        if shown := sample.get("images"):
            files = [(turn, pictures / f"{digest}.png") for turn, digest in shown]
            sample["images"] = [[turn, _inlined(file)] for turn, file in files if file.is_file()]
    curves = _curve_data(run_panels(metrics), read_warnings(run_folder), (made_of or {}).get("resumed_at", []))
    return curves | {
        "samples": samples,
        "left_out": left_out,
        "rewards": [one.get("name") or one["kind"] for one in rewards],
    }


def _inlined(image: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(image.read_bytes()).decode()}"


def _curve_data(
    panels: Sequence[Panel], messages: Sequence[Mapping[str, Any]], resumed_at: Sequence[int] = ()
) -> dict[str, Any]:
    drawn = [asdict(panel) for panel in panels]
    for line in (line for panel in drawn for line in panel["lines"]):
        line["values"] = [float(f"{value:.6g}") for value in line["values"]]
    return {"panels": drawn, "messages": messages, "resumed_at": resumed_at}


def _overview(metrics: Records, made_of: Mapping[str, Any] | None) -> str:
    tiles = _tiles(metrics, _planned(made_of)) if metrics else []
    return _render("overview.html.jinja", tiles=tiles, rewards=_rewards(metrics))


def _render(template: str, **content: Any) -> str:
    templates = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=templates, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template(template).render(**content)


def _write(page: Path, text: str) -> Path:
    with open_text(page) as file:
        file.write(text)
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
