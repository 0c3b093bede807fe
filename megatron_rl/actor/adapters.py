"""Low-rank adapters of the linear layers of a model, whose own weights are frozen.

An adapter adds `scale B A x` to the output of its layer; `layout/adapters.py` says which parts of A and B a rank has.
Its collectives carry A x, of `rank` numbers a token, in place of the layer's input or output: where the layer gathers
the tokens of sequence parallelism, A x is gathered, and where the layer sums its output over TP, A x is summed.
The output layer multiplies nothing, so its adapter enters where the logits are computed (logprobs.py).
Invariants (tests/dist): the gradients of A and B do not depend on the layout; with B = 0 all numbers are the base
model's, bit for bit; so they are while adapters are off.

Shape letters: T tokens, R rows of A (the rank, for each weight that the layer fuses), O outputs of the layer on this
rank, H its inputs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import RowParallelLinear, set_tensor_model_parallel_attributes
from torch import Tensor, nn

from megatron_rl.actor.copied import copied_to_all_ranks
from megatron_rl.actor.logprobs import OutputLayer
from megatron_rl.algorithms.logprobs import LowRank
from megatron_rl.convert.adapters import write_merged
from megatron_rl.layout import Box, Shard, slices
from megatron_rl.layout.adapters import A, B, is_adapter
from megatron_rl.layout.shards import local_extents
from megatron_rl.types import Adapters

Linear: TypeAlias = Any
"""A ColumnParallelLinear or a RowParallelLinear of Megatron, which has no types."""


class Adapting:
    """The adapters of a process's models."""

    def __init__(self, adapters: Adapters, shards: Iterable[Shard], seed: int) -> None:
        """
        Args:
            shards: all parts of this rank's parameters.
        """
        self._adapters, self._shards, self._seed = adapters, list(shards), seed
        self.is_on = True
        """Whether the adapters add something."""
        self.merges: dict[str, Callable[[Box, Tensor], None]] = {}
        """What writes a rectangle of a weight, with scale B A added, into a tensor of the rectangle's extents; by the
        local names of the weights that have adapters."""

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside the block the models are the base model."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True

    def adapt(self, gpt: GPTModel, prefix: str) -> None:
        """Freeze a model's weights, and give its layers their adapters: B is zero, and A uniform in
        +- 1 / sqrt(inputs), as in PEFT. The random numbers of an A depend on its name and the seed alone, so every
        layout begins with the same.

        Args:
            prefix: what the names of the model's shards begin with, such as `chunk1.`.
        """
        own = [shard for shard in self._shards if shard.local_name.startswith(prefix)]
        own = [replace(shard, local_name=shard.local_name.removeprefix(prefix)) for shard in own]
        for name, adapter in _add_adapters(gpt, own, self._adapters, self._seed, self).items():
            self.merges[f"{prefix}{name}.weight"] = adapter.write_merged


def _add_adapters(
    gpt: GPTModel, shards: Iterable[Shard], adapters: Adapters, seed: int, switch: Adapting
) -> dict[str, Adapter]:
    """Returns the adapters by the names of their layers."""
    for name, parameter in gpt.named_parameters():
        parameter.requires_grad_(name.startswith("value_head."))
    by_layer: dict[str, list[Shard]] = {}
    for shard in shards:
        by_layer.setdefault(shard.local_name.rpartition(".")[0], []).append(shard)
    by_layer = {name: parts for name, parts in by_layer.items() if any(is_adapter(part.local_name) for part in parts)}
    added = {}
    for name, parts in by_layer.items():
        layer = gpt.get_submodule(name)
        assert isinstance(layer, ColumnParallelLinear | RowParallelLinear), f"{name} is {type(layer).__name__}"
        added[name] = Adapter(layer, parts, adapters, seed, switch)
    if by_layer and gpt.pre_process:
        # Nothing below the first adapter has a gradient, and Megatron's recomputation ends the graph of a layer whose
        # input needs none.
        gpt.embedding.register_forward_hook(lambda module, inputs, output: _with_gradient(output))
    return added


def _with_gradient(output: Tensor) -> Tensor:
    return output if output.requires_grad or not torch.is_grad_enabled() else output.detach().requires_grad_()


