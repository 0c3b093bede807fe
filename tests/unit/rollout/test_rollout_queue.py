"""The queue before a real vLLM whose KV cache is small: 90 blocks of 32 tokens, where 256 answers may have 200
tokens each."""

from __future__ import annotations

import asyncio

import pytest
from tiny_trainers import write_model

from megatron_rl.rollout.progress import recorded
from megatron_rl.types import Mesh, Prompt

LONGEST, BLOCK, CAPACITY = 200, 32, 2880
PROMPTS = [Prompt(f"row {i}", (5, 6, 7 + i), "") for i in range(16)]


@pytest.fixture(scope="module")
def stage(make_stage, tmp_path_factory):
    """All 40 rows of its model are tokens, so that few answers end soon."""
    folder = write_model(tmp_path_factory.mktemp("long") / "model", seed=1, num_tokens=40)
    made = make_stage(
        folder,
        Mesh(),
        vllm={"num_gpu_blocks_override": CAPACITY // BLOCK, "block_size": BLOCK},
        record=tmp_path_factory.mktemp("record") / "engine.tokens",
        max_prompt_tokens=8,
        max_response_tokens=LONGEST,
    )
    made.push(folder, 0)
    return made


@pytest.fixture
def requests(stage):
    stage.engine.sampler._thread.requests.num_preempted = 0
    return stage.engine.sampler._thread.requests


def lengths(answers) -> list[int]:
    return [sample.length for group in answers for sample, _ in group]


@pytest.mark.deep
def test_nothing_is_preempted_more_answers_run_than_with_their_largest_lengths_and_groups_are_given_when_they_end(
    stage, requests, monkeypatch
):
    most_running, start_fitting = 0, requests.start_fitting

    def watch(engine):
        nonlocal most_running
        start_fitting(engine)
        most_running = max(most_running, engine.get_num_unfinished_requests())

    left = []
    with monkeypatch.context() as patch:
        patch.setattr(requests, "start_fitting", watch)
        groups = stage.run(stage.generate(PROMPTS, 16, 0, 1, finished=lambda number: left.append(len(requests))))
    assert len(left) == 16 and len(lengths(groups)) == 256 and requests.num_preempted == 0
    assert sum(lengths(groups)) > 3 * CAPACITY, "the cache was filled several times"
    assert most_running > 2 * CAPACITY // (LONGEST + 8)
    assert left[0] > 128 and left[-1] == 0, "the first of 16 groups is there long before the last"

    whole = stage.run(stage.generate(PROMPTS, 16, 0, seed=1))
    answers, expected = (
        [[(tokens.ids.tolist(), tokens.logp_rollout.tolist()) for _, tokens in group] for group in each]
        for each in (groups, whole)
    )
    assert answers == expected, "to the bit"


@pytest.mark.deep
def test_without_the_queue_vllm_preempts(stage, requests, monkeypatch):
    monkeypatch.setattr(requests._budget, "num_fitting", lambda running, waiting: len(waiting))
    stage.run(stage.generate(PROMPTS[:6], 16, 0, seed=1))
    assert requests.num_preempted > 0


def test_a_cancelled_group_ends_whether_it_runs_or_waits(stage, requests):
    """The others go on, even if none of them has started, and the group can be asked for again from its start."""

    async def answer(ticket):
        return await stage.answer(ticket, ticket % 100, PROMPTS[ticket % 100], range(16))

    async def cancel_three():
        tasks = [asyncio.create_task(answer(ticket)) for ticket in range(4)]
        await asyncio.sleep(0)
        while not recorded([stage.engine.sampler._progress.path], 0, 0).size:
            await stage.engine.sampler._thread.call(lambda: None)
        waiting = {request.answer[0] for request, _ in requests._waiting}
        assert {2, 3} <= waiting <= {1, 2, 3}, "short answers of group 0 may have ended"
        for ticket in (3, 1, 0):
            await stage.engine.cancel(ticket)
        assert {request.answer[0] for request, _ in [*requests._running.values(), *requests._waiting]} <= {2}
        return await asyncio.gather(*tasks, return_exceptions=True)

    ended = stage.run(cancel_three())
    assert [str(ended[ticket]) for ticket in (0, 1, 3)] == ["the group was cancelled"] * 3
    assert len(ended[2]) == 16 and not len(requests)
    stage.run(stage.engine.cancel(0))  # a second time, when nothing is left of it
    begun = stage.run(answer(100))
    assert [tokens.ids.tolist() for _, tokens in begun] == [tokens.ids.tolist() for _, tokens in stage.run(answer(200))]
    assert not len(recorded([stage.engine.sampler._progress.path], 3, 15)), "it waited when it was cancelled"
