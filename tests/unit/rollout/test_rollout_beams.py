"""Beam search as a pure function: by hand, against brute force, and what is refused before an engine starts."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.rollout.program import Call, Completion, Done, Force, Transcript, next_call, replay
from megatron_rl.rollout.programs.beams import Beam, BeamSearch, as_rollouts, best
from megatron_rl.rollout.programs.budgets import Budgets
from megatron_rl.rollout.programs.catalogue import Catalogue
from megatron_rl.rollout.programs.thinking import ThoughtAlone
from megatron_rl.types import Prompt

EOS = 9
ITEMS = [["1", "2", "3"], ["1", "2", "4"], ["1", "5", "3"], ["2", "2", "3"]]


def given_after(beam: Beam, logp_of: dict[tuple[int, ...], dict[int, float]], version: int = 0) -> Completion:
    return Completion([0], [-9.0], [version], False, candidates=logp_of[beam.ids])


def test_a_search_by_hand():
    """Two beams, items of two tokens. The best beginning (1) has no good end, and token 7 continues no item."""
    search = BeamSearch(Catalogue([(1, 3), (1, 4), (2, 3), (5, 3)]), width=2, prefix=(6,), num_candidates=8)
    logp_of = {
        (): {7: -0.1, 1: -0.5, 2: -1.0, 5: -3.0, 3: -4.0},
        (1,): {7: -0.2, 3: -2.0, 4: -3.5},
        (2,): {3: -0.25, 4: -0.1},
    }
    thought = Transcript()
    thought.sampled(Completion([21, 8], [-0.3, -0.2], [4, 4], False))
    beams = search.begin(thought, (8,))
    assert (beams, thought.ids, thought.is_action) == ([Beam()], [21, 8, 6], [True, True, False])
    beams = search.extended(beams, [given_after(beams[0], logp_of, version=4)])
    assert [(beam.ids, beam.logp) for beam in beams] == [((1,), (-0.5,)), ((2,), (-1.0,))]
    beams = search.extended(beams, [given_after(beam, logp_of, version=5) for beam in beams])
    assert beams == [Beam((2, 3), (-1.0, -0.25), (4, 5)), Beam((1, 3), (-0.5, -2.0), (4, 5))]


def test_lost_candidates_leave_fewer_beams():
    """The engine gave no token that continues 2, and -inf for one that continues 1."""
    search = BeamSearch(Catalogue([(1, 3), (1, 4), (2, 3)]), width=3, prefix=(), num_candidates=2)
    beams = search.extended([Beam()], [Completion([0], [-1.0], [0], False, candidates={1: -0.5, 2: -1.0})])
    nothing, one = {7: -0.1, 8: -0.2}, {3: -1.0, 4: -math.inf}
    completions = [Completion([0], [-1.0], [0], False, candidates=found) for found in (one, nothing)]
    assert [beam.ids for beam in search.extended(beams, completions)] == [(1, 3)]
    assert search.extended([Beam()], [completions[1]]) == [] == search.extended([], [])


def test_a_thought_that_the_model_has_ended_has_no_search():
    search = BeamSearch(Catalogue([(1,)]), 1, (6,), 4)
    thought = Transcript()
    thought.sampled(Completion([21, EOS], [-0.3, -0.2], [4, 4], True))
    assert search.begin(thought, (8,)) == [] and thought.ids == [21, EOS]
    [(sample, tokens)] = as_rollouts([11], thought, (8,), 5, [])
    assert (sample.beam, sample.num_item_tokens, sample.num_thought_tokens, sample.finish) == (0, 0, 2, "stop")
    assert tokens.action_mask.tolist() == [False, True, True]


@st.composite
def searches(draw):
    """A catalogue over a small alphabet, a width, and a log-prob of every token after every beginning."""
    size = draw(st.integers(1, 3))
    alphabet = range(draw(st.integers(2, 4)))
    items = draw(st.sets(st.tuples(*[st.sampled_from(alphabet)] * size), min_size=1, max_size=12))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    logp_of = {
        ids: dict(enumerate(np.log(random.dirichlet(np.ones(len(alphabet)))).tolist()))
        for length in range(size)
        for ids in itertools.product(alphabet, repeat=length)
    }
    return sorted(items), draw(st.integers(1, 14)), logp_of


def total(ids: tuple[int, ...], logp_of) -> float:
    return sum(logp_of[ids[:i]][token] for i, token in enumerate(ids))


@given(searches())
def test_the_search_against_brute_force(case):
    items, width, logp_of = case
    search = BeamSearch(Catalogue(items), width, (), 4)
    beams = [Beam()]
    for size in range(1, len(items[0]) + 1):
        kept = {beam.ids for beam in beams}
        beams = search.extended(beams, [given_after(beam, logp_of) for beam in beams])
        reachable = {item[:size] for item in items if item[: size - 1] in kept}
        expected = sorted(reachable, key=lambda ids: -total(ids, logp_of))[:width]
        assert [beam.ids for beam in beams] == expected
        assert all(sum(beam.logp) == pytest.approx(total(beam.ids, logp_of)) for beam in beams)
    if width >= len(items):
        assert sorted(beam.ids for beam in beams) == items, "with room for all, every item is found"


def test_equal_beams_are_ordered_by_their_tokens():
    beams = [Beam((2,), (-1.0,)), Beam((1,), (-1.0,)), Beam((3,), (-0.5,))]
    assert [beam.ids for beam in best(beams, 2)] == [(3,), (1,)]
    assert best(reversed(beams), 2) == best(beams, 2)


def test_the_samples_of_a_thought_token_by_token():
    """The example of `as_rollouts`: the thought's tokens are actions of the best beam alone."""
    thought = Transcript()
    thought.sampled(Completion([21, 22, 3], [-0.7, -0.1, -0.2], [4, 4, 5], False))
    thought.force((4,))
    beams = [Beam((31, 32), (-0.3, -0.4), (5, 6)), Beam((31, 33), (-0.3, -0.9), (5, 6))]
    (first, a), (second, b) = as_rollouts([11, 12], thought, (3,), 8, beams)
    assert a.ids.tolist() == [11, 12, 21, 22, 3, 4, 31, 32] and b.ids.tolist() == [11, 12, 21, 22, 3, 4, 31, 33]
    assert a.action_mask.tolist() == [False, False, True, True, True, False, True, True]
    assert b.action_mask.tolist() == [False] * 6 + [True, True]
    np.testing.assert_allclose(a.logp_rollout, [0, 0, -0.7, -0.1, -0.2, 0, -0.3, -0.4], rtol=1e-6)
    np.testing.assert_allclose(b.logp_rollout, [0, 0, 0, 0, 0, 0, -0.3, -0.9], rtol=1e-6)
    assert a.version.tolist() == [-1, -1, 4, 4, 5, -1, 5, 6] and b.version.tolist() == [-1] * 6 + [5, 6]
    assert (first.beam, first.num_actions, first.num_thought_tokens, first.num_item_tokens) == (0, 5, 2, 2)
    assert (second.beam, second.num_actions, second.num_thought_tokens, second.num_item_tokens) == (1, 2, 0, 2)
    assert (first.num_new_tokens, second.num_new_tokens) == (6, 2)
    assert (first.thought_budget, second.thought_budget) == (8, None)
    assert not first.thought_cut and not second.thought_cut
    assert (first.finish, first.oldest_version, second.oldest_version) == ("stop", 4, 5)


