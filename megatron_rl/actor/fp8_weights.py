"""The frozen weights of linear layers in one byte a number: float8 values, and float32 scales of blocks of 128 x 128
(convert/fp8.py). A layer computes with the dequantised weight, which exists while it is multiplied. So the forward
pass makes it, and the backward pass makes it again.

The blocks are the whole matrix's, wherever TP splits it. Invariants (tests/ranks, tests/unit/actor): in every layout a
run has the numbers of a model whose weights were quantised and dequantised before; autograd keeps no dequantised
weight.

Shape letters: O outputs of a layer on this rank, H its inputs, h blocks of 128 inputs of the whole layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils._pytree import tree_map

from megatron_rl.actor.adapters import SPLITS
from megatron_rl.actor.optimizer.fill import Target, fill
from megatron_rl.convert.fp8 import quantised
from megatron_rl.convert.manifest import WEIGHTS
from megatron_rl.convert.source import Region, Source
from megatron_rl.convert.tensor_files import Maps
from megatron_rl.models import Box, Shard, slices
from megatron_rl.models.quantisation import FROZEN_BLOCKS as BLOCKS
from megatron_rl.models.shards import extents, translate

aten = torch.ops.aten


class Fp8Weight(Tensor):
    """A matrix [O, H] that every operation sees as a dense tensor of `dtype`, which is made for the operation. A
    rectangle of it is another `Fp8Weight` of the same memory, and autograd saves it as it is. It cannot be written like
    a tensor; `load` fills it."""

    values_OH: Tensor
    scales_Oh: Tensor
    """The scale of each row in each block of columns."""
    block_H: Tensor
    """The column of `scales_Oh` that each column has."""
    # All of it happens in __torch_dispatch__, whose type is another one in torch's declarations than in its calls.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values_OH: Tensor, scales_Oh: Tensor, block_H: Tensor, dtype: torch.dtype) -> Fp8Weight:
        made: Fp8Weight = Tensor._make_wrapper_subclass(cls, values_OH.shape, dtype=dtype, device=values_OH.device)
        made.values_OH, made.scales_Oh, made.block_H = values_OH, scales_Oh, block_H
        return made

    @classmethod
    def zeros(cls, extents: torch.Size, dtype: torch.dtype, device: torch.device) -> Fp8Weight:
        num_rows, num_columns = extents
        values_OH = torch.zeros(extents, dtype=torch.float8_e4m3fn, device=device)
        scales_Oh = torch.ones(num_rows, BLOCKS.most_columns(num_columns), device=device)
        return cls(values_OH, scales_Oh, torch.zeros(num_columns, dtype=torch.int32, device=device), dtype)

    def dequantised(self) -> Tensor:
        scales_OH = self.scales_Oh.index_select(1, self.block_H)
        return self.values_OH.float().mul_(scales_OH).to(self.dtype)

    def _part(self, dim: int = 0, start: int | None = None, stop: int | None = None) -> Fp8Weight:
        chosen = slice(start, stop)
        if dim == 0:
            return Fp8Weight(self.values_OH[chosen], self.scales_Oh[chosen], self.block_H, self.dtype)
        return Fp8Weight(self.values_OH[:, chosen], self.scales_Oh, self.block_H[chosen], self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (aten.detach.default, aten.alias.default):
            whole = args[0]
            return cls(whole.values_OH, whole.scales_Oh, whole.block_H, whole.dtype)
        if func is aten.slice.Tensor and len(args) < 5:
            return args[0]._part(*args[1:])
        if func._schema.is_mutable and isinstance(args[0], cls):
            raise TypeError(f"{func} would write to a weight that is frozen in fp8 blocks")
        made = partial(tree_map, lambda one: one.dequantised() if isinstance(one, cls) else one)
        return func(*made(args), **made(kwargs or {}))


@contextmanager
def linear_layers_in_fp8() -> Iterator[None]:
    """Inside the block each linear layer that becomes a part of a module has zero weights in fp8 blocks, except the
    output layer. The weights that it was built with are freed, so there is only one of them at a time."""

    def replace(module: nn.Module, name: str, layer: nn.Module | None) -> None:
        if name == "output_layer" or not any(kind.__name__ in SPLITS for kind in type(layer).__mro__):
            return
        assert layer is not None
        weights = {own: weight for own, weight in layer.named_parameters(recurse=False) if own.startswith("weight")}
        for own, weight in weights.items():
            frozen = nn.Parameter(Fp8Weight.zeros(weight.shape, weight.dtype, weight.device), requires_grad=False)
            frozen.__dict__.update(weight.__dict__)  # Megatron's marks
            setattr(layer, own, frozen)
        if hasattr(layer, "_get_weight_tensors"):
            _compute_with_dense(layer, list(weights))

    hook = register_module_module_registration_hook(replace)
    try:
        yield
    finally:
        hook.remove()


def _compute_with_dense(layer: Any, names: Sequence[str]) -> None:
    """Give dense weights to the kernels of a layer of Transformer Engine, which take no other tensors. The layer saves
    them for its backward pass, and what is kept in their place are the weights in fp8 blocks.

    Args:
        names: of the layer's weights.
    """
    forward, made = layer.forward, list[tuple[Fp8Weight, Tensor]]()
    in_use = WeakValueDictionary[int, Tensor]()

    def weights() -> list[Tensor]:
        made[:] = [(own, own.dequantised()) for own in (getattr(layer, name) for name in names)]
        return [weight for _, weight in made]

    def pack(saved: Tensor) -> Tensor:
        same = (own for own, weight in made if (weight.data_ptr(), weight.shape) == (saved.data_ptr(), saved.shape))
        return next(same, saved)

    def unpack(saved: Tensor) -> Tensor:
        if not isinstance(saved, Fp8Weight):
            return saved
        weight = in_use.get(id(saved))  # the layer saves each weight twice
        if weight is None:
            weight = in_use[id(saved)] = saved.dequantised()
        return weight

    def with_dense(*arguments: Any, **options: Any) -> Any:
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return forward(*arguments, **options)
        finally:
            made.clear()

    layer._get_weight_tensors, layer.forward = weights, with_dense


def load(weight: Fp8Weight, shards: Iterable[Shard], source: Source, maps: Maps) -> None:
    """Quantise what a checkpoint holds of a weight. Blocks that the rank has parts of are read whole.

    Args:
        shards: the weight's.

    Raises:
        ValueError: a tensor has other bytes than the manifest says.
    """
    for shard in shards:
        box = (first, last), (left, right) = _whole_blocks(shard.hf_box, source.regions[shard.hf_name])
        read = torch.empty(extents(box), dtype=weight.dtype)
        everything = (0, last - first), (0, right - left)
        blocks = Shard(shard.hf_name, box, shard.local_name, everything)
        fill(Target(WEIGHTS, shard.local_name, tuple(read.shape), 0, read.view(-1)), [blocks], source, maps)
        values, scales = quantised(read.to(weight.device))
        rows, columns = (torch.arange(*interval, device=weight.device) for interval in shard.hf_box)
        own_rows = slices(shard.local_box)[0]
        weight.values_OH[slices(shard.local_box)] = values[slices(translate(shard.hf_box, box, everything))]
        weight.scales_Oh[own_rows, : scales.shape[1]] = scales[(rows - first) // BLOCKS.rows]
        weight.block_H.copy_((columns - left) // BLOCKS.columns)


def _whole_blocks(box: Box, regions: Iterable[Region]) -> tuple[tuple[int, int], tuple[int, int]]:
    """The rectangle of all blocks that a rectangle of a matrix has parts of.

    Args:
        regions: of the whole matrix.
    """
    wholes = (max(region.hf_box[dim][1] for region in regions) for dim in (0, 1))
    rows, columns = (
        (start // block * block, min(-(-stop // block) * block, whole))
        for (start, stop), block, whole in zip(box, (BLOCKS.rows, BLOCKS.columns), wholes, strict=True)
    )
    return rows, columns


def dense(weight: Tensor) -> Tensor:
    """The weight itself, or as a dense tensor if it is in fp8 blocks."""
    return weight.dequantised() if isinstance(weight, Fp8Weight) else weight


def stored(weight: Tensor) -> tuple[Tensor, ...]:
    """The tensors whose memory holds a weight."""
    return (weight.values_OH, weight.scales_Oh, weight.block_H) if isinstance(weight, Fp8Weight) else (weight,)


def writers(parameters: Mapping[str, Tensor]) -> dict[str, Callable[[Box, Tensor], None]]:
    """What writes a rectangle of each weight that is in fp8 blocks, dequantised, into a tensor of its extents."""
    return {name: partial(_write, own) for name, own in parameters.items() if isinstance(own, Fp8Weight)}


def _write(weight: Fp8Weight, box: Box, out: Tensor) -> None:
    out.copy_(weight[slices(box)])
