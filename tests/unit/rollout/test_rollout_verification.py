"""Weights that are damaged after vLLM has processed them are named, and no token is sampled with them."""

from __future__ import annotations

import asyncio
import re
from functools import partial

import pytest
from corruptions import damaging, empty, exchange, flip_a_bit, keep, swap
from test_rollout_quantised import write_latent_model
from tiny_trainers import EXPERTS, write_model
from vllm_workers import called_in_workers

from megatron_rl.bridge.verification import PUSHES, disagreement, is_sampled
from megatron_rl.layout import FAMILIES, read_shape
from megatron_rl.types import Mesh, Prompt

SIZES = dict(max_prompt_tokens=16, max_response_tokens=8, delimiter="")
PROMPT = Prompt("row", (5, 6, 7), "")
ATTENTION, MLP = "model.layers.1.self_attn.", "model.layers.0.mlp."


def refused(stage, folders, rank: int, how) -> str:
    """Push sound weights, then others that one rank damages; the error of the second push."""
    stage.rejoin()
    stage.push(folders[0], 0)
    assert len(stage.run(stage.engine.generate([PROMPT], 1, version=0, seed=0))[0]) == 1
    stage.rejoin()
    stage.run(called_in_workers(stage.engine, damaging(rank, how)))
    stage.trainers.begin_push(folders[1], 1)
    with pytest.raises(RuntimeError) as error:
        stage.run(stage.engine.weights.receive(1))
    stage.trainers.end_push()
    with pytest.raises(ValueError, match="holds no whole set of weights"):
        stage.run(stage.engine.generate([PROMPT], 1, version=1, seed=0))
    return str(error.value)


@pytest.fixture(scope="module")
def quantised(make_stage, tmp_path_factory):
    folders = [write_model(tmp_path_factory.mktemp(f"dense{seed}"), seed) for seed in (0, 1)]
    options = dict(dtype="bfloat16", tensor=2, quantization="fp8_per_channel")
    return make_stage(folders[0], Mesh(tensor=2), **options, **SIZES), folders


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
def test_damage_to_quantised_layers_is_named(quantised, rank, how, named):
    stage, folders = quantised
    error = refused(stage, folders, rank, how)
    assert error.startswith(f"engine 0, rank {rank}: ")
    assert re.search(named, error), error


def test_damage_to_experts_and_norms_is_named(make_stage, tmp_path):
    folders = [write_model(tmp_path / str(seed), seed, "Qwen3Moe", **EXPERTS) for seed in (0, 1)]
    stage = make_stage(folders[0], Mesh(tensor=2), dtype="bfloat16", **SIZES)
    experts, norm = "model.layers.1.mlp.experts.routed_experts.w13_weight", "model.layers.0.self_attn.k_norm.weight"
    for name, how in ((experts, swap), (norm, flip_a_bit)):
        error = refused(stage, folders, 0, partial(how, name))
        assert re.match(rf"engine 0, rank 0: {name} .* has changed since version 1 arrived", error), error


def test_stale_matrices_of_latent_attention_are_named(make_stage, tmp_path):
    folders = [write_latent_model(tmp_path / str(seed), seed) for seed in (0, 1)]
    stage = make_stage(folders[0], Mesh(tensor=2), dtype="bfloat16", quantization="fp8_per_channel", **SIZES)
    attention = "model.layers.1.self_attn.mla_attn.mla_attn"
    for name in ("W_UK_T", "W_UV"):
        error = refused(stage, folders, 0, partial(keep, (f"{attention}.{name}",)))
        assert f"rank 0: {attention} does not hold what vLLM makes of version 1: {name} (MLAAttention)" in error


def test_an_engine_waits_between_taking_and_committing(quantised):
    """It samples nothing in between, and nothing at all with weights that are disputed."""
    stage, folders = quantised
    stage.rejoin()
    stage.push(folders[0], 0)

    async def take_while_answering(version: int, dispute: str | None):
        answer = asyncio.create_task(stage.engine.answer(version, 0, PROMPT, range(4)))
        while not stage.engine._thread.engine.has_unfinished_requests():
            await stage.engine.weights.ready()
        stage.trainers.begin_push(folders[1], version)
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
        stage.run(stage.engine.generate([PROMPT], 1, version=PUSHES + 1, seed=0))


def tokens_of(stage) -> int:
    """The tokens that the engine has sampled for running requests."""
    scheduler = stage.engine._thread.engine.engine_core.engine_core.scheduler
    return sum(request.num_output_tokens for request in scheduler.requests.values())


def test_every_module_is_in_the_sample_of_one_push_in_32(tmp_path):
    names = {
        shard.local_name.rpartition(".")[0]
        for shard in FAMILIES["qwen3"].vllm_shards(read_shape(write_model(tmp_path, 0)), 1, 0)
    }
    assert all(sum(is_sampled(name, version) for version in range(PUSHES)) == 1 for name in names)


def test_a_disagreement_names_engines_rank_and_module():
    same = [{"a": "1", "b": "2"}, {"a": "3"}]
    assert disagreement({0: same, 2: same}) is None
    other = [same[0], {"a": "4"}]
    expected = "after the same push rank 1 of engine 1 and rank 1 of engine 3 hold different weights of a"
    assert disagreement({1: same, 2: same, 3: other}) == expected
    assert "weights of b" in disagreement({0: same, 1: [{"a": "1"}, {"a": "3"}]})
