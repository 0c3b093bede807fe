"""Rewards that score only the rows of some data sets."""

from __future__ import annotations

import re

import pytest
from small_ports import World, config

from megatron_rl.loop.evaluation import right_answers
from megatron_rl.loop.health.answers import (
    UNSCORED_PROMPTS,
    ScorelessSteps,
    SilentRewards,
    StepWarnings,
    UnscoredPrompts,
    UntrainedSteps,
)
from megatron_rl.loop.rollouts import MAX_DATASETS, describe_datasets, describe_rewards
from megatron_rl.types import Group, Prompt, Rollout, Verdict

CONFIG = config(
    rewards=[
        {"kind": "exact_answer", "name": f"for_{dataset}", "datasets": [dataset], "max_silent_steps": 2}
        for dataset in ("a", "b")
    ]
)
OF_A, OF_B, UNSCORED = (
    Verdict(1.0, parts=(1.0, None)),
    Verdict(0.0, parts=(None, 0.0)),
    Verdict(None, parts=(None, None)),
)


def group(dataset: str, verdict: Verdict) -> Group:
    return Group(
        Prompt("uid", (1,), "question", {"dataset": dataset}), [Rollout(3, 1, 2, 0, "stop", verdict=verdict)], None, 0
    )


def test_the_reward_that_scored_an_answer_decides_whether_it_is_right():
    assert right_answers(CONFIG, [OF_A, OF_B, UNSCORED]) == [True, False]


def test_a_reward_is_silent_only_about_rows_that_it_should_score():
    silent, sink = SilentRewards(CONFIG.rewards), World()
    for _ in range(3):
        silent.count([group("a", OF_A)], {}, sink)  # no row of b
    silent.count([group("a", OF_A), group("b", UNSCORED)], {}, sink)
    silent.count([group("a", OF_A)], {}, sink)
    with pytest.raises(ValueError, match="reward for_b .* 2 steps"):
        silent.count([group("a", OF_A), group("b", UNSCORED)], {}, sink)


def test_a_reward_that_is_0_for_all_is_told_once_though_another_one_gives_scores():
    silent, sink = SilentRewards(CONFIG.rewards), World()
    missing = Verdict(0.5, "no <END>", parts=(0.0, 0.5))
    for _ in range(4):
        silent.count([group("a", missing)], {}, sink)
    said = "reward for_a gave 0 to all answers of two steps in a row; the most frequent reason (100%) is: no <END>"
    assert sink.warnings == [said]


def test_a_run_ends_after_some_prompts_in_a_row_without_a_score_not_at_the_first():
    unscored, sink = UnscoredPrompts(), World()
    unscored.count([group("a", UNSCORED)] * (UNSCORED_PROMPTS - 1), sink)
    assert "every one of 7 answers was left without a score" in sink.warnings[0]
    unscored.count([group("a", UNSCORED), group("a", OF_A)], sink)
    unscored.count([group("a", UNSCORED)] * (UNSCORED_PROMPTS - 1), sink)
    with pytest.raises(ValueError, match="8 prompts in a row"):
        unscored.count([group("a", UNSCORED)], sink)


def test_a_reward_that_may_abstain_for_ever_stops_the_run_if_it_fails():
    rewards = config(
        rewards=[{"kind": "exact_answer", "name": "mine", "max_silent_steps": None, "max_failed_steps": 2}]
    ).rewards
    of_one, failed = [group("a", Verdict(None, parts=(None,)))], {"reward/mine/failed": 1.0}
    silent, sink = SilentRewards(rewards), World()
    for _ in range(5):
        silent.count(of_one, {}, sink)
    silent.count(of_one, failed, sink)
    silent.count(of_one, {}, sink)  # it did not fail in a row
    silent.count(of_one, failed, sink)
    with pytest.raises(ValueError, match="mine .* 2 steps .*max_failed_steps"):
        silent.count(of_one, failed, sink)


def test_the_metrics_of_a_reward_are_of_the_rows_that_it_scores():
    metrics = describe_rewards(CONFIG.rewards, [group("a", OF_A), group("a", UNSCORED), group("c", UNSCORED)])
    assert metrics == {"reward/for_a/abstained": 0.5, "reward/for_a/mean": 1.0, "reward/for_a/std": 0.0}


