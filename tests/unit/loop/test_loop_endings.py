"""However a run ends, it leaves its newest whole state; it goes on only under a configuration that means the same."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from small_ports import PROMPTS, StopAfter, World, config, open_checkpoints, run

from megatron_rl.loop.changes import compare
from megatron_rl.loop.health import answers
from megatron_rl.loop.run_lock import run_lock
from megatron_rl.ports import PolicyLost, TooManyRestarts
from megatron_rl.types import Verdict


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


RARELY = {"every": 0, "keep": 2}


@pytest.mark.parametrize("where", ["ask", "score", "begin", "push", "log", "update"])
def test_an_error_late_in_a_run_leaves_the_steps_that_were_done(tmp_path, where):
    """In the second step, wherever it strikes, but between two updates of one step."""
    whole, broken, resumed = World(), World(), World()
    run(whole, tmp_path / "whole", config())
    original = getattr(broken, where)

    def fails(*arguments, **options):
        if broken.updates == 1:
            raise ValueError("the judge is down")
        return original(*arguments, **options)

    setattr(broken, where, fails)
    with pytest.raises(ValueError, match="the judge is down"):
        run(broken, tmp_path / "c", config(checkpoint=RARELY))
    assert saved(tmp_path / "c") == ["step_000001"]
    assert run(resumed, tmp_path / "c", config(checkpoint=RARELY), resume="auto") == 3
    assert resumed.names == whole.names
    assert resumed.logged[-2][1]["loss"] == whole.logged[-2][1]["loss"] == 3.0


def test_an_error_between_two_updates_of_a_step_saves_nothing(tmp_path):
    world = World()
    original = world.update_once

    def fails(minibatch, coefficients):
        if world.updates == 3:
            raise ValueError("the second update of the second step")
        return original(minibatch, coefficients)

    world.update_once = fails
    with pytest.raises(ValueError, match="the second update"):
        run(world, tmp_path / "c", config(checkpoint=RARELY, algorithm={"updates_per_step": 2}))
    assert saved(tmp_path / "c") == []


def test_a_lost_policy_is_not_asked_to_save(tmp_path):
    world = World()

    def fails(shares, coefficients):
        raise PolicyLost("trainer rank 1 died")

    run(world, tmp_path / "c", config(), stopping=StopAfter(world, 1))
    world.begin = fails
    with pytest.raises(TooManyRestarts, match="trainer rank 1 died"):
        run(world, tmp_path / "c", config(), resume="auto")
    assert [call for call in world.calls if call.startswith("save")] == ["save step_000001"]


def test_a_checkpoint_that_fails_at_the_end_is_told_beside_the_cause(tmp_path, monkeypatch):
    world = World()
    world.updates = 0

    def full(folder, extra):
        raise ValueError("the disk is full")

    world.save = full
    world.score_of = lambda group, i: None if world.updates else float(i)
    monkeypatch.setattr(answers, "UNSCORED_PROMPTS", 2)
    with pytest.raises(ValueError, match="left without a score") as caught:
        run(world, tmp_path / "c", config(checkpoint=RARELY))
    assert caught.value.__notes__ == ["No checkpoint could be written after this error: the disk is full"]


def test_a_stop_in_a_generation_saves_the_state_that_the_step_began_with(tmp_path):
    whole, broken, resumed = World(), World(), World()
    run(whole, tmp_path / "whole", config())
    assert run(broken, tmp_path / "c", config(checkpoint=RARELY), stopping=StopAfter(broken, 1, at_once=True)) == 1
    assert saved(tmp_path / "c") == ["step_000001"] and broken.updates == 1
    run(resumed, tmp_path / "c", config(checkpoint=RARELY), resume="auto")
    assert resumed.calls == [c for c in whole.calls[whole.calls.index("push 1") :] if c != "save step_000002"]


def test_a_stop_before_the_first_step_saves_nothing(tmp_path):
    world = World()
    assert run(world, tmp_path / "c", config(), stopping=StopAfter(world, 0, at_once=True)) == 0
    assert saved(tmp_path / "c") == []


def test_an_older_checkpoint_can_be_chosen_and_the_later_ones_step_aside(tmp_path):
    first, again = World(), World()
    run(first, tmp_path / "c", config())
    with pytest.raises(ValueError, match=r"step 1; .*\[2, 3\]"):
        open_checkpoints(tmp_path / "c", config(), 1)
    assert run(again, tmp_path / "c", config(), resume=2) == 3
    assert again.calls[0] == "push 2"
    assert saved(tmp_path / "c") == ["step_000002", "step_000003", "superseded_step_000003"]


def test_a_damaged_extra_file_is_named(tmp_path):
    run(World(), tmp_path / "c", config())
    (tmp_path / "c" / "step_000003" / "extra.json").write_text('{"step": 3')
    with pytest.raises(ValueError, match="step_000003/extra.json.*--resume STEP"):
        open_checkpoints(tmp_path / "c", config(), "auto")
    assert open_checkpoints(tmp_path / "c", config(), 2).first_step == 2


def test_what_may_change_is_told_and_what_may_not_is_refused_by_name(tmp_path):
    run(World(), tmp_path / "c", config())
    longer = config(run={"name": "x", "steps": 5}, policy={"optimizer": {"lr": 0.5}})
    changes = open_checkpoints(tmp_path / "c", longer, "auto").changes
    assert [str(change) for change in changes] == ["run.steps: 3 -> 5", "policy.optimizer.lr: 1e-06 -> 0.5"]
    other = config(run={"name": "x", "steps": 3, "seed": 1}, algorithm={"loss": {"kind": "gspo"}})
    with pytest.raises(ValueError) as caught:
        open_checkpoints(tmp_path / "c", other, "auto")
    assert "run.seed: 0 -> 1" in str(caught.value)
    assert "algorithm.loss.kind: 'dual_clip' -> 'gspo'" in str(caught.value)
    assert "megatron-rl export" in str(caught.value)


@pytest.mark.parametrize("section", ["policy", "critic"])
def test_the_kind_of_the_optimizer_stays_and_its_numbers_may_change(section):
    def of(**optimizer):
        return {section: {"optimizer": optimizer}}

    assert [change.path for change in compare(of(kind="muon", momentum=0.9), of(kind="muon", momentum=0.8))] == [
        f"{section}.optimizer.momentum"
    ]
    nested = compare(of(kind="muon", adam={"eps": 1e-8}), of(kind="muon", adam={"eps": 1e-6}))
    assert [change.path for change in nested] == [f"{section}.optimizer.adam.eps"]
    with pytest.raises(ValueError, match=rf"cannot change these.*\n  {section}.optimizer.kind: 'adam' -> 'muon'\n"):
        compare(of(kind="adam", offload=False), of(kind="muon", momentum=0.8))
    assert compare(of(lr=1.0), of(kind="adam", lr=1.0)) == []  # a checkpoint from when there was one kind
    with pytest.raises(ValueError, match="optimizer.kind.*'muon'"):
        compare(of(lr=1.0), of(kind="muon", lr=1.0))


def test_what_becomes_of_the_adapters_of_a_run_that_cannot_go_on_is_told():
    adapters = (
        "policy.lora.start begins with them if their rank, scale and layers stay, and otherwise `megatron-rl merge`"
    )
    before = {"run": {"seed": 0}, "policy": {"lora": {"rank": 4}}}
    for now in (before | {"run": {"seed": 1}}, before | {"policy": {"lora": {"rank": 8}}}):
        with pytest.raises(ValueError) as refused:
            compare(before, now)
        assert adapters in str(refused.value)
    with pytest.raises(ValueError) as refused:
        compare(before | {"policy": {"lora": None}}, before)
    assert adapters not in str(refused.value), "all weights were trained"


def test_lists_are_compared_entry_by_entry():
    before, now = (
        {"rewards": [{"on_error": "stop", "weight": 1.0}]},
        {"rewards": [{"on_error": "abstain", "weight": 1.0}]},
    )
    assert [change.path for change in compare(before, now)] == ["rewards.0.on_error"]
    with pytest.raises(ValueError, match="rewards.0.weight: 1.0 -> 2.0"):
        compare(before, {"rewards": [{"on_error": "stop", "weight": 2.0}]})
    with pytest.raises(ValueError, match=r"rewards: \[\] -> "):
        compare({"rewards": []}, now)


def test_a_source_may_move_but_its_share_and_its_questions_stay():
    before = {"data": {"train": [{"path": "a.jsonl", "weight": 1.0, "columns": None}], "cache": None}}
    now = {
        "data": {"train": [{"path": "b/a.jsonl", "weight": 1.0, "columns": None}], "cache": "c", "deduplicate": False}
    }
    assert [change.path for change in compare(before, now)] == ["data.train.0.path", "data.cache", "data.deduplicate"]
    for key, value in {"weight": 2.0, "columns": {"messages": "question"}, "name": "b"}.items():
        with pytest.raises(ValueError, match=f"data.train.0.{key}: "):
            compare(before, {"data": {"train": [before["data"]["train"][0] | {key: value}], "cache": None}})


def test_exports_are_made_when_due(tmp_path):
    world = World()
    run(world, tmp_path / "c", config(checkpoint={"every": 0, "export_every": 1}))
    assert [call for call in world.calls if call.startswith("export")] == [
        "export exports/step_000001",
        "export exports/step_000002",
    ]


def test_a_reward_that_scores_nothing_is_told_and_then_stops_the_run(tmp_path):
    rewards = [{"kind": "exact_answer"}, {"kind": "function", "path": "a:judge"}]
    world = World(score=lambda group, i: Verdict(float(i), parts=(float(i), None)))
    cfg = config(rewards=rewards, run={"name": "x", "steps": 9}, checkpoint=RARELY)
    with pytest.raises(ValueError, match="reward judge .* 8 answers in 3 steps"):
        run(world, tmp_path / "c", cfg)
    once = "reward exact_answer could not score 50% of the answers; logs/rewards.log says why"
    assert world.warnings == [once, *["reward judge scored none of 8 answers; it gave no reward to any of them"] * 2]
    metrics = world.logged[0][1]
    assert metrics["reward/judge/abstained"] == 1.0 and "reward/judge/mean" not in metrics
    assert metrics["reward/exact_answer/mean"] == 0.5 and metrics["reward/exact_answer/seconds"] == 0.5
    assert saved(tmp_path / "c") == ["step_000002"]


def test_accuracy_is_the_share_that_the_deciding_reward_calls_right(tmp_path):
    rewards = [{"kind": "function", "path": "a:f", "weight": -2.0}, {"kind": "exact_answer"}]

    def score(group, i):
        right = [1.0, 0.0, None][group % 3]
        return Verdict(-2.0 + (right or 0.0), parts=(1.0, right))

    world = World(score)
    run(world, tmp_path / "a", config(rewards=rewards, algorithm={"drop_zero_signal": False}), heldout=PROMPTS[:3])
    assert world.logged[0][1]["eval/accuracy"] == 0.5, "of the two that the verifier judged"
    assert world.logged[0][1]["eval/reward_mean"] == pytest.approx((-1.0 - 2.0 - 2.0) / 3)
    world = World(score)
    run(world, tmp_path / "b", config(rewards=rewards, eval={"verifier": "f"}), heldout=PROMPTS[:3])
    assert world.logged[0][1]["eval/accuracy"] == 1.0
    world = World(lambda group, i: float(i))
    run(world, tmp_path / "d", config(rewards=rewards[:1]), heldout=PROMPTS[:3])
    assert "eval/accuracy" not in world.logged[0][1], "no reward decides what is right"


def test_rewards_have_names_of_their_own():
    twice = [{"kind": "function", "path": "a:f"}, {"kind": "function", "path": "b:f"}]
    with pytest.raises(ValueError, match="the names .* are not distinct"):
        config(rewards=twice)
    config(rewards=[twice[0], {**twice[1], "name": "g"}])
    with pytest.raises(ValueError, match="eval.verifier is 'h'"):
        config(rewards=twice[:1], eval={"verifier": "h"})


HOLD = """
    import sys, time
    from pathlib import Path
    from megatron_rl.loop.run_lock import run_lock
    with run_lock(Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.read()
"""


def test_a_second_run_in_a_folder_is_refused_until_the_first_is_gone(tmp_path):
    first = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLD), tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert first.stdout.readline() == b"held\n"
    with pytest.raises(ValueError, match=f"another run writes into .*: process {first.pid} on .*, since "):
        with run_lock(tmp_path):
            pass
    first.kill()
    first.communicate()
    with run_lock(tmp_path):
        pass


def test_a_step_without_any_score_trains_nothing_and_the_run_goes_on(tmp_path):
    world = World()
    world.score_of = lambda group, i: float(i) if world.version else None
    run(world, tmp_path / "c", config())
    assert any("left without a score" in warning for warning in world.warnings)
    assert [record.get("samples/active") for _, record in world.logged] == [0, 8, 8, None]
