"""Beam search on the real engine, against a search with transformers' log-probs."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter

import numpy as np
import pytest
import torch
from patience import deadline
from tiny_references import reference_logp
from tiny_trainers import NUM_TOKENS
from transformers import AutoModelForCausalLM

from megatron_rl.rollout.program import Request
from megatron_rl.rollout.progress import recorded
from megatron_rl.types import Mesh, Prompt

TEMPERATURE, WIDTH, THOUGHTS, BUDGET = 1.5, 5, 3, 6
DIGITS = "0123456789"
ITEMS = [[a, b, c] for a, b, c in itertools.product(DIGITS[:4], DIGITS, DIGITS) if (int(a) + int(b) + int(c)) % 7 == 0]
IDS = [tuple(5 + int(digit) for digit in item) for item in ITEMS]
PREFIX = 15
"""The token of `+`."""
DELIMITER = [16]
"""The token of `=`."""
TOLERANCE = 5e-5
"""fp32 rounding of both sides; the log-probs of other weights differ by more than 1."""


@pytest.fixture(scope="module")
def stage(make_stage, folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("beams")
    (folder / "items.json").write_text(json.dumps(ITEMS))
    return make_stage(
        folders[0],
        Mesh(),
        record=folder / "engine.tokens",
        max_prompt_tokens=8,
        max_response_tokens=BUDGET + 1 + 4,
        delimiter="=",
        thinking={"thought_tokens": BUDGET, "response_tokens": 4},
        beams={"width": WIDTH, "prefix": ["+"], "catalogue": folder / "items.json"},
        sampling={"temperature": TEMPERATURE},
    )


@pytest.fixture(scope="module")
def references(folders):
    return [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]


def prompts(count: int = 8) -> list[Prompt]:
    return [Prompt(f"row {i}", (5 + i, 6, 15), "") for i in range(count)]


def thoughts_of(group) -> list[list]:
    """The samples of each thought."""
    starts = [i for i, (sample, _) in enumerate(group) if sample.beam == 0]
    return [group[a:b] for a, b in itertools.pairwise([*starts, len(group)])]


@torch.no_grad()
def searched(models, context: list[int]) -> list[tuple[tuple[int, ...], list[float]]]:
    """The search with transformers: `models[i]` gives the log-probs of token i of the items."""
    beams: list[tuple[tuple[int, ...], list[float]]] = [((), [])]
    for size, model in enumerate(models):
        rows = torch.tensor([[*context, *ids] for ids, _ in beams])
        logits = model(rows).logits[:, -1, :NUM_TOKENS]  # the other rows have no token
        logp = (logits / TEMPERATURE).log_softmax(-1)
        longer = [
            ((*ids, token), [*before, float(logp[row, token])])
            for row, (ids, before) in enumerate(beams)
            for token in {item[size] for item in IDS if item[:size] == ids}
        ]
        beams = sorted(longer, key=lambda beam: -sum(beam[1]))[:WIDTH]
    return beams


def check_thought(samples, models, num_prompt: int = 3) -> str:
    """Compare the samples of one thought with a search. Returns how the thought ended."""
    first, tokens = samples[0]
    response = tokens.ids[num_prompt:].tolist()
    if first.num_item_tokens == 0:
        assert len(samples) == 1 and response[-1] == 1 and first.finish == "stop"
        return "ended by the model"
    context = tokens.ids[:-3].tolist()
    assert context[-2:] == [*DELIMITER, PREFIX] and len(samples) == WIDTH
    expected = searched(models, context)
    for rank, (sample, found) in enumerate(samples):
        assert (sample.beam, sample.length, sample.finish) == (rank, len(found.ids), "stop")
        assert found.ids[:-3].tolist() == context
        assert tuple(found.ids[-3:].tolist()) == expected[rank][0]
        np.testing.assert_allclose(found.logp_rollout[-3:], expected[rank][1], atol=TOLERANCE)
        assert found.action_mask[-4:].tolist() == [False, True, True, True]
        assert sample.num_actions == found.action_mask.sum()
        assert rank == 0 or not found.action_mask[:-3].any()
    assert tokens.action_mask[num_prompt : num_prompt + first.num_thought_tokens].all()
    return "cut" if first.thought_cut else "ended by the delimiter"


def flat(groups) -> list[tuple]:
    return [(t.ids.tolist(), t.action_mask.tolist(), t.logp_rollout.tolist()) for group in groups for _, t in group]


def test_the_beams_are_those_of_transformers(stage, folders, references):
    stage.push(folders[0], 0)
    asked = prompts()
    groups = stage.run(stage.generate(asked, THOUGHTS, 0, seed=4))
    ends = set()
    for group in groups:
        assert len(thoughts_of(group)) == THOUGHTS
        for samples in thoughts_of(group):
            ends.add(check_thought(samples, [references[0]] * 3))
            tokens = samples[0][1]
            expected = reference_logp(references[0], tokens.ids, TEMPERATURE)
            assert np.abs(expected - tokens.logp_rollout)[tokens.action_mask].max() < TOLERANCE
            assert set(tokens.version[tokens.action_mask]) == {0}
    assert ends >= {"cut", "ended by the delimiter"}
    again = stage.run(stage.generate(asked, THOUGHTS, 0, seed=4))
    assert flat(again) == flat(groups), "equal to the bit"
    assert len(stage.engine.sampler._thread.requests._budget._bins) == THOUGHTS * len(asked), (
        "lengths are those of thoughts"
    )


@pytest.mark.deep
def test_greedy_thoughts_have_beams_at_the_sampling_temperature(stage, folders, references):
    stage.push(folders[0], 1)
    [group] = stage.run(stage.generate(prompts(1), 1, 1, seed=4, purpose="baseline"))
    check_thought(group, [references[0]] * 3)


@pytest.mark.deep
def test_a_push_between_two_tokens_of_the_items(stage, folders, references, monkeypatch):
    """The tokens before the push keep their log-probs and their version, and the new weights give the others. The push
    begins as soon as the first thought's beams have one token each."""
    stage.push(folders[0], 2)
    thread, ask, rounds, is_pushed = stage.engine.sampler._thread, stage.engine.sampler.ask, Counter[int](), False

    async def push_in_the_middle():
        loop, has_one_token = asyncio.get_running_loop(), asyncio.Event()

        def asked(requests):
            nonlocal is_pushed
            if requests and requests[0].call.num_candidates and not is_pushed:
                rounds[requests[0].seed] += 1
                if rounds[requests[0].seed] == 2:
                    is_pushed = True
                    loop.call_soon_threadsafe(has_one_token.set)
                    thread._calls.put(thread._calls.get(timeout=deadline(60)))  # the push asks for a pause
            return ask(requests)

        monkeypatch.setattr(stage.engine.sampler, "ask", asked)
        generating = asyncio.create_task(stage.generate(prompts(), THOUGHTS, 2, seed=4))
        await has_one_token.wait()
        stage.trainers.begin_push(folders[1], 3)
        await stage.engine.weights.receive(3)
        return await generating

    groups = stage.run(push_in_the_middle())
    stage.trainers.end_push()
    seen = Counter()
    for samples in (samples for group in groups for samples in thoughts_of(group)):
        given = [tuple(tokens.version[-3:].tolist()) for _, tokens in samples]
        models = [references[version == 3] for version in given[0]]
        if check_thought(samples, models) != "ended by the model":
            assert len(set(given)) == 1, "the beams of a thought go on together"
            seen[given[0]] += 1
    assert seen[2, 3, 3] and set(seen) <= {(2, 2, 2), (2, 2, 3), (2, 3, 3), (3, 3, 3)}