def test_each_beam_has_the_experts_of_its_own_tokens():
    """They come with the log-probs of the last token, from the request that computed all tokens before it."""
    search = BeamSearch(Catalogue([(1,), (2,)]), width=2, prefix=(), num_candidates=4)
    routes = np.arange(6, dtype=np.uint8).reshape(3, 1, 2)
    completion = Completion([0], [-9.0], [0], False, routes, {1: -0.5, 2: -1.0})
    thought = Transcript()
    thought.sampled(Completion([21, 3], [-0.3, -0.2], [0, 0], False, routes[:2]))
    beams = search.extended(search.begin(thought, (3,)), [completion])
    for _, tokens in as_rollouts([11], thought, (3,), 5, beams):
        assert tokens.routes.tolist() == routes.tolist() and len(tokens.routes) == len(tokens.ids) - 1


def test_a_forced_closing_is_no_action_and_counts_as_a_cut_once():
    thought = Transcript()
    thought.sampled(Completion([21, 22], [-0.7, -0.1], [4, 4], False))
    thought.force((3, 4))
    beams = [Beam((31,), (-0.3,), (4,)), Beam((32,), (-0.9,), (4,))]
    (first, a), (second, _) = as_rollouts([11], thought, (3,), 2, beams)
    assert a.action_mask.tolist() == [False, True, True, False, False, True]
    assert first.thought_cut and not second.thought_cut


