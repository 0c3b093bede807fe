"""Qwen3, dense: pre-norm, GQA with per-head q and k norms, gated MLP, no biases (arXiv:2505.09388)."""

from __future__ import annotations

from megatron_rl.layout.family import COLUMNS, QKV, REPLICATED, ROWS, VOCABULARY, Family, HfTensor, Rule

QWEN3 = Family(
    name="qwen3",
    embedding=Rule(
        VOCABULARY,
        hf=(HfTensor("model.embed_tokens.weight", ("vocab", "hidden")),),
        megatron="embedding.word_embeddings.weight",
        vllm="model.embed_tokens.weight",
    ),
    layer=(
        Rule(
            REPLICATED,
            hf=(HfTensor("input_layernorm.weight", ("hidden",)),),
            megatron="input_layernorm.weight",
            megatron_fused_norm="self_attention.linear_qkv.layer_norm_weight",
            vllm="input_layernorm.weight",
        ),
        Rule(
            QKV,
            hf=(
                HfTensor("self_attn.q_proj.weight", ("q", "hidden")),
                HfTensor("self_attn.k_proj.weight", ("kv", "hidden")),
                HfTensor("self_attn.v_proj.weight", ("kv", "hidden")),
            ),
            megatron="self_attention.linear_qkv.weight",
            vllm="self_attn.qkv_proj.weight",
        ),
        Rule(
            REPLICATED,
            hf=(HfTensor("self_attn.q_norm.weight", ("head",)),),
            megatron="self_attention.q_layernorm.weight",
            vllm="self_attn.q_norm.weight",
        ),
        Rule(
            REPLICATED,
            hf=(HfTensor("self_attn.k_norm.weight", ("head",)),),
            megatron="self_attention.k_layernorm.weight",
            vllm="self_attn.k_norm.weight",
        ),
        Rule(
            COLUMNS,
            hf=(HfTensor("self_attn.o_proj.weight", ("hidden", "q")),),
            megatron="self_attention.linear_proj.weight",
            vllm="self_attn.o_proj.weight",
        ),
        Rule(
            REPLICATED,
            hf=(HfTensor("post_attention_layernorm.weight", ("hidden",)),),
            megatron="pre_mlp_layernorm.weight",
            megatron_fused_norm="mlp.linear_fc1.layer_norm_weight",
            vllm="post_attention_layernorm.weight",
        ),
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
            vllm="mlp.down_proj.weight",
        ),
    ),
    final_norm=Rule(
        REPLICATED,
        hf=(HfTensor("model.norm.weight", ("hidden",)),),
        megatron="decoder.final_layernorm.weight",
        vllm="model.norm.weight",
    ),
    output=Rule(
        VOCABULARY,
        hf=(HfTensor("lm_head.weight", ("vocab", "hidden")),),
        megatron="output_layer.weight",
        vllm="lm_head.weight",
    ),
)
