"""Ten planted causes are named, each alone, and a healthy step has none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.explain.causes import asks_for_older_weights, causes
from megatron_rl.explain.step import ExplainedAnswer, ExplainedStep
from megatron_rl.types import Episode, Picture, Prompt, Rollout, Tokens, Verdict

NUM_PROMPT = 3
PROMPTS = [Prompt(f"rows:{i}", (5, 6, 10 + i), "") for i in range(6)]


def answer(group: int, number: int, **changes) -> ExplainedAnswer:
    """One of four answers to a prompt: 20 tokens, of which engine and trainer think the same."""
    length = changes.pop("length", 20)
    total = NUM_PROMPT + length
    mask = np.arange(total) >= NUM_PROMPT
    logp = np.where(mask, -0.5, 0.0).astype(np.float32)
    reward = changes.pop("reward", float(number % 2))
    parts, reason = changes.pop("parts", (reward, 2.0)), changes.pop("reason", "")
    tokens = Tokens(np.full(total, 7, np.int32), mask, logp, np.where(mask, 9, -1).astype(np.int32))
    verdict = Verdict(reward, reason, parts)
    rollout = Rollout(total, NUM_PROMPT, length, 0, "stop", verdict=verdict)
    slope = np.where(mask, 1e-3, 0.0).astype(np.float32)
    advantage = changes.pop("advantage", 1.0 if number % 2 else -1.0)
    numbers = {"logp": logp, "slope": slope}
    given = ExplainedAnswer(
        4 * group + number, PROMPTS[group], number, rollout, tokens, advantage, number // 2, numbers
    )
    return replace(given, **changes)


def healthy(**changes) -> ExplainedStep:
    records = {s: {"lr": 1e-5, "update_ratio": 1e-4, "experts/unused": 0.0, "experts/load/max": 1.5} for s in range(10)}
    step = ExplainedStep(9, [answer(g, n) for g in range(6) for n in range(4)], records, labels=("right", "brief"))
    return replace(step, **changes)


def with_answer(index: int, **changes) -> ExplainedStep:
    step = healthy()
    answers = [*step.answers]
    answers[index] = answer(index // 4, index % 4, **changes)
    return replace(step, answers=answers)


def damaged(groups: set[int] | None = None, engine: int = -1) -> ExplainedStep:
    """Other log-probs of all tokens of some groups, or of one of the two engines."""
    answers = []
    for one in healthy().answers:
        wrong = one.engine == engine if groups is None else one.index // 4 in groups
        tokens = replace(one.tokens, logp_rollout=one.tokens.logp_rollout - 0.4 * one.tokens.action_mask * wrong)
        answers.append(replace(one, tokens=tokens))
    return healthy(answers=answers)


def stale(indices: set[int]) -> ExplainedStep:
    answers = [
        replace(
            one,
            tokens=replace(one.tokens, version=np.where(one.tokens.action_mask, 9 - 2 * (one.index in indices), -1)),
        )
        for one in healthy().answers
    ]
    return healthy(answers=answers)


def odd_row() -> ExplainedStep:
    """The answers to one row have nearly all of the loss."""
    answers = [
        replace(one, numbers=one.numbers | {"slope": one.numbers["slope"] * (200 if one.index < 4 else 1)})
        for one in healthy().answers
    ]
    return healthy(answers=answers)


def unscored_neighbours() -> ExplainedStep:
    answers = [
        answer(g, n, reward=None, parts=(None,), reason="the service timed out", advantage=float("nan"))
        if g == 2 and n < 3
        else answer(g, n)
        for g in range(6)
        for n in range(4)
    ]
    return healthy(answers=answers)


def wrong_token() -> ExplainedStep:
    step = healthy(untrained=(0, 1))
    ids = step.answers[5].tokens.ids.copy()
    ids[12] = 0
    answers = [*step.answers]
    answers[5] = replace(answers[5], tokens=replace(answers[5].tokens, ids=ids))
    return replace(step, answers=answers)


def equal_prompts() -> ExplainedStep:
    twin = replace(PROMPTS[4], uid="rows:77")
    return healthy(answers=[replace(one, prompt=twin) if one.index // 4 == 5 else one for one in healthy().answers])


def with_record(**changes) -> ExplainedStep:
    step = healthy()
    return replace(step, records={**step.records, 9: step.records[9] | changes})


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (
            with_answer(6, advantage=70.0, reward=900.0, parts=(1.0, 1798.0)),
            r"a huge advantage: rows:1, answer 2 has 70, and the median of all is 1; the reward brief gave it 1798, "
            r"where the median is 2",
        ),
        (unscored_neighbours(), r"3 of 4 answers to rows:2 have none \(the service timed out\)"),
        (odd_row(), r"one row: 98% of the derivatives of the loss are at the answers to rows:0"),
        (with_answer(9, length=200), r"a long answer: rows:2, answer 1 has 200 tokens, and the median is 20"),
        (with_record(lr=1e-3), r"the learning rate: it is 0.001 in this step, and 1e-05 in the median"),
        (damaged({4}), r"an engine with other weights: in 4 of 24 answers .* 100% of the tokens, by 0.4 nats \(rows:4"),
        (wrong_token(), r"rows:1, answer 1 sampled the token 0, whose embedding is almost 0"),
        (equal_prompts(), r"equal prompts: rows:4 and rows:77 are the same tokens"),
        (with_record(**{"experts/unused": 0.25, "experts/load/max": 6.0}), r"25% of the experts got none.* 6.0 times"),
        (stale({0, 1}), r"a stale engine: 2 of 24 answers have tokens of weights that are 2 versions old"),
    ],
    ids=["reward", "neighbours", "row", "length", "rate", "engine", "token", "twins", "experts", "stale"],
)
def test_a_planted_cause_is_named(step, said):
    import re

    found = causes(step)
    assert any(re.search(said, sentence) for sentence in found), found
    assert len(found) == 1, found


def test_a_healthy_step_has_none():
    assert causes(healthy()) == []


def test_an_update_that_was_too_large_is_found_afterwards():
    step = healthy()
    records = {s: record | {"update_ratio": 1e-4 if s < 7 else 5e-2} for s, record in step.records.items()}
    [said] = causes(replace(step, records=records))
    assert "the last updates changed the weights by 0.05 of their norm" in said


def test_one_of_two_engines_is_named():
    """Half of the answers are odd, so that their median tells nothing."""
    [said] = causes(damaged(engine=1))
    assert said.startswith("an engine with other weights: in 12 of 24 answers trainer and engine differ at 100%")
    assert "; engine 1 gave them (logs/engine_1.log)" in said
    unrecorded = [replace(one, engine=None) for one in damaged(engine=1).answers]
    [said] = causes(healthy(answers=unrecorded))
    assert "; which engine gave an answer was not recorded" in said
    [said] = causes(damaged({0, 1, 2}))
    assert "; the engines 0, 1 gave them and others that agree (logs/engine_0.log, logs/engine_1.log)" in said


def test_an_engine_with_the_weights_of_an_earlier_step_is_stale():
    """The log-probs of the odd answers are the trainer's of two steps before."""
    step = damaged(engine=0)
    earlier = {
        version: {one.index: one.numbers["logp"] - change * one.tokens.action_mask for one in step.answers}
        for version, change in {6: 0.7, 7: 0.4, 8: 0.2}.items()
    }
    [said] = causes(replace(step, earlier=earlier))
    assert said.startswith(
        "a stale engine: 12 of 24 answers have the log-probs of the weights of version 7 in place of 9"
    )
    assert "; engine 0 gave them" in said
    del earlier[7]
    [said] = causes(replace(step, earlier=earlier))
    assert "no weights of the versions 6 to 8 fit them either" in said


