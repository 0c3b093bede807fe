"""Mistral is Llama, whose layers may all have a sliding window (arXiv:2310.06825); from v0.2 on they have none."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.models.families.llama import LLAMA
from megatron_rl.models.families.windows import all_layers

MISTRAL = replace(
    LLAMA,
    name="mistral",
    absent={"num_key_value_heads": 8, "sliding_window": 4096},
    vllm_model="MistralForCausalLM",
    read_config=all_layers,
    known={name: value for name, value in LLAMA.known.items() if name != "sliding_window"}
    | {"llama_4_scaling": None, "ada_rms_norm_t_cond": False},  # vLLM's class reads them
)
