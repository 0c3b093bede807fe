"""An adapter that is damaged in the engine, or that never gets there, ends the push before a token is sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from corruptions import PROMPT
from safetensors.torch import save_file
from vllm_workers import called_in_workers

from megatron_rl.layout import read_shape
from megatron_rl.layout.adapters import SERVED_ID
from megatron_rl.layout.peft import tensors_of
from megatron_rl.types import Adapters, Mesh

pytestmark = pytest.mark.deep
ADAPTERS = Adapters(rank=3, alpha=3.0)
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
        tensor=1,
        adapters=ADAPTERS,
        max_prompt_tokens=8,
        max_response_tokens=12,
        delimiter="",
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
    "no adapter": (forget, "vLLM's slots hold the adapters .None., and not the run's"),
    "another adapter": (take_the_slot, "vLLM's slots hold the adapters .2., and not the run's"),
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
    worker.open_adapter_slot()


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
