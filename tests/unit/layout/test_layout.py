"""The layout room's promises: partitions, exact transfers, named errors. Pure: no process, no vendor."""

from __future__ import annotations

import json
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.layout import (
    FAMILIES,
    check_parameters,
    megatron_shards,
    padded_vocabulary,
    plan_policy_to_engines,
    plan_transfers,
    read_shape,
    slices,
    vllm_shards,
)
from megatron_rl.layout.hub import read_index
from megatron_rl.layout.shards import Shard, local_extents
from megatron_rl.types import Mesh, ModelShape


@st.composite
def shapes(draw) -> ModelShape:
    kv = draw(st.sampled_from([1, 2, 4, 8]))
    return ModelShape(
        family="qwen3",
        num_layers=draw(st.sampled_from([2, 4])),
        hidden_size=draw(st.sampled_from([8, 24])),
        num_heads=kv * draw(st.integers(1, 3)),
        num_kv_heads=kv,
        head_dim=draw(st.sampled_from([2, 6])),
        ffn_size=draw(st.sampled_from([8, 16])),
        vocab_size=draw(st.integers(3, 200)),
        rope_theta=1e4,
        norm_eps=1e-6,
        max_positions=64,
        tied_embeddings=draw(st.booleans()),
    )


def numbered(shape: ModelShape) -> dict[str, np.ndarray]:
    """HF tensors in which every element is its own global number."""
    tensors, count = {}, 0
    for name, extent in FAMILIES[shape.family].hf_tensors(shape).items():
        tensors[name] = np.arange(count, count + prod(extent)).reshape(extent)
        count += prod(extent)
    return tensors


