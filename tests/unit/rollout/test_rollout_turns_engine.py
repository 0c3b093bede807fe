"""Answers of several turns on the real engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tiny_references import reference_logp
from tiny_turns import Lengths, render, turns_of
from transformers import AutoModelForCausalLM

from megatron_rl.environments import Reaction
from megatron_rl.rollout.programs.episodes import Episodes
from megatron_rl.rollout.programs.turns import Turns
from megatron_rl.rollout.vocabulary import load_tokenizer
from megatron_rl.types import UTILITY, Mesh, Prompt

ENDS, EQUALS, ASKS = 1, 16, 18
TEMPERATURE = 2.0
MADE: list[Lengths] = []
TURNS: list[Turns] = []


def kept(turns: Turns) -> Turns:
    TURNS.append(turns)
    return turns


@pytest.fixture(scope="module")
def playing(make_stage, folders, tmp_path_factory):
    """The temperature is high, so that turns end soon."""
    return make_stage(
        folders[0],
        Mesh(),
        record=tmp_path_factory.mktemp("records") / "engine.tokens",
        answers=lambda rollout: partial(Episodes, kept(turns_of(folders[0], MADE)(rollout))),
        environment={"kind": "class", "path": "unused:Unused", "max_turns": 5, "retries": 0},
        delimiter="",
        prefix_values={"force": "=", "floor": -1000.0, "forced_tokens": 8},
        max_prompt_tokens=8,
        max_response_tokens=240,
        sampling={"temperature": TEMPERATURE},
    )


@pytest.fixture
def stage(playing, folders):
    playing.push(folders[0], 0)
    return playing


@pytest.fixture(scope="module")
def models(folders):
    return [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]


def prompts(count: int, **row) -> list[Prompt]:
    return [Prompt(f"row {i}", (5 + i, 6, EQUALS), "", {"num_turns": 5, **row}) for i in range(count)]


def largest_difference(model, tokens) -> float:
    expected = reference_logp(model, tokens.ids, TEMPERATURE)
    return float(np.abs(expected - tokens.logp_rollout)[tokens.action_mask].max())


def check_transcript(sample, tokens, prompt: Prompt) -> None:
    """Each turn ends with an `<eos>` that was sampled, and each observation is the one of its turn, forced."""
    start = len(prompt.token_ids)
    assert tuple(tokens.ids[:start]) == prompt.token_ids and not tokens.action_mask[:start].any()
    edges = np.flatnonzero(np.diff(tokens.action_mask.astype(int), append=0)) + 1
    begins, ends = edges[::2], edges[1::2]
    assert len(begins) == sample.episode.num_turns and begins[-1] == sample.episode.last_turn
    for end, following in zip(ends[:-1], begins[1:], strict=True):
        assert tokens.ids[end - 1] == ENDS
        observed = tokens.ids[end:following].tolist()
        assert (observed[0], observed[-2:]) == (ASKS, [ENDS, EQUALS])
    forced = ~tokens.action_mask
    assert (tokens.version[forced] == -1).all() and (tokens.logp_rollout[forced] == 0).all()
    given = [reward.position for reward in sample.token_rewards if reward.kind != UTILITY]
    assert given == [end - 1 for end in ends if tokens.ids[end - 1] == 1]


def test_five_turns_have_the_log_probs_of_one_forward_pass_over_the_transcript(stage, models):
    asked = prompts(8)
    groups = stage.run(stage.generate(asked, 12, 0, seed=1))
    whole = 0
    for prompt, group in zip(asked, groups, strict=True):
        for sample, tokens in group:
            check_transcript(sample, tokens, prompt)
            if sample.episode.num_turns == 5 and sample.finish == "stop":
                # Both sides compute two layers in fp32 and round logits at 1e-6 relative.
                assert largest_difference(models[0], tokens) < 1e-5
                assert (tokens.version[tokens.action_mask] == 0).all()
                whole += 1
    assert whole >= 5, f"only {whole} answers have five turns"


def test_each_sample_of_a_changed_history_has_the_log_probs_of_a_forward_pass(stage, models, folders, monkeypatch):
    """The template keeps only the last character of earlier turns of the model."""

    def shortens(turns, tools, opens):
        short = [{**one, "content": one["content"][-1:]} if one["role"] == "assistant" else one for one in turns]
        return render(short, tools, opens)

    monkeypatch.setattr(TURNS[0], "_continuation", None)
    monkeypatch.setattr(TURNS[0], "_render", shortens)
    tokenizer = load_tokenizer(folders[0])

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    asked = []
    for i in range(4):
        turns = ({"role": "user", "content": f"{i}"},)
        asked.append(Prompt(f"row {i}", tuple(ids(render(turns, [], True))), turns, {"num_turns": 3}))
    groups, num_changed = stage.run(stage.generate(asked, 12, 0, seed=2)), 0
    for prompt, group in zip(asked, groups, strict=True):
        for sample, tokens in group:
            assert largest_difference(models[0], tokens) < 1e-5
            if not sample.episode.conversation:
                history = list(prompt.messages)
            start = sample.num_prompt_tokens
            assert tokens.ids[:start].tolist() == ids(shortens(history, [], True))
            edges = np.flatnonzero(np.diff(tokens.action_mask.astype(int), append=0)) + 1
            for begin, end in zip(edges[::2], edges[1::2], strict=True):
                said = tokenizer.decode(tokens.ids[begin : end - 1].tolist(), skip_special_tokens=False)
                history += [{"role": "assistant", "content": said}, *tokens.conversation.turns[len(history) :][:1]]
            num_changed += sample.episode.continues
    assert num_changed >= 20, f"only {num_changed} histories were changed"


@pytest.mark.deep
def test_the_values_of_turns_are_those_of_a_forward_pass(stage, models):
    """The passages are the turns before the last one, each with its observation. A row without an answer has none."""
    asked = [replace(prompt, columns={**prompt.columns, "ground_truth": "42"}) for prompt in prompts(4)]
    [wanted] = stage.engine._valuer.wanted(asked[0])
    forced, num = [*wanted.before, *wanted.ids], 0
    assert (wanted.before, len(wanted.ids)) == ((EQUALS,), 2)

    def value(ids) -> float:
        return float(reference_logp(models[0], np.array([*ids, *forced]), 1.0)[-2:].mean())

    for prompt, group in zip(asked, stage.run(stage.generate(asked, 8, 0, seed=3)), strict=True):
        for sample, tokens in group:
            given = [reward for reward in sample.token_rewards if reward.kind == UTILITY]
            begins = np.flatnonzero(np.diff(tokens.action_mask.astype(int), prepend=0) == 1)[1:]
            assert [reward.position for reward in given] == (begins - 1).tolist()
            values = [value(tokens.ids[:end]) for end in (len(prompt.token_ids), *begins)]
            # Both sides compute two layers in fp32 and round logits at 1e-6 relative.
            assert [reward.value for reward in given] == pytest.approx(np.diff(values).tolist(), abs=1e-5)
            num += len(given)
    assert num > 32, f"only {num} turns"
    [group] = stage.run(stage.generate(prompts(1), 2, 0, seed=3))
    assert all(reward.kind != UTILITY for sample, _ in group for reward in sample.token_rewards)


def test_the_same_seed_gives_the_same_answers(stage):
    first, second = (stage.run(stage.generate(prompts(2, num_turns=2), 4, 0, seed=5)) for _ in range(2))
    for (_, a), (_, b) in zip(sum(first, []), sum(second, []), strict=True):
        assert a.ids.tolist() == b.ids.tolist()


def test_a_push_in_the_middle_of_an_episode_is_seen_in_its_versions(stage, folders, models, monkeypatch):
    """The environment waits for the push after the second turn."""
    reached, pushed = asyncio.Event(), asyncio.Event()
    react = Lengths.react

    async def wait_and_react(self, text: str) -> Reaction:
        if len(self.texts) == 1:
            reached.set()
            await pushed.wait()
        return await react(self, text)

    monkeypatch.setattr(Lengths, "react", wait_and_react)

    async def answer():
        asked = asyncio.ensure_future(stage.answer(0, 3, prompts(1)[0], range(16)))
        await reached.wait()
        stage.trainers.begin_push(folders[1], 1)
        await stage.engine.weights.receive(1)
        pushed.set()
        return await asked

    answers = stage.run(answer())
    stage.trainers.end_push()
    seen = set()
    for sample, tokens in answers:
        versions = tokens.version[tokens.action_mask]
        assert (np.diff(versions) >= 0).all()
        seen |= set(versions.tolist())
        if sample.episode.num_turns >= 3:
            assert versions[-1] == 1 and sample.oldest_version == 0
    assert seen == {0, 1}


def test_an_answer_that_an_engine_has_lost_begins_anew(stage):
    """Its record has no tokens, because the state of the environment is gone."""
    prompt = prompts(1)[0]
    [(_, first)] = stage.run(stage.answer(1, 8, prompt, range(1)))
    record = stage.engine.sampler._progress.path
    assert record.read_bytes() == b""
    [(_, again)] = stage.run(stage.answer(2, 8, prompt, range(1), earlier=[record]))
    assert again.ids.tolist() == first.ids.tolist()


def test_the_environment_fails_alone(stage):
    [group] = stage.run(stage.generate(prompts(1, fails_at=2), 8, 0, seed=2))
    assert any(sample.episode.fault for sample, _ in group)
    for sample, _ in group:
        failed = sample.episode.num_turns == 2 and sample.finish == "stop"
        assert sample.episode.fault == ("it broke down" if failed else "")
