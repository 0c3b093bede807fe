"""Says which models Transformer Engine's layers can express, as Megatron-Core uses them."""

from __future__ import annotations

from megatron_rl.models.families import FAMILIES
from megatron_rl.types import Llama3Rope, ModelShape


def obstacle_to_fused_layers(shape: ModelShape, context: int) -> str | None:
    """Why Transformer Engine's layers, as Megatron uses them, cannot express the model; None if they can.

    Args:
        context: the context-parallel size.
    """
    family, rope, latent = FAMILIES[shape.family], shape.rope_scaling, shape.latent
    if family.sinks:
        return f"its attention takes no sinks in packed rows, and {shape.family} has them"
    if family.post_norm:
        return f"{shape.family} has norms after its blocks, and its layers have none"
    if shape.delta:
        return f"Megatron's linear attention takes no packed rows, and {shape.family} has layers with it"
    if shape.sliding_layers and context > 1:
        return "their attention takes no sliding windows with policy.parallel.context above 1"
    if latent and not _takes_heads(latent.nope_dim + latent.rope_dim, latent.value_dim):
        return (
            f"cuDNN's attention trains no heads of {latent.nope_dim + latent.rope_dim} dims in query and key and "
            f"{latent.value_dim} in value"
        )
    # The rotation of latent attention is ours.
    if latent is None and rope is not None and rope != Llama3Rope(rope.factor, 1.0, 4.0, 8192):
        return "Megatron gives its layers no other rotary scaling than Llama 3.1's"
    return None


def _takes_heads(key: int, value: int) -> bool:
    """Whether Transformer Engine 2.11 finds an attention of cuDNN (9.11 or newer) for heads of these dims, in training
    on Hopper (nvte_get_fused_attn_backend in fused_attn.cpp). Blackwell takes 192 with 128, and otherwise 128 at
    most."""
    if key % 8 or value % 8 or max(key, value) > 256:
        return False
    return key == value or min(key, value) < 128 or (key, value) == (192, 128)
