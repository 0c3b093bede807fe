"""The thinking budget as a pure plan: golden cases, then properties over all small alphabets and cuts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.loop.thinking import (
    Completion,
    Continuation,
    find_delimiter,
    join,
    plan_second_call,
    truncate,
)

EOS = 9


def call(ids: list[int], stopped: bool = False, version: int = 0) -> Completion:
    """Each token has a log-prob of its own, and the last two are of the next version."""
    versions = [version + (i >= len(ids) - 2) for i in range(len(ids))]
    return Completion(ids, [-0.5 * (i + 1) for i in range(len(ids))], versions, stopped)


@pytest.mark.parametrize(
    ("ids", "stopped", "delimiter", "budget", "expected"),
    [
        pytest.param([7, 7, 7], False, (3,), 4, Continuation(3, (3,), 4), id="cut"),
        pytest.param([7, 3, 8], False, (3,), 4, Continuation(3, (), 3), id="answer-begun"),
        pytest.param([7, 7, 3], False, (3,), 4, Continuation(3, (), 4), id="delimiter-at-the-cut"),
        pytest.param([7, 3, 8, EOS], True, (3,), 4, Continuation(4, (), 0), id="answer-ended"),
        pytest.param([7, EOS], True, (3,), 4, Continuation(2, (), 0), id="ended-in-the-thought"),
        pytest.param([3, 8, 8, 8, 8], False, (3,), 2, Continuation(3, (), 0), id="answer-over-budget"),
        pytest.param([3, 8, 8, EOS], True, (3,), 2, Continuation(3, (), 0), id="ended-but-over-budget"),
        pytest.param([3, 8, EOS], True, (3,), 2, Continuation(3, (), 0), id="ended-exactly-at-the-budget"),
        pytest.param([7, 7, 3], False, (3, 4), 4, Continuation(3, (4,), 4), id="first-of-two-at-the-cut"),
        pytest.param([7, 3, 3], False, (3, 3, 4), 4, Continuation(3, (4,), 4), id="two-of-three-at-the-cut"),
        pytest.param([3, 3, 3], False, (3, 3, 4), 4, Continuation(3, (4,), 4), id="longest-beginning"),
        pytest.param([7, 3], False, (3, 3), 4, Continuation(2, (3,), 4), id="doubled-token"),
        pytest.param([3, 8, 3, 8], False, (3,), 9, Continuation(4, (), 6), id="first-delimiter-counts"),
    ],
)
def test_plan(ids, stopped, delimiter, budget, expected):
    assert plan_second_call(call(ids, stopped), delimiter, budget) == expected


def test_join_golden():
    """The example of types.Tokens, digit by digit, and a push before its last token."""
    calls = [Completion([21, 22], [-0.7, -0.1], [4, 4], False), Completion([31, 32], [-0.3, -0.2], [4, 5], True)]
    sample, tokens = join([11, 12, 13], calls, (3,), (3,))
    assert tokens.ids.tolist() == [11, 12, 13, 21, 22, 3, 31, 32]
    assert tokens.action_mask.tolist() == [False, False, False, True, True, False, True, True]
    np.testing.assert_array_equal(tokens.logp_rollout, np.float32([0, 0, 0, -0.7, -0.1, 0, -0.3, -0.2]))
    assert tokens.version.tolist() == [-1, -1, -1, 4, 4, -1, 4, 5]
    dtypes = tokens.ids.dtype, tokens.action_mask.dtype, tokens.logp_rollout.dtype, tokens.version.dtype
    assert dtypes == (np.int32, np.bool_, np.float32, np.int32)
    assert (sample.length, sample.num_prompt_tokens) == (8, 3)
    assert (sample.num_actions, sample.num_thought_tokens) == (4, 2)
    assert (sample.finish, sample.thought_cut, sample.verdict) == ("stop", True, None)


def test_a_kept_beginning_did_not_stop():
    assert truncate(call([3, 8, EOS], True), 2) == Completion([3, 8], [-0.5, -1.0], [0, 1], False)
    assert truncate(call([3, EOS], True), 2).stopped


def test_without_a_delimiter_nothing_is_a_thought():
    assert join([1], [call([7, 7])], (), (3,))[0].num_thought_tokens == 0
    assert join([1], [call([7, 3])], (), None)[0].num_thought_tokens == 0


small_ids = st.lists(st.sampled_from([3, 4, 5]), max_size=8)
delimiters = st.lists(st.sampled_from([3, 4]), min_size=1, max_size=4).map(tuple)


@given(small_ids)
def test_find_delimiter_finds_the_first(ids):
    for delimiter in [(3,), (3, 4), (3, 3), (3, 4, 3)]:
        found = [i for i in range(len(ids)) if tuple(ids[i : i + len(delimiter)]) == delimiter]
        assert find_delimiter(ids, delimiter) == (found[0] if found else None)


@given(small_ids, st.booleans(), delimiters, st.integers(1, 6), st.data())
def test_budgets_hold_for_every_cut(thought, stopped, delimiter, budget, data):
    """Whatever both calls sample: one closed thought, an answer within budget, forced tokens no actions."""
    first = call([*thought, EOS] if stopped else thought, stopped)
    plan = plan_second_call(first, delimiter, budget)
    calls = [truncate(first, plan.num_kept)]
    if plan.max_tokens:
        answer = data.draw(st.lists(st.sampled_from([3, 4, 5]), min_size=1, max_size=plan.max_tokens))
        calls.append(call(answer, stopped=len(answer) < plan.max_tokens, version=1))
    sample, tokens = join([1, 2], calls, plan.forced, delimiter)
    response = tokens.ids[2:].tolist()

    start = find_delimiter(response, delimiter)
    closed_by_model = find_delimiter(first.ids, delimiter) is not None
    if start is None:
        assert stopped and not closed_by_model and response == list(first.ids)
    else:
        assert sample.num_thought_tokens == start <= len(first.ids)
        assert len(response) - start - len(delimiter) <= budget
    if plan.forced:
        # what stands before call 2 ends with the first and only delimiter: completed, not doubled
        head = response[: len(first.ids) + len(plan.forced)]
        assert start == len(head) - len(delimiter) and not stopped
    assert bool(plan.forced) == sample.thought_cut == (not stopped and not closed_by_model)

    forced = np.zeros(len(response), bool)
    forced[plan.num_kept : plan.num_kept + len(plan.forced)] = True
    np.testing.assert_array_equal(tokens.action_mask[2:], ~forced)
    assert not tokens.action_mask[:2].any()
    assert sample.num_actions == tokens.action_mask.sum() and sample.length == len(tokens.ids)
    assert (tokens.version[~tokens.action_mask] == -1).all()
    assert tokens.version[tokens.action_mask].tolist() == [x for one in calls for x in one.version]
    assert (tokens.logp_rollout[~tokens.action_mask] == 0).all()
    np.testing.assert_array_equal(
        tokens.logp_rollout[tokens.action_mask], np.float32([x for one in calls for x in one.logp])
    )
    assert (sample.finish == "stop") == calls[-1].stopped
