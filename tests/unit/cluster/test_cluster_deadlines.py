"""The limits of a step's parts follow the run, or are the configuration's."""

from __future__ import annotations

from megatron_rl.cluster.deadlines import Deadlines


def test_a_limit_is_five_times_the_longest_so_far_and_at_least_ten_minutes():
    deadlines = Deadlines(None)
    assert deadlines.limit_s("to update") == 7200, "nobody knows how long it takes"
    assert "has not ended before" in deadlines.describe("to update")
    for seconds, limit_s in ((40.0, 600), (90.0, 600), (300.0, 1500), (100.0, 1500)):
        deadlines.took("to update", seconds)
        assert deadlines.limit_s("to update") == limit_s
    assert deadlines.limit_s("to write a checkpoint") == 7200, "each part has its own"
    assert "300 s at most before, so the limit is 1500 s; set cluster.step_timeout_s" in deadlines.describe("to update")


def test_the_configuration_fixes_all_limits():
    deadlines = Deadlines(15.0)
    deadlines.took("to update", 300.0)
    assert deadlines.limit_s("to update") == deadlines.limit_s("to write a checkpoint") == 15
    assert "raise it" in deadlines.describe("to update")
