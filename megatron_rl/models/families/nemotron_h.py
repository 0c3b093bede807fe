"""NVIDIA's hybrid models: Nemotron-H (arXiv:2504.03624) and Nemotron-3-Nano. Each layer has one block, which a letter
of `hybrid_override_pattern` names: Mamba-2, attention without rotation, an MLP with a squared ReLU, or such experts.

transformers writes the pattern as `layers_block_type`. It bounds the step sizes of Mamba-2 from below by
`time_step_min` where it reads a whole sequence; vLLM, Megatron-Core and this package do not. Source: transformers,
modeling_nemotron_h.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.models.config_values import flag, number, size
from megatron_rl.models.families.biased_mixture import ROUTER_BIAS_ROW, only
from megatron_rl.models.families.rows import (
    ATTENTION_OUTPUT,
    ENDS_ON_EVERY_STAGE,
    INPUT_NORM,
    MLP_NORM,
    QKV_WEIGHT,
    renamed,
)
from megatron_rl.models.family import WINDOWLESS, Family
from megatron_rl.models.rule import HfTensor, Rule
from megatron_rl.models.splits import COLUMNS, REPLICATED, ROWS, Piece, Sizes, SplitKind, part
from megatron_rl.types import Attention, Mlp, ModelShape
from megatron_rl.types.mamba import NO_ATTENTION, NO_MLP, Mamba2, SquaredReluMixture, SquaredReluMlp, is_absent

_NORM = (HfTensor("norm.weight", ("hidden",)),)
"""Each layer has one norm, in front of its block."""
_LETTERS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
"""The letters of `layers_block_type`; two kinds had other names in earlier versions of transformers."""


def _sections(*names: str) -> SplitKind:
    """A rank stacks the rows of its groups of each section of one tensor.

    Args:
        names: the sections' sizes.
    """

    def split(sizes: Sizes, lengths: tuple[int, ...], ways: int, rank: int) -> list[Piece]:
        part(sizes["mamba_groups"], ways, rank)
        pieces, begin, offset = [], 0, 0
        for name in names:
            start, stop = part(sizes[name], ways, rank)
            pieces.append(Piece(0, 0, begin + start, begin + stop, offset))
            begin, offset = begin + sizes[name], offset + stop - start
        return pieces

    return SplitKind(split, split)


_CHANNELS = ("mamba_value", "mamba_key", "mamba_key")
"""The sections of the convolution: x, B and C."""
_ATTENTION = (
    replace(INPUT_NORM, hf=_NORM),
    replace(
        QKV_WEIGHT,
        hf=tuple(replace(one, name=one.name.replace("self_attn", "mixer")) for one in QKV_WEIGHT.hf),
        vllm="mixer.qkv_proj.weight",
    ),
    replace(ATTENTION_OUTPUT, hf=(HfTensor("mixer.o_proj.weight", ("hidden", "q")),)),
)
_MAMBA = (
    replace(INPUT_NORM, hf=_NORM, fused=None),
    Rule(
        _sections("mamba_value", *_CHANNELS, "mamba_heads"),  # the gate, x, B, C and the step sizes
        hf=(HfTensor("mixer.in_proj.weight", ("mamba_input", "hidden")),),
        megatron="self_attention.in_proj.weight",
    ),
    Rule(
        _sections(*_CHANNELS),
        hf=(HfTensor("mixer.conv1d.weight", ("mamba_channels", "one", "convolution")),),
        megatron="self_attention.conv1d.weight",
    ),
    Rule(
        _sections(*_CHANNELS),
        hf=(HfTensor("mixer.conv1d.bias", ("mamba_channels",)),),
        megatron="self_attention.conv1d.bias",
    ),
    Rule(ROWS, hf=(HfTensor("mixer.dt_bias", ("mamba_heads",)),), megatron="self_attention.dt_bias"),
    Rule(
        ROWS,
        hf=(HfTensor("mixer.A_log", ("mamba_heads",)),),
        megatron="self_attention.A_log",
        vllm="mixer.A",
        negated_exp=True,
        float32=True,  # as vLLM has it
    ),
    Rule(ROWS, hf=(HfTensor("mixer.D", ("mamba_heads",)),), megatron="self_attention.D"),
    Rule(ROWS, hf=(HfTensor("mixer.norm.weight", ("mamba_value",)),), megatron="self_attention.norm.weight"),
    Rule(
        COLUMNS,
        hf=(HfTensor("mixer.out_proj.weight", ("hidden", "mamba_value")),),
        megatron="self_attention.out_proj.weight",
    ),
)


def _mlp(block: str, size: str, megatron: str) -> tuple[Rule, ...]:
    """The rows of an MLP of two matrices."""
    return (
        Rule(
            ROWS,
            hf=(HfTensor(f"{block}.up_proj.weight", (size, "hidden")),),
            megatron=f"{megatron}.linear_fc1.weight",
        ),
        Rule(
            COLUMNS,
            hf=(HfTensor(f"{block}.down_proj.weight", ("hidden", size)),),
            megatron=f"{megatron}.linear_fc2.weight",
        ),
    )


_UP, _DOWN = _mlp("mixer.experts.{}", "expert_ffn", "mlp.experts.local_experts.{}")
_MIXTURE = (
    replace(MLP_NORM, hf=_NORM, fused=None),
    Rule(
        REPLICATED,
        hf=(HfTensor("mixer.gate.weight", ("experts", "hidden")),),
        megatron="mlp.router.weight",
        served_float32=True,
    ),
    renamed(ROUTER_BIAS_ROW, "mixer.gate.e_score_correction_bias"),
    replace(_UP, vllm="mixer.experts.routed_experts.w13_weight"),
    replace(_DOWN, vllm="mixer.experts.routed_experts.w2_weight"),
    *_mlp("mixer.shared_experts", "shared_ffn", "mlp.shared_experts"),
)


class _Hybrid(Family):
    """A family whose layers have one block each."""

    __slots__ = ()

    def block_rules(self, block: Attention | Mlp) -> list[Rule]:
        """The rows of a block and of the norm in front of it; none of an absent one."""
        if is_absent(block):
            return []
        kinds = {Mamba2: self.linear, SquaredReluMlp: self.dense, SquaredReluMixture: self.mixture}
        return list(kinds.get(type(block), self.attention))


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    letters = _letters(config)
    mamba = Mamba2(
        num_key_heads=size(config, "n_groups", 8),
        num_value_heads=size(config, "mamba_num_heads", 128),
        key_size=size(config, "ssm_state_size", 128),
        value_size=size(config, "mamba_head_dim", 64),
        convolution=size(config, "conv_kernel", 4),
    )
    if mamba.num_value_heads % mamba.num_key_heads:
        raise ValueError(
            f"mamba_num_heads is {mamba.num_value_heads}, which must be a multiple of n_groups, {mamba.num_key_heads}"
        )
    blocks: dict[str, tuple[Attention | None, Mlp]] = {
        "M": (mamba, NO_MLP),
        "*": (None, NO_MLP),
        "-": (NO_ATTENTION, SquaredReluMlp(size(config, "intermediate_size"))),
    }
    if "E" in letters:
        blocks["E"] = NO_ATTENTION, _experts(config)
    return {"blocks": [blocks[letter] for letter in letters], "norm_eps": number(config, "layer_norm_epsilon", 1e-5)}


def _letters(config: Mapping[str, Any]) -> str:
    """The kinds of the layers' blocks."""
    keys = [key for key in ("layers_block_type", "hybrid_override_pattern") if config.get(key) is not None]
    if not keys:
        raise KeyError("hybrid_override_pattern")
    found = {key: _letters_of(key, config[key]) for key in keys}
    letters = found[keys[0]]
    if set(found.values()) != {letters}:
        raise ValueError(f"{keys[0]} is {config[keys[0]]!r}, but {keys[1]} is {config[keys[1]]!r}; make them equal")
    if not {*"M*"} <= {*letters}:
        raise ValueError(f"{keys[0]} has the blocks {letters}; at least one Mamba-2 and one attention are needed")
    if size(config, "num_hidden_layers", len(letters)) != len(letters):
        raise ValueError(f"num_hidden_layers is {config['num_hidden_layers']}, but {keys[0]} has {len(letters)} layers")
    return letters


