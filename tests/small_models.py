"""Models of a few layers, and models with other blocks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any

from megatron_rl.models import FAMILIES
from megatron_rl.types import Attention, GatedMlp, Layer, Mlp, ModelShape, Rope, SoftmaxAttention
from megatron_rl.types.mamba import is_absent


def model(
    family: str,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    ffn_size: int,
    vocab_size: int,
    max_positions: int = 64,
    **changes: Any,
) -> ModelShape:
    """A model of equal layers with softmax attention and a dense MLP, changed as `changed` does."""
    attention = SoftmaxAttention(num_heads, num_kv_heads, head_dim, Rope(1e4))
    layers = (Layer(attention, GatedMlp(ffn_size)),) * num_layers
    shape = ModelShape(family, hidden_size, vocab_size, 1e-6, max_positions, layers)
    return changed(shape, family=family, **changes)


def changed(
    shape: ModelShape,
    at: Collection[int] | None = None,
    *,
    attention: Attention | dict[str, Any] | None = None,
    mlp: Mlp | dict[str, Any] | None = None,
    family: str | None = None,
    **fields: Any,
) -> ModelShape:
    """The model with other blocks in the layers `at`; None means all layers.

    Args:
        attention: another block, or other fields of the blocks that are there; so is `mlp`.
        family: another family, whose table says what its layers have.
    """
    layers = list(shape.layers)
    for index in range(len(layers)) if at is None else at:
        own = layers[index]
        layers[index] = replace(own, attention=_other(own.attention, attention), mlp=_other(own.mlp, mlp))
    if family in FAMILIES:
        layers = [FAMILIES[family].layer(layer.attention, layer.mlp) for layer in layers]
    return replace(shape, layers=tuple(layers), family=family or shape.family, **fields)


def _other(block: Any, change: Any) -> Any:
    """An absent block has no fields to change."""
    if isinstance(change, dict):
        if is_absent(block):
            return block
        known = {field.name for field in fields(block)}
        return replace(block, **{name: value for name, value in change.items() if name in known})
    return change or block
