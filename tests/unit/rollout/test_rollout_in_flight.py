"""Pushes during generation, on the real engine.

A push starts when the engine hands out the tokens that a test waits for. In these tests only the budgets end an answer,
never a token, so every running request still has many steps to go.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import cover
import numpy as np
import pytest
import torch
from pushes import flat, moment, sampled, with_push
from tiny_references import reference_logp, reference_logp_across
from transformers import AutoModelForCausalLM

from megatron_rl.rollout.programs.budgets import Budgets
from megatron_rl.rollout.progress import MAX_SAMPLES, ROW, recorded
from megatron_rl.types import Mesh, Prompt

TEMPERATURE = 0.7
LONG = 150
"""A prompt of this length is longer than vLLM's largest cache block, so that its prefix is cached."""
TOLERANCE = 5e-5
"""With fp32, contexts of 200 tokens and logits of 20, both sides round at 1e-6 relative. Log-probs of other weights
differ by more than 1."""
THOUGHT, RESPONSE = 60, 40


@pytest.fixture(scope="module")
def stage(make_stage, folders, tmp_path_factory):
    stage = endless(
        make_stage(
            folders[0],
            Mesh(),
            record=tmp_path_factory.mktemp("record") / "engine.tokens",
            max_prompt_tokens=LONG,
            max_response_tokens=THOUGHT + RESPONSE + 2,
            delimiter="=?",
            thinking={"thought_tokens": THOUGHT, "response_tokens": RESPONSE},
            sampling={"temperature": TEMPERATURE},
        )
    )
    return stage


@pytest.fixture
def salted(stage, folders, monkeypatch):
    """Requests have one call, and keep their cache over a push. Nothing that vLLM is told when it starts depends on
    this."""
    config = stage.config.model_copy(update={"prefix_cache": "salted", "thinking": None})
    sampler = stage.engine.sampler
    monkeypatch.setattr(sampler, "spec", replace(sampler.spec, rollout=config))
    monkeypatch.setattr(stage.engine.weights, "_spec", sampler.spec)
    monkeypatch.setattr(stage.engine, "_budgets", Budgets(folders[0], config, on_gpu=False))
    return stage


def endless(stage):
    """No token ends an answer."""
    sampler = stage.engine.sampler
    params, stage.engine._stop_ids, sampler._stop_ids = sampler._params, (), ()
    sampler._params = lambda *call: params(*call) | {"stop_token_ids": [], "ignore_eos": True}
    return stage


@pytest.fixture(scope="module")
def references(folders):
    return [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]


def prompts(count: int, size: int) -> list[Prompt]:
    random = np.random.default_rng(0)
    return [Prompt(f"row {i}", tuple(random.integers(5, 21, size).tolist()), "") for i in range(count)]


def in_call_two(requests: list[tuple[int, int]]) -> bool:
    return any(num_prompt > THOUGHT and num_sampled >= 4 for num_prompt, num_sampled in requests)


def actions(tokens) -> tuple[list[int], np.ndarray]:
    return tokens.ids[tokens.action_mask].tolist(), tokens.version[tokens.action_mask]


def answer_group(stage, number, prompt, earlier=()):
    """The four answers of a group that is asked for once."""
    return stage.answer(number, number, prompt, range(4), earlier)


MOMENTS = [(sampled(6), 64), (in_call_two, 32)]
REACHED = cover.essential(MOMENTS, MOMENTS[0])


@pytest.mark.parametrize(("reached", "least"), REACHED, ids=["in call 1", "in call 2"])
def test_a_push_in_the_middle(stage, folders, references, reached, least):
    """No request is lost or started again, each token's version is right, and the new weights compute the whole context
    anew. At least `least` of the 64 answers have tokens of both versions; in call 2 fewer answers are still running."""
    asked = prompts(16, 5)
    stage.push(folders[0], 0)
    unbroken = stage.run(stage.generate(asked, 4, 0, seed=7))
    stage.trainers.begin_push(folders[1], 1)
    groups, running, metrics = with_push(stage, asked, 4, 0, reached, 1)
    stage.trainers.end_push()

    assert running >= least and 0 < metrics["paused_s"] <= metrics["seconds"]
    assert [len(group) for group in groups] == [4] * 16
    num_crossed, worst = 0, 0.0
    for (sample, tokens), (_, same) in zip(flat(groups), flat(unbroken), strict=True):
        assert tokens.ids[:5].tolist() == same.ids[:5].tolist() and sample.length == len(tokens.ids)
        ids, versions = actions(tokens)
        num_old = int((versions == 0).sum())
        assert (np.diff(versions) >= 0).all() and set(versions) <= {0, 1}
        assert ids[:num_old] == actions(same)[0][:num_old]
        num_crossed += 0 < num_old < len(ids)
        expected = np.stack([reference_logp(model, tokens.ids, TEMPERATURE) for model in references])
        expected = np.take_along_axis(expected, tokens.version[None].clip(0), 0)[0]
        worst = max(worst, np.abs(expected - tokens.logp_rollout)[tokens.action_mask].max())
    assert num_crossed >= least and worst < TOLERANCE


