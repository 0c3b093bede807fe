"""Rows and keys of the families whose layers have linear attention in three of four layers: Qwen3-Next and Qwen3.5.

Their norms are zero-centred, their softmax attention has a gate for each number of a head's output, and a quarter of
each head is rotated. Megatron's names are as in its own layer with a gated delta rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.models.config_values import kinds_of_layers, number, size, whole_numbers
from megatron_rl.models.families.rows import ATTENTION_OUTPUT, HEAD_NORMS, INPUT_NORM, QKV_WEIGHT
from megatron_rl.models.families.windows import FULL
from megatron_rl.models.family import DESCRIBED
from megatron_rl.models.multi_token import MultiTokenHead, head_rows
from megatron_rl.models.rule import HfTensor, Rule
from megatron_rl.models.splits import COLUMNS, DELTA_SECTIONS, GATED_QKV, REPLICATED, ROWS
from megatron_rl.types import DeltaNet, ModelShape

GATED_ATTENTION = (
    INPUT_NORM,
    Rule(
        GATED_QKV,
        hf=(HfTensor("self_attn.q_proj.weight", ("q_and_gate", "hidden")), *QKV_WEIGHT.hf[1:]),
        megatron=QKV_WEIGHT.megatron,
        vllm=QKV_WEIGHT.vllm,
    ),
    *HEAD_NORMS,
    ATTENTION_OUTPUT,
)
HEAD = MultiTokenHead(
    r"mtp\..*",
    "they are the multi-token head",
    "mtp_num_hidden_layers",
    prefix="mtp.",
    layer="layers.0.",
    rows=head_rows("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "fc.weight", "norm.weight"),
)
"""Its layer has softmax attention."""


def engine_fault(shape: ModelShape, dtype: str, device: str) -> str | None:
    """vLLM's kernels on CPUs have no other dtype."""
    if device != "cpu" or dtype == "bfloat16" or not shape.has_delta_rule:
        return None
    return (
        f"model.dtype is {dtype}, and vLLM's gated delta rule on CPUs computes in bfloat16 alone; set it to bfloat16, "
        "or run the engines on GPUs"
    )


IN_PROJ = "self_attention.in_proj.weight"
"""Megatron's one parameter of all projections of the input."""
DELTA_ROWS = (
    Rule(
        REPLICATED,
        hf=INPUT_NORM.hf,
        megatron=INPUT_NORM.megatron,
        fused="self_attention.in_proj.layer_norm_weight",
        zero_centred=True,
    ),
    Rule(
        DELTA_SECTIONS,
        hf=(HfTensor("linear_attn.conv1d.weight", ("delta_qkv", "one", "convolution")),),
        megatron="self_attention.conv1d.weight",
    ),
    Rule(
        ROWS,
        hf=(HfTensor("linear_attn.dt_bias", ("delta_heads",)),),
        megatron="self_attention.dt_bias",
    ),
    Rule(
        ROWS,
        hf=(HfTensor("linear_attn.A_log", ("delta_heads",)),),
        megatron="self_attention.A_log",
        float32=True,  # as vLLM has it
    ),
    Rule(
        REPLICATED,
        hf=(HfTensor("linear_attn.norm.weight", ("delta_head",)),),
        megatron="self_attention.out_norm.weight",
    ),
    Rule(
        COLUMNS,
        hf=(HfTensor("linear_attn.out_proj.weight", ("hidden", "delta_value")),),
        megatron="self_attention.out_proj.weight",
    ),
)
"""The rows of a layer with linear attention but the projections of its input, which the families store differently."""
SHARED_EXPERT = (
    Rule(
        REPLICATED,
        hf=(HfTensor("mlp.shared_expert_gate.weight", ("one", "hidden")),),
        megatron="mlp.shared_experts.gate_weight",
    ),
    Rule(
        ROWS,
        hf=(
            HfTensor("mlp.shared_expert.gate_proj.weight", ("shared_ffn", "hidden")),
            HfTensor("mlp.shared_expert.up_proj.weight", ("shared_ffn", "hidden")),
        ),
        megatron="mlp.shared_experts.linear_fc1.weight",
        vllm="mlp.shared_expert.gate_up_proj.weight",
    ),
    Rule(
        COLUMNS,
        hf=(HfTensor("mlp.shared_expert.down_proj.weight", ("hidden", "shared_ffn")),),
        megatron="mlp.shared_experts.linear_fc2.weight",
    ),
)
DESCRIBED_DELTA = DESCRIBED | {"qkv_bias": False, "layer_scale": False, "dual_chunk_attention_config": None}
_GATES = ("silu", "swish")
_LINEAR = "linear_attention"


def delta_layers(config: Mapping[str, Any], interleaved: bool) -> dict[str, Any]:
    """Linear attention and its layers, as `config.Special` has them.

    Raises:
        ValueError: the layers have other kinds of attention, or all have linear attention; attention has no output
            gate, or the sections of rotary frequencies do not share out all of them.
    """
    _check_sections(config)
    if config.get("attn_output_gate", True) is not True:
        raise ValueError(f"attn_output_gate is {config['attn_output_gate']!r}; only true is supported")
    if config.get("output_gate_type", "silu") not in _GATES:
        raise ValueError(f"output_gate_type is {config['output_gate_type']!r}; supported are {' and '.join(_GATES)}")
    num_layers, every = size(config, "num_hidden_layers"), size(config, "full_attention_interval", 4)
    types = kinds_of_layers(config, (_LINEAR, FULL))
    types = types or [_LINEAR if (n + 1) % every else FULL for n in range(num_layers)]
    delta = DeltaNet(
        num_key_heads=size(config, "linear_num_key_heads", 16),
        num_value_heads=size(config, "linear_num_value_heads", 32),
        key_size=size(config, "linear_key_head_dim", 128),
        value_size=size(config, "linear_value_head_dim", 128),
        convolution=size(config, "linear_conv_kernel_dim", 4),
        interleaved=interleaved,
    )
    if delta.num_value_heads % delta.num_key_heads:
        raise ValueError(
            f"linear_num_value_heads is {delta.num_value_heads}, which must be a multiple of linear_num_key_heads, "
            f"{delta.num_key_heads}"
        )
    layers = tuple(layer for layer, kind in enumerate(types) if kind == _LINEAR)
    if len(layers) == num_layers:
        raise ValueError(f"all {num_layers} layers have linear attention; at least one with {FULL} is needed")
    return {"delta": delta, "linear_layers": layers}


def _check_sections(config: Mapping[str, Any]) -> None:
    """The sections of rotary frequencies for time, height and width mean nothing for text, whose tokens have the same
    position in all three. `models.config` leaves them out."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if rope.get("mrope_section") is None:
        return
    sections = whole_numbers(rope, "mrope_section", least=0)
    share = number(rope if "partial_rotary_factor" in rope else config, "partial_rotary_factor", 0.25)
    half = int(size(config, "head_dim", 256) * share) // 2
    if len(sections) != 3 or sum(sections) != half:
        raise ValueError(
            f"mrope_section is {sections}; only three numbers whose sum is {half}, the half of the rotated dims of a "
            "head, are supported"
        )
