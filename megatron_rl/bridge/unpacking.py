"""vLLM on a CPU packs linear weights for oneDNN and experts for its grouped kernel, and drops the originals. Joining
the bridge gives the layers full parameters again and lets the forward pass read them, so a push is a copy into live
parameters, as on a GPU.

Invariant (tests/ranks): log-probs equal transformers'.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_rl.types import TOWER


def unpack(model: nn.Module, with_tower: bool) -> None:
    """Undo vLLM's packing for a CPU: the forward pass reads full parameters, and the next push gives them values. A
    vision tower that no push changes stays as it is."""
    for name, layer in model.named_modules():
        if name.startswith(TOWER) and not with_tower:
            continue
        if hasattr(layer, "cpu_linear"):
            _unpack_linear(layer)
        elif hasattr(layer, "w13_weight"):
            _unpack_experts(layer)


def _unpack_linear(layer: Any) -> None:
    """Let a layer compute with its weight. On a CPU the unquantised linear layers and output layers of vLLM call
    `cpu_linear`, which holds a packed copy of the weight."""
    layer.cpu_linear = nn.functional.linear
    if getattr(layer, "bias", None) is not None:
        layer.bias.data = layer.bias.data.to(layer.weight.dtype)  # a kernel for bfloat16 has taken it as float32
    if layer.weight.numel() == 0:
        columns = getattr(layer, "input_size_per_partition", layer.input_size)  # a replicated layer has no partition
        rows = getattr(layer, "output_size_per_partition", layer.output_size)
        layer.weight = _unwritten(layer.weight, rows, columns)


def _unpack_experts(layer: Any) -> None:
    """The kernel's packed experts have the extents of plain experts, or additional rows of zeros."""
    experts = layer.quant_method.moe_kernel.fused_experts
    if getattr(experts.apply, "func", None) is not apply_experts:
        num, ffn = layer.local_num_experts, layer.moe_config.intermediate_size_per_partition
        layer.w13_weight = _unwritten(layer.w13_weight, num, 2 * ffn, layer.hidden_size)
        layer.w2_weight = _unwritten(layer.w2_weight, num, layer.hidden_size, ffn)
        experts.apply = partial(apply_experts, biases=(experts.w1_bias, experts.w2_bias))


def _unwritten(weight: Tensor, *extents: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(extents, dtype=weight.dtype), requires_grad=False)


def apply_experts(
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    expert_map: Tensor | None,
    apply_router_weight_on_input: bool,
    **more: Any,
) -> None:
    """Apply this rank's experts in plain PyTorch. The arguments have the names and the order of vLLM's kernels.

    Shape letters: T tokens, K active experts, E experts of the rank, F their width, H hidden.

    Args:
        output, hidden_states: [T, H]
        w1, w2: gate's rows above up's rows, of gpt-oss by turns, [E, 2 F, H]; and down, [E, H, F].
        topk_weights, topk_ids: [T, K], over the experts of all ranks.
        expert_map: the place of every expert on this rank, or -1; None: this rank has all experts.
        more: `biases` of w1 and w2, [E, 2 F] and [E, H], each None if the model has none; and what other kernels need.
    """
    assert activation.value in ("silu", "swigluoai") and not apply_router_weight_on_input
    unit = _silu_unit if activation.value == "silu" else _clamped_unit
    b1, b2 = ([None] * len(w1) if bias is None else bias for bias in more["biases"])
    output.zero_()
    places_TK = topk_ids if expert_map is None else expert_map[topk_ids]
    for expert in range(len(w1)):
        token, choice = (places_TK == expert).nonzero(as_tuple=True)
        inner = unit(nn.functional.linear(hidden_states[token], w1[expert], b1[expert]))
        mixed = nn.functional.linear(inner, w2[expert], b2[expert]) * topk_weights[token, choice, None]
        output.index_add_(0, token, mixed.to(output.dtype))


def _silu_unit(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return nn.functional.silu(gate) * up


def _clamped_unit(x: Tensor) -> Tensor:
    """gpt-oss's, with the numbers that vLLM's kernels have (swigluoai_and_mul)."""
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))
