"""The engine's side of the transfer plan, recorded from vLLM: its own loaders get tensors without memory instead of a
checkpoint, and the copies that they would make are recorded as rectangles.

So the plan is right for any vLLM class that runs the model. Invariant (tests/ranks): where the family's
table has vLLM's side, the recording equals it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from megatron_rl.layout import Recording, box_of_view
from megatron_rl.models import FAMILIES, Box, Family, Shard
from megatron_rl.models.composite import in_whole, name_alone
from megatron_rl.models.interleaving import every
from megatron_rl.models.view import FileTensor
from megatron_rl.types import ModelShape

NEGATED_EXP = (torch.ops.aten.exp.default, torch.ops.aten.neg.default)


def record_loading(model: nn.Module, shape: ModelShape, dtype: torch.dtype) -> Recording:
    """What this rank of an engine holds of a checkpoint. The model's weights stay as they are.

    Args:
        model: vLLM's model. Its layers may have been processed, and may hold nothing in the checkpoint's form. If the
            shape has a multi-token head, this is vLLM's model `drafter` in it, which shares embedding and output layer.
        dtype: the dtype of the checkpoint's tensors.

    Raises:
        ValueError: a loader does not just copy rectangles, but computes with a weight or rearranges it.
    """
    loading: list[Any] = [model, *([model.drafter] if shape.multi_token else [])]  # torch's modules load no weights
    family = FAMILIES[shape.family]
    tensors, sources = in_whole(shape, family.file_tensors(shape)), {}
    for name, held in tensors.items():
        is_float32 = family.is_float32(next(iter(held.views), name))
        sources[name] = torch.empty(held.extents, dtype=torch.float32 if is_float32 else dtype, device="meta")
    with _in_checkpoint_form(model):
        copies = CopyRecorder(
            sources, dict(model.named_parameters()), tensors, family.hf_tensors(shape), _has_turns(family)
        )
        with copies:
            for one in loading:
                one.load_weights(iter(sources.items()))
    for shard in copies.shards:
        if family.has_negated_exp(shard.hf_name) != (shard.local_name in copies.negated):
            raise ValueError(f"the table of {family.name} and vLLM differ on whether {shard.local_name} is -exp(x)")
    shards = dict.fromkeys(copies.shards)  # both models load what they share
    return Recording.of([replace(one, hf_name=name_alone(shape, one.hf_name)) for one in shards], family)


def _has_turns(family: Family) -> bool:
    return any(isinstance(rule.vllm, tuple) for rule in family.mixture)


@contextmanager
def _in_checkpoint_form(model: nn.Module) -> Iterator[None]:
    """The parameters have the form that vLLM gave them, without memory, and their own loaders, as at a reload by
    vLLM. Nothing is loaded or processed. The layers then get back what they had."""
    for tensor in model.parameters():
        if isinstance(loader := getattr(tensor, "weight_loader", None), partial):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]  # vLLM 0.32.0 asks every loader for it
    initialize_layerwise_reload(model)
    try:
        for layer in model.modules():
            for tensor in get_layer_tensors(layer).values():
                if hasattr(tensor, "weight_loader"):  # without the wrapper that processes a layer when it is complete
                    tensor.weight_loader = _get_original_loader(tensor)
        yield
    finally:
        for layer in model.modules():
            info = get_layerwise_info(layer)
            _place_kernel_tensors(layer, info)
            info.reset()
        model._do_torchao_reload = model._original_do_torchao_reload


class CopyRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, copies between the given tensors are written down and not made. A view is known by the
    storage that it has in common with its tensor."""

    def __init__(
        self,
        sources: Mapping[str, Tensor],
        destinations: Mapping[str, Tensor],
        tensors: Mapping[str, FileTensor],
        extents: Mapping[str, tuple[int, ...]],
        has_turns: bool,
    ) -> None:
        """
        Args:
            sources: the checkpoint's tensors, by their names in files.
            tensors: what each of them holds.
            extents: the extents of every HF tensor.
            has_turns: the class computes with rows by turns. Of other classes a copy of several HF tensors at once is
                refused, because they take such rows for something else.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.shards: list[Shard] = []
        self._tensors, self._extents, self._has_turns = tensors, extents, has_turns
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        """Copies that a loader has made, and what of, by the copy's storage."""
        self.negated: set[str] = set()
        """The destinations that hold -exp(x) of what was copied to them."""
        self._computed: dict[int, tuple[str, tuple[Any, ...]]] = {}
        """What a loader has computed of a destination: its name and the functions, by the result's storage."""
        self._zeroed: set[str] = set()
        """The checkpoint's tensors that a loader has filled with zeros."""
        self._sources, self._destinations = _by_storage(sources), _by_storage(destinations)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.ops.aten.copy_.default:
            result = function(*args, **(kwargs or {}))
            self._follow(function, args[0] if args else None, result)
            return result
        to, what = args[:2]
        name, destination = self._destinations.get(_storage(to), ("", to))
        if (known := self._made.get(_storage(what))) and known[0].shape == what.shape and what.is_contiguous():
            what = known[1]
        source_name, source = self._sources.get(_storage(what), ("", what))
        if name and source_name in self._zeroed:
            return to
        if name and source_name and (parts := list(self._parts(source_name, source, what))):
            for held, rectangle, index in parts:
                self.shards.append(_piece(held, rectangle, name, destination, to[index]))
            return to
        if name and source_name:
            hf_name, hf_box = self._part(source_name, source, what)
            box = _box(destination, to)
            if hf_box is None or box is None or [b - a for a, b in hf_box] != [b - a for a, b in box][-len(hf_box) :]:
                raise ValueError(
                    f"vLLM rearranges {source_name} while it loads {name}, and the bridge only copies rectangles"
                )
            self.shards.append(Shard(hf_name, hf_box, name, box))
            return to
        if name and self._computed.get(_storage(what)) == (name, NEGATED_EXP):
            self.negated.add(name)
            return to
        if name and what.is_meta:
            raise ValueError(f"vLLM computes {name} from the checkpoint's tensors, and the bridge only copies them")
        return function(*args, **(kwargs or {}))

    def _follow(self, function: Any, given: object, result: object) -> None:
        """Note what a loader makes of the checkpoint's tensors before it copies: a part in its own memory, or zeros."""
        if not isinstance(given, Tensor) or not isinstance(result, Tensor):
            return
        if function is torch.ops.aten.clone.default:
            self._made[_storage(result)] = result, given
        elif function in NEGATED_EXP:
            name, functions = self._computed.get(
                _storage(given), (self._destinations.get(_storage(given), ("",))[0], ())
            )
            self._made[_storage(result)] = result, result  # so that its storage is not given to another tensor
            self._computed[_storage(result)] = name, (*functions, function)
        elif function is torch.ops.aten.zero_.default and (source := self._sources.get(_storage(given))):
            self._zeroed.add(source[0])

    def _parts(self, name: str, whole: Tensor, view: Tensor) -> Iterator[tuple[str, Box, tuple[slice, ...]]]:
        """(HF tensor, its rectangle, the index of the rectangle in the view) of all that a view of a file's tensor
        holds; nothing if it is one rectangle of one HF tensor."""
        views = self._tensors[name].views
        if not self._has_turns or len(views) < 2 or self._part(name, whole, view)[1] is not None:
            return
        offset = int(view.storage_offset() - whole.storage_offset())
        for hf_name, part in views.items():
            if common := part.common(offset, view.shape, view.stride(), self._extents[hf_name]):
                yield hf_name, *common

    def _part(self, name: str, whole: Tensor, view: Tensor) -> tuple[str, Box | None]:
        """The HF tensor that a view of a file's tensor is a rectangle of, and the rectangle; None if there is none."""
        for hf_name, part in self._tensors[name].views.items():
            offset = int(view.storage_offset() - whole.storage_offset())
            if box := part.box_of(offset, view.shape, view.stride(), self._extents[hf_name]):
                return hf_name, box
        return name, None if self._tensors[name].views else _box(whole, view)