# The thought alone.


@pytest.mark.parametrize(
    ("ids", "stopped", "delimiter", "expected"),
    [
        pytest.param([], False, (3,), Call(4, stops=(3,)), id="begins"),
        pytest.param([7, 3], False, (3,), Done(2), id="delimiter"),
        pytest.param([7, EOS], True, (3,), Done(2), id="ended-in-the-thought"),
        pytest.param([7, 7, 7, 7], False, (3,), Force((3,)), id="cut"),
        pytest.param([7, 3], False, (2, 3), Call(2, stops=(3,)), id="the-last-token-alone-is-no-delimiter"),
        pytest.param([7, 7, 7, 2], False, (2, 3), Force((3,)), id="first-of-two-at-the-cut"),
        pytest.param([7, 2, 3], False, (2, 3), Done(3), id="delimiter-of-two"),
    ],
)
def test_a_thought_alone(ids, stopped, delimiter, expected):
    transcript = Transcript()
    if ids:
        transcript.sampled(Completion(ids, [-1.0] * len(ids), [0] * len(ids), stopped))
    assert ThoughtAlone(delimiter, delimiter, 4).next(transcript) == expected


@given(st.lists(st.sampled_from([2, 3, 7, EOS]), max_size=8), st.sampled_from([(3,), (2, 3), (3, 3)]))
def test_a_thought_goes_on_from_its_sampled_tokens(stream, delimiter):
    """Whatever has been sampled of a thought, another engine that samples the rest gives the same transcript."""
    program, tokens = ThoughtAlone(delimiter, delimiter, 5), [*stream, *[7] * 8]

    def carried_out(sampled: list[int]) -> Transcript:
        known = Completion(sampled, [0.0] * len(sampled), [0] * len(sampled), False)
        transcript, call = replay(program, known, [EOS])
        position = len(sampled)
        while call is not None:
            rest: list[int] = []
            while len(rest) < call.max_tokens and not (rest and rest[-1] in (EOS, *call.stops)):
                rest.append(tokens[position])
                position += 1
            transcript.sampled(Completion(rest, [0.0] * len(rest), [0] * len(rest), rest[-1] == EOS))
            call = next_call(program, transcript)
        return transcript

    whole = carried_out([])
    num_sampled = sum(whole.is_action)
    for size in range(num_sampled + 1):
        again = carried_out(tokens[:size])
        assert (again.ids, again.is_action) == (whole.ids, whole.is_action)
    assert whole.ids[-len(delimiter) :] == list(delimiter) or whole.ids[-1] == EOS
    assert num_sampled <= 5


# What is refused before an engine starts.


def rollout(path, beams: dict | None = None, **changes) -> RolloutConfig:
    thinking = changes.pop("thinking", {})
    if thinking is not None:
        thinking = {"thought_tokens": 9, "response_tokens": 4} | thinking
    sizes = {"prompts_per_step": 1, "samples_per_prompt": 2, "max_prompt_tokens": 8, "max_response_tokens": 15}
    section = {"width": 2, "prefix": ["+"], "catalogue": path} | (beams or {})
    return RolloutConfig(**sizes | {"thinking": thinking, "beams": section, "delimiter": "=?"} | changes)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "items.json").write_text(json.dumps(ITEMS))
    return tmp_path / "items.json"


def test_what_fits(folders, path):
    budgets = Budgets(folders[0], rollout(path), on_gpu=False)
    assert (budgets.beams.prefix, budgets.beams.num_tokens) == ((15,), 3)
    assert budgets.beams.call == Call(1, num_candidates=40), "the whole vocabulary, which is small"
    smaller = Budgets(folders[0], rollout(path, {"candidates": 7}), on_gpu=False)
    assert smaller.beams.call.num_candidates == 7
    with pytest.raises(ValueError, match="row 3 has closed"):
        budgets.of(Prompt("row 3", (5, 16, 18), ""), 0)


def test_more_beams_than_candidates_are_refused(path):
    with pytest.raises(ValidationError, match="width is 8.*7 tokens"):
        rollout(path, {"width": 8, "candidates": 7})
