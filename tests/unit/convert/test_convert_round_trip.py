"""HF -> Megatron -> HF gives the same bits for every family and mesh; the Megatron form is what Megatron expects."""

from __future__ import annotations

import json

import cover
import pytest
import torch
from folders import CONFIGS, assert_same, back, read, read_plain, write, write_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader, load

from megatron_rl.convert import Options, open_checkpoint, smallest_mesh, to_hub, to_open, to_ranks
from megatron_rl.convert.forms import rank_tensors
from megatron_rl.convert.target import blocks
from megatron_rl.convert.tensor_files import Maps
from megatron_rl.models import megatron_shards, padded_vocabulary, read_shape, slices

PIPELINES = [
    dict(pipeline=1),
    dict(pipeline=2),
    dict(pipeline=3, layers=(1, 2, 1)),
    dict(pipeline=2, virtual=2),
    dict(pipeline=2, virtual=2, layers=(1, 0, 2, 1)),
]
EXPERTS = [(1, None), (2, None), (2, 1), (4, 1)]


@pytest.fixture(scope="module")
def hubs(tmp_path_factory):
    root = tmp_path_factory.mktemp("hubs")
    return {name: write_folder(root / name, name) for name in CONFIGS}


def tensors_of(conversion) -> dict[tuple[str, str], torch.Tensor]:
    """The tensors that the conversion would write, in memory, by file (without its number) and name."""
    maps, result = Maps({}), {}
    for file in conversion.files:
        for tensor, _ in file.tensors():
            stem = file.name.removesuffix(".safetensors")
            result[stem, tensor.name] = torch.cat([block.clone() for block in blocks(tensor, maps)])
    return result


@pytest.mark.parametrize("name", cover.essential(CONFIGS, "qwen2", "qwen3_moe_dense", "deepseek_v3"))
def test_the_ranks_of_every_mesh_hold_what_their_shards_say(hubs, name):
    """The test makes the tensors in memory. Each element comes from where the family's table says; padding is zero."""
    source, hf = open_checkpoint(hubs[name]), read_plain(hubs[name])
    shape = source.shape
    experts = EXPERTS if shape.mixture else EXPERTS[:1]
    for tensor, pipeline, (expert, expert_tensor), fused in cover.cases((1, 2, 4), PIPELINES, experts, (False, True)):
        mesh = smallest_mesh(tensor, expert, expert_tensor, **pipeline)
        found = tensors_of(to_ranks(source, mesh, fused))
        seen = set()
        for rank in range(mesh.world_size):
            t, p, _ = mesh.coordinates(rank)
            et, e, _ = mesh.expert_coordinates(rank)
            for shard in megatron_shards(shape, mesh, rank, fused):
                is_expert = ".mlp.experts." in shard.local_name
                stem = f"expert{e}_tensor{et}_pipeline{p}" if is_expert else f"tensor{t}_pipeline{p}"
                local = found[stem, shard.local_name]
                wanted = hf[shard.hf_name][slices(shard.hf_box)]
                assert torch.equal(local[slices(shard.local_box)].nan_to_num(7), wanted.nan_to_num(7)), (mesh, shard)
                seen.add((stem, shard.local_name))
        assert seen == found.keys()
        for (stem, local_name), local in found.items():
            if "embedding" in local_name:
                assert len(local) == padded_vocabulary(shape, tensor) // tensor
                real = max(0, min(len(local), shape.vocab_size - int(stem[6]) * len(local)))
                assert not local[real:].any()


MESHES = [
    (dict(tensor=2, expert=1, expert_tensor=None), dict(pipeline=2)),
    (dict(tensor=4, expert=2, expert_tensor=1), dict(pipeline=3, layers=(1, 2, 1))),
    (dict(tensor=2, expert=4, expert_tensor=2), dict(pipeline=2, virtual=2)),
]


@pytest.mark.parametrize("name", cover.essential(CONFIGS, "deepseek_v3_direct"))
def test_round_trips_are_bitwise(hubs, name, tmp_path):
    hf = read(hubs[name])
    write(to_open(open_checkpoint(hubs[name]), Options(max_file_bytes=4000)), tmp_path / "open")
    assert_same(read(back(tmp_path / "open", tmp_path / "hub")), hf)
    has_experts = read_shape(hubs[name]).mixture is not None
    for i, (ways, stages) in enumerate(MESHES):
        ways = ways if has_experts else dict(tensor=ways["tensor"], expert=1, expert_tensor=None)
        source = open_checkpoint(tmp_path / "open" if i else hubs[name])
        conversion = to_ranks(source, smallest_mesh(**ways, **stages), bool(i % 2), Options(max_file_bytes=3000))
        write(conversion, tmp_path / f"ranks{i}")
        assert_same(read(back(tmp_path / f"ranks{i}", tmp_path / f"hub{i}", Options(max_file_bytes=5000))), hf)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_the_distributed_checkpoint(hubs, tmp_path):
    """The expected tensors are written out by hand: query groups are interleaved, gate lies above up, and layers are
    stacked."""
    write(to_open(open_checkpoint(hubs["qwen3"]), Options(max_file_bytes=4000)), tmp_path / "open")
    metadata = FileSystemReader(tmp_path / "open").read_metadata()
    hf = read(hubs["qwen3"])
    key = "decoder.layers.self_attention.linear_qkv.weight"
    fc1, embedding = "decoder.layers.mlp.linear_fc1.weight", "embedding.word_embeddings.weight"
    state = {name: torch.zeros(metadata.state_dict_metadata[name].size) for name in (key, fc1, embedding)}
    load(state, checkpoint_id=tmp_path / "open", no_dist=True)
    for layer in range(4):
        q, k, v = (hf[f"model.layers.{layer}.self_attn.{x}_proj.weight"] for x in "qkv")
        groups = []
        for g in range(4):  # two query heads of 6 rows each to one of k and v
            groups += [q[12 * g : 12 * g + 12], k[6 * g : 6 * g + 6], v[6 * g : 6 * g + 6]]
        assert torch.equal(state[key][layer].nan_to_num(7), torch.cat(groups).nan_to_num(7))
        gate, up = (hf[f"model.layers.{layer}.mlp.{x}_proj.weight"] for x in ("gate", "up"))
        assert torch.equal(state[fc1][layer].nan_to_num(7), torch.cat([gate, up]).nan_to_num(7))
    assert torch.equal(state[embedding].nan_to_num(7), hf["model.embed_tokens.weight"].nan_to_num(7))


