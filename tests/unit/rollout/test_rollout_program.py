"""The programs between the calls of an engine: golden cases, then properties over all small alphabets and cuts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rollout.program import (
    Call,
    Completion,
    Done,
    Force,
    Transcript,
    as_rollout,
    find_delimiter,
    next_call,
    replay,
)
from megatron_rl.rollout.programs.thinking import OneCall, TwoCallBudget
from megatron_rl.types import NOT_JUDGED

EOS = 9
THOUGHT = 8


def call(ids: list[int], stopped: bool = False, version: int = 0) -> Completion:
    """Each token has a log-prob of its own, and the last two are of the next version."""
    versions = [version + (i >= len(ids) - 2) for i in range(len(ids))]
    return Completion(ids, [-0.5 * (i + 1) for i in range(len(ids))], versions, stopped)


def after(*completions: Completion) -> Transcript:
    transcript = Transcript()
    for completion in completions:
        transcript.sampled(completion)
    return transcript


def test_a_program_begins_with_a_call():
    assert OneCall(7).next(Transcript()) == Call(7)
    assert TwoCallBudget((3,), (3,), THOUGHT, 4).next(Transcript()) == Call(THOUGHT)


def test_one_call_is_all():
    assert OneCall(7).next(after(call([7, 7]))) == Done(2)


@pytest.mark.parametrize(
    ("ids", "stopped", "delimiter", "budget", "expected"),
    [
        pytest.param([7, 7, 7], False, (3,), 4, [Force((3,)), Call(4)], id="cut"),
        pytest.param([7, 3, 8], False, (3,), 4, [Call(3)], id="answer-begun"),
        pytest.param([7, 7, 3], False, (3,), 4, [Call(4)], id="delimiter-at-the-cut"),
        pytest.param([7, 3, 8, EOS], True, (3,), 4, [Done(4)], id="answer-ended"),
        pytest.param([7, EOS], True, (3,), 4, [Done(2)], id="ended-in-the-thought"),
        pytest.param([3, 8, 8, 8, 8], False, (3,), 2, [Done(3)], id="answer-over-budget"),
        pytest.param([3, 8, 8], False, (3,), 2, [Done(3)], id="answer-at-its-budget"),
        pytest.param([3, 8, 8, EOS], True, (3,), 2, [Done(3)], id="ended-but-over-budget"),
        pytest.param([3, 8, EOS], True, (3,), 2, [Done(3)], id="ended-exactly-at-the-budget"),
        pytest.param([7, 7, 3], False, (3, 4), 4, [Force((4,)), Call(4)], id="first-of-two-at-the-cut"),
        pytest.param([7, 3, 3], False, (3, 3, 4), 4, [Force((4,)), Call(4)], id="two-of-three-at-the-cut"),
        pytest.param([3, 3, 3], False, (3, 3, 4), 4, [Force((4,)), Call(4)], id="longest-beginning"),
        pytest.param([7, 3], False, (3, 3), 4, [Force((3,)), Call(4)], id="doubled-token"),
        pytest.param([3, 8, 3, 8], False, (3,), 9, [Call(6)], id="first-delimiter-counts"),
    ],
)
def test_thinking_budget(ids, stopped, delimiter, budget, expected):
    program, transcript, steps = TwoCallBudget(delimiter, delimiter, THOUGHT, budget), after(call(ids, stopped)), []
    steps.append(program.next(transcript))
    if isinstance(steps[0], Force):
        transcript.force(steps[0].ids)
        steps.append(program.next(transcript))
    assert steps == expected


def test_a_sample_golden():
    """The example of types.Tokens, digit by digit, and a push before its last token."""
    transcript = after(Completion([21, 22], [-0.7, -0.1], [4, 4], False))
    transcript.force((3,))
    transcript.sampled(Completion([31, 32], [-0.3, -0.2], [4, 5], True))
    sample, tokens = as_rollout([11, 12, 13], transcript, (3,), thought_budget=2)
    assert tokens.ids.tolist() == [11, 12, 13, 21, 22, 3, 31, 32]
    assert tokens.action_mask.tolist() == [False, False, False, True, True, False, True, True]
    np.testing.assert_array_equal(tokens.logp_rollout, np.float32([0, 0, 0, -0.7, -0.1, 0, -0.3, -0.2]))
    assert tokens.version.tolist() == [-1, -1, -1, 4, 4, -1, 4, 5]
    dtypes = tokens.ids.dtype, tokens.action_mask.dtype, tokens.logp_rollout.dtype, tokens.version.dtype
    assert dtypes == (np.int32, np.bool_, np.float32, np.int32)
    assert (sample.length, sample.num_prompt_tokens) == (8, 3)
    assert (sample.num_actions, sample.num_thought_tokens) == (4, 2)
    assert (sample.finish, sample.thought_cut, sample.verdict) == ("stop", True, NOT_JUDGED)
    assert sample.oldest_version == 4


def test_an_answer_without_sampled_tokens_has_no_version():
    transcript = Transcript()
    transcript.force((3,))
    assert as_rollout([1], transcript, (3,))[0].oldest_version == -1


def test_a_kept_beginning_did_not_stop():
    transcript = after(call([3, 8, EOS], True))
    transcript.cut(3)
    assert transcript.stopped
    transcript.cut(2)
    columns = transcript.ids, transcript.is_action, transcript.logp, transcript.version
    assert columns == ([3, 8], [True, True], [-0.5, -1.0], [0, 1]) and not transcript.stopped


def test_without_a_delimiter_nothing_is_a_thought():
    assert as_rollout([1], after(call([7, 7])), (3,))[0].num_thought_tokens == 0
    assert as_rollout([1], after(call([7, 3])), None)[0].num_thought_tokens == 0


small_ids = st.lists(st.sampled_from([3, 4, 5]), max_size=THOUGHT)
delimiters = st.lists(st.sampled_from([3, 4]), min_size=1, max_size=4).map(tuple)


@given(small_ids)
def test_find_delimiter_finds_the_first(ids):
    for delimiter in [(3,), (3, 4), (3, 3), (3, 4, 3)]:
        found = [i for i in range(len(ids)) if tuple(ids[i : i + len(delimiter)]) == delimiter]
        assert find_delimiter(ids, delimiter) == (found[0] if found else None)


@given(small_ids, st.booleans(), delimiters, st.integers(1, 6), st.data())
def test_budgets_hold_for_every_cut(thought, stopped, delimiter, budget, data):
    """Whatever the calls sample: one closed thought, an answer within budget, forced tokens no actions."""
    program, transcript = TwoCallBudget(delimiter, delimiter, THOUGHT, budget), Transcript()
    first = call([*thought, EOS] if stopped else thought, stopped)
    calls, forced = [first], ()
    transcript.sampled(first)
    while not isinstance(step := program.next(transcript), Done):
        if isinstance(step, Force):
            assert not forced and not calls[1:]
            forced = step.ids
            transcript.force(forced)
        else:
            assert len(calls) == 1, "a thought and an answer need two calls at most"
            answer = data.draw(st.lists(st.sampled_from([3, 4, 5]), min_size=1, max_size=step.max_tokens))
            calls.append(call(answer, stopped=len(answer) < step.max_tokens, version=1))
            transcript.sampled(calls[1])
    whole = len(transcript.ids)
    transcript.cut(step.num_tokens)
    assert program.next(transcript) == Done(step.num_tokens)
    sample, tokens = as_rollout([1, 2], transcript, delimiter, THOUGHT)
    response = tokens.ids[2:].tolist()

    start = find_delimiter(response, delimiter)
    closed_by_model = find_delimiter(first.ids, delimiter) is not None
    if start is None:
        assert stopped and not closed_by_model and response == list(first.ids)
    else:
        assert sample.num_thought_tokens == start <= len(first.ids)
        assert len(response) - start - len(delimiter) <= budget
    if forced:
        # what stands before call 2 ends with the first and only delimiter: completed, not doubled
        assert start == len(first.ids) + len(forced) - len(delimiter) and not stopped
    assert bool(forced) == sample.thought_cut == (not stopped and not closed_by_model)

    expected = [
        *(
            (token, True, logp, version)
            for token, logp, version in zip(first.ids, first.logp, first.version, strict=True)
        ),
        *((token, False, 0.0, -1) for token in forced),
        *((t, True, logp, v) for one in calls[1:] for t, logp, v in zip(one.ids, one.logp, one.version, strict=True)),
    ][: len(response)]
    got = zip(response, tokens.action_mask[2:], tokens.logp_rollout[2:], tokens.version[2:], strict=True)
    assert [(t, bool(a), float(x), int(v)) for t, a, x, v in got] == expected
    assert not tokens.action_mask[:2].any() and (tokens.version[:2] == -1).all()
    assert sample.num_actions == tokens.action_mask.sum() and sample.length == len(tokens.ids)
    assert (sample.finish == "stop") == (calls[-1].stopped and len(response) == whole)


@settings(max_examples=300)
@given(st.sampled_from([OneCall(7), TwoCallBudget((3,), (3,), 4, 3), TwoCallBudget((3, 4), (3, 4), 4, 3)]), st.data())
def test_an_answer_goes_on_from_any_of_its_tokens(program, data):
    """The engine samples from a list. It is interrupted after any number of tokens, and another one goes on."""
    sampled = data.draw(st.lists(st.sampled_from([3, 4, 7, EOS]), min_size=7, max_size=7))

    def go_on(transcript: Transcript, call: Call | None, used: int) -> Transcript:
        while call is not None:
            ids = sampled[used : used + call.max_tokens]
            ids = ids[: ids.index(EOS) + 1] if EOS in ids else ids
            versions = range(used, used + len(ids))
            transcript.sampled(Completion(ids, [-float(v) for v in versions], list(versions), EOS in ids))
            used += len(ids)
            call = next_call(program, transcript)
        return transcript

    first = Transcript()
    whole = go_on(first, next_call(program, first), 0)
    num_sampled = max(whole.version, default=-1) + 1
    cut = data.draw(st.integers(0, num_sampled))
    before = Completion(sampled[:cut], [-float(v) for v in range(cut)], list(range(cut)), stopped=False)
    transcript, call = replay(program, before, {EOS})
    assert sum(transcript.is_action) == cut
    assert go_on(transcript, call, cut) == whole


def routed(num_tokens: int, number: int) -> np.ndarray:
    """Routes of two layers with one expert, which tell the position and the call."""
    return np.array([[[position], [number]] for position in range(num_tokens)], np.uint8)


def test_the_routes_are_those_of_the_last_call():
    """The prompt has two tokens. A call gives the routes of all tokens but the last one."""
    prompt, transcript = [5, 6], Transcript()
    transcript.sampled(Completion([7, 7], [-1.0, -1.0], [0, 0], False, routed(3, number=1)))
    transcript.force([3])
    transcript.sampled(Completion([8, EOS], [-1.0, -1.0], [1, 1], True, routed(6, number=2)))
    _, tokens = as_rollout(prompt, transcript, delimiter=(3,))
    assert tokens.routes[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5] and (tokens.routes[:, 1] == 2).all()
    transcript.cut(2)
    assert len(as_rollout(prompt, transcript, delimiter=(3,))[1].routes) == 4


def test_without_routes_there_are_none():
    assert as_rollout([5], after(call([7, EOS], stopped=True)), None)[1].routes is None
