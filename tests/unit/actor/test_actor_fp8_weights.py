"""Frozen weights in fp8 blocks: what a rank holds of them, what autograd keeps, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.actor import platform  # noqa: F401  before Megatron: it silences its import
from megatron_rl.actor.fp8_weights import Fp8Weight, load, writers
from megatron_rl.convert import open_checkpoint
from megatron_rl.convert.fp8 import rounded
from megatron_rl.convert.tensor_files import Maps
from megatron_rl.models import FAMILIES, is_linear_weight, megatron_shards, read_shape, slices
from megatron_rl.models.shards import local_extents
from megatron_rl.types import Adapters, Mesh

CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "hidden_size": 200,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 90,
    "intermediate_size": 300,
    "vocab_size": 64,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
"""TP2 cuts rows and columns inside of blocks of 128 x 128."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shape, generator = read_shape(folder), torch.Generator().manual_seed(0)
    named = FAMILIES["qwen3"].hf_tensors(shape)
    save_file({k: torch.randn(v, generator=generator) for k, v in named.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_holds_its_part_of_the_whole_matrix_as_it_is_rounded(folder, rank, dtype):
    shape, stored = read_shape(folder), load_file(folder / "model.safetensors")
    source, maps, by_name = open_checkpoint(folder), Maps({}), {}
    for shard in megatron_shards(shape, Mesh(tensor=2), rank):
        if is_linear_weight(shard.hf_name, len(shard.hf_box), shape):
            by_name.setdefault(shard.local_name, []).append(shard)
    assert len(by_name) == 4
    for name, shards in by_name.items():
        weight = Fp8Weight.zeros(local_extents(shards)[name], dtype, torch.device("cpu"))
        load(weight, shards, source, maps)
        write = writers({name: weight})[name]
        for shard in shards:
            expected = rounded(stored[shard.hf_name].to(dtype))[slices(shard.hf_box)]
            assert torch.equal(weight[slices(shard.local_box)], expected)
            (first, last), (left, right) = shard.local_box
            part = (first + 7, last), (left, right - 60)
            out = torch.empty(last - first - 7, right - left - 60, dtype=dtype)
            write(part, out)
            assert torch.equal(out, expected[7:, : right - left - 60])


def test_routers_norms_and_the_output_layer_are_not_quantised(folder):
    shape = read_shape(folder)
    named = FAMILIES["qwen3"].hf_tensors(replace(shape, adapters=Adapters(4, 8.0)))
    found = {name for name, extents in named.items() if is_linear_weight(name, len(extents), shape)}
    projections = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    assert found == {f"model.layers.0.{name}_proj.weight" for name in projections}


def test_the_backward_pass_keeps_the_weight_as_it_is_held(folder):
    from megatron.core.tensor_parallel.layers import linear_with_frozen_weight

    source, shape = open_checkpoint(folder), read_shape(folder)
    shards = [s for s in megatron_shards(shape, Mesh(), 0) if s.local_name.endswith("linear_proj.weight")]
    weight = Fp8Weight.zeros((200, 360), torch.float32, torch.device("cpu"))
    load(weight, shards, source, Maps({}))
    parameter = torch.nn.Parameter(weight, requires_grad=False)
    x = torch.randn(3, 360, requires_grad=True)
    y = linear_with_frozen_weight(x, parameter, None, False, False, False, None)
    [saved] = y.grad_fn.saved_tensors
    assert isinstance(saved, Fp8Weight) and saved.values_OH is weight.values_OH
    y.backward(torch.ones_like(y))
    dense = weight.dequantised()
    assert torch.equal(y, x @ dense.t()) and torch.equal(x.grad, torch.ones(3, 200) @ dense)


def test_nothing_writes_to_a_frozen_weight():
    weight = Fp8Weight.zeros((4, 4), torch.bfloat16, torch.device("cpu"))
    for write in (lambda: weight.zero_(), lambda: weight.copy_(torch.ones(4, 4)), lambda: weight[1:].add_(1)):
        with pytest.raises(TypeError, match="frozen in fp8 blocks"):
            write()
    assert not weight.dequantised().any()
