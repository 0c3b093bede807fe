"""Answers of several turns, with a stub in place of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_turns import Lengths, turns_of

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.environments import Reaction
from megatron_rl.rollout.program import Completion, Request
from megatron_rl.rollout.programs.episodes import EpisodeRequest, Episodes
from megatron_rl.rollout.programs.thinking import OneCall
from megatron_rl.types import Prompt, TokenReward

ENDS = 1
EQUALS, ASKS = 16, 18
"""The tokens `<eos>`, `=` and `?`."""
VERSION = 4


def digit(number: int) -> int:
    return 5 + number


def program(prompt: Prompt, sample: int, left: int | None) -> OneCall:
    return OneCall(1000)


class StubEngine:
    """Gives the turns that were written down for each prompt, and cuts them at the limit of the call. All prompts have
    the same length."""

    def __init__(self, turns_of_prompt: dict[tuple[int, ...], list[list[int]]]) -> None:
        self.requests: list[Request] = []
        self._left = {ids: [list(turn) for turn in turns] for ids, turns in turns_of_prompt.items()}
        self._size = len(next(iter(turns_of_prompt)))

    async def begin(self, requests: Sequence[Request], is_first: bool) -> list[Future]:
        futures = [Future() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            future.set_result(await self.ask(request))
        return futures

    async def ask(self, request: Request) -> Completion:
        await asyncio.sleep(0)  # others go on meanwhile
        self.requests.append(request)
        ids = self._left[tuple(request.ids[: self._size])].pop(0)[: request.call.max_tokens]
        return Completion(ids, [-0.5] * len(ids), [VERSION] * len(ids), stopped=ids[-1] == ENDS)


def play(folder, turns: list[list[int]], row: dict, **options):
    """One answer to the prompt (5, 6)."""
    [[answer]], made, engine = play_all(folder, {(5, 6): turns}, [row], **options)
    return *answer, made[-1], engine


def play_all(folder, turns: dict, rows: list[dict], most: int = 60, **limits):
    sizes = dict(prompts_per_step=1, samples_per_prompt=1, max_prompt_tokens=8, max_response_tokens=most, delimiter="")
    rollout = RolloutConfig(environment={"kind": "class", "path": "unused:Unused", **limits}, **sizes)
    made: list[Lengths] = []
    engine = StubEngine(turns)
    episodes = Episodes(turns_of(folder, made)(rollout), engine.ask)
    prompts = [Prompt(f"row {i}", ids, "", row) for i, (ids, row) in enumerate(zip(turns, rows, strict=True))]

    async def answer():
        asked = [EpisodeRequest(i, prompt, range(1), 0, False, program) for i, prompt in enumerate(prompts)]
        return await asyncio.gather(*(episodes.answers(one, engine.begin) for one in asked))

    return asyncio.run(answer()), made, engine


@pytest.fixture(scope="module")
def folder(folders):
    return folders[0]


def test_turns_and_observations_alternate(folder):
    """The observation of a turn of n characters is `?n<eos>=`, of which the turn's own `<eos>` is not a part."""
    turns = [[7, 8, ENDS], [9, ENDS]]
    sample, tokens, environment, engine = play(folder, turns, {"num_turns": 2})
    observed = [ASKS, digit(2 + 1), ENDS, EQUALS]  # `2 3`: the tokenizer of the tiny models has no decoder
    assert tokens.ids.tolist() == [5, 6, 7, 8, ENDS, *observed, 9, ENDS]
    assert tokens.action_mask.tolist() == [False] * 2 + [True] * 3 + [False] * 4 + [True] * 2
    assert tokens.logp_rollout.tolist() == [0, 0, -0.5, -0.5, -0.5, 0, 0, 0, 0, -0.5, -0.5]
    assert tokens.version.tolist() == [-1, -1, 4, 4, 4, -1, -1, -1, -1, 4, 4]
    assert (sample.finish, sample.num_actions, sample.length) == ("stop", 5, 11)
    assert sample.token_rewards == (TokenReward(4, "environment", 3.0), TokenReward(10, "environment", 1.0))
    episode = sample.episode
    assert (episode.num_turns, episode.last_turn, len(episode.tool_errors), episode.fault) == (2, 9, 2, "")
    assert environment.texts == ["2 3", "4"] and environment.has_ended
    assert engine.requests[1].ids == tokens.ids[:9].tolist(), "the second call begins with all that there is"
    assert [request.goes_on for request in engine.requests] == [False, True]