def cut(shards: list[Shard], hf: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The local parameters of a rank, as its shards say; -1 where nothing was written."""
    local = {name: np.full(extent, -1) for name, extent in local_extents(shards).items()}
    for shard in shards:
        assert (local[shard.local_name][slices(shard.local_box)] == -1).all(), f"{shard} writes an element twice"
        local[shard.local_name][slices(shard.local_box)] = hf[shard.hf_name][slices(shard.hf_box)]
    return local


def divides(shape: ModelShape, ways: int) -> bool:
    return shape.num_kv_heads % ways == 0 and shape.ffn_size % ways == 0


@given(
    shapes(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4])
)
def test_every_engine_element_is_written_once_and_from_its_own_source(shape, tensor, pipeline, data, engine_tensor):
    """Each element carries its own number through trainer layout, plan and engine layout."""
    mesh = Mesh(tensor, pipeline, data)
    if not divides(shape, tensor) or shape.num_heads % engine_tensor or shape.ffn_size % engine_tensor:
        return
    if engine_tensor > shape.num_kv_heads and engine_tensor % shape.num_kv_heads:
        return
    hf = numbered(shape)
    trainers = [cut(megatron_shards(shape, mesh, rank), hf) for rank in range(mesh.world_size)]
    plan = plan_policy_to_engines(shape, mesh, fused_norms=False, num_engines=2, engine_tensor=engine_tensor)
    wanted = [cut(vllm_shards(shape, engine_tensor, rank), hf) for rank in range(engine_tensor)] * 2
    engines = [{name: np.full_like(a, -1) for name, a in one.items()} for one in wanted]
    for (source, destination), copies in plan.routes.items():
        for copy in copies:
            target = engines[destination][copy.destination_name][slices(copy.destination_box)]
            assert (target == -1).all()
            target[...] = trainers[source][copy.source_name][slices(copy.source_box)]
    for engine, want in zip(engines, wanted, strict=True):
        for name in want:
            np.testing.assert_array_equal(engine[name], want[name])


@given(shapes(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_trainer_ranks_partition_every_tensor(shape, tensor, pipeline):
    if not divides(shape, tensor):
        return
    hf = numbered(shape)
    norms = {name for name, extent in FAMILIES["qwen3"].hf_tensors(shape).items() if len(extent) == 1}
    seen = {name: np.zeros(a.shape, int) for name, a in hf.items()}
    mesh = Mesh(tensor, pipeline)
    for rank in range(mesh.world_size):
        for shard in megatron_shards(shape, mesh, rank):
            seen[shard.hf_name][slices(shard.hf_box)] += 1
    copies_of_tied = 2 if shape.tied_embeddings and pipeline > 1 else 1
    for name, count in seen.items():
        times = tensor if name in norms else copies_of_tied if "embed_tokens" in name else 1
        assert (count == times).all(), name


def test_qkv_order_by_hand():
    """2 query groups of 2 heads, head size 1: Megatron interleaves the groups, vLLM stacks q, k, v."""
    shape = ModelShape("qwen3", 1, 4, 4, 2, 1, 4, 3, 1e4, 1e-6, 64, False)
    hf = {name: np.zeros(extent, int) for name, extent in FAMILIES["qwen3"].hf_tensors(shape).items()}
    prefix = "model.layers.0.self_attn."
    hf[prefix + "q_proj.weight"][:] = np.array([[10], [11], [12], [13]])
    hf[prefix + "k_proj.weight"][:] = np.array([[20], [21]])
    hf[prefix + "v_proj.weight"][:] = np.array([[30], [31]])
    one = cut(megatron_shards(shape, Mesh(), 0), hf)["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert one[:, 0].tolist() == [10, 11, 20, 30, 12, 13, 21, 31]
    second = cut(megatron_shards(shape, Mesh(tensor=2), 1), hf)["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert second[:, 0].tolist() == [12, 13, 21, 31]
    engine = cut(vllm_shards(shape, 4, 3), hf)["model.layers.0.self_attn.qkv_proj.weight"]
    assert engine[:, 0].tolist() == [13, 21, 31], "4 ranks share 2 KV heads: rank 3 has the second one"


def test_replicas_share_the_load():
    """DP4 holds everything four times: no rank sends more than a quarter and the largest single shard."""
    shape = ModelShape("qwen3", 8, 64, 8, 4, 16, 128, 256, 1e4, 1e-6, 64, False)
    plan = plan_policy_to_engines(shape, Mesh(1, 1, 4), fused_norms=False, num_engines=1, engine_tensor=1)
    sent = [plan.num_elements((rank, 0)) for rank in range(4)]
    assert max(sent) - min(sent) <= 256 * 64


def test_a_gap_in_the_sources_is_named():
    shape = ModelShape("qwen3", 2, 8, 2, 2, 4, 8, 16, 1e4, 1e-6, 64, False)
    mesh = Mesh(tensor=2)
    only_first_rank = [megatron_shards(shape, mesh, 0)]
    with pytest.raises(ValueError, match=r"q_proj\.weight .* hold 32 of the 64 elements"):
        plan_transfers(only_first_rank, [vllm_shards(shape, 1, 0)])


def test_parameters_that_no_rule_covers_are_named():
    shape = ModelShape("qwen3", 1, 8, 2, 2, 4, 8, 16, 1e4, 1e-6, 64, False)
    shards = vllm_shards(shape, 1, 0)
    live = local_extents(shards)
    check_parameters(shards, live | {"lm_head.weight": (64, 8)}, "engine")  # padding rows are no error
    with pytest.raises(ValueError, match="strange.bias"):
        check_parameters(shards, live | {"strange.bias": (3,)}, "engine")
    with pytest.raises(ValueError, match="model.norm.weight"):
        check_parameters(shards, {k: v for k, v in live.items() if k != "model.norm.weight"}, "engine")
    with pytest.raises(ValueError, match=r"norm.weight is \(9,\)"):
        check_parameters(shards, live | {"model.norm.weight": (9,)}, "engine")


def test_mesh_that_does_not_divide_names_the_number():
    shape = ModelShape("qwen3", 3, 8, 2, 2, 4, 8, 16, 1e4, 1e-6, 64, False)
    with pytest.raises(ValueError, match="3 layers, which policy.parallel.pipeline=2"):
        megatron_shards(shape, Mesh(pipeline=2), 0)
    assert padded_vocabulary(shape, 2) == 64


HF_CONFIG = {
    "model_type": "qwen3", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 4, "intermediate_size": 8, "vocab_size": 16, "rope_theta": 1e4, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


def write_model(folder, change=None):
    import torch
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    tensors = {n: torch.zeros(e) for n, e in FAMILIES["qwen3"].hf_tensors(read_shape(folder)).items()}
    if change:
        change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_whole_folder_reads(tmp_path):
    shape = read_shape(write_model(tmp_path / "m"))
    assert read_index(tmp_path / "m", shape).keys() == FAMILIES["qwen3"].hf_tensors(shape).keys()


@pytest.mark.parametrize("keep", [0, 5, 9, 200, -1])
def test_truncated_weights_are_named(tmp_path, keep):
    folder = write_model(tmp_path / "m")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="model.safetensors"):
        read_index(folder, read_shape(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "1 tensors are missing, the first is model.norm.weight"),
        (lambda t: t.update({"model.extra": t["model.norm.weight"].clone()}), "model.extra .* unknown"),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"][:4].clone()}),
            r"is \(4,\), config.json asks for \(8,\)",
        ),
    ],
)
def test_wrong_tensors_are_named(tmp_path, change, message):
    folder = write_model(tmp_path / "m", change)
    with pytest.raises(ValueError, match=message):
        read_index(folder, read_shape(folder))


def test_missing_and_foreign_configurations(tmp_path):
    with pytest.raises(ValueError, match="has no config.json"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="gpt2.*supported: qwen3"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ValueError, match="num_attention_heads"):
        read_shape(tmp_path)
