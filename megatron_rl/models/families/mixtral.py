"""Mixtral has Llama's attention and eight experts, two of them active (arXiv:2401.04088)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.models.config_values import size
from megatron_rl.models.families.rows import ENDS_ON_EVERY_STAGE, LLAMA_ATTENTION, mixture_rows
from megatron_rl.models.families.windows import all_layers
from megatron_rl.models.family import Family
from megatron_rl.types import Mixture


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    mixture = Mixture(
        num_experts=size(config, "num_local_experts"),
        num_active=size(config, "num_experts_per_tok", at_most="num_local_experts"),
        ffn_size=size(config, "intermediate_size"),
    )
    return {"mixture": mixture, **all_layers(config)}


MIXTRAL = Family(
    name="mixtral",
    absent={"num_key_value_heads": 8, "rope_theta": 1_000_000.0},
    vllm_model="MixtralForCausalLM",
    attention=LLAMA_ATTENTION,
    dense=(),
    mixture=mixture_rows("block_sparse_moe", gate="w1", up="w3", down="w2"),
    read_config=_read,
    **ENDS_ON_EVERY_STAGE,
)