@pytest.mark.parametrize(
    ("turns", "row", "options", "num_tokens", "num_turns"),
    [
        ([[7, 8, 9]], {"num_turns": 5}, {"turn_tokens": 2}, 2, 1),
        ([[7, ENDS], [8, ENDS]], {"num_turns": 5}, {"max_turns": 1}, 2, 1),
        ([[7, ENDS], [8, ENDS]], {"num_turns": 5}, {"most": 6}, 2, 1),
        ([[7, ENDS], [8, ENDS]], {"num_turns": 5}, {"most": 7}, 7, 2),
    ],
    ids=["a long turn", "too many turns", "no room for a further token", "room for one"],
)
def test_a_limit_cuts_the_answer(folder, turns, row, options, num_tokens, num_turns):
    sample, tokens, environment, _ = play(folder, turns, row, **options)
    assert sample.finish == "length" and sample.episode.num_turns == num_turns
    assert sample.length == 2 + num_tokens and tokens.action_mask[-1], "nothing stands after the last turn"
    assert environment.has_ended


@pytest.mark.parametrize(("fails_at", "num_turns"), [(0, 1), (1, 1), (2, 2)])
def test_a_fault_of_the_environment_ends_the_answer_with_the_reason(folder, fails_at, num_turns):
    turns = [[7, ENDS], [8, ENDS], [9, ENDS]]
    sample, tokens, environment, _ = play(folder, turns, {"num_turns": 3, "fails_at": fails_at}, retries=0)
    assert sample.episode.fault == ("it broke down" if fails_at else "it cannot begin")
    assert sample.episode.num_turns == num_turns and len(sample.token_rewards) == num_turns - 1
    assert tokens.action_mask[-1] and environment.has_ended


@pytest.mark.parametrize("num_failures", [0, 1, 2])
def test_an_answer_begins_again_once_after_its_environment_has_failed(folder, num_failures):
    """What was sampled before is left out."""
    row = {"num_turns": 2, "fails_at": 2, "failures": [None] * num_failures}
    attempts = [[[7, ENDS], [8, ENDS]], [[9, ENDS], [10, ENDS]]][: num_failures + 1]
    sample, tokens, _, engine = play(folder, [turn for attempt in attempts for turn in attempt], row)
    actions = tokens.ids[tokens.action_mask].tolist()
    assert actions == [token for turn in attempts[min(num_failures, 1)] for token in turn]
    assert (sample.episode.fault, sample.episode.num_failed) == (
        "it broke down" * (num_failures == 2),
        min(num_failures, 1),
    )
    assert len(engine.requests) == 2 * len(attempts[:2]) and bool(sample.episode.host) == (num_failures == 2)


@pytest.mark.parametrize(("reward", "fault"), [(None, "too late"), (0.0, ""), (-1.0, "")])
def test_a_time_out_is_a_failure_or_a_reward_by_choice(folder, reward, fault):
    row = {"num_turns": 3, "late_at": 2}
    turns = [[7, ENDS], [8, ENDS]]
    sample, tokens, _, _ = play(folder, turns, row, retries=0, timeout_reward=reward)
    assert (sample.episode.fault, sample.episode.num_turns) == (fault, 2)
    given = [one.value for one in sample.token_rewards]
    assert given == [1.0] + ([] if reward is None else [reward])
    assert (sample.finish, tokens.action_mask[-1]) == ("stop" if reward is None else "length", True)


