"""The example of a trainer without Megatron runs as it stands, with a real engine in a process of its own."""

from __future__ import annotations

import pytest
import warm
from patience import deadline

from megatron_rl.rollout.shared_memory import remove_leftovers, remove_own_names
from megatron_rl.tools.bench import own_trainer


@pytest.mark.deep
def test_the_engine_answers_with_what_the_trainer_has_learnt():
    [rounds] = warm.together(_play, [()], deadline(180))
    assert [one["learnt"] for one in rounds] == list(own_trainer.TEXTS)
    for one in rounds:
        assert one["before"] != one["after"] == one["learnt"]
        assert one["difference_before"] > 1, "the engine still had the weights of before"
        assert one["difference_after"] < 1e-5  # fp32; two implementations add in different orders
    assert rounds[1]["before"] == rounds[0]["after"]


def _play():
    rounds = own_trainer.play()
    # vLLM's processes remove their shared memory when they end by themselves. Here they may live until this process is
    # killed, or may have been killed five seconds after `play` returned.
    remove_own_names()
    remove_leftovers()
    return rounds
