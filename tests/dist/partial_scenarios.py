"""GLM-4.5 (transformers' glm4_moe, arXiv:2508.06471) as a family of the tests: Qwen3's attention, of which a half of
each head is rotated, and DeepSeek-V3's mixture. It has no engine's side.

The published models have biases in q, k and v, and vLLM holds their routers in float32; neither is described here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import scenarios

from megatron_rl.layout import FAMILIES
from megatron_rl.types import Experts


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    experts = Experts(
        num_experts=config["n_routed_experts"],
        num_active=config["num_experts_per_tok"],
        ffn_size=config["moe_intermediate_size"],
        shared_ffn_size=config["n_shared_experts"] * config["moe_intermediate_size"],
        first_dense_layers=config["first_k_dense_replace"],
        score="sigmoid",
        normalised=config["norm_topk_prob"],
        num_groups=config["n_group"],
        num_active_groups=config["topk_group"],
        scaling_factor=config["routed_scaling_factor"],
    )
    return {"experts": experts}


@contextmanager
def known() -> Iterator[None]:
    """The family is known inside the block, in this process."""
    FAMILIES["glm4_moe"] = replace(
        FAMILIES["qwen3"],
        name="glm4_moe",
        vllm_model="",
        mixture=FAMILIES["deepseek_v3"].mixture,
        read_config=_read,
        rotary_share=0.5,
    )
    try:
        yield
    finally:
        del FAMILIES["glm4_moe"]


def logits(rank, world_size, url, **arguments):
    with known():
        return scenarios.logits(rank, world_size, url, **arguments)


def export(rank, world_size, url, **arguments):
    with known():
        return scenarios.export(rank, world_size, url, **arguments)
