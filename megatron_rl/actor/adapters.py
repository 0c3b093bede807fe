"""Low-rank adapters of the linear layers of a model, whose own weights are frozen.

An adapter adds `scale B A x` to the output of its layer; `models/adapters.py` says which parts of A and B a rank has.
Its collectives carry A x, of `rank` numbers a token, in place of the layer's input or output: where the layer gathers
the tokens of sequence parallelism, A x is gathered, and where the layer sums its output over TP, A x is summed.
Of Transformer Engine's layers that begin with a norm, x is the norm's output, which they return on request. They can
gather it, too, but then Transformer Engine 2.11 adds nothing of its gradient to the input's. The output layer
multiplies nothing, so its adapter enters where the logits are computed (logprobs.py).

Invariants (tests/ranks, tests/gpu_set): the gradients of A and B do not depend on the layout nor on the kind of layers;
with B = 0 all numbers are the base model's, bit for bit; so they are while adapters are off.

Shape letters: T tokens, R rows of A (the rank, for each weight that the layer fuses), O outputs of the layer on this
rank, H its inputs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import RowParallelLinear, set_tensor_model_parallel_attributes
from torch import Tensor, nn

from megatron_rl.actor.gradient_sum import copied_to_all_ranks
from megatron_rl.actor.logprobs import OutputLayer
from megatron_rl.algorithms.logprobs import LowRank
from megatron_rl.convert.adapters import write_merged
from megatron_rl.models import Box, Shard, slices
from megatron_rl.models.adapters import A, B, is_adapter
from megatron_rl.models.shards import local_extents
from megatron_rl.types import Adapters

Linear: TypeAlias = Any
"""A linear layer of Megatron, its own one or Transformer Engine's, which has no types."""
SPLITS: dict[str, Literal["outputs", "inputs", "nothing"]] = {
    "ColumnParallelLinear": "outputs",
    "RowParallelLinear": "inputs",
    "TEColumnParallelLinear": "outputs",
    "TELayerNormColumnParallelLinear": "outputs",
    "TERowParallelLinear": "inputs",
    "TEColumnParallelGroupedLinear": "outputs",
    "TERowParallelGroupedLinear": "inputs",
    "TELinear": "nothing",
}
"""What TP splits of a layer, by the name of its class: most of these classes exist only with Transformer Engine."""


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
            for expert in adapter.experts:
                self.merges[f"{prefix}{name}.weight{expert}"] = partial(adapter.write_merged, expert)


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
        added[name] = Adapter(gpt.get_submodule(name), parts, adapters, seed, switch)
    if by_layer and gpt.pre_process:
        # Nothing below the first adapter has a gradient, and Megatron's recomputation ends the graph of a layer whose
        # input needs none.
        gpt.embedding.register_forward_hook(lambda module, inputs, output: _with_gradient(output))
    return added


def _with_gradient(output: Tensor) -> Tensor:
    return output if output.requires_grad or not torch.is_grad_enabled() else output.detach().requires_grad_()


class _Wiring(NamedTuple):
    """How a layer is distributed over the ranks of a group, and who communicates."""

    splits: Literal["outputs", "inputs", "nothing"]
    group: dist.ProcessGroup
    sequence_parallel: bool
    is_expert: bool
    is_outside: bool
    """Tokens are gathered and outputs summed around the layer, by the dispatcher of experts for example."""

    @classmethod
    def of(cls, layer: Linear) -> _Wiring:
        known = [SPLITS[kind.__name__] for kind in type(layer).__mro__ if kind.__name__ in SPLITS]
        assert known, f"{type(layer).__name__} is none of {', '.join(SPLITS)}"
        splits = known[0]
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            # The gradient of the output layer's A is summed where its product is computed.
            is_outside = layer.explicit_expert_comm or isinstance(layer, OutputLayer)
            return cls(splits, layer.tp_group, layer.sequence_parallel, layer.is_expert, is_outside)
        # Megatron takes the mode from layers of Transformer Engine that do not communicate.
        is_outside = splits != "nothing" and layer.parallel_mode is None
        return cls(splits, layer._tp_group, layer.config.sequence_parallel, hasattr(layer, "num_gemms"), is_outside)


