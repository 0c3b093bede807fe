"""The families' tables against the truth: what transformers saves, what Megatron-Core and vLLM build.

Not seen here, for want of the libraries: the names with Transformer Engine's layers, and those of Megatron-Core's layer
with a gated delta rule. OLMo's two tables have rows that Megatron-Core does not build (post-norms, wide q and k norms).
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import image_models
import pytest
import transformers
import warm
from patience import deadline
from safetensors import safe_open

from megatron_rl.config.policy import PolicyConfig
from megatron_rl.models import FAMILIES, check_parameters, megatron_shards, read_shape, scan, vllm_shards
from megatron_rl.types import TOWER, Mesh

COMMON = dict(
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=60,
    max_position_embeddings=128,
    pad_token_id=0,
)
LATENT = dict(
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    n_shared_experts=2,
    num_key_value_heads=4,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
)
WITHOUT_KINDS = {key: value for key, value in LATENT.items() if key not in ("scoring_func", "topk_method")}
GLM = dict(
    head_dim=12,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=2,
    first_k_dense_replace=2,
)
MINIMAX = dict(
    head_dim=12,
    rotary_dim=6,
    num_local_experts=4,
    num_experts_per_tok=2,
    scoring_func="sigmoid",
    use_routing_bias=True,
)
DELTA = dict(
    head_dim=12,
    partial_rotary_factor=0.5,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=5,
    linear_value_head_dim=7,
    linear_conv_kernel_dim=3,
)
MAMBA = dict(
    head_dim=12,
    mamba_num_heads=12,
    mamba_head_dim=5,
    ssm_state_size=7,
    n_groups=4,
    conv_kernel=3,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    moe_shared_expert_intermediate_size=20,
)
GATED_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=20)
MODELS = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True, "head_dim": 12}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 12,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "mlp_only_layers": [0],
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 8}),
    "olmo3_tied": ("Olmo3", {"sliding_window": 8, "tie_word_embeddings": True, "head_dim": 12}),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 12,
            "intermediate_size": 64,  # vLLM's kernel on a CPU asks for multiples of 32 on each rank
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "beta_fast": 8.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen3_next": ("Qwen3Next", DELTA | GATED_EXPERTS | {"mlp_only_layers": [0]}),
    "qwen3_5": ("Qwen3_5", DELTA | {"tie_word_embeddings": True}),
    "qwen3_5_moe": ("Qwen3_5Moe", DELTA | GATED_EXPERTS),
    "deepseek_v3": ("DeepseekV3", LATENT | {"q_lora_rank": 20}),
    "deepseek_v3_direct": ("DeepseekV3", LATENT | {"q_lora_rank": None}),
    "kimi_k2": ("DeepseekV3", LATENT | {"q_lora_rank": 20, "n_group": 1}),
    "glm4_moe_lite": ("Glm4MoeLite", WITHOUT_KINDS | {"q_lora_rank": 20}),
    "glm4_moe": ("Glm4Moe", GLM | {"attention_bias": True, "use_qk_norm": True}),
    "gemma3": ("Gemma3", {"head_dim": 12, "sliding_window": 8, "sliding_window_pattern": 2}),
    "minimax_m2": ("MiniMaxM2", MINIMAX),
    "minimax_m2_shared": ("MiniMaxM2", MINIMAX | {"num_key_value_heads": 1}),
    "glm4_moe_plain": ("Glm4Moe", GLM | {"first_k_dense_replace": 1}),  # vLLM wants a mixture on every stage
    "nemotron_h": ("NemotronH", MAMBA | {"hybrid_override_pattern": "M-*MEM", "num_hidden_layers": 6}),
    "nemotron_h_dense": ("NemotronH", MAMBA | {"hybrid_override_pattern": "M-*M-M", "num_hidden_layers": 6}),
}
"""Sizes apart from each other, so that no two symbols of the tables can be mistaken for one another."""


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """What save_pretrained writes for a tiny model of each family."""
    root = tmp_path_factory.mktemp("families")
    for name, (family, more) in MODELS.items():
        kind = f"{family}TextConfig" if family.startswith(("Qwen3_5", "Gemma3")) else f"{family}Config"
        config = getattr(transformers, kind)(**(COMMON | more))
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(root / name)
    rename(root / "kimi_k2", "kimi_k2")
    return {name: root / name for name in MODELS}


def rename(folder: Path, model_type: str) -> None:
    """Give a model a name that transformers does not know."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": model_type}))


