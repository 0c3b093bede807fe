"""A policy that is lost is restarted and continues from the newest state that is left, with the same numbers."""

from __future__ import annotations

import pytest
from small_ports import World, config, run

from megatron_rl.ports import PolicyLost, TooManyRestarts

RARELY = {"every": 0, "keep": 2}


def lose(world: World, method: str, *, at_step: int, times: int = 1) -> None:
    """The policy is lost in the next calls of `method` in a step, before the call does anything."""
    original, left = getattr(world, method), [times]

    def fails(*arguments, **options):
        if world.version == at_step and left[0]:
            left[0] -= 1
            raise PolicyLost(f"a rank died in {method}")
        return original(*arguments, **options)

    setattr(world, method, fails)


def numbers(world: World) -> list[tuple[int, float | None, float | None]]:
    return [(step, metrics.get("loss"), metrics.get("coefficient/kl")) for step, metrics in world.logged]


@pytest.mark.parametrize("method", ["begin", "update", "save", "push", "mirror"])
@pytest.mark.parametrize("mirrors", [True, False])
def test_the_steps_after_a_loss_have_the_numbers_of_an_undisturbed_run(tmp_path, method, mirrors):
    changes = {"checkpoint": {"every": 2, "keep": 2}, "run": {"name": "x", "steps": 4}}
    whole, broken = World(), World()
    run(whole, tmp_path / "whole", config(**changes))
    lose(broken, method, at_step=3)
    broken.restarts_left, broken.keeps_mirrors = 1, mirrors
    assert run(broken, tmp_path / "broken", config(**changes)) == 4
    assert numbers(broken) == numbers(whole)
    rows = [world.names for world in (broken, whole)]
    assert rows[0] == rows[1], "the stream of prompts goes back with the policy"


def test_a_mirror_is_preferred_to_an_older_checkpoint_and_the_answers_are_kept(tmp_path):
    world = World()
    lose(world, "update", at_step=2)
    world.restarts_left, world.keeps_mirrors = 1, True
    run(world, tmp_path, config(checkpoint=RARELY))
    after = world.calls[world.calls.index("restart") :]
    assert after[:5] == ["restart", "load mirror 2", "rejoin", "push 2", "begin"], "nothing is generated again"
    assert [metrics["reward/exact_answer/failed"] for step, metrics in world.logged if "loss" in metrics] == [0.5] * 3
    assert "the trainer was restarted and continues with step 2, because a rank died in update" in world.warnings


def test_without_mirror_and_checkpoint_the_run_begins_again(tmp_path):
    world = World()
    lose(world, "begin", at_step=2)
    world.restarts_left = 1
    run(world, tmp_path, config(checkpoint=RARELY))
    after = world.calls[world.calls.index("restart") :]
    assert after[:4] == ["restart", "rejoin", "push 0", "ask 0: row 4 x 2"]
    assert [step for step, _ in world.logged] == [0, 1, 2, 3]


def test_a_mirror_that_not_all_ranks_have_is_not_used(tmp_path):
    """The policy offers only the step before; the loop still knows that step's own state."""
    whole, broken = World(), World()
    run(whole, tmp_path / "whole", config(checkpoint=RARELY))
    lose(broken, "mirror", at_step=2)
    broken.restarts_left, broken.keeps_mirrors = 1, True
    run(broken, tmp_path / "broken", config(checkpoint=RARELY))
    assert "load mirror 1" in broken.calls and numbers(broken) == numbers(whole)
    assert broken.updates == whole.updates


def test_a_loss_during_the_recovery_is_recovered_from(tmp_path):
    world = World()
    lose(world, "begin", at_step=1)
    lose(world, "rejoin", at_step=1)
    world.restarts_left = 2
    assert run(world, tmp_path, config(checkpoint=RARELY)) == 3
    assert world.calls.count("restart") == 2


def test_the_budget_ends_the_run(tmp_path):
    world = World()
    lose(world, "begin", at_step=1, times=3)
    world.restarts_left = 2
    with pytest.raises(TooManyRestarts, match="a rank died in begin"):
        run(world, tmp_path, config(checkpoint=RARELY))
    assert world.calls.count("restart") == 3 and not any(call.startswith("save") for call in world.calls)