@given(
    turns=st.lists(st.lists(st.integers(5, 14), max_size=9).map(lambda turn: [*turn, ENDS]), min_size=1, max_size=9),
    limits=st.fixed_dictionaries({"turn_tokens": st.integers(1, 12), "max_turns": st.integers(1, 9)}),
    most=st.integers(1, 60),
)
def test_no_limit_is_exceeded_and_every_sampled_token_is_an_action(folder, turns, limits, most):
    sample, tokens, _, engine = play(folder, turns, {"num_turns": len(turns)}, most=most, **limits)
    assert len(tokens.ids) - 2 <= most and sample.episode.num_turns <= limits["max_turns"]
    assert all(request.call.max_tokens <= limits["turn_tokens"] for request in engine.requests)
    starts = [len(request.ids) for request in engine.requests]
    written = [
        token
        for start, turn, request in zip(starts, turns, engine.requests, strict=False)
        for token in turn[: request.call.max_tokens]
    ]
    assert tokens.ids[tokens.action_mask].tolist() == written and sample.num_actions == len(written)
    assert sample.episode.last_turn == starts[-1]
    assert all(tokens.action_mask[reward.position] for reward in sample.token_rewards)
    is_whole = sample.episode.num_turns == len(turns) and tokens.ids[-1] == ENDS
    assert sample.finish == ("stop" if is_whole else "length")


def test_an_environment_that_is_slow_holds_up_no_other(folder, monkeypatch):
    """It waits until all other answers are complete, which would never happen in rounds."""
    others, all_done = 3, []
    react = Lengths.react

    async def wait_or_react(self, text: str) -> Reaction:
        if self.row.get("waits"):
            while len(all_done) < others:
                await asyncio.sleep(0)
        reaction = await react(self, text)
        if reaction.done:
            all_done.append(self.row)
        return reaction

    monkeypatch.setattr(Lengths, "react", wait_or_react)
    turns = {(i, 6): [[7, ENDS]] * 3 for i in range(5, 5 + others + 1)}
    rows = [{"num_turns": 3, "waits": i == 0} for i in range(others + 1)]
    groups, _, _ = play_all(folder, turns, rows)
    assert [sample.finish for [(sample, _)] in groups] == ["stop"] * 4
    assert "waits" in all_done[-1] and all_done[-1]["waits"]


def test_a_cancelled_group_asks_for_nothing_more(folder):
    sizes = dict(prompts_per_step=1, samples_per_prompt=1, max_prompt_tokens=8, max_response_tokens=60, delimiter="")
    rollout = RolloutConfig(environment={"kind": "class", "path": "unused:Unused"}, **sizes)
    made: list[Lengths] = []
    engine = StubEngine({(5, 6): [[7, ENDS]] * 50})
    episodes = Episodes(turns_of(folder, made)(rollout), engine.ask)

    async def answer():
        request = EpisodeRequest(7, Prompt("row", (5, 6), "", {"num_turns": 99}), range(2), 0, False, program)
        asked = asyncio.ensure_future(episodes.answers(request, engine.begin))
        while len(engine.requests) < 6:
            await asyncio.sleep(0)
        episodes.cancel(7)
        with pytest.raises(RuntimeError, match="the group was cancelled"):
            await asked
        asked_for = len(engine.requests)
        await asyncio.sleep(0)
        assert len(engine.requests) == asked_for

    asyncio.run(answer())
    assert len(made) == 2 and all(environment.has_ended for environment in made)


def test_a_thousand_episodes_at_once(folder):
    """Five turns each: nothing is lost, and the requests of the first turns begin together."""
    turns = {(5 + i // 100, 5 + i // 10 % 10, 5 + i % 10): [[7, ENDS]] * 5 for i in range(1000)}
    groups, made, engine = play_all(folder, turns, [{"num_turns": 5}] * 1000)
    assert len(made) == 1000 and len(engine.requests) == 5000
    assert [tuple(request.ids) for request in engine.requests[:1000]] == list(turns)
    assert all(sample.episode.num_turns == 5 for [(sample, _)] in groups)
