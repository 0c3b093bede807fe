"""Mistral is Llama, whose layers may all have a sliding window (arXiv:2310.06825); from v0.2 on they have none."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.layout.families.llama import LLAMA
from megatron_rl.layout.families.windows import all_layers
from megatron_rl.layout.family import DESCRIBED

MISTRAL = replace(
    LLAMA,
    name="mistral",
    absent={"num_key_value_heads": 8},
    vllm_model="MistralForCausalLM",
    read_config=lambda config: all_layers({"sliding_window": 4096, **config}),  # transformers' default
    known=DESCRIBED,
)
