from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_rl.balance.flops import attention_flops, linear_flops_per_token, training_flops
from megatron_rl.types import ModelShape


def shape_of(config: Qwen3Config) -> ModelShape:
    return ModelShape(
        family="qwen3",
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        ffn_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        rope_theta=10000.0,
        norm_eps=1e-6,
        max_positions=config.max_position_embeddings,
        tied_embeddings=False,
    )


def test_golden():
    shape = ModelShape("x", 2, 4, 3, 1, 2, 5, 7, 1e4, 1e-6, 16, False)
    # A layer: q and o 4x6 each, k and v 4x2 each, MLP 3 of 4x5; output 4x7.
    linear = 2 * (2 * (2 * 24 + 2 * 8 + 3 * 20) + 28)
    assert linear_flops_per_token(shape) == linear == 552
    # 10 tokens, 2 layers, 3 heads x 2: half of two products of 2 x 100 x 6.
    assert attention_flops(np.array([10]), shape).tolist() == [2 * 1200]
    assert training_flops(np.array([10, 0]), shape).tolist() == [3 * (5520 + 2400), 0]


@pytest.mark.parametrize("length", [16, 96])
def test_equals_the_profiler(length):
    config = Qwen3Config(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=80, vocab_size=200, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = Qwen3ForCausalLM(config)
    ids = torch.arange(length)[None]
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False).logits.sum().backward()
    shape, lengths = shape_of(config), np.array([length])
    # The plain attention multiplies the masked half too: add it back. 2 %: the rotary angles,
    # which are left out.
    full = training_flops(lengths, shape)[0] + 3 * attention_flops(lengths, shape)[0]
    assert full == pytest.approx(counter.get_total_flops(), rel=0.02)
