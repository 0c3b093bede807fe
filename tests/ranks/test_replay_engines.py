"""The trainer replays the experts that a real engine chose: then engine and trainer agree about a mixture's log-probs
in bf16 as well as about a dense model's."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from bridge_engines import Fleet
from patience import deadline
from scenarios import TEMPERATURE, Layout
from shares import TrainSample
from sizes import VOCAB_SIZE
from test_bridge_engines import LATENT
from test_bridge_engines import SIZES as SMALL

from megatron_rl.bridge.join import host_store
from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.layout import Engines
from megatron_rl.models import read_shape
from megatron_rl.types import Mesh, Metrics, Prompt

SIZES = dict(
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=128,
    vocab_size=VOCAB_SIZE,
    max_position_embeddings=128,
    rope_theta=10000.0,
    initializer_range=0.1,
    eos_token_id=1,
)
MODELS = {
    "dense": ("Qwen3", SIZES),
    "mixture": (
        "Qwen3Moe",
        SIZES | dict(num_experts=16, num_experts_per_tok=4, moe_intermediate_size=32, norm_topk_prob=True),
    ),
    "latent": ("DeepseekV3", SMALL | LATENT),
    "kimi": ("DeepseekV3", SMALL | LATENT | dict(n_routed_experts=384, n_group=1, topk_group=1)),
    "wide": (
        "Qwen3Moe",
        SIZES | dict(num_experts=512, num_experts_per_tok=4, moe_intermediate_size=8, norm_topk_prob=True),
    ),
}
"""Four active experts of 32 are as large as the MLP of the dense model. The latent ones have routers with a bias, and a
first layer without experts. The last two have as many experts as Kimi-K2 and Qwen3-Next."""
NUM_PROMPTS, RESPONSE = 24, 64


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name, (family, sizes) in MODELS.items():
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.2, 0.2)
        model.save_pretrained(root / name)
    return {name: root / name for name in MODELS}


@pytest.fixture(scope="module")
def scored(trainers, folders):
    """What a trainer says of an engine's answers (see `scenarios.replay_engine`), and the share of their tokens that
    have choices."""

    def of(name: str, tensor: int, dtype: str) -> tuple[Metrics, Metrics, Metrics, float]:
        folder, engines, mesh = folders[name], Engines(1, tensor), Mesh(tensor=tensor)
        fleet = Fleet(folder, engines, TEMPERATURE, dtype, RESPONSE, returns_routes=name != "dense")
        store, rng = host_store("127.0.0.1"), np.random.default_rng(0)
        prompts = [Prompt(str(i), tuple(rng.integers(2, VOCAB_SIZE, 8).tolist()), "") for i in range(NUM_PROMPTS)]
        address = "127.0.0.1", store.port
        setup = BridgeSetup(read_shape(folder), mesh, False, engines, dtype, *address, timeout_s=deadline(60))
        with ThreadPoolExecutor(1) as pool:
            layout = Layout(mesh, num_microbatches=4, dtype=dtype)
            given = dict(folder=folder, layout=layout, setup=setup, version=0)
            scoring = pool.submit(trainers.run, "replay_engine", mesh.world_size, **given)
            fleet.join(setup)
            fleet.receive(1, 0)
            answers = fleet.generate(1, prompts, 0)
            weight = 1 / sum(tokens.action_mask.sum() for tokens in answers)
            samples = [TrainSample(str(i), tokens, 1.0, weight) for i, tokens in enumerate(answers)]
            store.set("samples 0", pickle.dumps(samples))
            results = scoring.result()
        fleet.close()
        assert 1 / weight > 500
        num_known = sum(0 if tokens.routes is None else len(tokens.routes) for tokens in answers)
        return *results[0], num_known / sum(len(tokens.ids) for tokens in answers)

    return of


@pytest.mark.deep
@pytest.mark.parametrize("tensor", [1, 2])
def test_in_bf16_a_mixture_agrees_like_a_dense_model(scored, tensor):
    """Each number is a mean or a largest value over some thousand tokens. Without the engine's choices tokens go
    through other experts, so single log-probs are far off."""
    dense, *_ = scored("dense", tensor, "bfloat16")
    without, replayed, updated, known = scored("mixture", tensor, "bfloat16")
    for name in ("mismatch/mean_abs", "mismatch/max_abs", "mismatch/k3"):
        assert 0 < replayed[name] < dense[name]
    assert without["mismatch/k3"] > 3 * replayed["mismatch/k3"]
    assert without["mismatch/max_abs"] > 2 * dense["mismatch/max_abs"]
    assert updated["routing/replayed"] == pytest.approx(known, rel=1e-12) and 0.9 < known < 1
    assert 0.001 < updated["routing/differing"] < 0.1


@pytest.mark.deep
@pytest.mark.parametrize("name, tensor", [("mixture", 2), ("latent", 1), ("kimi", 1), ("wide", 2)])
def test_in_fp32_both_choose_the_same(scored, name, tensor):
    """Replay then changes nothing but rounding: partial sums in another order."""
    without, replayed, updated, known = scored(name, tensor, "float32")
    assert without["mismatch/max_abs"] < 1e-5 and replayed["mismatch/max_abs"] < 1e-5
    assert updated["routing/replayed"] == pytest.approx(known, rel=1e-12) and updated["routing/differing"] == 0
