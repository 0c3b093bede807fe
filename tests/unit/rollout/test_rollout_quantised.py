"""In a quantised engine vLLM quantises pushed weights as if it had loaded them from a checkpoint. Weights that are
damaged after that are named, and no token is sampled with them."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
import warm
from corruptions import PROMPT, empty, exchange, flip_a_bit, keep, refused, swap
from loaded_engine import checksums
from patience import deadline
from repacking import note_repacking, notes, repack_experts
from tiny_trainers import write_model
from vllm_workers import called_in_workers

from megatron_rl.bridge.verification import PUSHES, is_sampled
from megatron_rl.layout.route_order import WINDOW
from megatron_rl.models import read_shape, vllm_shards
from megatron_rl.models.shards import volume
from megatron_rl.types import Mesh

QUANTISED = dict(
    dtype="bfloat16", quantization="fp8_per_channel", max_prompt_tokens=16, max_response_tokens=8, delimiter=""
)
ATTENTION, MLP = "model.layers.1.self_attn.", "model.layers.0.mlp."


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """Two models that differ only in their weights."""
    return tuple(write_model(tmp_path_factory.mktemp(f"dense{seed}"), seed) for seed in (0, 1))


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.deep)], ids=["tp1", "tp2"])
def stage(request, make_stage, pair):
    return make_stage(pair[0], Mesh(tensor=2), parallel={"tensor": request.param}, **QUANTISED)


def test_pushed_weights_are_quantised_as_loaded_ones(stage, pair):
    """After two pushes of different weights every quantised layer, with its scales, has the same bits as in an engine
    that loaded the second weights."""
    seen, tensor = [], stage.config.parallel.tensor
    for version, folder in enumerate(pair):
        shape = read_shape(folder)
        recorded = stage.run(stage.engine.weights.record_loading(shape))  # of layers that vLLM has processed
        for rank, recording in enumerate(recorded):
            assert set(recording.shards) == set(vllm_shards(shape, tensor, rank))
        stage.push(folder, version)
        seen.append(stage.run(called_in_workers(stage.engine, "compute_weight_checksums")))
    (ranks,) = warm.together(checksums, [(pair[1], "fp8_per_channel", tensor)], deadline(240))
    assert len(ranks) == tensor
    for before, now, expected in zip(*seen, ranks, strict=True):
        layers = [name for name in expected if "layers." in name]  # vLLM keeps the others packed on a CPU
        assert sum("weight_scale" in name for name in layers) == 8  # 2 layers x (qkv, o, gate and up, down)
        assert {name: now[name] for name in layers} == {name: expected[name] for name in layers}
        assert all(before[name] != now[name] for name in layers)


@pytest.mark.parametrize(
    ("rank", "how", "named"),
    [
        (0, partial(flip_a_bit, f"{ATTENTION}qkv_proj.weight"), f"{ATTENTION}qkv_proj does not .*: weight \\(Fp8"),
        (1, partial(keep, (f"{MLP}down_proj.weight_scale",)), f"{MLP}down_proj does not .*: weight_scale \\(Fp8"),
        (
            1,
            partial(keep, (f"{MLP}gate_up_proj.weight", f"{MLP}gate_up_proj.weight_scale")),
            f"{MLP}gate_up_proj does not .*: weight, weight_scale \\(Fp8",
        ),
        (0, partial(swap, f"{ATTENTION}o_proj.weight_scale"), f"{ATTENTION}o_proj does not .*: weight_scale \\(Fp8"),
        (
            0,
            partial(exchange, "model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"),
            "down_proj does not .*: weight \\(Fp8",
        ),
        (1, partial(empty, "model.embed_tokens.weight"), "model.embed_tokens.weight .* has changed since version 1"),
    ],
    ids=["a bit", "a stale scale", "a layer left old", "two scales", "two layers", "an embedding"],
)
def test_damage_to_quantised_layers_is_named(stage, pair, rank, how, named):
    """On this rank, or on the only one."""
    rank = min(rank, stage.config.parallel.tensor - 1)
    error = refused(stage, pair, rank, how)
    assert error.startswith(f"engine 0, rank {rank}: ")
    assert re.search(named, error), error


@pytest.mark.deep
def test_an_engine_waits_between_taking_and_committing(stage, pair):
    """It samples nothing in between, and nothing at all with weights that are disputed."""
    stage.push(pair[0], 0)

    async def take_while_answering(version: int, dispute: str | None):
        answer = asyncio.create_task(stage.answer(version, 0, PROMPT, range(4)))
        while not stage.engine.sampler._thread.engine.has_unfinished_requests():
            await stage.engine.weights.ready()
        stage.trainers.begin_push(pair[1], version)
        digests = await stage.engine.weights.take(version)
        before = tokens_of(stage)
        for _ in range(10):
            await stage.engine.weights.ready()
        assert tokens_of(stage) == before and not answer.done()
        outcome = await asyncio.gather(stage.engine.weights.commit(version, dispute), answer, return_exceptions=True)
        return digests, *outcome

    digests, metrics, samples = stage.run(take_while_answering(PUSHES, None))
    assert metrics["paused_s"] > 0
    assert {version for _, tokens in samples for version in tokens.version.tolist()} <= {-1, 0, PUSHES}
    sampled = {module for rank in digests for module in rank}
    assert sampled == {module for module in sampled if is_sampled(module, PUSHES)}

    _, error, lost = stage.run(take_while_answering(PUSHES + 1, "engine 1 holds something else"))
    assert "engine 1 holds something else" in str(error)
    assert "the answers that were under way are lost" in str(lost)
    with pytest.raises(ValueError, match="engine 1 holds something else"):
        stage.run(stage.generate([PROMPT], 1, version=PUSHES + 1, seed=0))


def tokens_of(stage) -> int:
    """The tokens that the engine has sampled for running requests."""
    scheduler = stage.engine.sampler._thread.engine.engine_core.engine_core.scheduler
    return sum(request.num_output_tokens for request in scheduler.requests.values())


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
    return folder


@pytest.fixture(scope="module")
def latent_pair(tmp_path_factory) -> tuple[Path, Path]:
    return tuple(write_latent_model(tmp_path_factory.mktemp(f"latent{seed}"), seed) for seed in (0, 1))


@pytest.fixture(scope="module")
def latent(make_stage, latent_pair):
    return make_stage(latent_pair[0], Mesh(tensor=2), **QUANTISED)


@pytest.mark.deep
def test_matrices_that_vllm_makes_of_a_quantised_weight_follow_a_push(latent, latent_pair):
    """Latent attention decodes with copies of kv_b_proj's weight, in the form that a decoding step needs."""
    seen = []
    for version, folder in enumerate(latent_pair):
        latent.push(folder, version)
        seen.extend(latent.run(called_in_workers(latent.engine, "compute_weight_checksums")))
    ((expected,),) = warm.together(checksums, [(latent_pair[1], "fp8_per_channel", 1, "CPU_MLA")], deadline(240))
    before, now = seen
    made = [name for name in expected if name.endswith((".W_UK_T", ".W_UV"))]
    assert len(made) == 4  # of 2 layers
    layers = [name for name in expected if "layers." in name]
    assert {name: now[name] for name in layers} == {name: expected[name] for name in layers}
    assert all(before[name] != now[name] for name in layers)


