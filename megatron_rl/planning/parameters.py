"""The bytes of weights, gradients and optimizer state of a trainer rank, counted from the rows of a family's table.

Invariants (tests/unit/planning, tests/ranks): weights and gradients have the bytes that the actor allocates on every
rank on a CPU, and so has the optimizer's state of the ranks that share it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from megatron_rl.config.optimizer import AdamConfig, OptimizerConfig
from megatron_rl.models import FAMILIES, is_linear_weight, is_matrix, padded_vocabulary, volume
from megatron_rl.models.adapters import trains
from megatron_rl.models.multi_token import HEAD_EMBEDDING
from megatron_rl.models.quantisation import FROZEN_BLOCKS
from megatron_rl.models.shards import is_vocabulary
from megatron_rl.types import Mesh, ModelShape

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The bytes of a parameter of each dtype."""


@dataclass(frozen=True, slots=True)
class RankParameters:
    """The elements of the parameters of one trainer rank, with the padding of the vocabulary. With adapters only they,
    and a value head, are trained, and all other weights are in `frozen`."""

    dense: int
    """The trained elements outside the routed experts: attention, norms, router, shared experts, embedding and output
    layer."""
    expert: int
    """The trained elements of the rank's routed experts."""
    padding: int = 0
    """The padding of the distributed optimizer's buffers of weights and of gradients, in elements."""
    constant: int = 0
    """The elements of fp32 parameters that have no gradient, such as the bias of a router."""
    matrices: int = 0
    """The elements of `dense` that are in matrices of layers."""
    expert_vectors: int = 0
    """The elements of `expert` that are not in matrices, but in biases."""
    frozen: int = 0
    """The elements of weights that adapters leave as they are. They have neither a gradient nor a state."""
    fp8: int = 0
    """The elements of `frozen` that are in fp8 blocks, one byte each."""
    fp8_scales: int = 0
    """The number of their float32 scales and int32 block numbers, four bytes each."""
    dequantised: int = 0
    """The elements of the largest weight of them or, with Transformer Engine's layers, of the weights of a layer's
    experts, which are multiplied together."""
    dequantised_alone: int = 0
    """The elements of the largest weight of them."""
    copied: int = 0
    """The elements of the embedding that a multi-token head reads on a last stage that is not the first one."""

    @property
    def trained(self) -> int:
        return self.dense + self.expert

    @property
    def total(self) -> int:
        return self.trained + self.frozen + self.copied + self.constant

    def weight_bytes(self, dtype: str) -> int:
        numbers = self.trained + self.padding + self.frozen - self.fp8 + self.copied
        return numbers * BYTES[dtype] + self.fp8 + (self.fp8_scales + self.constant) * 4

    def kept_bytes(self, dtype: str) -> int:
        """The bytes of the weights that a checkpoint and a mirror hold: of all of them, or without the frozen ones."""
        return self.trained * BYTES[dtype] if self.frozen else self.weight_bytes(dtype)

    def dequantised_bytes(self, dtype: str) -> int:
        """The bytes of the weights that are multiplied, and of the values and scales in float32 of the one that is
        made."""
        return self.dequantised * BYTES[dtype] + self.dequantised_alone * 8

    def gradient_bytes(self, optimizer: OptimizerConfig = AdamConfig()) -> int:
        """The bytes of the buffer of gradients."""
        return (self.trained + self.padding) * BYTES[optimizer.gradients]

    def state_elements(self, mesh: Mesh) -> float:
        """The parameters whose optimizer state is on this rank.

        This is the mean of the ranks that share the state. Megatron gives each rank an equal interval of the padded
        buffer. A single rank may hold more than the mean, at most by the padding, which is then on other ranks.
        """
        dense_ways, expert_ways = optimizer_ways(mesh)
        return self.dense / dense_ways + self.expert / expert_ways

    def state_bytes(self, mesh: Mesh, dtype: str, optimizer: OptimizerConfig = AdamConfig()) -> float:
        """The bytes of the optimizer's state of this rank between two updates, wherever it is."""
        dense_ways, expert_ways = optimizer_ways(mesh)
        of_matrices, of_others = (state_width(dtype, optimizer, is_matrix) for is_matrix in (True, False))
        dense = self.matrices * of_matrices + (self.dense - self.matrices) * of_others
        expert = (self.expert - self.expert_vectors) * of_matrices + self.expert_vectors * of_others
        return dense / dense_ways + expert / expert_ways

    def bytes(self, mesh: Mesh, dtype: str, optimizer: OptimizerConfig) -> float:
        """The bytes of weights, gradients and optimizer state together."""
        return self.weight_bytes(dtype) + self.gradient_bytes(optimizer) + self.state_bytes(mesh, dtype, optimizer)


def state_width(dtype: str, optimizer: OptimizerConfig, is_matrix: bool) -> int:
    """The bytes of a parameter's state between two updates: its moments, and an fp32 copy of a weight in two bytes.

    Args:
        is_matrix: whether the parameter is in a matrix of a layer.
    """
    return optimizer.moment_bytes(is_matrix) + (4 if BYTES[dtype] == 2 else 0)