def _letters_of(key: str, given: Any) -> str:
    known = dict(zip("M*-E", "M*-E", strict=True)) if key == "hybrid_override_pattern" else _LETTERS
    kind = str if key == "hybrid_override_pattern" else list
    if not isinstance(given, kind) or any(one not in known for one in given):
        raise ValueError(f"{key} is {given!r}; supported is a block for each layer, of {', '.join(known)}")
    return "".join(known[one] for one in given)


def _experts(config: Mapping[str, Any]) -> SquaredReluMixture:
    only(config, n_shared_experts=1, n_group=1, topk_group=1, moe_latent_size=None)
    return SquaredReluMixture(
        num_experts=size(config, "n_routed_experts"),
        num_active=size(config, "num_experts_per_tok", at_most="n_routed_experts"),
        ffn_size=size(config, "moe_intermediate_size"),
        shared_ffn_size=size(config, "moe_shared_expert_intermediate_size"),
        score="sigmoid",
        normalised=flag(config, "norm_topk_prob", absent=True),
        scaling_factor=number(config, "routed_scaling_factor", 1.0),
    )


def _engine_fault(shape: ModelShape, dtype: str, device: str) -> str | None:
    """vLLM's layer of experts on CPUs asserts that they have a gate."""
    told = "it has experts with a squared ReLU, and vLLM on CPUs computes only gated experts; run the engines on GPUs"
    return told if device == "cpu" and shape.mixture else None


NEMOTRON_H = _Hybrid(
    name="nemotron_h",
    vllm_model="NemotronHForCausalLM",
    embedding=replace(
        ENDS_ON_EVERY_STAGE["embedding"],
        hf=(HfTensor("backbone.embeddings.weight", ("vocab", "hidden")),),
        vllm="model.embed_tokens.weight",
    ),
    attention=_ATTENTION,
    linear=_MAMBA,
    dense=(replace(MLP_NORM, hf=_NORM, fused=None), *_mlp("mixer", "ffn", "mlp")),
    mixture=_MIXTURE,
    final_norm=replace(
        ENDS_ON_EVERY_STAGE["final_norm"],
        hf=(HfTensor("backbone.norm_f.weight", ("hidden",)),),
        vllm="model.norm_f.weight",
    ),
    output=ENDS_ON_EVERY_STAGE["output"],
    read_config=_read,
    engine_fault=_engine_fault,
    known=WINDOWLESS
    | {"use_bias": False, "use_conv_bias": True, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"}
    | {"tie_word_embeddings": False, "residual_in_fp32": False, "num_nextn_predict_layers": 0}
    | {"mamba_proj_bias": False, "hidden_dropout": 0.0, "block_configs": None},
    absent={"num_key_value_heads": 8, "head_dim": 128},
    rotary_share=0.0,
    hf_layer="backbone.layers.{}.",
)
