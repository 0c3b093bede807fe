"""The loop with a source whose groups finish in any order, against small in-process ports."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_ports import PROMPTS, StopAfter, World, config, run

from megatron_rl.data import ShuffledStream
from megatron_rl.loop.asynchronous import AsynchronousSource
from megatron_rl.loop.source import SynchronousSource
from megatron_rl.loop.stopping import NEVER
from megatron_rl.ports import PolicyLost, Ports

ROLLOUT = {"prompts_per_step": 4, "samples_per_prompt": 2, "max_prompt_tokens": 8, "max_response_tokens": 8}


class Recording(World):
    """Notes which groups were asked for and which ones every step trained on, by their numbers."""

    def __init__(self, **options):
        super().__init__(**options)
        self.asked_for: list[tuple[int, str]] = []
        self.steps: dict[int, list[int]] = {}

    def ask(self, number, prompt, num_samples, version):
        self.asked_for.append((number, prompt.uid))
        super().ask(number, replace(prompt, uid=str(number)), num_samples, version)

    @property
    def in_step(self) -> list[int]:
        return sorted({int(name.split(",")[0]) for name in self.names})

    def log(self, step, metrics):
        super().log(step, metrics)
        if "loss" in metrics:
            self.steps[step] = self.in_step


def asynchronous(max_lag: int, **rollout):
    return config(rollout=ROLLOUT | {"max_lag": max_lag} | rollout, run={"name": "x", "steps": 8})


@pytest.mark.parametrize("max_lag", [1, 3])
def test_engines_are_ahead_by_no_more_than_the_lag(tmp_path, max_lag):
    world = Recording()
    assert run(world, tmp_path / "c", asynchronous(max_lag)) == 8
    before_first_step = world.calls[: world.calls.index("begin")]
    assert sum(call.startswith("ask") for call in before_first_step) == 4 * (max_lag + 1)
    assert all(metrics["lag/max"] <= max_lag for _, metrics in world.logged[:-1])
    assert any(metrics["lag/mean"] > 0 for _, metrics in world.logged[:-1])
    stream = ShuffledStream(PROMPTS, 1, seed=0)
    assert world.asked_for == [(n, stream.item(n).uid) for n in range(32)], "and none that no step will take"
    first = world.logged[0][1]
    assert first["stream/ready"] + first["stream/running"] == 4 * max_lag
    assert first["reward/exact_answer/failed"] == pytest.approx(0.25), "a share, however many scorings there were"


def test_a_resumed_run_asks_again_for_what_was_under_way(tmp_path):
    broken, resumed, cfg = Recording(), Recording(), asynchronous(2)
    assert run(broken, tmp_path / "c", cfg, stopping=StopAfter(broken, 3)) == 3
    assert run(resumed, tmp_path / "c", cfg, resume="auto") == 8
    again, new = resumed.asked_for[:8], resumed.asked_for[8:]
    assert len(broken.asked_for) == 20 and set(again) < set(broken.asked_for)
    assert [number for number, _ in new] == list(range(20, 32))
    trained = [number for world in (broken, resumed) for numbers in world.steps.values() for number in numbers]
    assert len(trained) == len(set(trained)) == 32


def test_groups_of_a_step_whose_policy_was_lost_are_trained_on_again(tmp_path):
    class Losing(Recording):
        before = None

        def update(self, minibatch, coefficients):
            if self.updates == 2 and self.before is None:
                self.before = self.in_step
                raise PolicyLost("a rank died")
            return super().update(minibatch, coefficients)

    world = Losing()
    world.restarts_left, world.keeps_mirrors = 1, True
    assert run(world, tmp_path / "c", asynchronous(1)) == 8
    assert len(world.asked_for) == len(set(world.asked_for)) == 32, "nothing was asked for twice"
    assert world.steps[2] == world.before
    assert len({number for numbers in world.steps.values() for number in numbers}) == 32


@pytest.mark.parametrize("max_lag", [0, 2])
@pytest.mark.parametrize("useless", [0.0, 0.5, 0.9])
def test_the_batch_is_full_of_groups_with_a_signal(tmp_path, max_lag, useless):
    def score(group, i):
        if i == 0:
            world.flat = world.random.random() < useless
        return 1.0 if world.flat else float(i)

    world = Recording(score=score)
    assert run(world, tmp_path / "c", asynchronous(max_lag, active_sampling=True)) == 8
    steps = [metrics for _, metrics in world.logged[:-1]]
    assert all(m["samples/active"] == 8 and m["groups/zero_signal"] == 0 and m["lag/max"] <= max_lag for m in steps)
    assert (sum(m["stream/useless"] for m in steps) > 0) == (useless > 0)
    counted = sum(m["stream/useless"] + m["stream/surplus"] + 4 for m in steps)
    assert counted + steps[-1]["stream/running"] + steps[-1]["stream/ready"] == len(world.asked_for)


def test_data_without_any_signal_end_the_run_with_the_rewards(tmp_path):
    world = World(score=lambda group, i: 0.25)
    with pytest.raises(ValueError, match=r"no group with a signal among the last \d{3}: .*\(0.25: \d{3} groups\)"):
        run(world, tmp_path / "c", asynchronous(0, active_sampling=True))


def test_a_state_of_the_other_kind_is_refused():
    world, stream = World(), ShuffledStream(PROMPTS, 4, seed=0)
    ports = Ports(world, world, world, world, world)
    sources = [kind(asynchronous(1), ports, stream, world, NEVER) for kind in (SynchronousSource, AsynchronousSource)]
    for one, other in (sources, sources[::-1]):
        with pytest.raises(ValueError, match="resume with the same settings"):
            one.restore(other.state())