@lru_cache(maxsize=4096)
def rank_parameters(shape: ModelShape, mesh: Mesh, rank: int, fused: bool = False) -> RankParameters:
    """The parameters of a rank, counted from the rows of the family's table.

    With the distributed optimizer each chunk of the model has one buffer for its dense parameters and one for its
    experts. In a buffer every parameter begins at a multiple of 64 elements, and every bucket ends at a multiple of 128
    and of the number of ranks that share it. A tied embedding is a bucket of its own where first and last stage have
    separate copies of it. On GPUs gradients are reduced in more buckets (`overlap_grad_reduce`), whose padding is not
    counted.

    Args:
        fused: the layers are Transformer Engine's, whose down projections of latent attention are whole on each rank.
    """
    dense_ways, expert_ways = optimizer_ways(mesh)
    rows = padded_vocabulary(shape, mesh.tensor) // mesh.tensor
    totals, constant, matrices, expert_vectors, frozen, copied = {False: 0, True: 0}, 0, 0, 0, 0, 0
    fp8 = fp8_scales = dequantised = dequantised_alone = 0
    buckets: dict[tuple[str, bool, bool], int] = {}
    for placement, _, prefix in FAMILIES[shape.family].megatron_placed(shape, mesh, rank, fused):
        in_vocabulary = is_vocabulary(placement.local_name)
        elements = sum(volume(local) for _, _, local in placement.pieces)
        if in_vocabulary:
            [(_, _, (_, (_, width)))] = placement.pieces
            elements = rows * width
        number = placement.num_experts
        if placement.float32:
            constant += elements * number
            continue
        if placement.local_name == HEAD_EMBEDDING:
            copied += elements
            continue
        if not trains(shape, placement.local_name):
            frozen += elements * number
            name, _, local = placement.pieces[0]
            if shape.is_frozen_in_fp8 and is_linear_weight(name, len(local), shape):
                width = local[1][1] - local[1][0]
                fp8 += elements * number
                # A parameter has its blocks of columns once, also if several rows of the table are parts of it.
                columns = width if local[0][0] == 0 else 0
                fp8_scales += (elements // width * FROZEN_BLOCKS.most_columns(width) + columns) * number
                dequantised = max(dequantised, elements * (number if fused else 1))
                dequantised_alone = max(dequantised_alone, elements)
            continue
        of_experts = placement.experts is not None
        totals[of_experts] += elements * number
        is_one = is_matrix(placement.local_name, len(placement.pieces[0][2]))
        matrices += 0 if of_experts or not is_one else elements
        expert_vectors += elements * number if of_experts and not is_one else 0
        chunk = prefix.partition(".")[0] if mesh.virtual > 1 else ""
        alone = in_vocabulary and shape.tied_embeddings and mesh.pipeline > 1
        # Without expert parallelism Megatron keeps the experts in the buffer of the dense parameters.
        bucket = (chunk, of_experts and mesh.expert > 1, alone)
        buckets[bucket] = buckets.get(bucket, 0) + _rounded(elements, 64) * number
    padding = 0
    if dense_ways > 1:
        ways = {False: dense_ways, True: expert_ways}
        buffers = sum(_rounded(size, math.lcm(ways[expert], 128)) for (_, expert, _), size in buckets.items())
        padding = buffers - sum(totals.values())
    of_frozen = frozen, fp8, fp8_scales, dequantised, dequantised_alone
    return RankParameters(totals[False], totals[True], padding, constant, matrices, expert_vectors, *of_frozen, copied)


class ParameterCount(NamedTuple):
    """The numbers of parameters of a whole model. A tied embedding counts once."""

    trained: int
    frozen: int


def count_parameters(shape: ModelShape) -> ParameterCount:
    family = FAMILIES[shape.family]
    trained = sum(math.prod(extents) for name, extents in family.hf_tensors(shape).items() if trains(shape, name))
    return ParameterCount(trained, family.num_parameters(shape) - trained)


def stage_parameters(shape: ModelShape, mesh: Mesh, fused: bool = False) -> list[RankParameters]:
    """The parameters of a rank of each pipeline stage; all ranks of a stage hold equally many."""
    return [rank_parameters(shape, mesh, stage * mesh.stage_size, fused) for stage in range(mesh.pipeline)]


def largest_stage(
    shape: ModelShape, mesh: Mesh, dtype: str, optimizer: OptimizerConfig, fused: bool = False
) -> RankParameters:
    """The parameters of a rank of the stage whose weights, gradients and optimizer state have the most bytes."""
    return max(stage_parameters(shape, mesh, fused), key=lambda held: held.bytes(mesh, dtype, optimizer))


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def optimizer_ways(mesh: Mesh) -> tuple[int, int]:
    """The number of ranks over which Megatron's distributed optimizer splits the state of a parameter, as (dense,
    expert).

    These are the ranks that hold the same parameter: the data x context ranks for a dense parameter, and the
    expert-data-parallel ranks for a parameter of an expert. Without data and context parallelism the actor uses the
    plain optimizer, which splits nothing.
    """
    dense = mesh.data * mesh.context
    return (dense, expert_data_ways(mesh)) if dense > 1 else (1, 1)


def expert_data_ways(mesh: Mesh) -> int:
    """Expert data parallelism: the number of ranks of a stage that hold the same part of the same experts."""
    return mesh.stage_size // (mesh.expert * mesh.expert_ways)


def checkpoint_bytes(shape: ModelShape, dtype: str, optimizer: OptimizerConfig = AdamConfig()) -> int:
    """The bytes of one checkpoint: the weights and the optimizer's state, once, in every layout. With adapters it has
    what is trained alone."""
    num_elements = {True: 0, False: 0}
    for name, extents in FAMILIES[shape.family].hf_tensors(shape).items():
        if not trains(shape, name):
            continue
        num_elements[is_matrix(name, len(extents))] += math.prod(extents)
    return sum(number * (BYTES[dtype] + state_width(dtype, optimizer, one)) for one, number in num_elements.items())


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2f} MB"
