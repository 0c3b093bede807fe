"""The loop with a source whose groups finish in any order, against small in-process ports."""

from __future__ import annotations

import os

import numpy as np
import pytest
from small_ports import StopAfter, World, config
from small_ports import run as run_on

from megatron_rl.data import JournalWriter, ShuffledStream
from megatron_rl.ports import PolicyLost
from megatron_rl.types import Group, Prompt, Rollout, Tokens, Verdict

ROWS = [Prompt(f"row {i}", (5, 6), "") for i in range(64)]
NUMBER_OF = {prompt.uid: number for number, prompt in ShuffledStream(ROWS, 1, seed=0).take(64)}
PROMPT_OF = {number: uid for uid, number in NUMBER_OF.items()}
ROLLOUT = {"prompts_per_step": 4, "samples_per_prompt": 2, "max_prompt_tokens": 8, "max_response_tokens": 8}


class Recording(World):
    """Notes which groups were asked for and which ones every step trained on, by their numbers."""

    def __init__(self, **options):
        super().__init__(**options)
        self.asked_for: list[tuple[int, str]] = []
        self.steps: dict[int, list[int]] = {}

    def ask(self, requests, version):
        self.asked_for += [(request.number, request.prompt.uid) for request in requests]
        super().ask(requests, version)

    @property
    def in_step(self) -> list[int]:
        return sorted({NUMBER_OF[name.split(",")[0]] for name in self.names})

    def log(self, step, metrics):
        record = super().log(step, metrics)
        if "loss" in metrics:
            self.steps[step] = self.in_step
        return record


def asynchronous(max_lag: int, folder="nowhere", every=1, steps=8, **rollout):
    run_section = {"name": "x", "folder": str(folder), "steps": steps}
    return config(rollout=ROLLOUT | {"max_lag": max_lag} | rollout, run=run_section, checkpoint={"every": every})


def run(world, folder, cfg, **options) -> int:
    return run_on(world, folder, cfg, train_on=ROWS, **options)


@pytest.mark.parametrize("max_lag", [1, 3])
def test_engines_are_ahead_by_no_more_than_the_lag(tmp_path, max_lag):
    world = Recording()
    assert run(world, tmp_path / "c", asynchronous(max_lag)) == 8
    before_first_step = world.calls[: world.calls.index("begin")]
    assert sum(call.startswith("ask") for call in before_first_step) == 4 * (max_lag + 1)
    assert all(metrics["lag/max"] <= max_lag for _, metrics in world.logged[:-1])
    assert any(metrics["lag/mean"] > 0 for _, metrics in world.logged[:-1])
    stream = ShuffledStream(ROWS, 1, seed=0)
    assert world.asked_for == [(n, stream.item(n).uid) for n in range(32)], "and none that no step will take"
    first = world.logged[0][1]
    assert first["stream/ready"] + first["stream/running"] == 4 * max_lag
    assert first["reward/exact_answer/failed"] == pytest.approx(0.5), "a share, however many scorings there were"


def test_a_resumed_run_asks_again_for_what_was_under_way(tmp_path):
    broken, resumed, cfg = Recording(), Recording(), asynchronous(2)
    assert run(broken, tmp_path / "c", cfg, stopping=StopAfter(broken, 3)) == 3
    assert run(resumed, tmp_path / "c", cfg, resume="auto") == 8
    again, new = resumed.asked_for[:8], resumed.asked_for[8:]
    assert len(broken.asked_for) == 20 and set(again) < set(broken.asked_for)
    assert [number for number, _ in new] == list(range(20, 32))
    trained = [number for world in (broken, resumed) for numbers in world.steps.values() for number in numbers]
    assert len(trained) == len(set(trained)) == 32


