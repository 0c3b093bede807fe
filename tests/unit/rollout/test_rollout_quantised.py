"""In a quantised engine vLLM quantises pushed weights as if it had loaded them from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
import warm
from loaded_engine import checksums
from patience import deadline
from repacking import note_repacking, notes
from tiny_trainers import write_model
from vllm_workers import called_in_workers

from megatron_rl.layout import read_shape, vllm_shards
from megatron_rl.layout.shards import volume
from megatron_rl.layout.turns import WINDOW
from megatron_rl.types import Mesh


@pytest.mark.parametrize("tensor", [1, 2])
def test_pushed_weights_are_quantised_as_loaded_ones(make_stage, tmp_path, tensor):
    """After two pushes of different weights every quantised layer, with its scales, has the same bits as in an engine
    that loaded the second weights."""
    folders = [write_model(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    sizes = dict(max_prompt_tokens=16, max_response_tokens=8)
    stage = make_stage(
        folders[0], Mesh(tensor=2), dtype="bfloat16", tensor=tensor, quantization="fp8_per_channel", **sizes
    )
    seen = []
    for version, folder in enumerate(folders):
        shape = read_shape(folder)
        recorded = stage.run(stage.engine.weights.record_loading(shape))  # of layers that vLLM has processed
        for rank, recording in enumerate(recorded):
            assert set(recording.shards) == set(vllm_shards(shape, tensor, rank))
        stage.push(folder, version)
        seen.append(stage.run(called_in_workers(stage.engine, "compute_weight_checksums")))
    (ranks,) = warm.together(checksums, [(folders[1], "fp8_per_channel", tensor)], deadline(240))
    assert len(ranks) == tensor
    for before, now, expected in zip(*seen, ranks, strict=True):
        layers = [name for name in expected if "layers." in name]  # vLLM keeps the others packed on a CPU
        assert sum("weight_scale" in name for name in layers) == 8  # 2 layers x (qkv, o, gate and up, down)
        assert {name: now[name] for name in layers} == {name: expected[name] for name in layers}
        assert all(before[name] != now[name] for name in layers)


def test_a_push_holds_few_layers_and_all_ranks_repack_them_in_one_order(make_stage, tmp_path):
    """vLLM may reduce over the ranks of an engine while it repacks a layer."""
    folder = write_model(tmp_path / "deep", seed=0, num_hidden_layers=8)
    sizes = dict(max_prompt_tokens=16, max_response_tokens=8)
    stage = make_stage(folder, Mesh(tensor=2), dtype="bfloat16", tensor=2, quantization="fp8_per_channel", **sizes)
    recorded = stage.run(stage.engine.weights.record_loading(read_shape(folder)))
    assert all(rank.repacked for rank in recorded)
    stage.rejoin(recorded=tuple(recorded), bucket_bytes=2**12)
    stage.run(called_in_workers(stage.engine, note_repacking))
    stage.push(folder, 0)
    first, second = stage.run(called_in_workers(stage.engine, notes))
    assert [name for name, _ in first] == [name for name, _ in second]
    assert len({name for name, _ in first}) == len(first) == 8 * 4  # qkv, o, gate and up, down
    weights = [shard.local_box for shard in recorded[0].shards if shard.local_name.endswith("proj.weight")]
    whole = 2 * sum(volume(box) for box in weights)
    for held in ([num_bytes for _, num_bytes in first], [num_bytes for _, num_bytes in second]):
        assert 0 < max(held) <= whole * (WINDOW + 1 / 8)  # two layers lie around the ends of the window


def write_latent_model(folder: Path, seed: int) -> Path:
    """DeepSeek-V3 with dense layers alone, because the test is about attention."""
    torch.manual_seed(seed)
    config = transformers.DeepseekV3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=512,
        qk_nope_head_dim=16,
        qk_rope_head_dim=64,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        num_nextn_predict_layers=0,
    )
    model = transformers.DeepseekV3ForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.normal_(parameter.ndim == 1, 0.2)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_matrices_that_vllm_makes_of_a_quantised_weight_follow_a_push(make_stage, tmp_path):
    """Latent attention decodes with copies of kv_b_proj's weight, in the form that a decoding step needs."""
    folders = [write_latent_model(tmp_path / str(seed), seed) for seed in (0, 1)]
    sizes = dict(max_prompt_tokens=16, max_response_tokens=8, delimiter="")
    stage = make_stage(folders[0], Mesh(tensor=2), dtype="bfloat16", quantization="fp8_per_channel", **sizes)
    seen = []
    for version, folder in enumerate(folders):
        stage.push(folder, version)
        seen.extend(stage.run(called_in_workers(stage.engine, "compute_weight_checksums")))
    ((expected,),) = warm.together(checksums, [(folders[1], "fp8_per_channel", 1, "CPU_MLA")], deadline(240))
    before, now = seen
    made = [name for name in expected if name.endswith((".W_UK_T", ".W_UV"))]
    assert len(made) == 4  # of 2 layers
    layers = [name for name in expected if "layers." in name]
    assert {name: now[name] for name in layers} == {name: expected[name] for name in layers}
    assert all(before[name] != now[name] for name in layers)