def test_each_data_set_has_its_metrics():
    """A row of two data sets counts in each; a group without a score has no signal."""
    two = Group(
        Prompt("uid", (1,), "q", {"dataset": ["a", "b", "a"]}),
        [Rollout(3 + i, 1, 2, 0, "stop", verdict=verdict) for i, verdict in enumerate((OF_A, OF_B))],
        None,
        0,
    )
    none = Group(Prompt("uid", (1,), "q", {}), [Rollout(9, 1, 8, 0, "stop", verdict=OF_A)], None, 0)
    assert describe_datasets([two, group("b", UNSCORED), group("b", OF_A), none]) == {
        "dataset/a/groups": 1.0,
        "dataset/a/zero_signal": 0.0,
        "dataset/a/response_mean": 2.5,
        "dataset/a/score_mean": 0.5,
        "dataset/b/groups": 3.0,
        "dataset/b/zero_signal": 2 / 3,
        "dataset/b/response_mean": 9 / 4,
        "dataset/b/score_mean": 2 / 3,
    }


def test_the_number_of_data_sets_with_metrics_is_bounded():
    metrics = describe_datasets([group(f"set {i % (MAX_DATASETS + 3)}", OF_A) for i in range(100)])
    assert len({name.split("/")[1] for name in metrics}) == MAX_DATASETS + 1
    assert sum(value for name, value in metrics.items() if name.endswith("/groups")) == 100


def answers(*verdicts: Verdict) -> list[Group]:
    samples = [Rollout(3, 1, 2, 0, "stop", verdict=verdict) for verdict in verdicts]
    return [Group(Prompt("uid", (1,), "question", {}), samples, None, 0)]


def test_a_step_in_which_no_answer_scores_tells_the_most_frequent_reason():
    sink = World()
    missing, wrong = Verdict(0.0, "no </think>"), Verdict(0.0, "other answer")
    ScorelessSteps().count(answers(missing, missing, wrong, Verdict(None, "the service is away", failed=True)), sink)
    assert sink.warnings == ["none of 3 answers scores above 0; the most frequent reason (67%) is: no </think>"]
    ScorelessSteps().count(answers(missing, Verdict(0.5)), sink)
    ScorelessSteps().count(answers(Verdict(None, "the service is away", failed=True)), sink)
    assert len(sink.warnings) == 1, "an answer that scores, and a step without a score, are told elsewhere or not"
    ScorelessSteps().count(answers(Verdict(-3.0), Verdict(-1.0)), sink)
    assert len(sink.warnings) == 1, "a user's penalties differ, so there is something to learn"
    ScorelessSteps().count(answers(Verdict(-1.0), Verdict(-1.0)), sink)
    assert sink.warnings[1:] == ["none of 2 answers scores above 0"]


@pytest.mark.parametrize("outcome", [True, False])
def test_answers_without_a_score_are_told_where_rewards_train(outcome: bool):
    sink = World()
    teachers = {"teachers": [{"path": "teacher"}], "algorithm": {"distillation": {"outcome": outcome}}}
    StepWarnings(config(**teachers)).count(answers(*[Verdict(0.0, parts=(0.0,))] * 2), {}, sink)
    assert sink.warnings == ["none of 2 answers scores above 0"] * outcome


def test_steps_without_a_score_are_told_less_and_less_often():
    sink, steps = World(), ScorelessSteps()
    for _ in range(9):
        steps.count(answers(Verdict(0.0, "no </think>")), sink)
    assert [re.findall(r"for (\d) steps", one) for one in sink.warnings] == [[], ["2"], ["4"], ["8"]]
    steps.count(answers(Verdict(1.0)), sink)
    steps.count(answers(Verdict(0.0, "no </think>")), sink)
    assert len(sink.warnings) == 5


def test_steps_in_which_nothing_is_trained_are_told_with_their_rewards():
    sink, steps, groups = World(), UntrainedSteps(), answers(OF_A, OF_A, OF_B, UNSCORED)
    planned = {"groups/zero_signal": 1.0, "samples/abstained": 1.0, "samples/overlong": 0.0}
    for is_trained in (False, True, False, False, False, False, False):
        steps.count(is_trained, planned, groups, sink)
    assert [warning.partition(".")[0] for warning in sink.warnings] == [
        "nothing was trained in 2 steps in a row",
        "nothing was trained in 4 steps in a row",
    ]
    assert (
        "In the last one in 1 groups of answers to one prompt all rewards are equal, so that every advantage is 0; 1 "
        "answers have no score. Its rewards are 1: 50%, 0: 25%, none: 25%. " in sink.warnings[0]
    )


def test_a_step_whose_answers_were_all_cut_is_told_so():
    sink, steps = World(), UntrainedSteps()
    for _ in range(2):
        steps.count(False, {"samples/overlong": 2.0, "groups/zero_signal": 0.0}, answers(OF_A, OF_B), sink)
    [warning] = sink.warnings
    assert "algorithm.overlong_filter leaves out the 2 answers that rollout.max_response_tokens cut." in warning
    assert "equal" not in warning and warning.endswith("or train on cut answers too")