@pytest.mark.deep
def test_another_engine_goes_on_with_a_thought_and_searches_its_beams_again(stage, folders, references, monkeypatch):
    """The record has the thoughts alone, and no token of them is sampled again."""
    stage.push(folders[0], 4)
    asked: list[Request] = []
    add = stage.engine.sampler._thread.requests.add
    monkeypatch.setattr(stage.engine.sampler._thread.requests, "add", lambda new: asked.extend(new) or add(new))

    async def answer(ticket: int, earlier=()):
        calls = [stage.answer(ticket + i, i, one, range(THOUGHTS), earlier) for i, one in enumerate(prompts())]
        return await asyncio.gather(*calls)

    groups = stage.run(answer(100))
    num_thoughts = sum(request.call.num_candidates == 0 for request in asked)
    assert num_thoughts >= THOUGHTS * len(prompts()) and len(asked) > num_thoughts
    for i, group in enumerate(groups):
        for number, samples in enumerate(thoughts_of(group)):
            check_thought(samples, [references[0]] * 3)
            sample, tokens = samples[0]
            num = tokens.action_mask.sum() - sample.num_item_tokens
            rows = recorded([stage.engine.sampler._progress.path], 100 + i, number)
            assert rows["token"].tolist() == tokens.ids[tokens.action_mask][:num].tolist()

    asked.clear()
    again = stage.run(answer(100, [stage.engine.sampler._progress.path]))
    assert all(request.call.num_candidates for request in asked), "only beams are searched"
    assert [ids for ids, *_ in flat(again)] == [ids for ids, *_ in flat(groups)]