class Adapter:
    """The adapters of one layer: one, or one for each expert of a grouped layer. Their parameters are the layer's, and
    a hook of the layer adds their product. The output layer has no hook, but gives both to who computes the logits."""

    def __init__(self, layer: Linear, shards: Iterable[Shard], adapters: Adapters, seed: int, switch: Adapting) -> None:
        """
        Args:
            shards: of A, B and the layer's own parameters.
        """
        self._scale, self._switch, self._layer, self._wiring = adapters.scale, switch, layer, _Wiring.of(layer)
        parts: dict[str, list[Shard]] = {}
        for shard in shards:
            parts.setdefault(shard.local_name.rpartition(".")[2], []).append(shard)
        self.experts = [name.removeprefix(A) for name in parts if name.startswith(A)]
        """What the names of the parameters end with: nothing, or the number of an expert of a grouped layer."""
        for expert in self.experts:
            self._add_parameters(expert, parts[A + expert], parts[B + expert], seed)
        self._returns_norm = hasattr(layer, "return_layernorm_output")
        if self._returns_norm:
            layer.return_layernorm_output = True
        first = self.experts[0]  # all experts have the same rows
        of_a, of_b, base = parts[A + first], parts[B + first], getattr(layer, f"weight{first}")
        self._blocks_OR: Tensor | None = None
        """1 where a row of B belongs to the columns of its own A, if the layer fuses several weights."""
        self._columns: Tensor | None = None
        """The layer's outputs that the rows of B belong to; None: all, in their order."""
        names = [shard.hf_name.replace(f".{A}.", f".{B}.") for shard in of_a]
        num_rows = len(getattr(layer, B + first))
        if len(names) > 1:
            blocks_OR = torch.zeros(num_rows, len(names) * adapters.rank, dtype=base.dtype, device=base.device)
            for shard in of_b:
                (start, stop), column = shard.local_box[0], names.index(shard.hf_name) * adapters.rank
                blocks_OR[start:stop, column : column + adapters.rank] = 1
            self._blocks_OR, self._num_fused = blocks_OR, len(names)
        rows = {(shard.hf_name, shard.hf_box[0]): shard.local_box[0] for shard in parts[f"weight{first}"]}
        places = [rows[shard.hf_name.replace(f"{B}.", ""), shard.hf_box[0]] for shard in of_b]
        rows_of_a = {shard.hf_name.replace(f"{A}.", f"{B}."): shard.local_box[0] for shard in of_a}
        self._products = [
            (place, shard.local_box[0], rows_of_a[shard.hf_name]) for place, shard in zip(places, of_b, strict=True)
        ]
        """Rows of a weight, and the rows of B and of A whose product belongs to them."""
        if num_rows < len(base):  # some of the weights that the layer fuses have no adapters
            outputs = [row for place in places for row in range(*place)]
            self._columns = torch.tensor(outputs, device=base.device)
        if isinstance(layer, OutputLayer):
            layer.low_rank = self._low_rank
        else:
            layer.register_forward_hook(self)

    def _add_parameters(self, expert: str, of_a: Sequence[Shard], of_b: Sequence[Shard], seed: int) -> None:
        """Give the layer A and B of one weight, with the marks by which Megatron sums gradients and norms."""
        base = getattr(self._layer, f"weight{expert}")
        splits, group, sequence_parallel, is_expert, is_outside = self._wiring
        (a_extents,), (b_extents,) = (local_extents(part).values() for part in (of_a, of_b))
        if isinstance(self._layer, OutputLayer):
            b_extents = len(base), b_extents[1]  # with the padding rows of the vocabulary
        a_RH: Any = nn.Parameter(torch.empty(a_extents, dtype=base.dtype, device=base.device))
        b_OR: Any = nn.Parameter(torch.zeros(b_extents, dtype=base.dtype, device=base.device))
        num_inputs = a_extents[1] * (group.size() if splits == "inputs" else 1)
        for shard in of_a:
            a_RH.data[slices(shard.local_box)] = _initial(shard, num_inputs, seed)
        for name, parameter, held_in, dim in ((A, a_RH, "inputs", 1), (B, b_OR, "outputs", 0)):
            self._layer.register_parameter(name + expert, parameter)
            if hasattr(base, "allreduce"):
                parameter.allreduce = base.allreduce  # Megatron's mark of experts
            if splits == held_in:
                set_tensor_model_parallel_attributes(parameter, True, dim, 1)
                continue
            if is_expert:
                # Megatron counts a parameter in norms if it has this mark, or is on the first rank of the model's TP.
                parameter.tensor_model_parallel = group.rank() == 0
            # Megatron sums the gradients of such parameters over TP: with sequence parallelism each rank has other
            # tokens.
            parameter.sequence_parallel = sequence_parallel and not is_outside

    def __call__(self, layer: Linear, inputs: tuple[Any, ...], output: tuple[Any, Tensor | None]) -> tuple[Any, ...]:
        """
        Args:
            inputs: the layer's; of a grouped layer its tokens, and how many of them each expert has.
        """
        whole, bias = output
        input_TH = inputs[0]
        if self._returns_norm:
            whole, input_TH = whole
        if not self._switch.is_on:
            return whole, bias
        parts = input_TH.split(inputs[1]) if len(inputs) > 1 else (input_TH,)
        sums = [self._added(part, expert) for part, expert in zip(parts, self.experts, strict=True)]
        added = torch.cat(sums) if len(sums) > 1 else sums[0]
        return whole + added if self._columns is None else whole.index_add(-1, self._columns, added), bias

    def _low_rank(self) -> LowRank | None:
        """A and B of the output layer. Each rank has the gradient of A from its part of the vocabulary."""
        if not self._switch.is_on:
            return None
        layer = self._layer
        return LowRank(copied_to_all_ranks(layer.lora_A, layer.tp_group), layer.lora_B, self._scale)

    def write_merged(self, expert: str, box: Box, out: Tensor) -> None:
        """Write a rectangle of a weight of the layer on this rank, with the product of the same rectangle added. Each
        rank has the rows of B and the columns of A that belong to its part of the weight.

        Args:
            expert: one of `experts`.
            out: has the rectangle's extents, and any dtype.
        """
        whole, a_RH, b_OR = (getattr(self._layer, name + expert) for name in ("weight", A, B))
        (first, last), columns = box[0], slice(*box[1])
        part = whole[slices(box)]
        out.copy_(part)
        if out.dtype == part.dtype:
            part = out  # so a weight in fp8 blocks is dequantised once
        for (start, stop), (b_start, _), rows_of_a in self._products:
            begin, end = max(start, first), min(stop, last)
            if begin < end:
                b_rows = b_OR[b_start + begin - start : b_start + end - start]
                a_part = a_RH[slice(*rows_of_a), columns]
                rows = slice(begin - first, end - first)
                write_merged(out[rows], part[rows], a_part, b_rows, self._scale)

    def _added(self, input_TH: Tensor, expert: str) -> Tensor:
        """`scale B A x`, of the tokens and the outputs that the layer returns on this rank."""
        a_RH, b_OR = getattr(self._layer, A + expert), getattr(self._layer, B + expert)
        if self._wiring.is_outside:
            # Each rank has a part of the gradient of what all of them hold.
            if self._wiring.splits == "outputs":
                a_RH = copied_to_all_ranks(a_RH, self._wiring.group)
            else:
                b_OR = copied_to_all_ranks(b_OR, self._wiring.group)
            middle_TR = input_TH @ a_RH.t()
        else:
            middle_TR = self._shared(input_TH @ a_RH.t())
        if self._blocks_OR is not None:  # each output's row of B, in the columns of its own A
            b_OR = b_OR.repeat(1, self._num_fused) * self._blocks_OR
        added: Tensor = (self._scale * middle_TR) @ b_OR.t()
        return added

    def _shared(self, middle_TR: Tensor) -> Tensor:
        """A x of the tokens of the layer's output, over all inputs."""
        splits, group, sequence_parallel, *_ = self._wiring
        if splits == "nothing":
            return middle_TR
        if splits == "outputs" and sequence_parallel:
            shared = gather_from_sequence_parallel_region(middle_TR, tensor_parallel_output_grad=True, group=group)
        elif splits == "outputs":
            shared = copied_to_all_ranks(middle_TR, group)
        elif sequence_parallel:
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
