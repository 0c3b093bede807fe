"""MiniMax-M2, M2.1 and M2.5: grouped-query attention that rotates a half of each head and normalises q and k over all
heads together, and Mixtral's experts with a sigmoid router, whose bias balances them.

Published folders are in fp8, and have no weights of the multi-token modules that their config.json counts. vLLM's class
splits the norms of q and k over ranks, and holds routers in float32. Source: transformers, modeling_minimax_m2.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron_rl.models.config_values import size
from megatron_rl.models.families.biased_mixture import ROUTER_BIAS_ROW, served_in_float32, sigmoid_scored
from megatron_rl.models.families.mixtral import MIXTRAL
from megatron_rl.models.families.rows import ATTENTION_OUTPUT, ENDS, INPUT_NORM, QKV_WEIGHT, renamed
from megatron_rl.models.family import WINDOWLESS, Family
from megatron_rl.models.rule import HfTensor, Rule
from megatron_rl.models.splits import ROWS, Piece, Sizes, SplitKind, part
from megatron_rl.types import ModelShape

_NEEDED = {"scoring_func": "sigmoid", "use_routing_bias": True}
"""What vLLM's class reads from config.json, and transformers' class always does."""


def _engine_kv_heads(sizes: Sizes, lengths: tuple[int, ...], ways: int, rank: int) -> list[Piece]:
    """A rank of vLLM has the weights of its own KV heads. If there are fewer heads than ranks, several ranks have the
    same head."""
    copies = max(1, ways // sizes["kv_heads"])
    start, stop = part(lengths[0], ways // copies, rank // copies)
    return [Piece(0, 0, start, stop, 0)]


_ATTENTION = (
    INPUT_NORM,
    QKV_WEIGHT,
    Rule(ROWS, hf=(HfTensor("self_attn.q_norm.weight", ("q",)),), megatron="self_attention.q_layernorm.weight"),
    Rule(
        SplitKind(ROWS.megatron, _engine_kv_heads),
        hf=(HfTensor("self_attn.k_norm.weight", ("kv",)),),
        megatron="self_attention.k_layernorm.weight",
    ),
    ATTENTION_OUTPUT,
)
_ROUTER_BIAS = renamed(ROUTER_BIAS_ROW, "block_sparse_moe.e_score_correction_bias")


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in _NEEDED.items():
        if key not in config:
            raise ValueError(
                f"config.json has no {key}, which vLLM's class reads; add {json.dumps({key: value})[1:-1]}"
            )
        if config[key] != value:
            raise ValueError(f"{key} is {config[key]!r}; for the family minimax_m2 only {value!r} is supported")
    size(config, "rotary_dim")  # vLLM needs it
    if any(kind != 1 for kind in config.get("attn_type_list") or ()):
        raise ValueError(f"attn_type_list is {config['attn_type_list']}; only 1, softmax attention, is supported")
    return sigmoid_scored(MIXTRAL.read_config)(config)


def _engine_fault(shape: ModelShape, dtype: str, device: str) -> str | None:
    """vLLM's `CPURouter` asserts softmax for routers without groups."""
    told = "vLLM on CPUs has no sigmoid router without groups of experts; run the engines on GPUs"
    return told if device == "cpu" else None


MINIMAX_M2 = Family(
    name="minimax_m2",
    vllm_model="MiniMaxM2ForCausalLM",
    attention=_ATTENTION,
    dense=(),
    mixture=(*served_in_float32(MIXTRAL.mixture), _ROUTER_BIAS),
    read_config=_read,
    engine_fault=_engine_fault,
    absent={"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5_000_000.0},
    known=WINDOWLESS
    | {"tie_word_embeddings": False, "shared_intermediate_size": 0}
    | {"use_qk_norm": True, "qk_norm_type": "per_layer"},
    rotary_share=0.5,
    **ENDS,
)