def test_experts_of_like_layers_share_a_key_and_those_of_unlike_layers_do_not(hubs, tmp_path):
    sizes = {}
    for name in ("qwen3_moe", "qwen3_moe_dense"):
        write(to_open(open_checkpoint(hubs[name])), tmp_path / name)
        sizes[name] = FileSystemReader(tmp_path / name).read_metadata().state_dict_metadata
    assert sizes["qwen3_moe"]["decoder.layers.mlp.experts.experts.linear_fc1.weight"].size == (4, 4, 16, 16)
    assert sizes["qwen3_moe_dense"]["decoder.layers.2.mlp.experts.experts.linear_fc1.weight"].size == (4, 16, 16)
    assert sizes["qwen3_moe_dense"]["decoder.layers.0.mlp.linear_fc1.weight"].size == (48, 16)


def test_index_sizes_and_companions(hubs, tmp_path):
    folder = hubs["qwen3_moe"]
    write(to_open(open_checkpoint(folder)), tmp_path / "open")
    target = back(tmp_path / "open", tmp_path / "hub", Options(max_file_bytes=6000))
    index = json.loads((target / "model.safetensors.index.json").read_text())
    tensors = read(folder)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    for name, file in index["weight_map"].items():
        with safe_open(target / file, framework="pt") as opened:
            assert name in opened.keys()
    sizes = [
        sum(tensors[n].nbytes for n, f in index["weight_map"].items() if f == p.name)
        for p in target.glob("*.safetensors")
    ]
    assert max(sizes) <= 6000 and len(sizes) > 3
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (target / name).read_bytes() == (folder / name).read_bytes()


def test_dtypes_are_converted_on_request_and_the_routers_bias_is_not(tmp_path):
    folder = write_folder(tmp_path / "hub", "deepseek_v3")
    write(to_open(open_checkpoint(folder), Options(dtype="bfloat16")), tmp_path / "open")
    target = back(tmp_path / "open", tmp_path / "back")
    before, after = read(folder), read(target)
    for name, tensor in before.items():
        kept = name.endswith("e_score_correction_bias")
        wanted = tensor if kept else tensor.bfloat16()
        assert after[name].dtype == wanted.dtype and torch.equal(after[name].nan_to_num(7), wanted.nan_to_num(7)), name
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    assert_same(
        read(back(target, tmp_path / "float", Options(dtype="float32"))), {n: t.float() for n, t in after.items()}
    )


@pytest.mark.deep
def test_a_tensor_takes_the_memory_of_a_few_blocks(tmp_path):
    """Converting a tensor of 256 MB needs less than 32 MiB of this process's private memory."""
    folder = write_folder(
        tmp_path / "hub", "qwen3", torch.bfloat16, 1, hidden_size=4096, vocab_size=16384, num_hidden_layers=1
    )
    conversion = to_hub(open_checkpoint(folder), Options(dtype="float32"))
    maps, tensor = Maps({}), conversion.files[0].segments[1]
    assert tensor.num_bytes == 2**28

    def private_bytes() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

    before = private_bytes()
    peak = max(private_bytes() for _ in blocks(tensor, maps))
    assert peak - before < 2**25


@settings(max_examples=cover.examples(24), deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 2**14))
def test_the_block_size_changes_nothing(hubs, a, b, block_bytes):
    from megatron_rl.convert import target

    source = open_checkpoint(hubs["qwen3"])
    mesh = smallest_mesh(2 ** (a // 2), 1, None, pipeline=2 ** (b // 3))
    wanted, before = tensors_of(to_ranks(source, mesh, True)), target.BLOCK_BYTES
    target.BLOCK_BYTES = block_bytes
    try:
        found = tensors_of(to_ranks(source, mesh, True))
    finally:
        target.BLOCK_BYTES = before
    assert_same({str(k): v for k, v in found.items()}, {str(k): v for k, v in wanted.items()})


def test_files_of_a_mesh_repeat_no_replica(hubs):
    """Each stage has one file for each tensor-parallel rank and one for each expert rank, and no other."""
    shape = read_shape(hubs["qwen3_moe"])
    names = rank_tensors(shape, smallest_mesh(2, 2, 1, pipeline=2), True).keys()
    assert set(names) == {
        f"{x}_pipeline{p}" for p in (0, 1) for x in ("tensor0", "tensor1", "expert0_tensor0", "expert1_tensor0")
    }
