"""Says which models Transformer Engine's layers can express, as Megatron-Core uses them."""

from __future__ import annotations

from megatron_rl.types import Attention, DeltaNet, GatedMlp, LatentAttention, Llama3Rope, ModelShape, SoftmaxAttention


def obstacle_to_fused_layers(shape: ModelShape, context: int) -> str | None:
    """Why Transformer Engine's layers, as Megatron uses them, cannot express the model; None if they can.

    Args:
        context: the context-parallel size.
    """
    for layer in dict.fromkeys(shape.layers):
        if layer.post_norm:
            return f"{shape.family} has norms after its blocks, and its layers have none"
        if obstacle := _of_attention(layer.attention, shape.family, context):
            return obstacle
        if isinstance(layer.mlp, GatedMlp) and layer.mlp.activation != "silu":
            return f"their fused MLP has no {layer.mlp.activation}, and {shape.family} has it"
    ropes = {block.rope for block in shape.attentions if isinstance(block, SoftmaxAttention)}
    if len(ropes) > 1:
        return f"Megatron rotates all their layers alike, and {shape.family} does not"
    return None


def _of_attention(attention: Attention, family: str, context: int) -> str | None:
    scaling = attention.rope.scaling if isinstance(attention, SoftmaxAttention) else None  # of the others it is ours
    match attention:
        case DeltaNet():
            return f"Megatron's linear attention takes no packed rows, and {family} has layers with it"
        case SoftmaxAttention(sinks=True):
            return f"its attention takes no sinks in packed rows, and {family} has them"
        case SoftmaxAttention(norms="full"):
            return f"they normalise each head of q and k by itself, and {family} all heads together"
        case SoftmaxAttention(window=int()) if context > 1:
            return "their attention takes no sliding windows with policy.parallel.context above 1"
        case LatentAttention(head_dim=key, value_dim=value) if not _takes_heads(key, value):
            return f"cuDNN's attention trains no heads of {key} dims in query and key and {value} in value"
    if scaling is not None and scaling != Llama3Rope(scaling.factor, 1.0, 4.0, 8192):
        return "Megatron gives its layers no other rotary scaling than Llama 3.1's"
    return None


def _takes_heads(key: int, value: int) -> bool:
    """Whether Transformer Engine 2.11 finds an attention of cuDNN (9.11 or newer) for heads of these dims, in training
    on Hopper (nvte_get_fused_attn_backend in fused_attn.cpp). Blackwell takes 192 with 128, and otherwise 128 at
    most."""
    if key % 8 or value % 8 or max(key, value) > 256:
        return False
    return key == value or min(key, value) < 128 or (key, value) == (192, 128)
