"""gpt-oss has attention sinks, a window in every second layer, biases in all linear layers, and experts with a clamped
unit (OpenAI 2025, arXiv:2508.10925).

Files stack the experts of a layer, transpose their matrices, and hold rows of gate and up by turns. Megatron-Core calls
the sinks `softmax_offset`. vLLM's class takes several numbers from its own code instead of config.json, so other ones
are refused: trainer and engine would compute different models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.models.config_values import size
from megatron_rl.models.families.rows import (
    ATTENTION_OUTPUT,
    ENDS_ON_EVERY_STAGE,
    INPUT_NORM,
    MIXTURE_NORM,
    QKV_BIAS,
    QKV_WEIGHT,
    Ends,
)
from megatron_rl.models.families.windows import window
from megatron_rl.models.family import DESCRIBED, Family
from megatron_rl.models.interleaving import every
from megatron_rl.models.rule import HfTensor, Rule
from megatron_rl.models.splits import COLUMNS, ONCE, REPLICATED, ROWS, Piece, Sizes, SplitKind
from megatron_rl.models.view import InFile
from megatron_rl.types import Mixture

_ENGINE = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "rms_norm_eps": 1e-5}
"""The numbers that vLLM's class has in its code (gpt_oss.py: TransformerBlock; `swigluoai` in its activations)."""
_YARN = {"rope_type", "type", "rope_theta", "factor", "beta_fast", "beta_slow", "truncate"}
_YARN |= {"original_max_position_embeddings", "partial_rotary_factor"}


def _by_turns(name: str) -> tuple[str, str]:
    """vLLM has a row of gate, a row of up, and so on."""
    gate, up = (every(f"mlp.experts.routed_experts.{name}", part, 2) for part in range(2))
    return gate, up


def _engine_heads(sizes: Sizes, lengths: tuple[int, ...], ways: int, rank: int) -> list[Piece]:
    """One row for each query head. vLLM's class repeats no KV heads."""
    if sizes["kv_heads"] % ways:
        raise ValueError(
            f"the model has {sizes['kv_heads']} KV heads, and vLLM's class of gpt_oss cannot divide them among {ways} "
            "tensor-parallel ranks"
        )
    return ROWS.vllm(sizes, lengths, ways, rank)


_ATTENTION = (
    INPUT_NORM,
    replace(QKV_WEIGHT, vllm="attn.qkv_proj.weight"),
    replace(QKV_BIAS, vllm="attn.qkv_proj.bias"),
    Rule(
        SplitKind(ROWS.megatron, _engine_heads),
        hf=(HfTensor("self_attn.sinks", ("heads",)),),
        megatron="self_attention.core_attention.softmax_offset",
        vllm="attn.sinks",
    ),
    replace(ATTENTION_OUTPUT, vllm="attn.o_proj.weight"),
    Rule(
        REPLICATED,
        hf=(HfTensor("self_attn.o_proj.bias", ("hidden",)),),
        megatron="self_attention.linear_proj.bias",
        vllm="attn.o_proj.bias",
    ),
)

