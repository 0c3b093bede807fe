from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from small_models import changed, model

from megatron_rl.actor import platform
from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.model import transformer_config, uses_fused_layers
from megatron_rl.actor.spec import ActorSpec
from megatron_rl.algorithms import SupervisedObjective
from megatron_rl.config.policy import ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.planning.activations import has_fused_layers
from megatron_rl.types import (
    Adapters,
    DeltaNet,
    LatentAttention,
    LinearRope,
    Llama3Rope,
    Mixture,
    ModelShape,
    Rope,
    YarnRope,
)

QWEN3 = model("qwen3", 4, 32, 4, 2, 16, 48, 60, 128)
LLAMA = model("llama", 4, 32, 4, 2, 16, 48, 60, 128)
MIXTRAL = changed(LLAMA, family="mixtral", mlp=Mixture(num_experts=4, num_active=2, ffn_size=48))
SIGMOID = Mixture(num_experts=8, num_active=4, ffn_size=48, score="sigmoid", num_groups=4, num_active_groups=2)
PLAIN = Rope(1e4)
DEEPSEEK = changed(LLAMA, family="deepseek_v3", mlp=SIGMOID, attention=LatentAttention(4, 0, 12, 6, 8, 10, PLAIN))


REPLAY_AND = {"routing_replay": True}
FUSED_ROUTER = {"transformer": {"moe_router_fusion": True}}
RECOMPUTED = {"transformer": {"recompute_granularity": "selective", "recompute_modules": ("moe",)}}


def spec(shape: ModelShape, settings: dict | None = None, **parallel) -> ActorSpec:
    """
    Args:
        settings: keys of `policy`.
    """
    return ActorSpec(
        shape=shape,
        model=ModelConfig(path=Path("model"), dtype="float32"),
        policy=PolicyConfig(parallel=ParallelConfig(**parallel), **(settings or {})),
        objective=SupervisedObjective(),
        temperature=1.0,
        total_steps=1,
        seed=0,
    )


@pytest.mark.parametrize(
    "shape, parallel, message",
    [
        (MIXTRAL, dict(tensor=2, sequence=False), "policy.parallel.sequence must be true"),
        (MIXTRAL, dict(tensor=2, expert_tensor=1), "expert_tensor is 1 and .*tensor is 2.*Leave expert_tensor out"),
        (
            QWEN3,
            dict(settings=dict(load_balancing_loss=0.1)),
            "load_balancing_loss is 0.1, but the model has no experts",
        ),
        (QWEN3, dict(settings=dict(router_z_loss=0.1)), "router_z_loss is 0.1, but the model has no experts"),
        (
            MIXTRAL,
            dict(settings=dict(router_bias_update_rate=0.1)),
            "router_bias_update_rate is 0.1.*mixtral have no bias",
        ),
        (MIXTRAL, dict(settings=dict(multi_token="keep")), "the family mixtral have no multi-token head"),
        (MIXTRAL, dict(settings=dict(multi_token="train")), "multi_token is train.*mixtral have no multi-token head"),
        (
            changed(DEEPSEEK, mlp={"num_active_groups": 1}),
            {},
            "num_experts_per_tok is 4 and topk_group is 1.*quotient of 2",
        ),
        (changed(DEEPSEEK, mlp={"normalised": False}), {}, "norm_topk_prob is False with 4 active"),
    ],
)
def test_the_specification_refuses_what_cannot_be_trained(shape, parallel, message):
    with pytest.raises(ValueError, match=message):
        spec(shape, **parallel)