class Adapter:
    """The adapter of one layer. Its parameters are the layer's, and a hook of the layer adds their product. The output
    layer has no hook, but gives both to who computes the logits."""

    def __init__(self, layer: Linear, shards: Sequence[Shard], adapters: Adapters, seed: int, switch: Adapting) -> None:
        """
        Args:
            shards: of A, B and the layer's weight.
        """
        self._scale, self._switch, self._layer = adapters.scale, switch, layer
        of_a = [shard for shard in shards if shard.local_name.endswith(A)]
        of_b = [shard for shard in shards if shard.local_name.endswith(B)]
        base, is_last = layer.weight, isinstance(layer, OutputLayer)
        (a_extents,), (b_extents,) = (local_extents(part).values() for part in (of_a, of_b))
        if is_last:
            b_extents = len(base), adapters.rank  # with the padding rows of the vocabulary
        a_RH: Any = nn.Parameter(torch.empty(a_extents, dtype=base.dtype, device=base.device))
        b_OR: Any = nn.Parameter(torch.zeros(b_extents, dtype=base.dtype, device=base.device))
        for shard in of_a:
            a_RH.data[slices(shard.local_box)] = _initial(shard, layer.input_size, seed)
        self._splits_output = isinstance(layer, ColumnParallelLinear)
        layer.register_parameter(A, a_RH)
        layer.register_parameter(B, b_OR)
        split, whole = (b_OR, a_RH) if self._splits_output else (a_RH, b_OR)
        set_tensor_model_parallel_attributes(split, True, 0 if self._splits_output else 1, 1)
        for parameter in (a_RH, b_OR):
            if hasattr(base, "allreduce"):
                parameter.allreduce = base.allreduce  # Megatron's mark of experts
        if layer.is_expert:
            # Megatron counts a parameter in norms if it has this mark, or is on the first rank of the model's TP.
            whole.tensor_model_parallel = layer.tp_group.rank() == 0
        # Megatron sums the gradients of such parameters over TP: with sequence parallelism each rank has other tokens.
        whole.sequence_parallel = layer.sequence_parallel and not layer.explicit_expert_comm and not is_last
        self._blocks_OR: Tensor | None = None
        """1 where a row of B belongs to the columns of its own A, if the layer fuses several weights."""
        self._columns: Tensor | None = None
        """The layer's outputs that the rows of B belong to; None: all, in their order."""
        names = [shard.hf_name.replace(f".{A}.", f".{B}.") for shard in of_a]
        if len(names) > 1:
            blocks_OR = torch.zeros(b_extents[0], len(names) * adapters.rank, dtype=base.dtype, device=base.device)
            for shard in of_b:
                (start, stop), first = shard.local_box[0], names.index(shard.hf_name) * adapters.rank
                blocks_OR[start:stop, first : first + adapters.rank] = 1
            self._blocks_OR, self._num_fused = blocks_OR, len(names)
        rows = {(shard.hf_name, shard.hf_box[0]): shard.local_box[0] for shard in shards}
        places = [rows[shard.hf_name.replace(f"{B}.", ""), shard.hf_box[0]] for shard in of_b]
        rows_of_a = {shard.hf_name.replace(f"{A}.", f"{B}."): shard.local_box[0] for shard in of_a}
        self._products = [
            (place, shard.local_box[0], rows_of_a[shard.hf_name]) for place, shard in zip(places, of_b, strict=True)
        ]
        """Rows of the layer's weight, and the rows of B and of A whose product belongs to them."""
        if b_extents[0] < len(base):  # some of the weights that the layer fuses have no adapters
            outputs = [row for place in places for row in range(*place)]
            self._columns = torch.tensor(outputs, device=base.device)
        if is_last:
            layer.low_rank = self._low_rank
        else:
            layer.register_forward_hook(self)

    def __call__(
        self, layer: Linear, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        if not self._switch.is_on:
            return output
        whole, bias = output
        added = self._added(layer, inputs[0])
        return whole + added if self._columns is None else whole.index_add(-1, self._columns, added), bias

    def _low_rank(self) -> LowRank | None:
        """A and B of the output layer. Each rank has the gradient of A from its part of the vocabulary."""
        if not self._switch.is_on:
            return None
        layer = self._layer
        return LowRank(copied_to_all_ranks(layer.lora_A, layer.tp_group), layer.lora_B, self._scale)

    def write_merged(self, box: Box, out: Tensor) -> None:
        """Write a rectangle of the layer's weight on this rank, with the product of the same rectangle added. Each rank
        has the rows of B and the columns of A that belong to its part of the weight.

        Args:
            out: has the rectangle's extents, and any dtype.
        """
        layer, (first, last), columns = self._layer, box[0], slice(*box[1])
        out.copy_(layer.weight[slices(box)])
        for (start, stop), (b_start, _), rows_of_a in self._products:
            begin, end = max(start, first), min(stop, last)
            if begin < end:
                b_OR = layer.lora_B[b_start + begin - start : b_start + end - start]
                a_RH = layer.lora_A[slice(*rows_of_a), columns]
                weight_OH = layer.weight[begin:end, columns]
                write_merged(out[begin - first : end - first], weight_OH, a_RH, b_OR, self._scale)

    def _added(self, layer: Linear, input_TH: Tensor) -> Tensor:
        """`scale B A x`, of the tokens and the outputs that the layer returns on this rank."""
        a_RH, b_OR, group = layer.lora_A, layer.lora_B, layer.tp_group
        if layer.explicit_expert_comm:
            # The dispatcher gathers an expert's tokens and sums its outputs over the ranks that split it. Each rank
            # has a part of the gradient of what all of them hold.
            if self._splits_output:
                a_RH = copied_to_all_ranks(a_RH, group)
            else:
                b_OR = copied_to_all_ranks(b_OR, group)
            middle_TR = input_TH @ a_RH.t()
        else:
            middle_TR = self._shared(layer, input_TH @ a_RH.t())
        if self._blocks_OR is not None:  # each output's row of B, in the columns of its own A
            b_OR = b_OR.repeat(1, self._num_fused) * self._blocks_OR
        added: Tensor = (self._scale * middle_TR) @ b_OR.t()
        return added

    def _shared(self, layer: Linear, middle_TR: Tensor) -> Tensor:
        """A x of the tokens of the layer's output, over all inputs."""
        group = layer.tp_group
        if self._splits_output and layer.sequence_parallel:
            shared = gather_from_sequence_parallel_region(middle_TR, tensor_parallel_output_grad=True, group=group)
        elif self._splits_output:
            shared = copied_to_all_ranks(middle_TR, group)
        elif layer.sequence_parallel:
            shared = reduce_scatter_to_sequence_parallel_region(middle_TR, group=group)
        else:
            shared = reduce_from_tensor_model_parallel_region(middle_TR, group=group)
        result: Tensor = shared
        return result


def _initial(shard: Shard, num_inputs: int, seed: int) -> Tensor:
    """This rank's part of an A at the start.

    Args:
        num_inputs: of the whole layer.
    """
    rank = shard.hf_box[0][1]
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {shard.hf_name}".encode()))
    whole = torch.empty(rank, num_inputs).uniform_(-1, 1, generator=generator) / num_inputs**0.5
    part: Tensor = whole[slices(shard.hf_box)]
    return part