@pytest.mark.parametrize("name", MODELS)
def test_names_and_extents_are_those_that_transformers_saves(folders, name):
    shape = read_shape(folders[name])
    with safe_open(folders[name] / "model.safetensors", framework="pt") as file:
        saved = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
    assert saved == {name: held.extents for name, held in FAMILIES[shape.family].file_tensors(shape).items()}
    assert scan(folders[name], shape).ignored == {}


MEGATRON = [
    ("llama", Mesh(pipeline=2, layers=(3, 1))),
    ("llama_tied", Mesh()),
    ("llama_tied", Mesh(tensor=2, pipeline=3, layers=(1, 2, 1))),
    ("qwen2", Mesh(tensor=2)),
    ("qwen3", Mesh(tensor=2, data=2)),
    ("qwen3_moe", Mesh(tensor=2, expert=2, expert_tensor=1)),
    ("qwen3_moe", Mesh(data=2, pipeline=2, expert=2, virtual=2)),
    ("mixtral", Mesh(data=4, expert=4)),
    ("mixtral", Mesh(tensor=2, context=2, expert=2, expert_tensor=2)),
    (
        "deepseek_v3",
        Mesh(tensor=4, pipeline=3, data=2, context=2, expert=4, expert_tensor=2, layers=(1, 2, 1)),
    ),
    ("deepseek_v3_direct", Mesh(tensor=2)),
    ("glm4_moe", Mesh(tensor=2, pipeline=2, expert=2, expert_tensor=1)),
    ("glm4_moe_plain", Mesh(data=2, expert=2)),
    ("gpt_oss", Mesh(tensor=2, data=2, expert=2)),
]


def in_process(module: str, name: str, *arguments):
    """The function of a module that only this process imports."""
    return getattr(importlib.import_module(module), name)(*arguments)


def live(parameters: dict) -> dict[str, tuple[int, ...]]:
    return {name: tuple(extents) for name, extents in parameters.items()}


def test_names_and_extents_are_those_that_megatron_builds(folders):
    """On every rank of meshes with every axis, one of them with all but virtual stages at once."""
    cases = [(name, mesh, rank) for name, mesh in MEGATRON for rank in range(mesh.world_size)]
    asked = [(folders[name], mesh, rank) for name, mesh, rank in cases]
    (answers,) = warm.together(in_process, [("megatron_models", "all_parameters", asked)], deadline(240))
    for (name, mesh, rank), parameters in zip(cases, answers, strict=True):
        shards = megatron_shards(read_shape(folders[name]), mesh, rank)
        check_parameters(shards, live(parameters), f"{name}, rank {rank} of {mesh}")


def test_an_engines_first_start_on_a_machine_looks_at_its_class_without_another_process(folders, tmp_path):
    call = ("vllm_models", "looked_at", str(folders["llama"]), str(tmp_path))
    (files,) = warm.together(in_process, [call], deadline(240))
    assert files == ["vllm-model_executor-models-llama-LlamaForCausalLM.json"]