def test_older_weights_are_looked_at_only_if_trainer_and_engine_differ():
    assert not asks_for_older_weights(healthy())
    assert asks_for_older_weights(with_record(**{"mismatch/mean_abs": 0.02}))
    assert not asks_for_older_weights(replace(with_record(**{"mismatch/mean_abs": 0.02}), max_lag=1))


def test_a_token_that_many_answers_sampled_is_told_once():
    step = healthy(untrained=(7,))
    [said] = causes(step)
    assert "24 of 24 answers sampled the token 7" in said and "(rows:0, answer 0; rows:0, answer 1 and 22 more)" in said


def test_all_engines_may_be_wrong():
    [said] = causes(damaged({0, 1, 2, 3, 4, 5}))
    assert said.startswith("all engines differ from the trainer, by 0.4 nats")


def test_rare_tokens_that_round_are_no_engine():
    """One token in twenty differs by 0.3 nats in some answers, as rare tokens do in bf16."""
    answers = []
    for one in healthy().answers:
        logp = one.tokens.logp_rollout.copy()
        logp[7] += 0.3 * (one.index % 3 == 0)
        answers.append(replace(one, tokens=replace(one.tokens, logp_rollout=logp)))
    assert causes(healthy(answers=answers)) == []


def test_other_pictures_make_other_prompts():
    step = equal_prompts()
    shown = [replace(group[0].prompt, pictures=(Picture(str(i), 4, 4),)) for i, group in enumerate(step.groups)]
    answers = [replace(one, prompt=shown[i]) for i, group in enumerate(step.groups) for one in group]
    assert causes(step) and not causes(replace(step, answers=answers))


def test_the_columns_of_an_environment_s_rows_tell_equal_prompts_apart():
    """Files and tests are the task; the prompt may be the same for all."""
    step = equal_prompts()
    episode = Episode(1, NUM_PROMPT)

    def played(one: ExplainedAnswer, number: int) -> ExplainedAnswer:
        return replace(one, rollout=replace(one.rollout, episode=episode), prompt=prompts[number])

    prompts = [replace(group[0].prompt, columns={"files": {"f.py": str(i)}}) for i, group in enumerate(step.groups)]
    answers = [played(one, i) for i, group in enumerate(step.groups) for one in group]
    assert causes(step) and not causes(replace(step, answers=answers))