def test_no_group_that_was_verified_before_a_kill_is_generated_again(tmp_path, monkeypatch):
    """The run is killed in step 5, and the newest checkpoint is that of step 3: the groups of the steps since then,
    and those that were ready, come from the journal."""

    class Killed(BaseException):
        pass

    class Dying(Recording):
        def update_once(self, minibatch, coefficients):
            if self.updates == 5:
                raise Killed
            return super().update_once(minibatch, coefficients)

    cfg = asynchronous(2, folder=tmp_path, every=3)
    broken, resumed = Dying(), Recording()
    broken.journal, resumed.journal = (JournalWriter(cfg.run_folder / "journal") for _ in range(2))
    with pytest.raises(Killed):
        run(broken, cfg.run_folder / "checkpoints", cfg)
    verified = {number for number, _ in broken.asked_for} - broken.asked.keys()
    assert run(resumed, cfg.run_folder / "checkpoints", cfg, resume="auto") == 8
    asked_again = {number for number, _ in resumed.asked_for}
    assert len(verified) > 20 and not asked_again & verified
    old = {number for step in (0, 1, 2) for number in broken.steps[step]}
    assert asked_again == set(range(32)) - verified and not old & {n for s in resumed.steps.values() for n in s}
    lags = [metrics["lag/max"] for _, metrics in resumed.logged[:-1]]
    assert lags[0] >= 1 and max(lags) <= 3, "tokens of lost weights count as one version older than the checkpoint"
    assert [step for step, _ in resumed.logged] == [3, 4, 5, 6, 7, 8]
    versions = {int(name[:6]) for name in os.listdir(cfg.run_folder / "journal")}
    assert min(versions) == 6 - 2, "the files before the newest checkpoint are removed"


def test_a_run_that_begins_anew_does_not_read_an_old_journal(tmp_path):
    cfg, world = asynchronous(1, folder=tmp_path), Recording()
    tokens = Tokens(*(np.zeros(4, t) for t in (np.int32, bool, np.float32, np.int32)))
    stream = ShuffledStream(ROWS, 1, seed=0)
    old = Group(stream.item(0), [Rollout(4, 2, 2, 0, "stop", verdict=Verdict(1.0))], [tokens], version=0)
    JournalWriter(cfg.run_folder / "journal").write({0: old})
    run(world, cfg.run_folder / "checkpoints", cfg)
    assert [number for number, _ in world.asked_for] == list(range(32))
    assert not os.listdir(cfg.run_folder / "journal")


def test_groups_of_a_step_whose_policy_was_lost_are_trained_on_again(tmp_path):
    class Losing(Recording):
        before = None

        def update_once(self, minibatch, coefficients):
            if self.updates == 2 and self.before is None:
                self.before = self.in_step
                raise PolicyLost("a rank died")
            return super().update_once(minibatch, coefficients)

    world = Losing()
    world.restarts_left, world.keeps_mirrors = 1, True
    assert run(world, tmp_path / "c", asynchronous(1)) == 8
    assert len(world.asked_for) == len(set(world.asked_for)) == 32, "nothing was asked for twice"
    assert world.steps[2] == world.before
    assert len({number for numbers in world.steps.values() for number in numbers}) == 32


@pytest.mark.parametrize("late", ["wait", "requeue", "drop"])
def test_a_late_group_is_waited_for_or_asked_again_or_dropped(tmp_path, late):
    class OneSlow(Recording):
        """Group 3 is handed out when nothing else is under way, and without a wait only after step 4."""

        def collect(self, version):
            too_slow = len(self.asked) > 1 if late == "wait" else self.updates < 5
            held = {3: self.asked.pop(3)} if 3 in self.asked and too_slow else {}
            verified = super().collect(version)
            self.asked |= held
            return verified

    world = OneSlow()
    assert run(world, tmp_path / "c", asynchronous(2, late=late)) == 8
    trained = [number for numbers in world.steps.values() for number in numbers]
    num_late = sum(metrics["stream/late"] for _, metrics in world.logged[:-1])
    cancelled = [call for call in world.calls if call.startswith("cancel")]
    assert num_late == len(cancelled) and cancelled.count("cancel 3") == (late != "wait")
    assert world.asked_for.count((3, PROMPT_OF[3])) == (2 if late == "requeue" else 1)
    assert trained.count(3) == (late != "drop")
    assert len(trained) == len(set(trained)) == 32
    assert all(metrics["lag/max"] <= 2 for _, metrics in world.logged[:-1])