ENGINES = [
    # name, tensor, pipeline, expert_parallel
    ("llama", 1, 1, False),
    ("llama_tied", 2, 1, False),
    ("llama_tied", 1, 2, False),
    ("qwen2", 2, 1, False),
    ("qwen3", 1, 2, False),
    ("qwen3_moe", 2, 1, False),
    ("qwen3_moe", 2, 1, True),
    ("mixtral", 2, 1, False),
    ("mixtral", 1, 2, False),
    ("olmo2", 1, 2, False),
    ("olmo3", 2, 1, False),
    ("olmo3_tied", 1, 2, False),
    ("qwen3_next", 1, 1, False),
    ("qwen3_next", 2, 1, True),
    ("qwen3_next", 1, 2, False),
    ("qwen3_5", 2, 1, False),
    ("qwen3_5", 1, 2, False),
    ("qwen3_5_moe", 2, 1, False),
    ("deepseek_v3", 2, 1, True),
    ("deepseek_v3", 1, 2, False),
    ("deepseek_v3_direct", 2, 1, False),
    ("glm4_moe_lite", 2, 1, False),
    ("glm4_moe", 2, 1, True),
    ("glm4_moe_plain", 1, 2, False),
    ("gemma3", 2, 1, False),
    ("gemma3", 1, 2, False),
    ("minimax_m2", 2, 1, False),
    ("minimax_m2", 1, 2, False),
    ("minimax_m2_shared", 2, 1, True),
    ("nemotron_h_dense", 2, 1, False),  # on CPUs vLLM builds no experts without a gate
    ("nemotron_h_dense", 1, 2, False),
    ("gpt_oss", 1, 1, False),
    ("gpt_oss", 2, 1, False),
    ("gpt_oss", 2, 1, True),
    ("gpt_oss", 1, 2, False),
]


def test_class_names_extents_and_rectangles_are_those_of_vllm(folders, tmp_path):
    asked = [(str(folders[name]), *ways) for name, *ways in ENGINES]
    calls = [("vllm_models", "rank_parameters", f"file://{tmp_path}/meeting", rank, asked) for rank in range(2)]
    ranks = warm.together(in_process, calls, deadline(240))
    for i, (name, tensor, pipeline, expert_parallel) in enumerate(ENGINES):
        shape = read_shape(folders[name])
        for rank in range(tensor * pipeline):
            model, parameters, recording = ranks[rank][i]
            assert model == FAMILIES[shape.family].vllm_model
            shards = vllm_shards(shape, tensor, rank, expert_parallel, pipeline)
            check_parameters(shards, parameters, f"{name}, rank {rank} of TP{tensor} PP{pipeline}")
            assert set(recording.shards) == set(shards), f"{name}, rank {rank} of TP{tensor} PP{pipeline}"
            assert len(recording.shards) == len(shards)


@pytest.mark.deep
def test_rectangles_of_a_tower_are_those_of_vllm(tmp_path):
    """Every stage of an engine has the tower. The names of the text model differ, which the bridge records."""
    kinds, ways = ("qwen2_5_vl", "qwen3_vl", "qwen3_5"), [(2, 1), (1, 2)]
    for kind in kinds:
        image_models.write_model(tmp_path / kind, kind)
    asked = [(str(tmp_path / kind), *way, False) for kind in kinds for way in ways]
    calls = [("vllm_models", "rank_parameters", f"file://{tmp_path}/meeting", rank, asked) for rank in range(2)]
    ranks = warm.together(in_process, calls, deadline(240))
    for i, (folder, tensor, pipeline, _) in enumerate(asked):
        shape = PolicyConfig(vision_tower="trained").adapted(read_shape(Path(folder)))
        for rank in range(2):
            _, parameters, recording = ranks[rank][i]
            shards = [one for one in vllm_shards(shape, tensor, rank, False, pipeline) if TOWER in one.hf_name]
            check_parameters(shards, {name: one for name, one in parameters.items() if TOWER in name}, folder)
            found = [one for one in recording.shards if TOWER in one.hf_name]
            assert set(found) == set(shards) and len(found) == len(shards) > 30


def test_a_class_that_computes_what_the_table_does_not_say_is_refused(folders, tmp_path):
    """vLLM's class of Nemotron-H, in a form that copies A_log, which it holds as -exp(A_log)."""
    call = ("vllm_models", "rank_parameters", f"file://{tmp_path}/meeting", 0)
    (ranks,) = warm.together(
        in_process, [(*call, [(str(folders["nemotron_h_dense"]), 1, 1, False, "plain_rates")])], deadline(240)
    )
    assert re.search(r"nemotron_h and vLLM differ on whether model.layers.\d.mixer.A is -exp\(x\)", ranks[0][2])


