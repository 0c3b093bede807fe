"""The turn in which an answer went wrong is named, from a step that was kept in a file."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from megatron_rl.data.saved_rollouts import read_step, write_step
from megatron_rl.explain.episodes import bad_episodes, wrong_turns
from megatron_rl.explain.step import ExplainedStep, answers_of
from megatron_rl.explain.text import Explanation, as_json, show
from megatron_rl.types import Conversation, Episode, Group, Prompt, Rollout, Rollouts, Tokens, Verdict

TEXT = "Error: ValueError: the text is 0 times in f.py, but must be there exactly once"
PROMPT = Prompt("tasks:0", (5, 6), ({"role": "user", "content": "repair"},))


def turns(*observations: str) -> tuple[dict[str, str], ...]:
    """A turn of the model before each observation, and one after all."""
    said = [({"role": "assistant", "content": "a call"}, {"role": "tool", "content": o}) for o in observations]
    return (*(turn for pair in said for turn in pair), {"role": "assistant", "content": "done"})


def played(reward, said, finish="stop", **episode) -> tuple[Rollout, Tokens]:
    number = sum(turn["role"] == "assistant" for turn in said)
    mask = np.array([0, 0, 1, 1, 1], bool)
    tokens = Tokens(np.arange(5, dtype=np.int32), mask, mask * -0.5, np.where(mask, 0, -1), None, Conversation(said))
    verdict = Verdict(reward, "" if reward is not None else "the environment failed")
    return Rollout(5, 2, 3, 0, finish, episode=Episode(number, 2, **episode), verdict=verdict), tokens


CASES = {
    "a right answer": (played(1.0, turns("1 def f(a):", "right")), None),
    "a call that raised": (
        played(0.0, turns("1 def f(a):", TEXT), tool_errors=("raised",)),
        [f"turn 2 of 3: raised: '{TEXT}'"],
    ),
    "a wrong repair": (
        played(0.0, turns(TEXT, "replaced", "f(3, 4) is\n-1, not 7\n\n[exit status 1]"), tool_errors=("raised",)),
        [
            f"turn 1 of 4: raised: '{TEXT}'",
            "turn 3 of 4: the last that it read: 'f(3, 4) is -1, not 7 [exit status 1]'",
        ],
    ),
    "too many turns": (
        played(0.0, turns("1 def f(a):"), "length"),
        ["turn 1 of 2: the last that it read: '1 def f(a):'", "turn 2 of 2: a limit cut the answer"],
    ),
    "no call": (played(0.0, turns()), ["turn 1 of 1 ended the answer without reading anything"]),
    "a lost sandbox": (
        played(None, turns("replaced"), fault="run raised BoxError: the sandbox has ended"),
        [
            "turn 1 of 2: the last that it read: 'replaced'",
            "turn 2 of 2: the environment failed: 'run raised BoxError: the sandbox has ended'",
        ],
    ),
    "errors without end": (
        played(0.0, turns(*[TEXT] * 4), tool_errors=("raised", "unclosed", "arguments", "raised")),
        [
            *(f"turn {n} of 5: {kind}: '{TEXT}'" for n, kind in ((1, "raised"), (2, "unclosed"), (3, "arguments"))),
            "and 1 more, the last in turn 4",
            f"turn 4 of 5: the last that it read: '{TEXT}'",
        ],
    ),
    "a result that looks like an error": (
        played(0.0, turns("Error: exit", TEXT), tool_errors=("raised",)),
        ["turn 1 of 3: an error: 'Error: exit'", f"turn 2 of 3: an error: '{TEXT}'"],
    ),
}


@pytest.fixture
def step(tmp_path) -> ExplainedStep:
    rollouts, payload = zip(*(given for given, _ in CASES.values()), strict=True)
    write_step(tmp_path, 3, Rollouts([Group(PROMPT, rollouts, payload, 0)], None, {}), [payload], {})
    share = SimpleNamespace(index=np.arange(len(rollouts)), advantages=np.zeros(len(rollouts)), minibatches=())
    return ExplainedStep(3, answers_of(read_step(tmp_path, 3), [[share]], {}))


def test_the_turn_that_went_wrong_is_named(step):
    for answer, (name, (_, expected)) in zip(step.answers, CASES.items(), strict=True):
        if expected is not None:
            assert wrong_turns(answer) == expected, name
    bad = bad_episodes(step.answers)
    assert [one.number for one in bad] == [5, 1, 2, 3, 4, 6, 7], "the lost sandbox first, the right answer not at all"


def test_an_answer_with_several_conversations_is_told_once(step):
    first, second = step.answers[0], step.answers[1]
    part = replace(second.rollout, episode=replace(second.rollout.episode, continues=True))
    assert bad_episodes([first, replace(second, rollout=part)]) == []
    assert bad_episodes([replace(first, rollout=replace(first.rollout, episode=None))]) == []


def test_a_step_without_a_right_answer_tells_all(step):
    assert bad_episodes(step.answers[2:4]) == list(step.answers[2:4]) and bad_episodes(step.answers[:1]) == []


def test_an_explanation_tells_them(step):
    told = Explanation(step, "reward", "what was kept", True, None, [], [])
    console = Console(record=True, width=300, file=io.StringIO())
    show(told, SimpleNamespace(), console)
    text = console.export_text()
    assert "an answer that went wrong, one of 7: tasks:0, answer 5: 3 tokens, no score (the environment failed)" in text
    assert f"  turn 2 of 3: raised: '{TEXT}'" in text
    episodes = json.loads(json.dumps(as_json(told)))["episodes"]
    assert episodes[1] == {"uid": "tasks:0", "index": 1, "turns": CASES["a call that raised"][1]}
