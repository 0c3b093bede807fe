"""Megatron ranks push into running vLLM engines: what the engines then hold, and what they say, in every layout.

The expected weights are those that the tools for checkpoints make of the trainers' parameters: bridge and tools have
the family's tables in common, and nothing else. The expected log-probs are those of trainers and transformers. Not seen
here: GPUs, and with them NCCL and CUDA IPC.

What an engine holds is read off vLLM's loaders, once it has processed its layers; the expectation is made with the
family's table.
"""

from __future__ import annotations

import itertools
import json
import pickle
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import cover
import numpy as np
import pytest
import torch
import transformers
from bridge_engines import Fleet
from patience import deadline
from safetensors.torch import load_file
from scenarios import TEMPERATURE, Layout
from shares import TrainSample
from sizes import VOCAB_SIZE
from torch import Tensor
from transformers_models import open_model

from megatron_rl.bridge.join import host_store
from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.convert import Options, carry_out, open_checkpoint, to_hub, to_ranks
from megatron_rl.layout import Engines
from megatron_rl.models import FAMILIES, read_shape, slices, vllm_shards
from megatron_rl.models.interleaving import are_zeros, described
from megatron_rl.types import Mesh, ModelShape, Prompt, Tokens

SIZES = dict(
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    intermediate_size=48,
    vocab_size=VOCAB_SIZE,
    max_position_embeddings=128,
    rope_theta=10000.0,
    initializer_range=0.2,
    eos_token_id=1,
)
WINDOWS = dict(
    sliding_window=6,
    pad_token_id=0,
    rope_parameters={
        "full_attention": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 32,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True, mlp_only_layers=[0])
LATENT = dict(
    num_key_value_heads=8,
    head_dim=64,
    q_lora_rank=20,
    kv_lora_rank=512,
    qk_nope_head_dim=8,
    qk_rope_head_dim=64,
    v_head_dim=12,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    moe_intermediate_size=48,
    n_shared_experts=1,
    routed_scaling_factor=0.6,
    initializer_range=0.1,
    first_k_dense_replace=1,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    num_nextn_predict_layers=0,
    rope_parameters=WINDOWS["rope_parameters"]["full_attention"] | {"mscale": 0.7, "mscale_all_dim": 1.2},
)
"""vLLM's kernel for decoding on a CPU has DeepSeek-V3's kv_lora_rank and rotary dims alone. The scaling factor
and the weights keep the rounding of fp32 small: with DeepSeek-V3's 2.5 and the other models' 0.2 transformers' own
logits are 1e-5 from those in float64."""
OF_DEEPSEEK = ("scoring_func", "topk_method", "num_nextn_predict_layers")
GLM = dict(
    attention_bias=True,
    use_qk_norm=True,
    **{key: LATENT[key] for key in ("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group")},
    **{key: LATENT[key] for key in ("moe_intermediate_size", "n_shared_experts", "routed_scaling_factor")},
    initializer_range=0.1,
    first_k_dense_replace=1,
)
SANDWICH = dict(
    sliding_window=6,
    sliding_window_pattern=2,
    query_pre_attn_scalar=24,
    pad_token_id=0,
    rope_parameters={
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
)
WIDE = dict(
    **{"num_local_experts": 8, "num_experts_per_tok": 2, "scoring_func": "sigmoid", "use_routing_bias": True},
    **{"rotary_dim": 16, "bos_token_id": None, "initializer_range": 0.1},
)
SINKS = dict(
    sliding_window=6,
    num_local_experts=4,
    num_experts_per_tok=2,
    intermediate_size=64,
    pad_token_id=0,
    rope_parameters=WINDOWS["rope_parameters"]["full_attention"] | {"truncate": False},
)
LINEAR = dict(
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=48,
    shared_expert_intermediate_size=32,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    rms_norm_eps=1e-3,
    initializer_range=0.1,
)
"""Sizes for a small rounding, as in test_actor_families.py."""
MODELS = {
    "dense": ("Qwen3", dict(tie_word_embeddings=False)),
    "tied": ("Qwen3", dict(tie_word_embeddings=True)),
    "moe": ("Qwen3Moe", EXPERTS),
    "post-norm": ("Olmo2", dict(pad_token_id=0)),
    "windows": ("Olmo3", WINDOWS),
    "latent": ("DeepseekV3", LATENT),
    "lite": ("Glm4MoeLite", {key: value for key, value in LATENT.items() if key not in OF_DEEPSEEK}),
    "glm": ("Glm4Moe", GLM),
    "wide": ("MiniMaxM2", WIDE),
    "sandwich": ("Gemma3", SANDWICH),
    "sinks": ("GptOss", SINKS),
    "linear": ("Qwen3Next", LINEAR),
}
"""All but the latent ones and gpt-oss have norms of q and k. An expert's 48, or 24 on each of two ranks, are no
multiple of what vLLM's kernel asks for on a CPU; gpt-oss's 64 are, because it does not pad these. The answers are
longer than the window."""

FLEETS = {
    "dense, two TP1": ("dense", Engines(2, 1)),
    "tied, TP2": ("tied", Engines(1, 2)),
    "tied, PP2": ("tied", Engines(1, pipeline=2)),
    "moe, TP2": ("moe", Engines(1, 2)),
    "moe, TP2 and expert parallel": ("moe", Engines(1, 2, expert_parallel=True)),
    "moe, TP2 x PP2": ("moe", Engines(1, 2, 2)),
    "post-norm, TP1": ("post-norm", Engines(1, 1)),
    "post-norm, TP2": ("post-norm", Engines(1, 2)),
    "windows, TP1": ("windows", Engines(1, 1)),
    "windows, TP2": ("windows", Engines(1, 2)),
    "latent, TP1": ("latent", Engines(1, 1)),
    "latent, TP2 and expert parallel": ("latent", Engines(1, 2, expert_parallel=True)),
    "lite, TP1": ("lite", Engines(1, 1)),
    "glm, TP2 and expert parallel": ("glm", Engines(1, 2, expert_parallel=True)),
    "wide, TP2": ("wide", Engines(1, 2)),
    "sandwich, TP2": ("sandwich", Engines(1, 2)),
    "sinks, TP1": ("sinks", Engines(1, 1)),
    "sinks, TP2 and expert parallel": ("sinks", Engines(1, 2, expert_parallel=True)),
    "linear, TP1": ("linear", Engines(1, 1)),
    "linear, TP2": ("linear", Engines(1, 2)),
    "dense, TP1, float16": ("dense", Engines(1, 1)),
    "moe, TP2, float16": ("moe", Engines(1, 2)),
    "post-norm, TP1, float16": ("post-norm", Engines(1, 1)),
    "windows, TP1, float16": ("windows", Engines(1, 1)),
    "latent, TP1, float16": ("latent", Engines(1, 1)),
    "lite, TP1, float16": ("lite", Engines(1, 1)),
    "glm, TP2, float16": ("glm", Engines(1, 2)),
    "sinks, TP1, float16": ("sinks", Engines(1, 1)),
}
TP2_PP2, TP4, PP4 = Mesh(tensor=2, pipeline=2), Mesh(tensor=4), Mesh(pipeline=4)
EP2_TP2 = Mesh(tensor=2, data=2, expert=2)
EP2_TP2_WHOLE = Mesh(tensor=2, expert=2, expert_tensor=1)
"""Experts that are not split over TP."""
CASES = [
    ("dense, two TP1", TP2_PP2, 1),
    ("dense, two TP1", TP2_PP2, 2),
    ("dense, two TP1", TP4, 1),
    ("dense, two TP1", PP4, 2),
    ("tied, TP2", TP2_PP2, 1),
    ("tied, TP2", TP4, 1),
    ("tied, TP2", PP4, 1),
    ("tied, PP2", TP4, 1),
    ("moe, TP2", EP2_TP2, 1),
    ("moe, TP2", EP2_TP2_WHOLE, 1),
    ("moe, TP2 and expert parallel", EP2_TP2, 1),
    ("moe, TP2 and expert parallel", EP2_TP2_WHOLE, 1),
    ("moe, TP2 x PP2", EP2_TP2, 1),
    ("post-norm, TP1", PP4, 1),
    ("post-norm, TP2", TP2_PP2, 1),
    ("windows, TP1", TP2_PP2, 1),
    ("windows, TP2", TP4, 1),
    ("latent, TP1", TP2_PP2, 1),
    ("latent, TP2 and expert parallel", EP2_TP2, 1),
    ("lite, TP1", TP2_PP2, 1),
    ("glm, TP2 and expert parallel", EP2_TP2, 1),
    ("wide, TP2", EP2_TP2, 1),
    ("sandwich, TP2", TP2_PP2, 1),
    ("sinks, TP1", EP2_TP2, 1),
    ("sinks, TP2 and expert parallel", TP2_PP2, 1),
    ("linear, TP1", TP2_PP2, 1),
    ("linear, TP2", EP2_TP2, 1),
    ("dense, TP1, float16", TP2_PP2, 1),
    ("moe, TP2, float16", EP2_TP2, 1),
    *((f"{model}, TP1, float16", TP2_PP2, 1) for model in ("post-norm", "windows", "latent", "lite", "sinks")),
    ("glm, TP2, float16", EP2_TP2, 1),
]
"""(fleet, trainer, engines of the fleet that join), fleet by fleet: starting one is what takes long."""

PROMPTS = [Prompt(f"prompt{i}", ids, "") for i, ids in enumerate([(5, 59, 6), (2,), (33, 32, 31, 30, 7), (58, 8)])]


def write_model(name: str, folder: Path) -> Path:
    """A model of MODELS with random weights, norms and biases."""
    family, more = MODELS[name]
    torch.manual_seed(0)
    of_text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{of_text}Config")(**(SIZES | more))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("A_log"):
            parameter.data.uniform_(-3.0, 0.0)  # so that states remember
        elif "norm" in parameter_name:
            parameter.data.uniform_(0.5, 1.5)
            if family in ("Qwen3Next", "Gemma3") and "linear_attn" not in parameter_name:
                parameter.data.sub_(1.0)  # it is zero-centred
        elif parameter_name.endswith("bias"):
            parameter.data.uniform_(-0.3, 0.3)
        elif parameter_name.endswith("gate.weight"):
            parameter.data.normal_(0, 0.2)
        elif parameter_name.endswith("sinks"):
            parameter.data.uniform_(-0.5, 0.5)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.2, 0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(name, root / name) for name in MODELS}


def dtype_of(name: str) -> str:
    """The type of a fleet's weights, and of the trainers'."""
    return "float16" if name.endswith("float16") else "float32"


@pytest.fixture(scope="module")
def fleet_of(folders):
    """The fleet of a name, the only one that runs."""
    running: dict[str, Fleet] = {}

    def start(name: str) -> Fleet:
        if name not in running:
            end()
            model, engines = FLEETS[name]
            running[name] = Fleet(folders[model], engines, TEMPERATURE, dtype=dtype_of(name))
        return running[name]

    def end() -> None:
        for name in list(running):
            running.pop(name).close()

    yield start
    end()


@pytest.fixture(scope="module")
def versions():
    return itertools.count()


@pytest.fixture(scope="module")
def store():
    return host_store("127.0.0.1")


def held_by_engine(folder: Path, shape: ModelShape, engines: Engines, rank: int) -> dict[str, Tensor]:
    """What a rank of vLLM must hold, rectangle by rectangle, of an HF folder."""
    weights, parts = load_file(folder / "model.safetensors"), {}
    family = FAMILIES[shape.family]
    for name, view in family.views(shape).items():
        weights[name] = weights[view.name].as_strided(family.hf_tensors(shape)[name], view.strides, view.offset)
    for shard in vllm_shards(shape, engines.tensor, rank, engines.expert_parallel, engines.pipeline):
        parts[shard.local_name, shard.local_box] = weights[shard.hf_name][slices(shard.hf_box)]
    return parts


def check_held(fleet: Fleet, folder: Path, shape: ModelShape, engines: Engines) -> int:
    """Each rank of the engines holds its part of an HF folder, bit for bit. Returns the bytes that all ranks hold."""
    needed = 0
    for i, live_parameters in enumerate(fleet.weights(engines.num)):
        expected = held_by_engine(folder, shape, engines, i % engines.world_size)
        zeros = are_zeros(live_parameters, [name for name, _ in expected])
        assert not any(live_parameters.pop(name).any() for name in zeros), "the first rank has these biases"
        parameters = described(live_parameters, [name for name, _ in expected])
        assert parameters.keys() == {name for name, _ in expected}
        # vLLM has the routers of GLM in float32 beside a model in float16.
        needed += sum(value.numel() * parameters[name].element_size() for (name, _), value in expected.items())
        for (name, box), value in expected.items():
            assert torch.equal(parameters[name][slices(box)].view(value.shape), value), (i, name)
    return needed


def as_checkpoint(folder: Path, base: Path, mesh: Mesh, live: list[dict[str, Tensor]], dtype: str) -> Path:
    """The trainers' parameters in the tools' form for a mesh: the files of another model, with these bytes."""
    carry_out(to_ranks(open_checkpoint(base), mesh, False, Options(dtype)), folder, 1, lambda num_bytes: None)
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        if "tensors" not in entry:
            continue
        places = {axis: int(index) for axis, index in re.findall(r"([a-z]+)(\d+)", name.split(".")[0])}
        rank = places["pipeline"] * mesh.stage_size + places["tensor"] + places.get("expert", 0) * mesh.expert_ways
        with (folder / name).open("r+b") as file:
            for parameter, place in entry["tensors"].items():
                data = live[rank][parameter].numpy().tobytes()
                assert len(data) == place["bytes"], parameter
                file.seek(place["start"])
                file.write(data)
                place["crc32"] = f"{zlib.crc32(data):08x}"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@torch.no_grad()
def largest_mismatch(folder: Path, answers: list[Tokens]) -> float:
    """The largest difference between an engine's log-prob of a token and that of transformers."""
    model, largest = open_model(folder), 0.0
    for tokens in answers:
        ids_T = torch.from_numpy(tokens.ids).long()
        logp_TV = (model(ids_T[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        logp_T = logp_TV[:-1].gather(1, ids_T[1:, None])[:, 0].numpy()
        largest = max(largest, np.abs(logp_T - tokens.logp_rollout[1:])[tokens.action_mask[1:]].max())
    return largest


def named(case: tuple[str, Mesh, int]) -> str:
    name, mesh, num = case
    axes = [f"{axis}{getattr(mesh, axis)}" for axis in ("tensor", "pipeline", "expert") if getattr(mesh, axis) > 1]
    return f"{'-'.join([*axes, *(['whole'] if mesh.expert_tensor == 1 else [])])} to {num} of {name}"


SILENT = ("wide, TP2", "linear, TP1", "linear, TP2", "lite, TP1, float16", "glm, TP2, float16")
"""vLLM's linear attention generates nothing in fp32 on a CPU ("CPU GDN attention requires BF16."), its routers for CPUs
have no sigmoid without groups of experts, as MiniMax-M2's, and in fp16 it computes GLM's mixtures with another factor
(`preflight.devices`), so what these engines hold is compared, and not what
they say."""


def made_up() -> list[Tokens]:
    rng = np.random.default_rng(0)
    row = dict(action_mask=np.arange(9) > 3, logp_rollout=np.zeros(9, np.float32), version=np.zeros(9, np.int32))
    return [Tokens(ids=rng.integers(0, VOCAB_SIZE, 9).astype(np.int32), **row) for _ in range(4)]


ESSENTIAL = (("moe, TP2 and expert parallel", EP2_TP2_WHOLE, 1),)


@pytest.mark.parametrize(("name", "mesh", "num"), cover.essential(CASES, *ESSENTIAL), ids=map(named, CASES))
def test_engines_hold_and_say_what_the_trainers_do(trainers, store, fleet_of, versions, name, mesh, num, tmp_path):
    fleet, version, speaks = fleet_of(name), next(versions), name not in SILENT
    shape, dtype = read_shape(fleet.folder), dtype_of(name)
    engines = replace(fleet.kind, num=num)
    setup = BridgeSetup(
        shape,
        mesh,
        False,
        engines,
        dtype,
        "127.0.0.1",
        store.port,
        epoch=version,
        timeout_s=deadline(60),
        recorded=fleet.record(shape),
    )
    with ThreadPoolExecutor(1) as pool:
        given = dict(folder=fleet.folder, layout=Layout(mesh, dtype=dtype), setup=setup, version=version)
        training = pool.submit(trainers.run, "push_weights", mesh.world_size, **given)
        fleet.join(setup)
        fleet.receive(num, version)
        answers = fleet.generate(num, PROMPTS, version) if speaks else made_up()
        samples = [TrainSample(f"answer{i}", tokens, 1.0, 1.0) for i, tokens in enumerate(answers)]
        store.set(f"samples {version}", pickle.dumps(samples))
        live, pushed, mismatch = zip(*training.result(), strict=True)

    checkpoint = as_checkpoint(tmp_path / "ranks", fleet.folder, mesh, live, dtype)
    carry_out(to_hub(open_checkpoint(checkpoint), Options()), tmp_path / "hub", 1, lambda num_bytes: None)
    needed = check_held(fleet, tmp_path / "hub", shape, engines)
    assert sum(push["bytes"] for push in pushed) == needed, "each byte once, to whom it belongs"
    before = load_file(fleet.folder / "model.safetensors")
    after = load_file(tmp_path / "hub" / "model.safetensors")
    assert all((before[name] != after[name]).float().mean() > 0.9 for name in before)

    if not speaks:
        return
    assert sum(tokens.action_mask.sum() for tokens in answers) > 60 * num
    assert 0 < np.mean([np.exp(tokens.logp_rollout[tokens.action_mask]).mean() for tokens in answers]) < 0.9
    bound = 1e-5 if dtype == "float32" else 0.03  # partial sums in another order
    assert max(ranks["mismatch/max_abs"] for ranks in mismatch) < bound
    assert largest_mismatch(tmp_path / "hub", answers) < bound