def test_a_late_group_that_was_verified_before_it_was_asked_again_is_not_taken_from_the_journal(tmp_path):
    """A verifier had written it when it was given up. The run is resumed when the group is too old for every step."""
    cfg = asynchronous(1, folder=tmp_path, every=3)
    broken, resumed = Recording(), Recording()
    assert run(broken, cfg.run_folder / "checkpoints", cfg, stopping=StopAfter(broken, 3)) == 3
    [again, *_] = broken.asked
    tokens = Tokens(*(np.zeros(4, t) for t in (np.int32, bool, np.float32, np.int32)))
    prompt = Prompt(PROMPT_OF[again], (0, 0), "")
    old = Group(prompt, [Rollout(4, 2, 2, 0, "stop", verdict=Verdict(1.0))], [tokens], version=1)
    JournalWriter(cfg.run_folder / "journal").write({again: old})
    assert run(resumed, cfg.run_folder / "checkpoints", cfg, resume="auto") == 8
    assert (again, PROMPT_OF[again]) in resumed.asked_for
    assert all(metrics["stream/surplus"] == 0 for _, metrics in resumed.logged[:-1])


HELDOUT = [Prompt(f"heldout {i}", (7, 8), "") for i in range(5)]


def test_an_evaluation_runs_beside_its_step_and_ends_before_the_next_push(tmp_path):
    world = Recording(score=lambda group, i: float(i % 2))
    cfg = asynchronous(2).model_copy(update={"eval": config(eval={"every": 3, "samples_per_prompt": 2}).eval})
    assert run(world, tmp_path / "c", cfg, heldout=HELDOUT) == 8
    evaluations = {step: metrics for step, metrics in world.logged if "eval/accuracy" in metrics}
    assert list(evaluations) == [0, 3, 6, 8]
    assert all(m["eval/accuracy"] == 0.5 and m["eval/num_samples"] == 10 for m in evaluations.values())
    assert [number for number, _ in world.asked_for if number < 0] == list(range(-1, -21, -1))
    assert all(m["rollout/num_samples"] == 8 and m["lag/max"] <= 2 for _, m in world.logged[:-1])
    pushed = [i for i, call in enumerate(world.calls) if call.startswith("push")]
    for version, (start, end) in enumerate(zip(pushed, [*pushed[1:], None], strict=False)):
        calls = world.calls[start:end]
        assert any("heldout 4 x" in call for call in calls) == (version in evaluations)
    assert not any(number < 0 for number in world.asked), "no answer is under way when its weights go"


def test_an_evaluation_outlives_the_loss_of_the_policy_and_a_stop_gives_it_up(tmp_path):
    class Losing(Recording):
        def update_once(self, minibatch, coefficients):
            if self.restarts_left and self.updates == 3:
                raise PolicyLost("a rank died")
            return super().update_once(minibatch, coefficients)

    evaluation = config(eval={"every": 3, "samples_per_prompt": 2}).eval
    for max_lag in (0, 1):
        cfg = asynchronous(max_lag, every=2).model_copy(update={"eval": evaluation})
        for keeps_mirrors in (True, False):  # without mirrors it goes back to the checkpoint of step 2
            world = Losing()
            world.restarts_left, world.keeps_mirrors = 1, keeps_mirrors
            assert run(world, tmp_path / f"{max_lag} {keeps_mirrors}", cfg, heldout=HELDOUT) == 8
            assert [step for step, metrics in world.logged if "eval/accuracy" in metrics] == [0, 3, 6, 8]
            given_up = [call for call in world.calls if call.startswith("cancel -")]
            assert given_up == [f"cancel -{n}" for n in range(6, 11)] * max_lag  # the evaluation of step 3, begun again
    cfg = asynchronous(1).model_copy(update={"eval": evaluation})

    class Slow(Recording):
        def collect(self, version):
            held = {n: self.asked.pop(n) for n in list(self.asked) if n < 0} if self.updates >= 3 else {}
            verified = super().collect(version)
            self.asked |= held
            return verified

    world = Slow()
    assert run(world, tmp_path / "b", cfg, heldout=HELDOUT, stopping=StopAfter(world, 4)) == 4
    assert world.warnings[-1:] == ["the run stops, and of the evaluation only 0 of 5 prompts are done"]
    assert [(step, "eval/accuracy" in metrics) for step, metrics in world.logged] == [
        (0, True),
        (1, False),
        (2, False),
        (3, False),
    ]


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


