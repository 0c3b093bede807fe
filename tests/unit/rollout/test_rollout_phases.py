"""An engine that shares its GPUs gives its memory up and takes it back. On a CPU the storages really shrink."""

from __future__ import annotations

import asyncio

import pytest

from megatron_rl.rollout.program import Call, Request
from megatron_rl.types import Mesh, Prompt

PROMPTS = [Prompt("row 0", (7, 8, 9, 10, 11), ""), Prompt("row 1", (12, 6), "")]


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.deep)], ids=["tp1", "tp2"])
def stage(request, make_stage, folders):
    return make_stage(
        folders[0],
        Mesh(tensor=2),
        shares_gpus=True,
        parallel={"tensor": request.param},
        max_prompt_tokens=16,
        max_response_tokens=24,
        sampling={"temperature": 0.7},
    )


def held(worker) -> tuple[int, int]:
    """The bytes of a worker's parameters and of its KV cache. vLLM's worker processes unpickle and run this."""
    runner = worker.model_runner
    kinds = (list(runner.model.parameters()), runner.kv_caches)
    return tuple(
        sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values()) for tensors in kinds
    )


def sizes(stage) -> list[tuple[int, int]]:
    thread = stage.engine.sampler._thread
    return stage.run(thread.call(lambda: thread.engine.collective_rpc(held)))


def answers(stage, version: int) -> list:
    groups = stage.run(stage.generate(PROMPTS, 3, version, seed=version))
    return [(tokens.ids.tolist(), tokens.logp_rollout.tolist()) for group in groups for _, tokens in group]


def enter(stage, phase: str) -> None:
    stage.run(stage.engine.weights.enter(phase))


def test_memory_is_given_up_and_a_push_brings_the_same_answers(stage, folders):
    stage.push(folders[0], 0)
    before, whole = answers(stage, 0), sizes(stage)
    assert all(weights and cache for weights, cache in whole)
    for _ in range(2):
        enter(stage, "training")
        assert sizes(stage) == [(0, 0)] * len(whole)
        enter(stage, "weight sync")
        assert sizes(stage) == [(weights, 0) for weights, _ in whole]
        stage.push(folders[0], 0)
        enter(stage, "generating")
        assert sizes(stage) == whole
        assert answers(stage, 0) == before


def test_weights_come_back_after_a_teacher_has_scored(stage, folders):
    stage.push(folders[0], 0)
    before, whole = answers(stage, 0), sizes(stage)
    enter(stage, "scoring")
    assert all(cache == 0 for _, cache in sizes(stage)), "on a CPU the copy of the weights is in their place"
    with pytest.raises(RuntimeError, match="phase scoring.*generating"):
        answers(stage, 0)
    enter(stage, "generating")
    assert sizes(stage) == whole and answers(stage, 0) == before


def test_a_phase_can_be_left_early_and_the_bridge_joined_in_the_next(stage, folders):
    stage.push(folders[0], 0)
    before = answers(stage, 0)
    for phase in ("weight sync", "training", "training", "weight sync"):  # as after a stop or a failed push
        enter(stage, phase)
    stage.rejoin()
    stage.push(folders[0], 0)
    enter(stage, "generating")
    assert answers(stage, 0) == before


def test_what_a_phase_does_not_allow_is_refused_by_name(stage, folders):
    stage.push(folders[0], 0)
    enter(stage, "training")
    with pytest.raises(RuntimeError, match="the phase training, in which others have the memory of its weights"):
        stage.run(stage.engine.weights.receive(1))
    with pytest.raises(RuntimeError, match="kv_cache and weights.*generating"):
        answers(stage, 0)
    enter(stage, "weight sync")
    with pytest.raises(RuntimeError, match="memory of its kv_cache; .*generating"):
        answers(stage, 0)
    enter(stage, "generating")
    with pytest.raises(
        ValueError, match=r"no whole set of weights \(its memory was lent to the trainers\); push first"
    ):
        answers(stage, 0)
    stage.push(folders[1], 1)
    assert answers(stage, 1)


def test_answers_that_are_under_way_end_when_the_trainers_take_the_memory(stage, folders):
    """Their call ends with an error, and after the next push the engine answers as before."""
    stage.push(folders[0], 0)
    before, whole = answers(stage, 0), sizes(stage)

    async def both():
        generating = asyncio.ensure_future(stage.generate(PROMPTS, 3, 0, seed=0))
        while not await stage.engine.sampler._thread.call(lambda: len(stage.engine.sampler._thread.requests)):
            pass
        await stage.engine.weights.enter("training")
        await generating

    with pytest.raises(RuntimeError, match="the answer ended, because the engine entered the phase training"):
        stage.run(both())
    assert sizes(stage) == [(0, 0)] * len(whole)
    with pytest.raises(RuntimeError, match="must enter the phase generating"):  # an agent may not know it yet
        stage.run(stage.engine.sampler.sample(Request((7, 8, 9), Call(max_tokens=4), seed=0)))
    enter(stage, "weight sync")
    stage.push(folders[0], 0)
    enter(stage, "generating")
    assert answers(stage, 0) == before
