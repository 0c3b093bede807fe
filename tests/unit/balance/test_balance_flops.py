"""FLOPs are compared with counts by hand, with plain torch implementations of every kind of layer, and with
transformers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from leaks import lasting
from small_models import changed, model
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from megatron_rl.balance import forward_flops, training_flops
from megatron_rl.balance.flops import attention_flops, flops_by_layer, layer_flops_per_token
from megatron_rl.types import (
    Adapters,
    Attention,
    DeltaNet,
    LatentAttention,
    Layer,
    Mixture,
    Mlp,
    ModelShape,
    Rope,
)

DENSE = model("x", 2, 48, 4, 2, 32, 80, 200, 512)  # 4 heads x 32 is not 48
MIXTURE = changed(DENSE, (1,), mlp=Mixture(8, 2, 24, shared_ffn_size=40))
LATENT = LatentAttention(4, query_rank=24, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=20, rope=Rope(1e4))
THREE = replace(DENSE, layers=DENSE.layers[:1] * 3)
SHAPES = {
    "dense": DENSE,
    "mixture": MIXTURE,
    "latent": changed(MIXTURE, attention=LATENT),
    "latent_without_query_rank": changed(DENSE, attention=replace(LATENT, query_rank=0)),
    "sliding": changed(THREE, (0, 2), attention={"window": 24}),
}


def test_golden():
    shape = model("x", 2, 4, 3, 1, 2, 5, 7, 16)
    # A layer: q and o 4x6 each, k and v 4x2 each, MLP 3 of 4x5; output 4x7.
    assert layer_flops_per_token(shape) == 2 * 2 * (2 * 24 + 2 * 8 + 3 * 20) == 496
    # 10 tokens, 2 layers, 3 heads x 2: half of two products of 2 x 100 x 6.
    lengths = np.array([10])
    assert attention_flops(lengths, shape).tolist() == [2 * 1200]
    assert forward_flops(lengths, shape).tolist() == [4960 + 2400 + 560]
    assert training_flops(lengths, shape).tolist() == [3 * (4960 + 2400 + 560)]
    assert training_flops(lengths, shape, "full").tolist() == [4 * (4960 + 2400) + 3 * 560]
    # Frozen weights have no gradient; attention has both of its own.
    frozen = replace(shape, adapters=Adapters(1, 1.0))
    assert training_flops(lengths, frozen, "full").tolist() == [3 * 4960 + 4 * 2400 + 2 * 560]
    # A head that is trained: one more layer, a matrix 4x8 in front of it, and the output layer again.
    with_head = replace(shape, multi_token=True)
    assert training_flops(lengths, with_head, "full").tolist() == [4 * 1.5 * (4960 + 2400) + 3 * (640 + 2 * 560)]
    # Windows of 4 in one of the layers: 6 of the 10 tokens see 4 each, the first 4 half of 16.
    sliding = changed(shape, (1,), attention={"window": 4})
    assert attention_flops(lengths, sliding).tolist() == [1200 + 24 * (6 * 4 + 8)]
    assert attention_flops(np.array([3]), sliding) == attention_flops(np.array([3]), shape)
    # Router 4x6, two of six experts 3 of 4x3, the shared one 3 of 4x2; the first layer stays dense.
    mixture = changed(shape, (1,), mlp=Mixture(6, 2, 3, shared_ffn_size=2))
    assert layer_flops_per_token(mixture) == 2 * (2 * 64 + 60 + 24 + 72 + 24)
    # Latent attention: q by way of rank 2, 4x2 and 2x15, k and v by way of 3, 4x4 and 3x18; o 6x4; MLP as above.
    attention = LatentAttention(3, query_rank=2, kv_rank=3, nope_dim=4, rope_dim=1, value_dim=2, rope=Rope(1e4))
    latent = changed(shape, attention=attention)
    assert layer_flops_per_token(latent) == 2 * 2 * (8 + 30 + 16 + 54 + 24 + 60)
    assert attention_flops(lengths, latent).tolist() == [2 * 3 * (5 + 2) * 2 * 50]
    direct = changed(latent, attention={"query_rank": 0})
    assert layer_flops_per_token(direct) == 2 * 2 * (60 + 16 + 54 + 24 + 60)


def test_golden_of_linear_attention():
    shape = model("x", 2, 4, 3, 1, 2, 5, 7, 16)
    delta = DeltaNet(num_key_heads=1, num_value_heads=2, key_size=3, value_size=5, convolution=4, interleaved=False)
    hybrid = changed(changed(shape, attention={"gated": True}), (0,), attention=delta)
    # Projections 4 x (2 x 3 + 2 x 10 + 2 x 2) and 10 x 4; keys 2 x 64 x 3; a value head 64 x 8 / 2 + 3 x 15 + 320.
    linear = 4 * 30 + 40 + 384 + 2 * (256 + 45 + 320)
    # Softmax attention: q, gate and o 4x6 each, k and v 4x2 each. Both layers have an MLP of 3 of 4x5.
    assert layer_flops_per_token(hybrid) == 2 * (linear + 3 * 24 + 2 * 8 + 2 * 60)
    assert attention_flops(np.array([10]), hybrid).tolist() == [1200]
    layers = flops_by_layer(10, hybrid)
    assert layers == [20 * (linear + 60), 20 * (72 + 16 + 60) + 1200]
    assert sum(layers) + 2 * 4 * 7 * 10 == forward_flops(np.array([10]), hybrid)


class Plain:
    """A decoder that consists only of matrix products. Each token is multiplied only with the keys that it may see."""

    def __init__(self, shape: ModelShape):
        self.shape = shape
        self.weights: dict[str, Tensor] = {}

    def linear(self, name: str, x: Tensor, width: int) -> Tensor:
        """Multiply by a weight, which is created at its first use."""
        if name not in self.weights:
            self.weights[name] = (0.1 * torch.randn(x.shape[-1], width)).requires_grad_()
        return x @ self.weights[name]

    def attention(self, name: str, x: Tensor, at: Attention) -> Tensor:
        length = len(x)
        if isinstance(at, LatentAttention):
            query = self.linear(f"{name}.qa", x, at.query_rank) if at.query_rank else x
            q = self.linear(f"{name}.q", query, at.num_heads * (at.nope_dim + at.rope_dim))
            compressed = self.linear(f"{name}.kva", x, at.kv_rank + at.rope_dim)
            up = self.linear(f"{name}.kv", compressed[:, : at.kv_rank], at.num_heads * (at.nope_dim + at.value_dim))
            up = up.view(length, at.num_heads, -1)
            rope = compressed[:, None, at.kv_rank :].expand(-1, at.num_heads, -1)
            k, v = torch.cat([up[..., : at.nope_dim], rope], -1), up[..., at.nope_dim :]
        else:
            q = self.linear(f"{name}.q", x, at.num_heads * at.head_dim)
            k = self.linear(f"{name}.k", x, at.num_kv_heads * at.head_dim).view(length, at.num_kv_heads, -1)
            v = self.linear(f"{name}.v", x, at.num_kv_heads * at.head_dim).view(length, at.num_kv_heads, -1)
            share = at.num_heads // at.num_kv_heads
            k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        q = q.view(length, at.num_heads, -1).transpose(0, 1)
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        rows = []
        for t in range(length):
            seen = slice(max(0, t + 1 - at.window) if at.window else 0, t + 1)
            scores = torch.bmm(q[:, t : t + 1], k[:, seen].transpose(1, 2)).softmax(-1)
            rows.append(torch.bmm(scores, v[:, seen])[:, 0])
        return self.linear(f"{name}.o", torch.stack(rows).flatten(1), self.shape.hidden_size)

    def gated(self, name: str, x: Tensor, width: int) -> Tensor:
        hidden = torch.sigmoid(self.linear(f"{name}.gate", x, width)) * self.linear(f"{name}.up", x, width)
        return self.linear(f"{name}.down", hidden, x.shape[-1])

    def mlp(self, name: str, x: Tensor, experts: Mlp) -> Tensor:
        if not isinstance(experts, Mixture):
            return self.gated(name, x, experts.size)
        weight, chosen = self.linear(f"{name}.router", x, experts.num_experts).softmax(-1).topk(experts.num_active)
        result = self.gated(f"{name}.shared", x, experts.shared_ffn_size)
        for expert in range(experts.num_experts):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            out = self.gated(f"{name}.{expert}", x[token], experts.ffn_size)
            result = result.index_add(0, token, weight[token, slot, None] * out)
        return result

    def layer(self, x: Tensor, number: int) -> Tensor:
        layer: Layer = self.shape.layers[number]
        x = x + self.attention(f"{number}.attention", x, layer.attention)
        return x + self.mlp(f"{number}.mlp", x, layer.mlp)

    def __call__(self, length: int, recompute: str) -> Tensor:
        x = torch.randn(length, self.shape.hidden_size, requires_grad=True)
        for layer in range(self.shape.num_layers):
            x = checkpoint(self.layer, x, layer, use_reentrant=False) if recompute == "full" else self.layer(x, layer)
        return self.linear("output", x, self.shape.vocab_size)


@pytest.mark.deep
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("passes", ["forward", "none", "full", "frozen none", "frozen full"])
def test_equals_counted_operations(name, passes):
    torch.manual_seed(0)
    shape, length = SHAPES[name], 128
    model = Plain(shape)
    model(length, "none")  # creates the weights
    if passes.startswith("frozen"):
        passes, shape = passes.removeprefix("frozen "), replace(shape, adapters=Adapters(1, 1.0))
        for weight in model.weights.values():
            weight.requires_grad_(False)
    # The whole layer runs again. The counter imports torch's compiler, which sets a variable of the environment.
    with lasting(), FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(False):
        logits = model(length, passes)
        if passes != "forward":
            logits.sum().backward()
    lengths = np.array([length])
    expected = forward_flops(lengths, shape) if passes == "forward" else training_flops(lengths, shape, passes)
    # The tolerance is 2 %, because a token also sees itself: there are L (L + 1) / 2 pairs instead of L^2 / 2.
    assert expected[0] == pytest.approx(counter.get_total_flops(), rel=0.02)


COMMON = dict(
    hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=80, vocab_size=200,
    max_position_embeddings=128, tie_word_embeddings=False, attn_implementation="eager",
)  # fmt: skip


def transformers_model(name: str) -> tuple[torch.nn.Module, ModelShape]:
    import transformers as tf  # its modules take seconds to import

    if name == "qwen3":
        return tf.Qwen3ForCausalLM(tf.Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=32)), THREE
    if name == "qwen3_moe":
        config = tf.Qwen3MoeConfig(
            **COMMON, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
            moe_intermediate_size=24, mlp_only_layers=[0], decoder_sparse_step=1, experts_implementation="eager",
        )  # fmt: skip
        return tf.Qwen3MoeForCausalLM(config), changed(THREE, (1, 2), mlp=Mixture(8, 2, 24))
    config = tf.DeepseekV3Config(
        **COMMON, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=24,
        n_shared_experts=2, first_k_dense_replace=1, n_group=1, topk_group=1, q_lora_rank=24, kv_lora_rank=16,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=20, experts_implementation="eager",
    )  # fmt: skip
    mixture = changed(THREE, (1, 2), mlp=Mixture(8, 2, 24, shared_ffn_size=48))
    return tf.DeepseekV3ForCausalLM(config), changed(mixture, attention=LATENT)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_equals_counted_operations_of_transformers(name):
    torch.manual_seed(0)
    with lasting():  # the first import of a model sets a variable of the environment
        (model, shape), length = transformers_model(name), 96
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(length)[None], use_cache=False).logits.sum().backward()
    lengths = np.array([length])
    # Plain attention also multiplies the masked half, which is added here. The 2 % are the rotary angles, which the
    # count leaves out.
    full = training_flops(lengths, shape)[0] + 3 * attention_flops(lengths, shape)[0]
    assert full == pytest.approx(counter.get_total_flops(), rel=0.02)