def test_groups_without_a_signal_fill_the_batch_after_some_batches(tmp_path):
    world = Recording(score=lambda group, i: 0.25)
    assert run(world, tmp_path / "c", asynchronous(0, active_sampling=3)) == 8
    steps = [metrics for _, metrics in world.logged[:-1]]
    assert all(m["groups/zero_signal"] == 4 and m["stream/useless"] == 8 for m in steps)


def test_data_without_any_signal_end_the_run_with_the_rewards(tmp_path):
    world = World(score=lambda group, i: 0.25)
    with pytest.raises(ValueError, match=r"no group with a signal among the last \d{3}: .*\(0.25: \d{3} groups\)"):
        run(world, tmp_path / "c", asynchronous(0, active_sampling=True))


def test_the_engines_are_idle_for_a_share_of_the_time_in_which_groups_were_collected(tmp_path):
    world = World()
    world.spans = [{"stream/idle_s": 0.75, "stream/span_s": 1.5}] * 100
    run(world, tmp_path, asynchronous(2, tmp_path))
    for _, metrics in world.logged:
        if "rollout/idle" in metrics:
            assert metrics["rollout/idle"] == 0.5 and metrics["rollout/tokens_per_s"] > 0
        assert not {"stream/idle_s", "stream/span_s"} & metrics.keys()
    assert "rollout/idle" in world.logged[0][1]


def test_prompts_that_became_easy_rest_and_come_back(tmp_path):
    """Half of the prompts are easy from the first epoch on. One that is drawn again before its answers are verified,
    at the seam of two epochs, is drawn once too often. The run is resumed in between."""
    easy = {f"row {i}" for i in range(16)}

    class SomeEasy(Recording):
        def score(self, groups):
            self.score_of = lambda g, i: 1.0 if groups[g].prompt.uid in easy else float(i % 2)
            return super().score(groups)

    rows = ROWS[:32]
    cfg = asynchronous(0, steps=45, active_sampling=True)
    broken, resumed = SomeEasy(), SomeEasy()
    assert run_on(broken, tmp_path / "c", cfg, train_on=rows, stopping=StopAfter(broken, 15)) == 15
    assert run_on(resumed, tmp_path / "c", cfg, train_on=rows, resume="auto") == 45
    asked = dict(broken.asked_for + resumed.asked_for)  # those under way at the stop are asked for again
    epochs = {row.uid: sorted(number // 32 for number, uid in asked.items() if uid == row.uid) for row in rows}
    for uid, drawn in epochs.items():
        early = [epoch for epoch in drawn if epoch <= 9]
        assert len(early) <= 5 if uid in easy else early == list(range(10)), (uid, drawn)
        assert early[0] == 0 and len(early) >= 3
    steps = [metrics for _, metrics in broken.logged + resumed.logged if "loss" in metrics]
    assert all(metrics["samples/active"] == 8 for metrics in steps)
    assert sum(metrics["stream/resting"] for metrics in steps) > 16 * 5
