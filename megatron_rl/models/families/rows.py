"""Rows that several families share."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TypedDict

from megatron_rl.models.family import Family
from megatron_rl.models.rule import HfTensor, Rule
from megatron_rl.models.splits import COLUMNS, QKV, REPLICATED, ROWS, VOCABULARY

EMBEDDING = Rule(
    VOCABULARY,
    hf=(HfTensor("model.embed_tokens.weight", ("vocab", "hidden")),),
    megatron="embedding.word_embeddings.weight",
)
FINAL_NORM = Rule(
    REPLICATED,
    hf=(HfTensor("model.norm.weight", ("hidden",)),),
    megatron="decoder.final_layernorm.weight",
)
OUTPUT = Rule(VOCABULARY, hf=(HfTensor("lm_head.weight", ("vocab", "hidden")),), megatron="output_layer.weight")


class Ends(TypedDict):
    """The rows outside the layers, as arguments of `Family`."""

    embedding: Rule
    final_norm: Rule
    output: Rule


ENDS: Ends = {"embedding": EMBEDDING, "final_norm": FINAL_NORM, "output": OUTPUT}
ENDS_ON_EVERY_STAGE: Ends = {
    "embedding": replace(EMBEDDING, on_every_stage=True),
    "final_norm": replace(FINAL_NORM, on_every_stage=True),
    "output": replace(OUTPUT, on_every_stage=True),
}

INPUT_NORM = Rule(
    REPLICATED,
    hf=(HfTensor("input_layernorm.weight", ("hidden",)),),
    megatron="input_layernorm.weight",
    fused="self_attention.linear_qkv.layer_norm_weight",
)
QKV_WEIGHT = Rule(
    QKV,
    hf=(
        HfTensor("self_attn.q_proj.weight", ("q", "hidden")),
        HfTensor("self_attn.k_proj.weight", ("kv", "hidden")),
        HfTensor("self_attn.v_proj.weight", ("kv", "hidden")),
    ),
    megatron="self_attention.linear_qkv.weight",
    vllm="self_attn.qkv_proj.weight",
)
QKV_BIAS = Rule(
    QKV,
    hf=(
        HfTensor("self_attn.q_proj.bias", ("q",)),
        HfTensor("self_attn.k_proj.bias", ("kv",)),
        HfTensor("self_attn.v_proj.bias", ("kv",)),
    ),
    megatron="self_attention.linear_qkv.bias",
    vllm="self_attn.qkv_proj.bias",
)
HEAD_NORMS = (
    Rule(
        REPLICATED,
        hf=(HfTensor("self_attn.q_norm.weight", ("head",)),),
        megatron="self_attention.q_layernorm.weight",
    ),
    Rule(
        REPLICATED,
        hf=(HfTensor("self_attn.k_norm.weight", ("head",)),),
        megatron="self_attention.k_layernorm.weight",
    ),
)
"""The norms of q and of k. All heads share their weights."""
ATTENTION_OUTPUT = Rule(
    COLUMNS,
    hf=(HfTensor("self_attn.o_proj.weight", ("hidden", "q")),),
    megatron="self_attention.linear_proj.weight",
)
MLP_NORM = Rule(
    REPLICATED,
    hf=(HfTensor("post_attention_layernorm.weight", ("hidden",)),),
    megatron="pre_mlp_layernorm.weight",
    fused="mlp.linear_fc1.layer_norm_weight",
)
"""The norm in front of a dense MLP."""
MIXTURE_NORM = Rule(REPLICATED, hf=MLP_NORM.hf, megatron=MLP_NORM.megatron)
"""The norm in front of a mixture of experts. Router and experts read its output, so it is never fused."""
GATED_MLP = (
    Rule(
        ROWS,
        hf=(
            HfTensor("mlp.gate_proj.weight", ("ffn", "hidden")),
            HfTensor("mlp.up_proj.weight", ("ffn", "hidden")),
        ),
        megatron="mlp.linear_fc1.weight",
        vllm="mlp.gate_up_proj.weight",
    ),
    Rule(
        COLUMNS,
        hf=(HfTensor("mlp.down_proj.weight", ("hidden", "ffn")),),
        megatron="mlp.linear_fc2.weight",
    ),
)
LLAMA_ATTENTION = (INPUT_NORM, QKV_WEIGHT, ATTENTION_OUTPUT)


def mixture_rows(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """The rows of router and routed experts. The HF names differ between families; vLLM uses the same name for the
    block."""
    return (
        MIXTURE_NORM,
        Rule(
            REPLICATED,
            hf=(HfTensor(f"{block}.gate.weight", ("experts", "hidden")),),
            megatron="mlp.router.weight",
        ),
        Rule(
            ROWS,
            hf=(
                HfTensor(f"{block}.experts.{{}}.{gate}.weight", ("expert_ffn", "hidden")),
                HfTensor(f"{block}.experts.{{}}.{up}.weight", ("expert_ffn", "hidden")),
            ),
            megatron="mlp.experts.local_experts.{}.linear_fc1.weight",
            fused="mlp.experts.linear_fc1.weight{}",
            vllm=f"{block}.experts.routed_experts.w13_weight",
        ),
        Rule(
            COLUMNS,
            hf=(HfTensor(f"{block}.experts.{{}}.{down}.weight", ("hidden", "expert_ffn")),),
            megatron="mlp.experts.local_experts.{}.linear_fc2.weight",
            fused="mlp.experts.linear_fc2.weight{}",
            vllm=f"{block}.experts.routed_experts.w2_weight",
        ),
    )


def first_name(rule: Rule) -> str:
    """The HF name that stands for a row in tables that are made of others."""
    return rule.hf[0].name


def rows_of(family: Family, *hf_names: str) -> tuple[Rule, ...]:
    """The rows of a family that these HF tensors are the first ones of."""
    return tuple(rule for rule in family.rules if first_name(rule) in hf_names)


def renamed(rule: Rule, hf_name: str) -> Rule:
    """A row of one HF tensor, which a model has under this name."""
    return replace(rule, hf=(replace(rule.hf[0], name=hf_name),))


def rows_without(rows: Iterable[Rule], hf_names: Collection[str]) -> tuple[Rule, ...]:
    return tuple(rule for rule in rows if first_name(rule) not in hf_names)
