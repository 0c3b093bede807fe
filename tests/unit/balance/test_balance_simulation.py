"""In the tool's small mode our plans keep the cap and the promised balance; the usual strategies do not."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO

import pytest

from megatron_rl.tools.bench.simulate_balance import main

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def report() -> dict:
    with redirect_stdout(StringIO()) as printed:
        assert main(["--small", "--json"]) in (0, None)
    return json.loads(printed.getvalue().splitlines()[-1])


def test_ours(report):
    ours = report["strategies"]["ours"]
    assert ours["over_cap"] == 0 and ours["microbatches_worst"] <= 1
    assert ours["imbalance_median"] <= 1e-4 and ours["lockstep_mean"] <= 1.03


def test_the_usual_strategies_fall_short(report):
    for name, row in report["strategies"].items():
        if name != "ours":
            assert row["over_cap"] > 0 or row["imbalance_median"] > 1e-4, name
            assert row["microbatches_mean"] > 1, name


def test_full_micro_batches_lose_less_than_by_balancing_ranks_first(report):
    assert len(report["tails"]) == 5
    for row in report["tails"]:
        assert row["ours_lockstep"] < row["LPT_lockstep"] and row["ours_imbalance"] < 1e-3, row
        assert row["ours_microbatches"] == 1, row
    assert report["tails"][0]["ours_lockstep"] < 1.022, "only the fullest micro-batches lose more than a percent"


def test_planning_times_are_reported(report):
    [times] = report["planning"].values()
    assert 0 < times["plan_s_mean"] <= times["plan_s_worst"] and times["times_of_a_sort_mean"] > 1