@pytest.mark.parametrize(("reached", "least"), REACHED, ids=["in call 1", "in call 2"])
def test_answers_go_on_from_the_tokens_of_an_engine_that_lost_them(stage, folders, references, reached, least):
    """No token is sampled twice: what the record has is the beginning of the answers that another call completes, with
    other weights."""
    asked, path = prompts(16, 5), stage.engine.sampler._progress.path

    async def answer(earlier=()):
        calls = [answer_group(stage, 100 * least + i, prompt, earlier) for i, prompt in enumerate(asked)]
        return await asyncio.gather(*calls, return_exceptions=True)

    async def interrupted():
        event = moment(stage.engine, reached)
        answers = asyncio.create_task(answer())
        await event.wait()
        with pytest.raises(RuntimeError, match="must name the same version"):
            await stage.engine.weights.receive(9)  # the trainer pushes another version
        return await answers

    stage.push(folders[0], 0)
    stage.trainers.begin_push(folders[1], 1)
    assert all("are lost" in str(error) for error in stage.run(interrupted()))
    [failure] = stage.trainers.end_push()
    assert isinstance(failure, RuntimeError)
    stage.rejoin()
    stage.push(folders[1], 1)
    rows = [recorded([path], 100 * least + i, sample) for i in range(16) for sample in range(4)]
    assert sum(0 < len(row) < THOUGHT + RESPONSE for row in rows) >= least

    worst = 0.0
    for row, (sample, tokens) in zip(rows, flat(stage.run(answer([path]))), strict=True):
        ids, versions = actions(tokens)
        logp = tokens.logp_rollout[tokens.action_mask]
        row = row[: len(ids)]  # if the thought is short, the first call samples more than the answer may have
        num, thought = len(row), sample.num_thought_tokens
        assert thought <= THOUGHT and sample.length == 5 + thought + len(stage.engine._budgets.delimiter) + RESPONSE
        assert sample.oldest_version == min(versions)
        assert (ids[:num], versions[:num].tolist()) == (row["token"].tolist(), [0] * num) and (
            versions[num:] == 1
        ).all()
        assert (logp[:num] == row["logp"]).all()
        expected = np.stack([reference_logp(model, tokens.ids, TEMPERATURE) for model in references])
        expected = np.take_along_axis(expected, tokens.version[None].clip(0), 0)[0]
        worst = max(worst, np.abs(expected - tokens.logp_rollout)[tokens.action_mask].max())
    assert worst < TOLERANCE


