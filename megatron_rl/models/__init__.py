"""The models: families, the rows of their tables, and what config.json and a folder's files say. README.md describes
them."""

from __future__ import annotations

from functools import lru_cache

from megatron_rl.models.adapters import linear_names
from megatron_rl.models.composite import check_text_alone
from megatron_rl.models.config import critic_config, critic_shape, hub_hint, read_shape
from megatron_rl.models.families import FAMILIES
from megatron_rl.models.family import Family
from megatron_rl.models.fused import obstacle_to_fused_layers
from megatron_rl.models.hub import HubIndex, check_model, scan
from megatron_rl.models.matrices import is_matrix
from megatron_rl.models.placement import engine_layers
from megatron_rl.models.shards import Box, Shard, check_parameters, slices, volume
from megatron_rl.models.splits import VOCABULARY_MULTIPLE, padded
from megatron_rl.types import Mesh, ModelShape


def megatron_shards(shape: ModelShape, mesh: Mesh, rank: int, fused_norms: bool = False) -> list[Shard]:
    return FAMILIES[shape.family].megatron_shards(shape, mesh, rank, fused_norms)


def vllm_shards(
    shape: ModelShape, tensor: int, rank: int, expert_parallel: bool = False, pipeline: int = 1
) -> list[Shard]:
    return FAMILIES[shape.family].vllm_shards(shape, tensor, rank, expert_parallel, pipeline)


def linear_layers(shape: ModelShape) -> list[str]:
    """The names of the linear layers of a model's layers, as `Adapters.targets` has them: q_proj, k_proj and so on."""
    family = FAMILIES[shape.family]
    return linear_names([rule for layer in dict.fromkeys(shape.layers) for rule in family.layer_rules(layer)])


def is_linear_weight(name: str, num_dims: int, shape: ModelShape) -> bool:
    """Whether an HF tensor is the weight of a linear layer of the model's layers.

    Args:
        num_dims: of the tensor.
    """
    parts = name.split(".")
    return num_dims == 2 and parts[-1] == "weight" and len(parts) > 1 and parts[-2] in _linear_layers(shape)


@lru_cache(maxsize=64)
def _linear_layers(shape: ModelShape) -> frozenset[str]:
    return frozenset(linear_layers(shape))


def padded_vocabulary(shape: ModelShape, tensor: int) -> int:
    """The number of rows of Megatron's embedding over all tensor-parallel ranks, padding included."""
    return padded(shape.vocab_size, VOCABULARY_MULTIPLE * tensor)


__all__ = [
    "FAMILIES",
    "VOCABULARY_MULTIPLE",
    "Box",
    "Family",
    "HubIndex",
    "Shard",
    "check_model",
    "check_parameters",
    "check_text_alone",
    "critic_config",
    "critic_shape",
    "engine_layers",
    "hub_hint",
    "is_matrix",
    "is_linear_weight",
    "linear_layers",
    "megatron_shards",
    "obstacle_to_fused_layers",
    "padded_vocabulary",
    "read_shape",
    "scan",
    "slices",
    "vllm_shards",
    "volume",
]