@pytest.mark.deep
def test_stale_matrices_of_latent_attention_are_named(latent, latent_pair):
    attention = "model.layers.1.self_attn.mla_attn.mla_attn"
    for name in ("W_UK_T", "W_UV"):
        error = refused(latent, latent_pair, 0, partial(keep, (f"{attention}.{name}",)))
        assert f"rank 0: {attention} does not hold what vLLM makes of version 1: {name} (MLAAttention)" in error


@pytest.mark.deep
def test_a_push_holds_few_layers_and_all_ranks_repack_them_in_one_order(make_own_stage, tmp_path):
    """vLLM may reduce over the ranks of an engine while it repacks a layer."""
    folder = write_model(tmp_path, seed=0, num_hidden_layers=8)
    stage = make_own_stage(folder, Mesh(tensor=2), parallel={"tensor": 2}, **QUANTISED)
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


@pytest.mark.deep
def test_unquantised_experts_are_the_same_if_a_push_repacks_them(make_own_stage, tmp_path):
    """A push of a bf16 mixture repacks its experts where vLLM's kernels have another order, as on Blackwell. Here an
    engine on a CPU is made to take this way. vLLM's own packing for CPUs happens at the first loading alone, so that
    the experts have the checkpoint's order afterwards, as after a push that copies into them."""
    changes = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)
    folders = [write_model(tmp_path / str(seed), seed, "Qwen3Moe", **changes) for seed in (0, 1)]
    plain = {key: value for key, value in QUANTISED.items() if key != "quantization"}
    stage = make_own_stage(folders[0], Mesh(tensor=2), parallel={"tensor": 2}, **plain)

    def pushed(folder: Path, version: int) -> tuple[dict[str, str], list[list[int]]]:
        stage.push(folder, version)
        ranks = stage.run(called_in_workers(stage.engine, "compute_weight_checksums"))
        held = {name: digest for rank in ranks for name, digest in rank.items()}
        (group,) = stage.run(stage.generate([PROMPT], 4, version=version, seed=0))
        return held, [tokens.ids.tolist() for _, tokens in group]

    expected = pushed(folders[1], 0)
    stage.run(called_in_workers(stage.engine, repack_experts))
    stage.run(called_in_workers(stage.engine, note_repacking))
    stage.rejoin()
    before, now = pushed(folders[0], 1), pushed(folders[1], 2)
    assert now == expected and before[1] != now[1]
    experts = [name for name in now[0] if ".experts." in name]
    assert len(experts) == 8 and all(before[0][name] != now[0][name] for name in experts)
    for repacked in stage.run(called_in_workers(stage.engine, notes)):
        assert [name for name, _ in repacked] == 2 * [f"model.layers.{i}.mlp.experts.routed_experts" for i in range(2)]
