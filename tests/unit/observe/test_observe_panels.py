from __future__ import annotations

import pytest

from megatron_rl.observe.curves import draw, draw_comparison
from megatron_rl.observe.panels import Curve, Experiment, Panel, comparison_panels, experiments_of, run_panels


def run_of(name: str, values: dict[int, float]) -> list[dict[str, float]]:
    return [{"step": step, name: value} for step, value in values.items()]


def test_a_band_has_the_steps_that_every_seed_has_logged():
    seeds = {"a": run_of("loss", {0: 4.0, 1: 3.0, 2: 9.0}), "b": run_of("loss", {0: 2.0, 1: 1.0}), "c": []}
    [panel] = comparison_panels([Experiment("both", seeds)])
    *thin, mean = panel.lines
    assert [(line.label, line.is_thin, list(line.steps)) for line in thin] == [
        ("a", True, [0, 1, 2]),
        ("b", True, [0, 1]),
    ]
    assert (mean.label, mean.steps, mean.values, mean.is_thin) == ("both", [0, 1], [3.0, 2.0], False)
    [band] = panel.bands
    assert (band.steps, band.low, band.high) == ([0, 1], [2.0, 1.0], [4.0, 3.0])


def test_seeds_without_a_common_step_have_thin_lines_alone():
    seeds = {"a": run_of("loss", {0: 4.0}), "b": run_of("loss", {1: 2.0})}
    [panel] = comparison_panels([Experiment("both", seeds)])
    assert [line.is_thin for line in panel.lines] == [True, True] and not panel.bands


def config(seed: int, name: str, **other) -> dict:
    return {"config": {"run": {"seed": seed, "name": name, "folder": f"/{name}"}, "model": {"path": "m"} | other}}


def test_only_runs_that_differ_in_nothing_but_seed_and_name_are_one_experiment():
    configs = {
        "a": config(0, "a"), "b": config(0, "b", dtype="float32"), "c": config(1, "c"), "d": None, "e": None,
        "f": config(2, "f"),
    }  # fmt: skip
    found = experiments_of({name: [] for name in configs}, configs)
    assert [(one.label, list(one.runs)) for one in found] == [
        ("a and 2 more seeds", ["a", "c", "f"]),
        ("b", ["b"]),
        ("d", ["d"]),
        ("e", ["e"]),
    ]


def test_a_comparison_draws_every_run_in_every_panel_that_it_logged():
    runs = [
        Experiment("a", {"a": [{"step": 0, "reward/mean": 0.5, "loss": 1.0}]}),
        Experiment("b", {"b": [{"step": 0, "reward/mean": -1.0, "grad_norm": 2.0}]}),
    ]
    figure = draw_comparison(runs)
    reward, norm = figure.axes
    assert [line.get_label() for line in reward.lines[:2]] == ["a", "b"]
    assert [(line.get_label(), list(line.get_ydata())) for line in norm.lines] == [("b", [2.0])]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_the_time_of_a_step_is_a_stack_of_its_phases():
    steps = [
        {"step": 3, "time/generate_s": 3.0, "time/other_s": 1.0, "time/total_s": 4.0},
        {"step": 4, "time/generate_s": 2.0, "time/update_s": 4.0, "time/other_s": 0.5, "time/total_s": 6.5},
        {"step": 5, "time/export_s": 9.0},  # after the last step
    ]
    [panel] = run_panels(steps)
    assert panel.kind == "stack"
    assert [(line.label, list(line.steps), list(line.values)) for line in panel.lines] == [
        ("generate", [3, 4], [3.0, 2.0]),
        ("update", [3, 4], [0.0, 4.0]),
        ("other", [3, 4], [1.0, 0.5]),
    ]


@pytest.mark.parametrize(
    ("name", "values", "scale", "ends"),
    [
        ("grad_norm", [0.5, 0.5, 100.0], "log", (None, None)),
        ("grad_norm", [0.5, 0.5, 10.0], "linear", (0, None)),
        ("grad_norm", [-0.5, 1.0], "linear", (None, None)),
        ("mismatch/mean_abs", [2e-6, 1.5e-5], "log", (1e-6, 1e-4)),
        ("mismatch/mean_abs", [0.0, 1.0], "linear", (None, None)),
        ("reward/mean", [0.0, 1.0], "linear", (0, 1.03)),
        ("reward/mean", [0.0, 1.5], "linear", (None, None)),
    ],
)
def test_an_axis_suits_its_numbers(name, values, scale, ends):
    [panel] = run_panels(run_of(name, dict(enumerate(values))))
    assert panel.scale == scale and (panel.low, panel.high) == pytest.approx(ends)


def test_the_picture_draws_a_thin_line_without_an_entry_in_the_legend():
    lines = [Curve("a", 0, [0, 1], [1.0, 2.0], is_thin=True), Curve("mean", 0, [0, 1], [1.5, 2.5])]
    [axes] = draw([Panel("Reward", lines)], resumed_at=[1]).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["mean"]
    assert [line.get_linewidth() for line in axes.lines] == [0.8, 1.8, 1.2]
