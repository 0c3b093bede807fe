"""Qwen3-Next has linear attention in three of four layers, and routed experts with a gated shared one in all of them.

The rows of the projections of linear attention's input are ordered by key head: [q ; k ; its values ; their gates], and
[strengths ; decays] of its values. Source: transformers, modeling_qwen3_next.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.models.config_values import flag, size
from megatron_rl.models.families.delta import (
    DELTA_ROWS,
    DESCRIBED_DELTA,
    GATED_ATTENTION,
    HEAD,
    IN_PROJ,
    SHARED_EXPERT,
    delta_layers,
    engine_fault,
)
from megatron_rl.models.families.qwen3_moe import first_dense_layers
from megatron_rl.models.families.rows import ENDS, ENDS_ON_EVERY_STAGE, GATED_MLP, MLP_NORM, Ends, mixture_rows
from megatron_rl.models.family import Family
from megatron_rl.models.rule import HfTensor, Rule
from megatron_rl.models.splits import DELTA_STRENGTH, ROWS
from megatron_rl.types import Mixture

_INPUT = (
    Rule(
        ROWS,
        hf=(HfTensor("linear_attn.in_proj_qkvz.weight", ("delta_qkvz", "hidden")),),
        megatron=IN_PROJ,
    ),
    Rule(
        DELTA_STRENGTH,
        hf=(HfTensor("linear_attn.in_proj_ba.weight", ("delta_two_heads", "hidden")),),
        megatron=IN_PROJ,
    ),
)


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    mixture = Mixture(
        num_experts=size(config, "num_experts"),
        num_active=size(config, "num_experts_per_tok", at_most="num_experts"),
        ffn_size=size(config, "moe_intermediate_size"),
        shared_ffn_size=size(config, "shared_expert_intermediate_size"),
        shared_gate=True,
        normalised=flag(config, "norm_topk_prob", absent=True),
    )
    return {
        "mixture": mixture,
        "dense_layers": first_dense_layers(config),
        **delta_layers(config, interleaved=True),
    }


_ENDS: Ends = {**ENDS_ON_EVERY_STAGE, "final_norm": ENDS["final_norm"]}
QWEN3_NEXT = Family(
    name="qwen3_next",
    vllm_model="Qwen3NextForCausalLM",
    attention=GATED_ATTENTION,
    linear=(*DELTA_ROWS, *_INPUT),
    dense=(MLP_NORM, *GATED_MLP),
    mixture=(*mixture_rows("mlp", "gate_proj", "up_proj", "down_proj"), *SHARED_EXPERT),
    read_config=_read,
    engine_fault=engine_fault,
    known=DESCRIBED_DELTA,
    ignored=(replace(HEAD, key="num_nextn_predict_layers"),),
    absent={"num_key_value_heads": 2, "head_dim": 256},
    rotary_share=0.25,
    **_ENDS,
)