def _piece(hf_name: str, hf_box: Box, name: str, whole: Tensor, view: Tensor) -> Shard:
    """The shard of a part of a parameter, whose rows may be every second one.

    Raises:
        ValueError: the part is no such rectangle.
    """
    refused = f"vLLM rearranges {hf_name} while it loads {name}, and the bridge only copies rectangles"
    extents, offset = tuple(whole.shape), int(view.storage_offset() - whole.storage_offset())
    box, by, turn, step = [], 1, 0, whole.numel()
    sizes = {stride: size for size, stride in zip(view.shape, view.stride(), strict=True) if size > 1}
    for axis, length in enumerate(extents):
        step //= length
        first, offset = divmod(offset, step)
        stride = next((s for s in sizes if s % step == 0 and (axis == 0 or s < step * length)), step)
        size, jump = sizes.pop(stride, 1), stride // step
        if jump > 1:
            if axis != 1 or by > 1:
                raise ValueError(refused)
            by, turn, first = jump, first % jump, first // jump
        box.append((first, first + size))
    if sizes:
        raise ValueError(refused)
    return Shard(hf_name, hf_box, every(name, turn, by) if by > 1 else name, tuple(box))


def _by_storage(tensors: Mapping[str, Tensor]) -> dict[int, tuple[str, Tensor]]:
    return {_storage(tensor): (name, tensor) for name, tensor in tensors.items()}


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _box(whole: Tensor, view: Tensor) -> Box | None:
    assert whole.is_contiguous(), "vLLM makes parameters contiguous before it loads them"
    return box_of_view(int(view.storage_offset() - whole.storage_offset()), view.shape, view.stride(), whole.shape)
