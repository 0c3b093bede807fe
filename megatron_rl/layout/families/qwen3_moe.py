"""Qwen3-MoE has Qwen3's attention and routed experts without shared ones (arXiv:2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.layout.families.qwen3 import QWEN3
from megatron_rl.layout.families.rows import ENDS, mixture_rows
from megatron_rl.layout.families.windows import all_layers
from megatron_rl.layout.family import ALL_ENDS, Family
from megatron_rl.types import Experts


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, every = config["num_hidden_layers"], config.get("decoder_sparse_step", 1)
    only_dense = config.get("mlp_only_layers") or []
    dense = [layer for layer in range(num_layers) if layer in only_dense or (layer + 1) % every]
    if dense != list(range(len(dense))):
        raise ValueError(
            f"mlp_only_layers and decoder_sparse_step make the layers {dense} dense; only first layers may be dense"
        )
    experts = Experts(
        num_experts=config["num_experts"] if "num_experts" in config else config["num_local_experts"],
        num_active=config["num_experts_per_tok"],
        ffn_size=config["moe_intermediate_size"],
        first_dense_layers=len(dense),
        normalised=config["norm_topk_prob"],
    )
    return {"experts": experts} | (all_layers(config) if config.get("use_sliding_window") else {})


QWEN3_MOE = Family(
    name="qwen3_moe",
    absent={"num_key_value_heads": 4},
    vllm_model="Qwen3MoeForCausalLM",
    attention=QWEN3.attention,
    dense=QWEN3.dense,
    mixture=mixture_rows("mlp", "gate_proj", "up_proj", "down_proj"),
    read_config=_read,
    vllm_repeats_ends=ALL_ENDS,
    **ENDS,
)
