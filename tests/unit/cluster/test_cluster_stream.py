"""How long engines have nothing to do."""

from __future__ import annotations

from megatron_rl.cluster.stream import IdleTime


def test_idle_time_adds_up_over_engines_and_calls():
    idle = IdleTime([0, 1], now=10.0)
    idle.begin_work(0, 12.0)
    assert idle.take(13.0) == 2.0 + 3.0
    idle.begin_work(0, 14.0)  # another group of a busy engine
    idle.end_work(0, 15.0)
    idle.begin_work(1, 16.0)
    assert idle.take(20.0) == 5.0 + 3.0
    assert idle.take(21.0) == 1.0
