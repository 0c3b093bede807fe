"""Says which models Transformer Engine's layers can express, as Megatron-Core uses them."""

from __future__ import annotations

from megatron_rl.layout.families import FAMILIES
from megatron_rl.types import Llama3Rope, ModelShape


def obstacle_to_fused_layers(shape: ModelShape, context: int) -> str | None:
    """Why Transformer Engine's layers, as Megatron uses them, cannot express the model; None if they can.

    Args:
        context: the context-parallel size.
    """
    rope = shape.rope_scaling
    if shape.adapters:
        return "low-rank adapters have not been built for its layers"
    if FAMILIES[shape.family].sinks:
        return f"the attention sinks of {shape.family} have not been tried with its layers"
    if FAMILIES[shape.family].post_norm:
        return f"{shape.family} has norms after its blocks, and its layers have none"
    if shape.latent:
        return f"the latent attention of {shape.family} has not been tried with its layers"
    if shape.delta:
        return f"the linear attention of {shape.family} has not been tried with its layers"
    if shape.rotary_dim < shape.head_dim:
        return "heads that are rotated in part have not been tried with its layers"
    if shape.sliding_layers and context > 1:
        return "their attention takes no sliding windows with policy.parallel.context above 1"
    if rope is not None and rope != Llama3Rope(rope.factor, 1.0, 4.0, 8192):
        return "Megatron gives its layers no other rotary scaling than Llama 3.1's"
    return None
