"""Compares what an engine's kernels read with what they should read.

A checksum of the sent bytes does not cover what happens to a layer afterwards: vLLM may repack it wrongly, keep an old
scale, or leave a rank's layer as it was. So a layer is compared after all processing. A layer that vLLM repacks is
compared with the same layer rebuilt from the received bytes, in separate memory. A layer that is used as received is
compared with its checksums on arrival. The driver compares equal ranks of different engines.

The first push after joining is compared as a whole; in later pushes a sample of the modules is compared.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from megatron_rl.bridge.checksum import word_sums
from megatron_rl.models import Box, slices

PUSHES = 32
"""The number of pushes after which every module has been in the sample once."""

Sums = tuple[int, int]


def is_sampled(module: str, version: int) -> bool:
    """Whether a push as `version` is compared in a module, by the module's name in vLLM. All ranks agree without a
    message."""
    return crc32(module.encode()) % PUSHES == version % PUSHES


def element_sums(tensor: Tensor) -> Tensor:
    """The checksum of a tensor's elements in their order, wherever they lie, as `word_sums` gives it."""
    return word_sums(tensor.detach().contiguous().view(-1).view(torch.uint8))


def read(found: Sequence[Tensor]) -> list[Sums]:
    """Several results of `element_sums` as numbers. It waits for the device once, and not for each of hundreds of small
    tensors."""
    return [(first, second) for first, second in torch.stack(tuple(found)).tolist()] if found else []


Arrived = tuple[str, Box, Tensor]
"""A rectangle of a parameter, by the parameter's name, and its `element_sums` when it arrived."""


def changed(arrived: Sequence[Arrived], forms: Mapping[str, Tensor]) -> str | None:
    """The first of the rectangles that holds other numbers than on its arrival, in words; None if all hold the same."""
    before = read([of_arrival for *_, of_arrival in arrived])
    now = read([element_sums(forms[name][slices(box)]) for name, box, _ in arrived])
    return next((f"{name} {box}" for (name, box, _), a, b in zip(arrived, before, now, strict=True) if a != b), None)


def kernel_sums(layer: nn.Module) -> dict[str, Sums]:
    """The checksums of all tensors that the kernels of a layer read, by name: its parameters and buffers, and what its
    quantisation method holds."""
    of_method = _tensors("quant_method", getattr(layer, "quant_method", None), set())
    named = (*layer._parameters.items(), *layer._buffers.items(), *of_method)
    tensors = {name: tensor for name, tensor in named if tensor is not None}
    return dict(zip(tensors, read([element_sums(tensor) for tensor in tensors.values()]), strict=True))


def _tensors(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that an object of vLLM's kernels refers to, except for tensors of modules and configurations."""
    if isinstance(value, Tensor):
        yield name, value
        return
    if id(value) in seen or isinstance(value, nn.Module | type):
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        parts: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    elif type(value).__module__.startswith("vllm.model_executor"):
        parts = vars(value).items() if hasattr(value, "__dict__") else ()
    else:
        return
    for key, part in parts:
        yield from _tensors(f"{name}.{key}", part, seen)


def made_anew(layer: nn.Module, formed: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> nn.Module:
    """The layer as vLLM makes it of a checkpoint, in new memory. The layer itself does not change.

    Args:
        formed: the parameters and buffers as vLLM created them, without memory.
        weights: the checkpoint's form of the parameters, by name.
    """
    anew = copy.copy(layer)
    method: Any = copy.copy(layer.quant_method)  # vLLM's, which this file does not import
    anew.__dict__ |= {"_parameters": {}, "_buffers": dict(layer._buffers), "quant_method": method}
    anew.__dict__.pop("_already_called_process_weights_after_loading", None)
    device = next(iter(weights.values())).device
    for name, form in formed.items():
        tensor = torch.empty_strided(form.size(), form.stride(), dtype=form.dtype, device=device)
        tensor.__class__, tensor.__dict__ = form.__class__, form.__dict__.copy()
        if name in weights:
            tensor.data.copy_(weights[name])
        if isinstance(tensor, nn.Parameter):  # as `form` is
            anew._buffers.pop(name, None)
            anew._parameters[name] = tensor
        else:
            anew._buffers[name] = tensor
    for name, parameter in layer._parameters.items():
        if name == "bias":  # vLLM does not repack it
            anew._parameters[name] = parameter
    method.process_weights_after_loading(anew)
    return anew


def short(values: Mapping[str, Sums]) -> str:
    """A digest of checksums, for messages between processes."""
    return hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:16]


def disagreement(of_engines: Mapping[int, list[dict[str, str]]]) -> str | None:
    """Compare engines with each other.

    Args:
        of_engines: by the engine's index, and for each of its ranks, the digests by module.

    Returns:
        None, or a sentence that names the first module that differs between equal ranks of two engines.
    """
    first = next(iter(of_engines))
    for engine, ranks in of_engines.items():
        for rank, (expected, digests) in enumerate(zip(of_engines[first], ranks, strict=True)):
            for module in sorted(expected.keys() | digests.keys()):
                if expected.get(module) != digests.get(module):
                    return (
                        f"after the same push rank {rank} of engine {first} and rank {rank} of engine {engine} hold "
                        f"different weights of {module}"
                    )
    return None
