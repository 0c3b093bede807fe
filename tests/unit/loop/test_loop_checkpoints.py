"""Which checkpoints are kept, and when a checkpoint that is written beside training is concluded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_ports import config

from megatron_rl.config.load import validate
from megatron_rl.config.schema import SftRunConfig
from megatron_rl.loop.checkpoints import SCORES, Checkpoints, WholeState, part_path


class Policy:
    """A policy whose checkpoints are complete when the test says so."""

    num_changes = 0

    def __init__(self) -> None:
        self.writing: Path | None = None
        self.is_full = False

    def save(self, folder: Path, extra) -> None:
        assert self.writing is None, "the one before is concluded first"
        self.writing, self.extra = folder, extra

    def write(self) -> None:
        self.writing.mkdir(exist_ok=True)
        (self.writing / "extra.json").write_text(json.dumps(self.extra))

    def finish_save(self, wait: bool) -> bool:
        if self.is_full:
            self.writing = None
            raise ValueError("the disk is full")
        if wait:
            self.write()
        if not self.writing.exists():
            return False
        self.writing = None
        return True


def make(folder: Path, resume=None, **kept) -> Checkpoints:
    return Checkpoints(folder, config(checkpoint=kept, data={"train": "rows", "eval": "held out"}), resume=resume)


def save_all(checkpoints: Checkpoints, policy: Policy, steps, scores=None) -> None:
    for step in steps:
        checkpoints.save(policy, step, {})
        policy.write()
        checkpoints.finish(policy, wait=False)
        if scores:
            checkpoints.judge(step, {"eval/accuracy": scores[step]})


def test_the_newest_every_nth_and_the_best_are_kept(tmp_path):
    kept = dict(keep=2, keep_every=4, keep_best="eval/accuracy")
    scores = {1: 0.1, 2: 0.7, 3: 0.9, 4: 0.2, 5: 0.3, 6: 0.9, 7: 0.5, 8: 0.4, 9: 0.6, 10: 0.1}
    checkpoints, policy = make(tmp_path, **kept), Policy()
    save_all(checkpoints, policy, range(1, 6), scores)
    assert checkpoints.steps() == [3, 4, 5], "4 is a multiple of 4, and 3 the best so far"
    save_all(checkpoints, policy, range(6, 11), scores)
    assert checkpoints.steps() == [4, 6, 8, 9, 10], "of equal ones the later is kept"
    again = make(tmp_path, resume="auto", **kept)
    save_all(again, policy, (11, 12, 13), {11: 0.0, 12: 0.0, 13: 0.95})
    assert again.steps() == [4, 6, 8, 12, 13], "a resumed run knows the earlier values"
    save_all(again, policy, (14,), {14: 0.0})
    assert again.steps() == [4, 8, 12, 13, 14]


def test_the_best_loss_is_the_smallest(tmp_path):
    given = {"run": {"name": "x", "steps": 9}, "model": {"path": "m"}, "sft": {"rows": "rows", "eval": "held out"}}
    supervised = validate(SftRunConfig, given | {"checkpoint": {"keep": 1, "keep_best": "eval/loss"}})
    checkpoints, policy = Checkpoints(tmp_path, supervised, resume=None), Policy()
    save_all(checkpoints, policy, (1, 2, 3))
    checkpoints.judge(3, {"eval/loss": 0.5})
    save_all(checkpoints, policy, (4,))
    checkpoints.judge(4, {"eval/loss": 0.7})
    save_all(checkpoints, policy, (5,))
    assert checkpoints.steps() == [3, 5]


def test_a_step_that_was_not_evaluated_is_not_the_best(tmp_path):
    checkpoints, policy = make(tmp_path, keep=1, keep_best="eval/accuracy"), Policy()
    save_all(checkpoints, policy, (1, 2))
    checkpoints.judge(2, {"loss": 3.0})
    save_all(checkpoints, policy, (3,))
    assert checkpoints.steps() == [3] and not (tmp_path / SCORES).exists()


@pytest.mark.parametrize("content", ["", "[1]", '{"1": '])
def test_a_file_of_values_that_a_crash_cut_is_as_none(tmp_path, content):
    (tmp_path / SCORES).write_text(content)
    save_all(make(tmp_path, keep=1, keep_best="eval/accuracy"), Policy(), (1, 2), {1: 0.5, 2: 0.4})


def test_the_older_checkpoint_stays_until_the_new_one_is_complete(tmp_path):
    checkpoints, policy = make(tmp_path, keep=1), Policy()
    save_all(checkpoints, policy, (1,))
    checkpoints.save(policy, 2, {})
    checkpoints.finish(policy, wait=False)
    assert checkpoints.steps() == [1] and policy.writing is not None
    policy.write()
    assert checkpoints.steps() == [1, 2]
    checkpoints.finish(policy, wait=False)
    assert checkpoints.steps() == [2]


def test_a_synchronous_checkpoint_is_complete_at_once(tmp_path):
    checkpoints, policy = make(tmp_path, asynchronous=False), Policy()
    checkpoints.save(policy, 1, {})
    assert checkpoints.steps() == [1] and policy.writing is None


def test_the_end_of_a_run_waits_for_its_checkpoint(tmp_path):
    checkpoints, policy = make(tmp_path), Policy()
    with WholeState(checkpoints, policy, {}) as whole:
        whole.mark(1)
        whole.save()
        assert checkpoints.steps() == []
    assert checkpoints.steps() == [1]


def test_a_checkpoint_that_could_not_be_written_ends_the_run_and_is_not_asked_for_again(tmp_path):
    checkpoints, policy = make(tmp_path), Policy()
    with pytest.raises(ValueError, match="the disk is full") as caught, WholeState(checkpoints, policy, {}) as whole:
        whole.mark(1)
        whole.save()
        policy.is_full = True
        whole.mark(2)
    assert "No checkpoint could be written after this error: the disk is full" in caught.value.__notes__


def test_what_a_killed_run_left_unfinished_is_removed(tmp_path):
    (tmp_path / "step_000003.tmp-abcd").mkdir()
    assert make(tmp_path).restore(Policy(), {}) == 0
    assert list(tmp_path.iterdir()) == []


def test_with_a_critic_a_checkpoint_has_two_parts(tmp_path):
    class Both(Policy):
        def write(self) -> None:
            part_path(self.writing, "critic").mkdir(parents=True, exist_ok=True)
            super().write()

    def opened(resume=None) -> Checkpoints:
        with_critic = {"critic": {}, "algorithm": {"adv_estimator": {"kind": "gae"}}}
        return Checkpoints(tmp_path, config(checkpoint={"keep": 2}, **with_critic), resume=resume)

    checkpoints = opened()
    save_all(checkpoints, Both(), range(1, 5))
    assert checkpoints.steps() == [3, 4]
    assert sorted(path.name for path in (tmp_path / "critic").iterdir()) == ["step_000003", "step_000004"]

    of_critic = part_path(checkpoints.path(4), "critic")
    of_critic.rename(tmp_path / "critic" / "step_000004.tmp-1")  # killed before its critic's
    again = opened("auto")
    assert again.first_step == 3


def test_a_checkpoint_from_before_a_key_was_there_is_resumed_with_its_default(tmp_path):
    lora = {"rank": 4, "alpha": 8.0}
    checkpoints = Checkpoints(tmp_path, config(policy={"lora": lora}), resume=None)
    save_all(checkpoints, Policy(), [1])
    extra = checkpoints.path(1) / "extra.json"
    saved = json.loads(extra.read_text())
    del saved["config"]["policy"]["lora"]["base"], saved["config"]["policy"]["multi_token"]
    extra.write_text(json.dumps(saved))
    assert Checkpoints(tmp_path, config(policy={"lora": lora}), resume="auto").changes == []
    with pytest.raises(ValueError, match="policy.lora.base: 'unquantised' -> 'fp8'"):
        Checkpoints(tmp_path, config(policy={"lora": lora | {"base": "fp8"}}), resume="auto")
    saved["config"]["policy"]["removed"] = 1
    extra.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="policy.removed: 1"):
        Checkpoints(tmp_path, config(policy={"lora": lora}), resume="auto")