@pytest.mark.parametrize(
    "shape, parallel, world_size, message",
    [
        (QWEN3, dict(tensor=2, data=2), 2, "are 4 ranks, but there are 2"),
        (QWEN3, dict(tensor=8), 8, "4 attention heads.*policy.parallel.tensor=8"),
        (QWEN3, dict(pipeline=3), 3, "4 layers.*policy.parallel.pipeline=3"),
        (QWEN3, dict(data=2, expert=2), 2, "policy.parallel.expert=2.*no experts"),
        (MIXTRAL, dict(data=3, expert=3), 3, "4 experts.*policy.parallel.expert=3"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_any_rank_waits(shape, parallel, world_size, message):
    with pytest.raises(ValueError, match=message):
        MegatronActor(spec(shape, **parallel), rank=0, world_size=world_size, store=dist.HashStore())


DELTA = DeltaNet(num_key_heads=2, num_value_heads=4, key_size=8, value_size=8, convolution=4, interleaved=True)
MLA = LatentAttention(4, query_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, rope=PLAIN)
"""DeepSeek-V3's, whose head dims cuDNN's attention takes."""
WINDOWS = changed(LLAMA, (0,), attention={"window": 4})


def turned(scaling: Llama3Rope | YarnRope | None, share: float = 1.0) -> ModelShape:
    return changed(LLAMA, attention={"rope": Rope(1e4, scaling, share)})


def latent(**sizes: int) -> ModelShape:
    return changed(DEEPSEEK, attention=replace(MLA, **sizes))


FUSED = [
    *(LLAMA, WINDOWS, turned(Llama3Rope(32.0, 1.0, 4.0, 8192)), turned(None, 0.5), latent()),
    changed(DEEPSEEK, attention=replace(MLA, rope=Rope(1e4, YarnRope(4.0, 64)))),
    changed(latent(nope_dim=192, value_dim=256), family="glm4_moe_lite"),
    replace(MIXTRAL, adapters=Adapters(8, 16.0)),
]
NOT_FUSED = [
    (changed(LLAMA, family="olmo2"), "olmo2 has norms after its blocks"),
    (DEEPSEEK, "no heads of 14 dims in query and key and 10 in value"),
    (latent(value_dim=160), "no heads of 192 dims in query and key and 160 in value"),
    (latent(value_dim=512), "no heads of 192 dims in query and key and 512 in value"),
    (changed(LLAMA, attention={"norms": "full"}), "llama all heads together"),
    (changed(LLAMA, family="gpt_oss"), "takes no sinks in packed rows"),
    (changed(LLAMA, (0,), family="qwen3_next", attention=DELTA), "linear attention takes no packed rows"),
    (turned(LinearRope(8.0)), "no other rotary scaling than Llama 3.1's"),
    (changed(WINDOWS, (0,), attention={"rope": Rope(1e3)}), "Megatron rotates all their layers alike, and llama does"),
    (changed(LLAMA, mlp={"activation": "gelu_tanh"}), "their fused MLP has no gelu_tanh, and llama has it"),
    (turned(YarnRope(4.0, 64)), "no other rotary scaling than Llama 3.1's"),
    (turned(Llama3Rope(8.0, 1.0, 4.0, 64)), "no other rotary scaling than Llama 3.1's"),
]


def fused(shape: ModelShape, layers: str = "auto", dtype: str = "bfloat16", context: int = 1) -> bool:
    return uses_fused_layers(ModelConfig(path=Path("model"), dtype=dtype, layers=layers), shape, context)


@pytest.fixture
def transformer_engine(monkeypatch):
    """A machine that has it."""
    monkeypatch.setattr(platform, "HAS_TRANSFORMER_ENGINE", True)


@pytest.mark.parametrize("shape", FUSED, ids=str)
def test_transformer_engines_layers_are_used_where_they_can_be(transformer_engine, shape):
    assert fused(shape) and fused(shape, "transformer_engine") and fused(shape, "transformer_engine", "float32")
    assert not fused(shape, dtype="float32") and not fused(shape, "local")


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("shape", [*FUSED, *(shape for shape, _ in NOT_FUSED)], ids=str)
def test_the_memory_that_is_planned_is_for_the_same_layers(transformer_engine, shape, context):
    model = ModelConfig(path=Path("model"), dtype="bfloat16")
    assert has_fused_layers(shape, model, context) == fused(shape, context=context)


def test_their_attention_takes_no_windows_with_context_parallelism(transformer_engine):
    assert fused(LLAMA, context=2) and not fused(WINDOWS, context=2)
    with pytest.raises(ValueError, match="policy.parallel.context above 1; set model.layers"):
        fused(WINDOWS, "transformer_engine", context=2)


@pytest.mark.parametrize("shape, message", NOT_FUSED)
def test_what_they_cannot_express_has_local_layers(transformer_engine, shape, message):
    assert not fused(shape) and not fused(shape, "local")
    with pytest.raises(ValueError, match=f"{message}.*set model.layers to local"):
        fused(shape, "transformer_engine")


def test_without_the_library_the_layers_are_local():
    assert not fused(LLAMA)
    with pytest.raises(ValueError, match="Transformer Engine .*model.layers"):
        fused(LLAMA, "transformer_engine")


@pytest.mark.parametrize("has_cuda", [False, True])
def test_an_output_between_virtual_stages_is_not_freed_before_it_is_sent(monkeypatch, has_cuda):
    monkeypatch.setattr(platform, "HAS_CUDA", has_cuda)
    model = ModelConfig(path=Path("model"), dtype="float32")
    for virtual in (1, 2):
        parallel = ParallelConfig(pipeline=2, virtual=virtual)
        assert transformer_config(QWEN3, model, parallel, {}).deallocate_pipeline_outputs == (virtual == 1)
