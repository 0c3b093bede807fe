"""Qwen3-MoE has Qwen3's attention and routed experts without shared ones (arXiv:2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.models.config_values import flag, size, whole_numbers
from megatron_rl.models.families.qwen3 import QWEN3
from megatron_rl.models.families.rows import ENDS_ON_EVERY_STAGE, mixture_rows
from megatron_rl.models.families.windows import all_layers_if_switched_on
from megatron_rl.models.family import Family
from megatron_rl.types import Mixture


def first_dense_layers(config: Mapping[str, Any]) -> int:
    """The number of layers in front of the first mixture.

    Raises:
        ValueError: a layer behind the first mixture is dense.
    """
    every = size(config, "decoder_sparse_step", 1)
    named = config.get("mlp_only_layers") is not None
    only_dense = whole_numbers(config, "mlp_only_layers", least=0) if named else []
    layers = range(size(config, "num_hidden_layers"))
    dense = [layer for layer in layers if layer in only_dense or (layer + 1) % every]
    if dense != list(range(len(dense))):
        raise ValueError(
            f"mlp_only_layers and decoder_sparse_step make the layers {dense} dense; only first layers may be dense"
        )
    return len(dense)


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    experts_key = "num_experts" if "num_experts" in config else "num_local_experts"
    mixture = Mixture(
        num_experts=size(config, experts_key),
        num_active=size(config, "num_experts_per_tok", at_most=experts_key),
        ffn_size=size(config, "moe_intermediate_size"),
        normalised=flag(config, "norm_topk_prob", absent=None),
    )
    return {
        "mixture": mixture,
        "dense_layers": first_dense_layers(config),
        **all_layers_if_switched_on(config),
    }


QWEN3_MOE = Family(
    name="qwen3_moe",
    absent={"num_key_value_heads": 4},
    vllm_model="Qwen3MoeForCausalLM",
    attention=QWEN3.attention,
    dense=QWEN3.dense,
    mixture=mixture_rows("mlp", "gate_proj", "up_proj", "down_proj"),
    read_config=_read,
    known={**QWEN3.known, "shared_expert_intermediate_size": 0},
    **ENDS_ON_EVERY_STAGE,
)
