"""OLMo 2 and OLMo 3 have norms after attention and MLP, and q and k norms over all heads together (arXiv:2501.00656).

Megatron-Core 0.16 has neither: its q and k norms are per head, and its layer has no norm after attention or MLP. This
project chose the Megatron names of these rows. OLMo 3 has sliding windows in three of four layers, and scales the
rotary frequencies only in the others. vLLM runs both families with its Transformers backend, which puts vLLM's linear
layers and norms into transformers' modules and fuses q, k, v and gate, up as vLLM's own models do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.models.families.rows import ATTENTION_OUTPUT, ENDS, GATED_MLP, QKV_WEIGHT
from megatron_rl.models.families.windows import window
from megatron_rl.models.family import DESCRIBED, WINDOWLESS, Family
from megatron_rl.models.rule import HfTensor, Rule
from megatron_rl.models.splits import REPLICATED, WIDE_NORM

_ATTENTION = (
    QKV_WEIGHT,
    Rule(
        WIDE_NORM,
        hf=(HfTensor("self_attn.q_norm.weight", ("q",)),),
        megatron="self_attention.q_layernorm.weight",
    ),
    Rule(
        WIDE_NORM,
        hf=(HfTensor("self_attn.k_norm.weight", ("kv",)),),
        megatron="self_attention.k_layernorm.weight",
    ),
    ATTENTION_OUTPUT,
    Rule(
        REPLICATED,
        hf=(HfTensor("post_attention_layernorm.weight", ("hidden",)),),
        megatron="post_self_attn_layernorm.weight",
    ),
    Rule(
        REPLICATED,
        hf=(HfTensor("post_feedforward_layernorm.weight", ("hidden",)),),
        megatron="post_mlp_layernorm.weight",
    ),
)
_BACKEND = {"logit_scale": 1.0, "final_logit_softcapping": None, "attn_logit_softcapping": None, "kv_lora_rank": None}
"""What vLLM's Transformers backend reads for every model."""


def _three_of_four(config: Mapping[str, Any]) -> dict[str, Any]:
    return window(config, [layer for layer in range(config["num_hidden_layers"]) if (layer + 1) % 4], needed=True)


OLMO2 = Family(
    name="olmo2",
    vllm_model="TransformersForCausalLM",
    published_model="Olmo2ForCausalLM",
    attention=_ATTENTION,
    dense=GATED_MLP,
    known=WINDOWLESS | _BACKEND,
    **ENDS,
)
OLMO3 = Family(
    name="olmo3",
    vllm_model="TransformersForCausalLM",
    published_model="Olmo3ForCausalLM",
    attention=_ATTENTION,
    dense=GATED_MLP,
    read_config=_three_of_four,
    known=DESCRIBED | _BACKEND,
    absent={"rope_theta": 500_000.0},
    **ENDS,
)