_MIXTURE = (
    MIXTURE_NORM,
    Rule(
        REPLICATED,
        hf=(HfTensor("mlp.router.weight", ("experts", "hidden")),),
        megatron="mlp.router.weight",
    ),
    Rule(
        REPLICATED,
        hf=(HfTensor("mlp.router.bias", ("experts",)),),
        megatron="mlp.router.bias",
    ),
    Rule(
        ROWS,
        hf=(
            HfTensor(
                "mlp.experts.{}.gate_proj.weight",
                ("expert_ffn", "hidden"),
                InFile("mlp.experts.gate_up_proj", 0, 2, interleaved=True, transposed=True),
            ),
            HfTensor(
                "mlp.experts.{}.up_proj.weight",
                ("expert_ffn", "hidden"),
                InFile("mlp.experts.gate_up_proj", 1, 2, interleaved=True, transposed=True),
            ),
        ),
        megatron="mlp.experts.local_experts.{}.linear_fc1.weight",
        fused="mlp.experts.linear_fc1.weight{}",
        vllm=_by_turns("w13_weight"),
    ),
    Rule(
        ROWS,
        hf=(
            HfTensor(
                "mlp.experts.{}.gate_proj.bias",
                ("expert_ffn",),
                InFile("mlp.experts.gate_up_proj_bias", 0, 2, interleaved=True),
            ),
            HfTensor(
                "mlp.experts.{}.up_proj.bias",
                ("expert_ffn",),
                InFile("mlp.experts.gate_up_proj_bias", 1, 2, interleaved=True),
            ),
        ),
        megatron="mlp.experts.local_experts.{}.linear_fc1.bias",
        fused="mlp.experts.linear_fc1.bias{}",
        vllm=_by_turns("w13_bias"),
    ),
    Rule(
        COLUMNS,
        hf=(
            HfTensor(
                "mlp.experts.{}.down_proj.weight",
                ("hidden", "expert_ffn"),
                InFile("mlp.experts.down_proj", transposed=True),
            ),
        ),
        megatron="mlp.experts.local_experts.{}.linear_fc2.weight",
        fused="mlp.experts.linear_fc2.weight{}",
        vllm="mlp.experts.routed_experts.w2_weight",
    ),
    Rule(
        ONCE,
        hf=(HfTensor("mlp.experts.{}.down_proj.bias", ("hidden",), InFile("mlp.experts.down_proj_bias")),),
        megatron="mlp.experts.local_experts.{}.linear_fc2.bias",
        fused="mlp.experts.linear_fc2.bias{}",
        vllm="mlp.experts.routed_experts.w2_bias",
    ),
)


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in _ENGINE.items():
        found = config.get(key, value if key == "swiglu_alpha" else None)
        if found != value:
            raise ValueError(f"{key} is {found!r}; for gpt_oss only {value!r} is supported, which vLLM computes with")
    _check_rope(config)
    even = list(range(0, config["num_hidden_layers"], 2))
    windows = window(config, even, needed=True)
    if windows and [*windows["windowed"]] != even:
        raise ValueError(
            f"layer_types gives the window to the layers {[*windows['windowed']]}; for gpt_oss only "
            f"sliding_attention in every second layer, from the first one on, is supported, which vLLM computes"
        )
    mixture = Mixture(
        num_experts=size(config, "num_local_experts"),
        num_active=size(config, "num_experts_per_tok", at_most="num_local_experts"),
        ffn_size=size(config, "intermediate_size"),
        clamp=_ENGINE["swiglu_limit"],
    )
    return {"mixture": mixture, **windows}


def _check_rope(config: Mapping[str, Any]) -> None:
    """
    Raises:
        ValueError: the rotation is not what vLLM computes: YaRN without factors of its own.
    """
    key = next((key for key in ("rope_scaling", "rope_parameters") if config.get(key)), None)
    if key is None:
        raise ValueError(
            "neither rope_parameters nor rope_scaling is there; for gpt_oss one with rope_type yarn is needed"
        )
    rope = config[key]
    kind = rope.get("rope_type", rope.get("type"))
    if kind != "yarn":
        raise ValueError(f"{key} has rope_type {kind!r}; for gpt_oss only 'yarn' is supported")
    if foreign := sorted(rope.keys() - _YARN):
        raise ValueError(f"{key} has the key {foreign[0]!r}, which vLLM does not read for gpt_oss; remove it")
    for name in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"):
        if rope.get(name) is None:
            raise ValueError(f"{key} has no {name}, which vLLM needs for gpt_oss")


_ENDS: Ends = {
    **ENDS_ON_EVERY_STAGE,
    "embedding": replace(ENDS_ON_EVERY_STAGE["embedding"], vllm="model.embedding.weight"),
}
GPT_OSS = Family(
    name="gpt_oss",
    vllm_model="GptOssForCausalLM",
    attention=_ATTENTION,
    dense=(),
    mixture=_MIXTURE,
    read_config=_read,
    absent={"num_key_value_heads": 8, "head_dim": 64, "rope_theta": 150_000.0},
    known=DESCRIBED | {"attention_bias": True},
    **_ENDS,
)
