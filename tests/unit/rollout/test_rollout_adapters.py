"""An adapter that is damaged in the engine, or that never gets there, ends the push before a token is sampled. An
evaluation keeps the version that it began with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from corruptions import PROMPT
from pushes import moment, sampled
from safetensors.torch import load_file, save_file
from test_rollout_in_flight import endless
from tiny_references import reference_logp
from transformers import AutoModelForCausalLM
from vllm_workers import called_in_workers

from megatron_rl.models import read_shape
from megatron_rl.models.adapters import SERVED_ID
from megatron_rl.models.peft import tensors_of
from megatron_rl.types import Adapters, GroupRequest, Mesh

pytestmark = pytest.mark.deep
ADAPTERS = Adapters(rank=3, alpha=3.0)
LONG = 100
A, B = (f"model.layers.{{}}.self_attn.qkv_proj.lora_{part}_stacked.{{}}" for part in "ab")


def write(folder, model, seed: int):
    """Adapters by their HF names, as the tiny trainers read them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = tensors_of(replace(read_shape(model), adapters=ADAPTERS))
    folder.mkdir()
    save_file({n: 0.3 * torch.randn(s, generator=generator) for n, s in sizes.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def pushed(folders, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return [write(root / str(seed), folders[0], seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def stage(make_stage, folders):
    return make_stage(
        folders[0],
        Mesh(tensor=2),
        shares_gpus=True,
        adapters=ADAPTERS,
        max_prompt_tokens=8,
        max_response_tokens=LONG,
        delimiter="",
        max_lag=1,
    )


def flip_a_bit(name: str, slots, before, adapters) -> None:
    slots[name].view(torch.uint8)[0, 0, 0, 0] ^= 4


def swap_rows(name: str, slots, before, adapters) -> None:
    slots[name][0, 0, :2] = slots[name][0, 0, :2].flip(0).clone()


def keep(names: tuple[str, ...], slots, before, adapters) -> None:
    for name in names or slots:
        slots[name].copy_(before[name])


def exchange(one: str, other: str, slots, before, adapters) -> None:
    slots[one].copy_(slots[other])


def empty(name: str, slots, before, adapters) -> None:
    slots[name].zero_()


def fill_padding(name: str, slots, before, adapters) -> None:
    slots[name][0, 0, ADAPTERS.rank] = 1


def forget(slots, before, adapters) -> None:
    adapters.remove_all_adapters()


def take_the_slot(slots, before, adapters) -> None:
    adapters.lora_index_to_id[0] = SERVED_ID + 1


DAMAGES = {
    "a bit of A": (partial(flip_a_bit, A.format(0, 0)), r"qkv_proj.lora_a_stacked.0 .* has changed since version 1"),
    "a bit of B": (partial(flip_a_bit, B.format(1, 2)), r"layers.1.*lora_b_stacked.2 .* has changed"),
    "rows of B": (partial(swap_rows, B.format(0, 1)), r"lora_b_stacked.1 .* has changed"),
    "an old B": (partial(keep, (B.format(1, 0),)), r"layers.1.*lora_b_stacked.0 .* has changed"),
    "an old adapter": (partial(keep, ()), "has changed since version 1"),
    "another layer's A": (partial(exchange, A.format(0, 0), A.format(1, 0)), r"layers.0.*lora_a_stacked.0 .* has ch"),
    "an empty B": (partial(empty, B.format(0, 0)), r"lora_b_stacked.0 .* has changed"),
    "rows beyond the rank": (
        partial(fill_padding, A.format(0, 1)),
        r"lora_a_stacked.1 has numbers in rows that belong",
    ),
    "no adapter": (forget, "vLLM's slots hold the adapters .None, None., and not the run's"),
    "another adapter": (take_the_slot, "vLLM's slots hold the adapters .2, 2., and not the run's"),
}


def damage(worker, how: Callable) -> None:
    """Do this damage in the next push, after everything is written."""
    from megatron_rl.bridge.adapter_slot import SlotParameters, slot_tensors

    adapters = worker.model_runner.lora_manager._adapter_manager
    before = {name: tensor.clone() for name, tensor in slot_tensors(adapters).items()}
    finish = SlotParameters.finish

    def damaged(self):
        SlotParameters.finish = finish
        how(slot_tensors(adapters), before, adapters)
        return finish(self)

    SlotParameters.finish = damaged


def reopen(worker) -> None:
    manager = worker.model_runner.lora_manager
    manager.remove_all_adapters()
    worker.open_adapter_slots()


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_adapter_is_named_and_no_token_is_sampled(stage, pushed, name):
    how, message = DAMAGES[name]
    stage.push(pushed[0], 0)
    assert len(stage.run(stage.generate([PROMPT], 1, version=0, seed=0))[0]) == 1
    stage.run(called_in_workers(stage.engine, partial(damage, how=how)))
    stage.trainers.begin_push(pushed[1], 1)
    with pytest.raises(RuntimeError, match=message):
        stage.run(stage.engine.weights.receive(1))
    stage.trainers.end_push()
    with pytest.raises(ValueError, match="holds no whole set of weights"):
        stage.run(stage.generate([PROMPT], 1, version=1, seed=0))
    stage.run(called_in_workers(stage.engine, reopen))
    stage.rejoin()


def merged(folder, adapters):
    """transformers' model with W + B A; the scale is 1."""
    model, stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), load_file(adapters)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, a in stored.items():
            if ".lora_A." in name:
                weights[name.replace(".lora_A", "")] += stored[name.replace("lora_A", "lora_B")] @ a
    return model


@pytest.fixture
def long_answers(stage, monkeypatch):
    sampler = stage.engine.sampler
    for owner, name in ((stage.engine, "_stop_ids"), (sampler, "_stop_ids"), (sampler, "_params")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    return endless(stage)


def test_an_evaluation_keeps_its_version_while_others_take_the_newest_one(long_answers, folders, pushed):
    stage = long_answers
    models = [merged(folders[0], folder / "model.safetensors") for folder in pushed]

    async def asked(ticket: int, number: int, version: int):
        request = GroupRequest(number, PROMPT, 2, (7,))
        own, _ = await stage.engine.answer(ticket, request, range(2), version)
        return [tokens for _, tokens in own]

    async def crossed():
        event = moment(stage.engine, sampled(6))
        answers = asyncio.gather(asked(1, -1, 5), asked(2, 0, 5))
        await event.wait()
        await stage.engine.weights.receive(6)
        return *await answers, await asked(3, -2, 6)

    stage.push(pushed[0], 5)
    stage.trainers.begin_push(pushed[1], 6)
    evaluated, trained, later = stage.run(crossed())
    stage.trainers.end_push()
    worst = 0.0
    for tokens, versions in [(t, {5}) for t in evaluated] + [(t, {5, 6}) for t in trained] + [(t, {6}) for t in later]:
        own = tokens.version[tokens.action_mask]
        assert set(own.tolist()) == versions and len(own) == LONG
        expected = np.stack([reference_logp(model, tokens.ids, 1.0) for model in models])
        expected = np.take_along_axis(expected, (tokens.version[None] - 5).clip(0), 0)[0]
        worst = max(worst, np.abs(expected - tokens.logp_rollout)[tokens.action_mask].max())
    assert worst < 5e-5
    assert evaluated[0].ids.tolist() != trained[0].ids.tolist(), "of one seed, and other weights after the push"


def test_answers_end_when_memory_is_lent_and_the_base_model_stays(long_answers, pushed):
    """The next push brings the adapters alone, and the engine answers as before."""
    stage = long_answers

    def answers(version: int) -> list:
        [group] = stage.run(stage.generate([PROMPT], 2, version, seed=3))
        return [(tokens.ids.tolist(), tokens.logp_rollout.tolist()) for _, tokens in group]

    async def lent():
        event = moment(stage.engine, sampled(6))
        answering = asyncio.ensure_future(stage.generate([PROMPT], 2, 8, seed=4))
        await event.wait()
        await stage.engine.weights.enter("training")
        await answering

    stage.push(pushed[0], 8)
    before = answers(8)
    with pytest.raises(RuntimeError, match="the answer ended, because the engine entered the phase training"):
        stage.run(lent())
    stage.run(stage.engine.weights.enter("weight sync"))
    stage.push(pushed[0], 9)
    stage.run(stage.engine.weights.enter("generating"))
    assert answers(9) == before
