"""An engine of two pipeline stages. vLLM works on two batches at once, so one is under way between two steps; whatever
changes the engine waits for it."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest
import torch
from corruptions import flip_a_bit, refused
from pushes import flat, moment, sampled, with_push
from test_rollout_in_flight import TOLERANCE, actions, answer_group, endless, prompts
from tiny_references import reference_logp
from transformers import AutoModelForCausalLM

from megatron_rl.types import Mesh

pytestmark = pytest.mark.deep
TEMPERATURE = 0.7
CHANGES = ("collective_rpc", "abort_requests", "reset_prefix_cache", "set_weight_version", "sleep", "wake_up")
"""The methods of vLLM's core that change more than the requests."""


@pytest.fixture(scope="module")
def stage(make_stage, folders, tmp_path_factory):
    return endless(
        make_stage(
            folders[0],
            Mesh(tensor=2),
            parallel={"pipeline": 2},
            shares_gpus=True,
            record=tmp_path_factory.mktemp("record") / "engine.tokens",
            max_prompt_tokens=8,
            max_response_tokens=60,
            delimiter="",
            sampling={"temperature": TEMPERATURE},
        )
    )


@pytest.fixture
def seen(stage, monkeypatch):
    """The numbers of batches under way: when the thread was asked to wait for them, in every change of the engine, by
    name, and the tokens of each of them after every step."""
    core, thread = stage.engine.sampler._thread.engine.engine_core.engine_core, stage.engine.sampler._thread
    found = {"waits": [], "changes": [], "tokens": []}
    drain, step = thread.drain, thread.engine.step

    def drain_and_tell() -> None:
        found["waits"].append(len(core.batch_queue))
        drain()

    def step_and_tell():
        outputs = step()
        found["tokens"].append([batch.total_num_scheduled_tokens for _, batch, _ in core.batch_queue])
        return outputs

    def telling(name: str):
        method = getattr(core, name)

        def change(*arguments, **options):
            if arguments[:1] != ("synchronize_device",) and not (name == "abort_requests" and not arguments[0]):
                found["changes"].append((name, len(core.batch_queue)))
            return method(*arguments, **options)

        return change

    monkeypatch.setattr(thread, "drain", drain_and_tell)
    monkeypatch.setattr(thread.engine, "step", step_and_tell)
    for name in CHANGES:
        monkeypatch.setattr(core, name, telling(name))
    monkeypatch.setattr(thread.engine, "collective_rpc", telling_of(thread.engine.collective_rpc, core, found))
    return found


def telling_of(method, core, found):
    def change(*arguments, **options):
        found["changes"].append((arguments[0], len(core.batch_queue)))
        return method(*arguments, **options)

    return change


def check_changes(seen, *names: str) -> None:
    """These changes were made, and none of any kind while a batch was under way."""
    assert {name for name, _ in seen["changes"]} >= {*names}
    assert all(number == 0 for _, number in seen["changes"])


def test_a_push_in_the_middle_finds_no_batch_and_each_token_has_its_version(stage, folders, seen):
    """The log-prob of every token is that of the version that it carries. The answers that run make two batches of the
    same size, so both stages work."""
    asked = prompts(16, 5)
    stage.push(folders[0], 0)
    unbroken = stage.run(stage.generate(asked, 4, 0, seed=7))
    assert [32] in seen["tokens"] and [64] not in seen["tokens"]
    stage.trainers.begin_push(folders[1], 1)
    seen["waits"].clear()
    groups, running, metrics = with_push(stage, asked, 4, 0, sampled(6), 1)
    stage.trainers.end_push()
    assert running == 64 and metrics["paused_s"] > 0
    assert max(seen["waits"]) == 1, "a batch was under way when the push came"
    check_changes(seen, "take_weights", "set_weight_version", "reset_prefix_cache")

    references = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]
    worst, apart, numbers = 0.0, 0.0, set()
    for (_, tokens), (_, same) in zip(flat(groups), flat(unbroken), strict=True):
        ids, versions = actions(tokens)
        assert len(ids) == 60 and (np.diff(versions) >= 0).all() and set(versions) == {0, 1}
        num_old = int((versions == 0).sum())
        numbers.add(num_old)
        assert ids[:num_old] == actions(same)[0][:num_old]
        expected = np.stack([reference_logp(model, tokens.ids, TEMPERATURE) for model in references])
        own = np.take_along_axis(expected, tokens.version[None].clip(0), 0)[0]
        worst = max(worst, np.abs(own - tokens.logp_rollout)[tokens.action_mask].max())
        last = 5 + num_old - 1  # the last token of the old weights, which the wait has handed out
        apart = max(apart, abs(expected[1, last] - tokens.logp_rollout[last]))
    assert worst < TOLERANCE and apart > 1
    assert len(numbers) <= 2, "all answers of a batch change their weights at the same token"


def test_a_cancelled_group_ends_between_batches_and_the_others_go_on(stage, folders, seen):
    stage.push(folders[0], 40)
    asked = prompts(2, 5)

    async def both():
        event = moment(stage.engine, sampled(6))
        calls = [asyncio.create_task(answer_group(stage, 70 + i, prompt)) for i, prompt in enumerate(asked)]
        await event.wait()
        await stage.engine.cancel(70)
        return await asyncio.gather(*calls, return_exceptions=True)

    cancelled, answers = stage.run(both())
    assert "the group was cancelled" in str(cancelled)
    assert [len(actions(tokens)[0]) for _, tokens in answers] == [60] * 4
    check_changes(seen, "abort_requests")
    seen["changes"].clear()
    again = [stage.run(stage.generate(asked, 4, 40, seed=3)) for _ in range(2)]
    check_changes(seen, "reset_prefix_cache")
    first, second = ([actions(tokens)[0] for _, tokens in flat(groups)] for groups in again)
    assert first == second


def test_memory_is_given_up_and_a_push_brings_the_same_answers(stage, folders, seen):
    stage.push(folders[0], 50)
    before = stage.run(stage.generate(prompts(4, 5), 4, 50, seed=5))

    async def both():
        event = moment(stage.engine, sampled(6))
        calls = [asyncio.create_task(answer_group(stage, 80 + i, prompt)) for i, prompt in enumerate(prompts(2, 5))]
        await event.wait()
        await stage.engine.weights.enter("training")
        return await asyncio.gather(*calls, return_exceptions=True)

    assert {str(error) for error in stage.run(both())} == {
        "the answer ended, because the engine entered the phase training"
    }
    stage.run(stage.engine.weights.enter("weight sync"))
    stage.push(folders[0], 51)
    stage.run(stage.engine.weights.enter("generating"))
    after = stage.run(stage.generate(prompts(4, 5), 4, 51, seed=5))
    check_changes(seen, "abort_requests", "sleep", "wake_up", "take_weights")
    for (_, a), (_, b) in zip(flat(before), flat(after), strict=True):
        assert a.ids.tolist() == b.ids.tolist() and a.logp_rollout.tolist() == b.logp_rollout.tolist()


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_on_each_stage_is_named(stage, folders, rank):
    name = f"model.layers.{rank}.mlp.down_proj.weight"
    error = refused(stage, folders, rank, partial(flip_a_bit, name))
    assert error.startswith(f"engine 0, rank {rank}: {name} ") and "has changed since version 1 arrived" in error