def test_an_answer_is_the_same_in_any_company_and_when_it_goes_on(stage, folders, tmp_path):
    """The noise of a token belongs to its group's number, its sample's number and its position. Batches of other sizes
    round otherwise, at 1e-6 to 1e-5, which changes a choice as often: of 32 answers with 100 tokens each, three differ
    once in 200,000 times, and without the common noise all would."""
    asked = prompts(8, 5)
    stage.push(folders[0], 20)

    def answered(groups, earlier=()) -> list[list[int]]:
        async def answer():
            return await asyncio.gather(*(answer_group(stage, 900 + i, asked[i], earlier) for i in groups))

        return [actions(tokens)[0] for _, tokens in flat(stage.run(answer()))]

    expected = answered(range(8))
    assert len({tuple(ids) for ids in expected}) == 32
    assert num_equal(answered([5, 3]), expected[20:24] + expected[12:16]) >= 6

    rows = [
        ((900 + i // 4) * MAX_SAMPLES + i % 4, token, 20, 0.0)
        for i, ids in enumerate(expected)
        for token in ids[: 3 * i]  # of the long ones the second call has begun
    ]
    np.array(rows, ROW).tofile(tmp_path / "lost.tokens")
    assert num_equal(answered(range(8), [tmp_path / "lost.tokens"]), expected) >= 30


def num_equal(answers: list[list[int]], expected: list[list[int]]) -> int:
    return sum(a == b for a, b in zip(answers, expected, strict=True))


def test_without_running_requests_nothing_is_paused(stage, folders):
    metrics, _ = stage.push(folders[0], 2)
    assert metrics["paused_s"] == 0 < metrics["seconds"]


def test_a_call_that_begins_in_a_push_waits_for_it(stage, folders):
    """The cache of the older weights is gone: the answers equal those of a later call."""

    async def both():
        receiving = asyncio.create_task(stage.engine.weights.receive(3))
        answering = asyncio.create_task(stage.generate(prompts(4, 5), 4, 3, seed=1))
        await asyncio.sleep(0)  # both have begun
        stage.trainers.begin_push(folders[1], 3)
        return (await asyncio.gather(receiving, answering))[1]

    first = stage.run(both())
    stage.trainers.end_push()
    later = stage.run(stage.generate(prompts(4, 5), 4, 3, seed=1))
    assert [actions(tokens)[0] for _, tokens in flat(first)] == [actions(tokens)[0] for _, tokens in flat(later)]
    assert all(set(actions(tokens)[1]) == {3} for _, tokens in flat(first))


@pytest.mark.deep
def test_a_push_that_fails_ends_what_runs_and_a_whole_one_heals(stage, folders):
    stage.push(folders[0], 10)
    expected = stage.run(stage.generate(prompts(16, 5), 4, 10, seed=7))
    stage.trainers.begin_push(folders[1], 12)
    failed, running, error = with_push(stage, prompts(16, 5), 4, 10, sampled(6), 11)
    stage.trainers.end_push()
    assert running == 64 and isinstance(error, RuntimeError) and isinstance(failed, RuntimeError)
    assert "the push of version 11 over version 10 failed: " in str(failed) and str(error) in str(failed)
    with pytest.raises(ValueError, match="version 11 over version 10"):
        stage.run(stage.generate(prompts(1, 5), 1, 10, seed=7))
    stage.rejoin()
    stage.push(folders[0], 12)
    healed = stage.run(stage.generate(prompts(16, 5), 4, 12, seed=7))
    for (_, a), (_, b) in zip(flat(healed), flat(expected), strict=True):
        assert a.ids.tolist() == b.ids.tolist() and a.logp_rollout.tolist() == b.logp_rollout.tolist()


def test_a_trainer_that_dies_in_the_middle_is_an_error_of_both(stage, folders):
    stage.push(folders[0], 20)
    stage.trainers.processes[0].kill()
    stage.trainers.processes[0].join()
    failed, running, error = with_push(stage, prompts(16, 5), 4, 20, sampled(4), 21)
    assert running == 64 and isinstance(error, RuntimeError) and isinstance(failed, RuntimeError)
    with pytest.raises(ValueError, match="version 21 over version 20"):
        stage.run(stage.generate(prompts(1, 5), 1, 20, seed=7))
    stage.restart_trainers()


def test_running_requests_keep_their_cache_and_later_ones_never_see_it(salted, folders, references):
    """The second call begins while the first one still runs, and has the same prompts."""
    asked = prompts(2, LONG)
    salted.push(folders[0], 0)
    salted.trainers.begin_push(folders[1], 1)

    async def second_call():
        assert salted.engine.sampler._thread.engine.get_num_unfinished_requests()
        return await salted.generate(asked, 4, 1, seed=8)

    groups, running, metrics, later = with_push(salted, asked, 16, 0, sampled(4), 1, second_call)
    salted.trainers.end_push()

    old, new = references
    assert running == 32 and metrics["paused_s"] > 0
    worst, num_crossed, alone = 0.0, 0, 0.0
    for _, tokens in flat(groups):
        num_old = LONG + int((tokens.version == 0).sum())
        # the new weights process the last token before the push and write its keys and values
        expected = reference_logp_across(old, new, tokens.ids, num_old - 1, TEMPERATURE)
        worst = max(worst, np.abs(expected - tokens.logp_rollout)[tokens.action_mask].max())
        if num_old < len(tokens.ids):
            num_crossed += 1
            expected = reference_logp(new, tokens.ids, TEMPERATURE)
            alone = max(alone, np.abs(expected - tokens.logp_rollout)[tokens.version == 1].max())
    assert num_crossed == running and worst < TOLERANCE and alone > 0.1
    for _, tokens in flat(later):
        assert set(actions(tokens)[1]) == {1}
        expected = reference_logp(new, tokens.ids, TEMPERATURE)
        assert np.abs(expected - tokens.logp_rollout)[tokens.action_mask].max() < TOLERANCE
