"""Who goes on after a push."""

from __future__ import annotations

from ray.exceptions import RayActorError, RayTaskError

from megatron_rl.cluster.bridge import who_goes_on

SENT = [{"bytes": 1.0}, {"bytes": 1.0}]
SAME = [{"model.norm": "12"}, {"model.norm": "34"}]
OTHER = [{"model.norm": "12"}, {"model.norm": "56"}]
REFUSED = RayTaskError("take", "", RuntimeError("holds something else"))


def test_all_engines_go_on_when_they_agree():
    assert who_goes_on([SAME, SAME, SAME], SENT) == ([0, 1, 2], None)


def test_those_that_live_go_on_without_the_dead():
    assert who_goes_on([SAME, RayActorError(), SAME], SENT) == ([0, 2], None)
    assert who_goes_on([SAME, SAME], [SENT[0], RayActorError()]) == ([0, 1], None)


def test_none_goes_on_when_one_refuses():
    assert who_goes_on([SAME, REFUSED, SAME], SENT) == ([], None)
    assert who_goes_on([SAME, SAME], [SENT[0], REFUSED]) == ([], None)
    assert who_goes_on([RayActorError()], SENT) == ([], None)


def test_engines_that_hold_different_weights_are_told_so():
    took, dispute = who_goes_on([RayActorError(), SAME, OTHER], SENT)
    assert took == [1, 2]
    assert (
        dispute == "after the same push rank 1 of engine 1 and rank 1 of engine 2 hold different weights of model.norm"
    )
