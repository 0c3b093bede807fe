"""The adapter of a run in vLLM's own tables of adapters: a push writes A and B into one slot of every layer, and
vLLM's kernels for LoRA add their product to the output of the base model.

vLLM reads adapters from folders. Here it gets an empty one, whose slot is then written in place; every request names
it, or the version of it that was copied into a second slot before an evaluation began. B arrives times the scale, as
vLLM itself stores it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.bridge.intake import Parameters
from megatron_rl.bridge.messages import Message
from megatron_rl.bridge.verification import Arrived, Sums, changed, element_sums, read, short
from megatron_rl.bridge.vllm_loaders import CopyRecorder
from megatron_rl.layout import Recording
from megatron_rl.models import FAMILIES, Shard, slices
from megatron_rl.models.adapters import PINNED_ID, SERVED_ID, A, B, is_adapter
from megatron_rl.models.composite import in_whole
from megatron_rl.models.shards import local_extents
from megatron_rl.models.view import FileTensor
from megatron_rl.types import ModelShape


def open_slots(model_runner: Any) -> None:
    """Give vLLM adapters of zeros, one for each of its slots, which every request may name from now on."""
    adapters = model_runner.lora_manager._adapter_manager
    rank = adapters.lora_config.max_lora_rank
    for number in (SERVED_ID, PINNED_ID)[: adapters.lora_config.max_loras]:
        adapters.add_adapter(adapters.create_dummy_lora(number, rank, model_runner.model.embedding_modules))
        adapters.activate_adapter(number)


def pin(adapters: Any) -> None:
    """Copy the adapter that the last push brought into the slot of the pinned one, where pushes leave it alone.

    Raises:
        RuntimeError: vLLM's slots hold other adapters.
    """
    if (ids := adapters.lora_index_to_id) != [SERVED_ID, PINNED_ID]:
        raise RuntimeError(f"vLLM's slots hold the adapters {ids}, and not the run's and its pinned version")
    for tensor in slot_tensors(adapters).values():
        tensor[1].copy_(tensor[0])


def slot_tensors(adapters: Any) -> dict[str, Tensor]:
    """The tensors that vLLM's kernels for LoRA read on this rank, by name: for each fused weight of a layer
    `lora_a_stacked.I` [slots, 1, max rank, inputs] and `lora_b_stacked.I` [slots, 1, outputs, max rank].

    Args:
        adapters: vLLM's LoRAModelManager.
    """
    return {
        f"{name}.{kind}.{i}": tensor
        for name, layer in adapters.modules.items()
        for kind in ("lora_a_stacked", "lora_b_stacked")
        for i, tensor in enumerate(getattr(layer, kind, ()))
    }


def record_adapters(adapters: Any, shape: ModelShape, dtype: torch.dtype) -> Recording:
    """The part of each A and B that this rank's slot holds, and its place, as vLLM's own `set_lora` puts it there. The
    slot's content becomes zero.

    Raises:
        ValueError: vLLM has no adapter for a layer that has one, or does not just copy rectangles.
    """
    family = FAMILIES[shape.family]
    own = {name: sizes for name, sizes in family.hf_tensors(shape).items() if is_adapter(name)}
    theirs = dict(zip(_as_in_vllm(adapters.model, shape, own), own, strict=True))
    extents = {name: own[mine] for name, mine in theirs.items()}
    sources = {name: torch.empty(sizes, dtype=dtype, device="meta") for name, sizes in extents.items()}
    whole = {name: FileTensor(sizes, {}) for name, sizes in extents.items()}
    recorder = CopyRecorder(sources, slot_tensors(adapters), whole, extents, has_turns=False)
    slot, used = adapters.lora_index_to_id.index(SERVED_ID), set[str]()

    def of(part: str, names: list[str]) -> list[Tensor | None]:
        found = [f"{name}.{part}.weight" for name in names]
        used.update(name for name in found if name in sources)
        return [sources.get(name) for name in found]

    with recorder:
        for name, layer in adapters.modules.items():
            packed = adapters.packed_modules.get(name)
            parts = packed or [name]
            if any(f"{one}.{A}.weight" in sources for one in parts):
                a, b = of(A, parts), of(B, parts)
                layer.set_lora(slot, a if packed else a[0], b if packed else b[0])
    if missing := sorted(sources.keys() - used):
        raise ValueError(
            f"vLLM has no adapters for {missing[0].rpartition('.lora_')[0]} and {len(missing) // 2 - 1} other "
            "layers; choose others with policy.lora.targets"
        )
    return Recording.of([replace(one, hf_name=theirs[one.hf_name]) for one in recorder.shards], family)


def _as_in_vllm(model: Any, shape: ModelShape, names: Iterable[str]) -> Iterable[str]:
    """The names of adapters with the names that vLLM's model gives its layers."""
    if shape.vision is None:
        return names
    mapped: list[str] = model.hf_to_vllm_mapper.apply_list(list(in_whole(shape, dict.fromkeys(names))))
    return mapped


class SlotParameters(Parameters):
    """The slot of the run's adapter on one rank. After a push every tensor is compared with what arrived."""

    def __init__(self, adapters: Any, shards: Iterable[Shard], side: str) -> None:
        """
        Args:
            shards: what this rank holds.
            side: the name of this rank in error messages.
        """
        self._adapters, self._side, self._slots = adapters, side, slot_tensors(adapters)
        sizes = local_extents(shards)  # vLLM's slots may have more rows, for a larger rank
        super().__init__({name: self._slots[name][tuple(map(slice, sizes[name]))] for name in sizes})

    def begin(self, version: int, whole: bool) -> None:
        self._version = version
        self._arrived: list[Arrived] = []
        """Everything that was written."""

    def written(self, message: Message, verified: bool) -> None:
        for one in message.copies:
            written = self.forms[one.destination_name][slices(one.destination_box)]
            self._arrived.append((one.destination_name, one.destination_box, element_sums(written)))

    def finish(self) -> dict[str, str]:
        if other := changed(self._arrived, self.forms):
            raise RuntimeError(f"{self._side}: {other} has changed since version {self._version} arrived")
        if (ids := self._adapters.lora_index_to_id).count(SERVED_ID) != 1:
            raise RuntimeError(f"{self._side}: vLLM's slots hold the adapters {ids}, and not the run's")
        slot = ids.index(SERVED_ID)
        counts = {name: (self._slots[name][slot], form) for name, form in self.forms.items()}
        outside = [torch.count_nonzero(whole) - torch.count_nonzero(form) for whole, form in counts.values()]
        for name, number in zip(counts, torch.stack(outside).tolist() if outside else [], strict=True):
            if number:  # all of it lies in this slot
                raise RuntimeError(f"{self._side}: {name} has numbers in rows that belong to no adapter")
        return {name: short(held) for name, held in self._by_layer(slot)}

    def _by_layer(self, slot: int) -> Iterator[tuple[str, Mapping[str, Sums]]]:
        found = dict(zip(self._slots, read([element_sums(t[slot]) for t in self._slots.values()]), strict=True))
        for layer in self._adapters.modules:
            yield layer, {name: held for name, held in found.items() if name.startswith(f"{layer}.lora_")}