STACKED = [
    # tensor, pipeline, expert_parallel, form
    (2, 1, False, "like_qwen3_5"),
    (2, 1, True, "like_qwen3_5"),
    (2, 1, False, "like_llama4"),
    (1, 2, False, "like_llama4"),
    (1, 1, False, "like_gpt_oss"),
]


def test_vllms_loaders_take_rectangles_of_stacked_experts_too(folders, tmp_path):
    """vLLM's loader of experts knows gate above up, transposed or not. Rows by turns are not what it takes them for,
    and are refused."""
    folder = folders["qwen3_moe"]
    shape = read_shape(folder)
    asked = [(str(folder), *ways) for ways in STACKED]
    calls = [("vllm_models", "rank_parameters", f"file://{tmp_path}/meeting", rank, asked) for rank in range(2)]
    ranks = warm.together(in_process, calls, deadline(240))
    for i, (tensor, pipeline, expert_parallel, form) in enumerate(STACKED):
        for rank in range(tensor * pipeline):
            _, _, recording = ranks[rank][i]
            if form == "like_gpt_oss":
                assert re.search(
                    r"vLLM rearranges model.layers.1.mlp.experts.\w+ while it loads model.layers.1.mlp", recording
                )
            else:
                shards = vllm_shards(shape, tensor, rank, expert_parallel, pipeline)
                assert set(recording.shards) == set(shards) and len(recording.shards) == len(shards), STACKED[i]


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(tensor=2, pipeline=2, data=2),
        Mesh(tensor=2, pipeline=2, data=2, context=2, expert=4, expert_tensor=1),
        Mesh(tensor=4, data=2, context=2, expert=2),
        Mesh(tensor=2, pipeline=3, data=4, expert=2, expert_tensor=4),
    ],
    ids=str,
)
def test_ranks_are_counted_as_megatron_counts_them(mesh):
    """A rank's place in each of Megatron's groups is the coordinate."""
    from megatron.core.parallel_state import RankGenerator

    order = "tp-cp-ep-dp-pp"
    common = dict(tp=mesh.tensor, cp=mesh.context, ep=1, dp=mesh.data, pp=mesh.pipeline, order=order)
    of_experts = dict(tp=mesh.expert_ways, cp=1, ep=mesh.expert, pp=mesh.pipeline, order=order)
    of_experts["dp"] = mesh.stage_size // (mesh.expert * mesh.expert_ways)
    axes = [
        (common, "tp", lambda rank: mesh.coordinates(rank)[0]),
        (common, "pp", lambda rank: mesh.coordinates(rank)[1]),
        (common, "dp", lambda rank: mesh.coordinates(rank)[2]),
        (common, "cp", mesh.context_rank),
        (of_experts, "tp", lambda rank: mesh.expert_coordinates(rank)[0]),
        (of_experts, "ep", lambda rank: mesh.expert_coordinates(rank)[1]),
        (of_experts, "dp", lambda rank: mesh.expert_coordinates(rank)[2]),
    ]
    for sizes, axis, coordinate in axes:
        for group in RankGenerator(**sizes).get_ranks(axis):
            assert [coordinate(rank) for rank in group] == list(range(len(group)))


@pytest.mark.parametrize("virtual", [1, 2])
def test_layers_are_numbered_as_megatron_numbers_them(virtual):
    """First and last stages may hold fewer layers; Megatron's offset of every chunk."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    stages = (2, 6, 6, 4)
    mesh = Mesh(pipeline=4, virtual=virtual, layers=tuple(n // virtual for n in stages) * virtual)
    config = TransformerConfig(
        num_layers=18,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        num_layers_in_first_pipeline_stage=stages[0],
        num_layers_in_last_pipeline_stage=stages[-1],
        pipeline_dtype="float32",
    )
    for chunk in range(virtual):
        vp_stage = chunk if virtual > 1 else None
        for stage in range(4):
            start = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=stage)
            num = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=stage)
            assert mesh.layer_range(18, stage, chunk) == range(start, start + num)
