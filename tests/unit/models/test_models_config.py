"""config.json: reads the configurations of published models, and names every value that is not supported."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from leaks import lasting

from megatron_rl.models import FAMILIES, critic_config, read_shape
from megatron_rl.tools.bench.family.proposal import HARMLESS
from megatron_rl.types import LatentAttention, Llama3Rope, Mixture, ModelShape, Rope, YarnRope
from megatron_rl.types.mamba import NO_ATTENTION, NO_MLP, Mamba2, SquaredReluMixture, SquaredReluMlp

QWEN3 = {
    "model_type": "qwen3", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 4, "intermediate_size": 8, "vocab_size": 16, "rope_theta": 1e4, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64,
    "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256, "rope_theta": 5e5, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
"""The configuration of Llama 3.1 70B."""
DEEPSEEK = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129280, "rope_theta": 10000,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 163840, "tie_word_embeddings": False, "attention_bias": False,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "first_k_dense_replace": 3, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "topk_group": 4,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
}  # fmt: skip
OLMO3 = LLAMA | {
    "model_type": "olmo3", "num_hidden_layers": 8, "sliding_window": 4096,
    "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192,
                     "attention_factor": 1.2, "beta_fast": 32.0, "beta_slow": 1.0},
}  # fmt: skip
MIXTRAL = {k: v for k, v in LLAMA.items() if k != "rope_scaling"} | {
    "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1,
}  # fmt: skip


def read(tmp_path, config: dict) -> ModelShape:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_shape(tmp_path)


def windows(shape: ModelShape) -> tuple[int | None, list[int]]:
    """The window, and the layers that have it."""
    found = {n: layer.attention.window for n, layer in enumerate(shape.layers) if layer.attention.window}
    return next(iter(found.values()), None), [*found]


def test_llama(tmp_path):
    shape = read(tmp_path, LLAMA)
    assert (shape.attention.head_dim, windows(shape)) == (128, (None, []))
    assert shape.attention.rope == Rope(5e5, Llama3Rope(8.0, 1.0, 4.0, 8192))
    assert FAMILIES["llama"].num_parameters(shape) == 70_553_706_496


def test_deepseek_v3(tmp_path):
    shape = read(tmp_path, DEEPSEEK)
    rope = Rope(1e4, YarnRope(40, 4096, 32, 1, mscale=1.0, mscale_all_dim=1.0))
    sizes = dict(query_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    assert shape.attention == LatentAttention(128, **sizes, rope=rope)
    assert [layer.mixture is not None for layer in shape.layers] == [False] * 3 + [True] * 58
    groups = dict(num_groups=8, num_active_groups=4)
    chosen = dict(score="sigmoid", **groups, scaling_factor=2.5, router_bias=True)
    assert shape.mixture == Mixture(256, 8, 2048, 2048, **chosen)
    assert FAMILIES["deepseek_v3"].num_parameters(shape) == 671_026_419_200
    assert read(tmp_path, DEEPSEEK | {"q_lora_rank": None}).attention.query_rank == 0


def test_olmo_3_in_the_older_and_the_newer_form(tmp_path):
    shape = read(tmp_path, OLMO3)
    assert shape.attention.rope.scaling == YarnRope(8.0, 8192, 32.0, 1.0, attention_factor=1.2)
    assert shape.layers[0].attention.rope.scaling is None
    assert windows(shape) == (4096, [0, 1, 2, 4, 5, 6])
    newer = {key: value for key, value in OLMO3.items() if key not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = {
        "full_attention": OLMO3["rope_scaling"] | {"rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    }
    assert read(tmp_path, newer) == shape
    assert read(tmp_path, OLMO3 | {"layer_types": ["full_attention"] * 8}).attentions.keys() == {shape.attention}


TO_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10240}
PARAMETERS = {"rope_type": "default", "rope_theta": 1000000.0}


def test_two_sections_about_rotation_that_differ_are_refused_with_what_to_write(tmp_path):
    """transformers reads rope_scaling alone, so that the base would be the family's default."""
    both = QWEN3 | {"rope_parameters": PARAMETERS, "rope_scaling": TO_YARN}
    with pytest.raises(ValueError, match=r"config.json: it has both .* write rope_parameters: (.*)$") as raised:
        read(tmp_path, both)
    written = json.loads(str(raised.value).partition("write rope_parameters: ")[2])
    shape = read(
        tmp_path, {key: value for key, value in QWEN3.items() if key != "rope_theta"} | {"rope_parameters": written}
    )
    assert shape.attention.rope == Rope(1e6, YarnRope(4.0, 10240))
    same = QWEN3 | {"rope_parameters": written, "rope_scaling": written}
    assert read(tmp_path, same) == shape
    assert read(tmp_path, QWEN3 | {"rope_parameters": written, "rope_scaling": None}) == shape


def test_the_original_length_beside_the_section_goes_before_the_one_in_it(tmp_path):
    shape = read(tmp_path, QWEN3 | {"rope_scaling": TO_YARN, "original_max_position_embeddings": 4096})
    assert shape.attention.rope.scaling == YarnRope(4.0, 4096)


@pytest.mark.parametrize("config", [QWEN3, LLAMA, DEEPSEEK, MIXTRAL, OLMO3], ids=lambda c: c["model_type"])
@pytest.mark.parametrize("value", [None, "12", True, [1], 0, -1, 2.5, float("nan"), float("inf")], ids=json.dumps)
def test_a_key_that_is_no_number_is_named_with_the_file(tmp_path, config, value):
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
    numbers = () if value == 2.5 else ("rms_norm_eps", "rope_theta")
    for key in (*sizes, *numbers):
        if key in config:
            kind = "whole number above 0" if key in sizes else "number above 0"
            with pytest.raises(
                ValueError, match=rf"config.json: {key} must be a {kind}, but it is {re.escape(json.dumps(value))}"
            ):
                read(tmp_path, config | {key: value})


@pytest.mark.parametrize("config", [QWEN3, LLAMA, QWEN3_MOE, MIXTRAL, OLMO3], ids=lambda c: c["model_type"])
def test_a_size_that_is_not_there_is_what_transformers_takes(tmp_path, config):
    with lasting():
        from transformers import AutoConfig
    for key, field in (("num_key_value_heads", "num_kv_heads"), ("head_dim", "head_dim")):
        without = {name: value for name, value in config.items() if name != key}
        theirs = AutoConfig.for_model(**deepcopy(without))
        expected = getattr(theirs, key, None) or theirs.hidden_size // theirs.num_attention_heads
        assert getattr(read(tmp_path, without).attention, field) == expected


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match="config.json is no JSON"):
        read_shape(tmp_path)


@pytest.mark.parametrize("config", [DEEPSEEK, MIXTRAL, QWEN3_MOE, LLAMA, OLMO3], ids=lambda c: c["model_type"])
def test_null_anywhere_is_an_error_with_the_file_or_means_what_a_missing_key_means(tmp_path, config):
    for key in config.keys() - {"q_lora_rank"}:  # null is its value for queries without a rank
        try:
            shape = read(tmp_path, config | {key: None})
        except ValueError as error:
            assert "config.json" in str(error)
            continue
        assert shape == read(tmp_path, {name: value for name, value in config.items() if name != key})


@pytest.fixture
def partly(monkeypatch):
    """A family like Qwen3 that rotates a half of each head if config.json does not say otherwise."""
    monkeypatch.setitem(FAMILIES, "partly", replace(FAMILIES["qwen3"], name="partly", rotary_share=0.5))
    return QWEN3 | {"model_type": "partly"}


def test_the_rotated_share_of_heads(tmp_path, partly):
    """transformers prefers the section to what stands beside it."""
    assert read(tmp_path, QWEN3).attention.rope.share == 1.0
    half = read(tmp_path, partly).attention
    assert (half.rope.share, half.rotary_dim) == (0.5, 2)
    section = {"rope_parameters": PARAMETERS | {"partial_rotary_factor": 1.0}}
    assert read(tmp_path, partly | section).attention.rotary_dim == 4
    assert read(tmp_path, partly | section | {"partial_rotary_factor": 0.5}).attention.rotary_dim == 4
    beside = partly | {"head_dim": 8, "partial_rotary_factor": 0.25}
    assert read(tmp_path, beside).attention.rotary_dim == 2
    assert read(tmp_path, beside | {"rope_parameters": PARAMETERS}).attention.rotary_dim == 2
    assert read(tmp_path, beside | {"rope_scaling": TO_YARN}).attention.rope.scaling == YarnRope(4.0, 10240)
    assert read(tmp_path, QWEN3 | {"partial_rotary_factor": 1.0}) == read(tmp_path, QWEN3)
    assert critic_config(beside, None)["partial_rotary_factor"] == 0.25


@pytest.mark.parametrize(
    ("family", "factor", "message"),
    [
        ("partly", None, "must be a number above 0, but it is null"),
        ("partly", "half", "must be a number"),
        ("partly", 0, "must be a number above 0, but it is 0"),
        ("partly", 1.5, "above 0 and at most 1"),
        ("partly", 0.25, "rotates 1 of the 4 dims of a head; only even"),
        ("qwen3", 0.5, "heads of the family qwen3 are rotated whole"),
        ("qwen3", None, "must be a number"),
    ],
)
@pytest.mark.parametrize("place", ["section", "beside"])
def test_a_share_that_is_none_is_refused(tmp_path, partly, family, factor, message, place):
    more = {"partial_rotary_factor": factor}
    config = partly | {"model_type": family} | (more if place == "beside" else {"rope_parameters": PARAMETERS | more})
    with pytest.raises(ValueError, match=f"config.json: partial_rotary_factor .*{message}"):
        read(tmp_path, config)


def test_a_config_json_that_is_no_mapping_is_named(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json holds no mapping"):
        read_shape(tmp_path)


def test_windows(tmp_path):
    off = QWEN3 | {"sliding_window": 32, "max_window_layers": 0, "use_sliding_window": False}
    assert windows(read(tmp_path, off)) == (None, [])
    on = read(tmp_path, off | {"use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 3})
    assert windows(on) == (32, [1, 2])
    assert windows(read(tmp_path, MIXTRAL | {"sliding_window": 4096})) == (4096, [*range(80)])


def test_experts(tmp_path):
    assert read(tmp_path, QWEN3_MOE).mixture == Mixture(128, 8, 768)
    two = QWEN3_MOE | {"num_hidden_layers": 4, "mlp_only_layers": [0, 1], "norm_topk_prob": False}
    assert read(tmp_path, two).mixture == Mixture(128, 8, 768, normalised=False)
    assert [bool(layer.mixture) for layer in read(tmp_path, two).layers] == [False, False, True, True]
    assert read(tmp_path, MIXTRAL).mixture == Mixture(8, 2, 28672)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "gpt2"},
            "gpt2.*supported: deepseek_v3, gemma3, gemma3_text, glm4_moe, glm4_moe_lite, gpt_oss, kimi_k2, kimi_k25",
        ),
        ({"model_type": "gpt2"}, r"`megatron-rl family /.*`, in a clone, proposes what to add \(docs/models.md\)"),
        ({"model_type": "qwen3"}, "num_attention_heads"),
        (LLAMA | {"attention_bias": True}, "attention_bias is True"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        (LLAMA | {"rope_scaling": LLAMA["rope_scaling"] | {"novel": 1}}, "key 'novel'"),
        (MIXTRAL | {"sliding_window": 8, "rope_scaling": LLAMA["rope_scaling"]}, "supported only for gpt_oss, olmo3"),
        (QWEN3_MOE | {"num_hidden_layers": 4, "decoder_sparse_step": 2}, r"the layers \[0, 2\] dense"),
        (DEEPSEEK | {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (DEEPSEEK | {"rope_interleave": False}, "rope_interleave is False"),
        (OLMO3 | {"layer_types": ["chunked_attention"]}, "chunked_attention"),
    ],
)
def test_what_the_tables_do_not_describe_is_refused(tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, config)


GPT_OSS = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "rms_norm_eps": 1e-5,
    "swiglu_limit": 7.0,
    "attention_bias": True,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
YARN = GPT_OSS["rope_scaling"]


def test_gpt_oss(tmp_path):
    shape = read(tmp_path, GPT_OSS)
    assert shape.mixture == Mixture(4, 2, 32, clamp=7.0, linear_bias=True)
    assert windows(shape) == (8, [0, 2])
    assert {block.rope.scaling for block in shape.attentions} == {YarnRope(32.0, 4096, 32.0, 1.0, truncate=False)}
    types = ["sliding_attention", "full_attention"] * 2
    assert read(tmp_path, GPT_OSS | {"layer_types": types, "swiglu_alpha": 1.702}) == shape
    assert read(tmp_path, GPT_OSS | {"layer_types": None}) == shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": False}, "attention_bias is False; for the family gpt_oss only True is supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; for the family gpt_oss only 'silu' is supported"),
        ({"swiglu_limit": None}, "swiglu_limit is None; for gpt_oss only 7.0 is supported"),
        ({"swiglu_limit": 8.0}, "swiglu_limit is 8.0; for gpt_oss only 7.0 is supported"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0; for gpt_oss only 1.702 is supported"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06; for gpt_oss only 1e-05 is supported"),
        (
            {"layer_types": ["full_attention", "sliding_attention"] * 2},
            r"window to the layers \[1, 3\]; .*every second",
        ),
        (
            {"rope_scaling": None},
            "neither rope_parameters nor rope_scaling is there; for gpt_oss one with",
        ),
        ({"rope_scaling": LLAMA["rope_scaling"]}, "rope_scaling has rope_type 'llama3'; for gpt_oss only 'yarn'"),
        ({"rope_scaling": YARN | {"mscale": 1.0}}, "rope_scaling has the key 'mscale', which vLLM does not read"),
        ({"rope_scaling": YARN | {"beta_slow": None}}, "rope_scaling has no beta_slow, which vLLM needs"),
        ({"rope_scaling": YARN | {"truncate": "no"}}, 'truncate must be true or false, but it is "no"'),
    ],
)
def test_another_gpt_oss_than_vllms_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, GPT_OSS | changes)


QWEN3_NEXT = {key: value for key, value in QWEN3_MOE.items() if key != "rope_theta"} | {
    "model_type": "qwen3_next", "num_hidden_layers": 4, "shared_expert_intermediate_size": 8, "head_dim": 16,
}  # fmt: skip
GEMMA = {
    "model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "intermediate_size": 10240,
    "sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip
"""The `text_config` of the published 4B, which leaves the rest to transformers' defaults."""
MINIMAX = MIXTRAL | {
    "model_type": "minimax_m2", "scoring_func": "sigmoid", "use_routing_bias": True, "head_dim": 128, "rotary_dim": 64,
}  # fmt: skip
NEMOTRON_H = {
    "model_type": "nemotron_h", "num_hidden_layers": 5, "hybrid_override_pattern": "M-*ME", "hidden_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "vocab_size": 60,
    "max_position_embeddings": 128, "layer_norm_epsilon": 1e-5, "mamba_num_heads": 8, "mamba_head_dim": 6,
    "ssm_state_size": 10, "n_groups": 4, "conv_kernel": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 20, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "tie_word_embeddings": False,
}  # fmt: skip
GLM = {key: value for key, value in DEEPSEEK.items() if "lora" not in key} | {"model_type": "glm4_moe", "head_dim": 128}
WHOLE = "must be a whole number above 0, but it is "


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        *[
            (QWEN3_NEXT, {key: value}, f"{key} {WHOLE}{json.dumps(value)}")
            for key in ("full_attention_interval", "linear_num_key_heads", "linear_num_value_heads",
                        "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "decoder_sparse_step",
                        "num_experts", "shared_expert_intermediate_size")
            for value in (0, "4", None)
        ],
        *[
            (GLM, {key: value}, f"{key} {WHOLE}{json.dumps(value)}")
            for key in ("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "num_experts_per_tok",
                        "n_group", "topk_group")
            for value in (0, -5, "8", True)
        ],
        *[
            (DEEPSEEK, {key: value}, f"{key} {WHOLE}{json.dumps(value)}")
            for key in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            for value in (0, "64")
        ],
        *[
            (GPT_OSS, {key: value}, f"{key} {WHOLE}{json.dumps(value)}")
            for key in ("sliding_window", "num_local_experts", "num_experts_per_tok")
            for value in (0, "128", None)
        ],
        (QWEN3_NEXT, {"norm_topk_prob": "no"}, 'norm_topk_prob must be true or false, but it is "no"'),
        (GLM, {"norm_topk_prob": 1}, "norm_topk_prob must be true or false, but it is 1"),
        (GLM, {"first_k_dense_replace": "3"}, 'first_k_dense_replace must be a whole number of at least 0.*"3"'),
        (GLM, {"first_k_dense_replace": -1}, "first_k_dense_replace must be a whole number of at least 0.* -1"),
        (GLM, {"first_k_dense_replace": 62}, "must be at most num_hidden_layers, which is 61, but it is 62"),
        (GLM, {"num_experts_per_tok": 257}, "num_experts_per_tok must be at most n_routed_experts, which is 256"),
        (GLM, {"num_experts_per_tok": 129}, "num_experts_per_tok is 129, but the topk_group 4 .* have 128 experts"),
        (GLM, {"topk_group": 9}, "topk_group must be at most n_group, which is 8, but it is 9"),
        (GLM, {"n_group": 7}, "n_group is 7; n_routed_experts, 256, must be a multiple of it"),
        (GLM, {"routed_scaling_factor": 0}, "routed_scaling_factor must be a number above 0, but it is 0"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok must be at most num_local_experts, which is 8"),
        (QWEN3_MOE, {"num_experts_per_tok": 129}, "num_experts_per_tok must be at most num_experts, which is 128"),
        (GPT_OSS, {"layer_types": ["sliding_attention"]}, "layer_types has 1 entries, but num_hidden_layers is 4"),
        (OLMO3, {"sliding_window": None}, f"sliding_window {WHOLE}null"),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_size_inside_a_layer_that_is_none_is_named_with_the_file(tmp_path, config, changes, message):
    read(tmp_path, config)
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        read(tmp_path, config | changes)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (QWEN3, "Qwen3ForCausalLM"),
        (OLMO3, "Olmo3ForCausalLM"),
        (DEEPSEEK | {"model_type": "kimi_k2", "auto_map": {"AutoModel": "code.Model"}}, "DeepseekV3ForCausalLM"),
    ],
)
def test_the_class_that_config_json_names_is_the_familys(tmp_path, config, named):
    assert read(tmp_path, config | {"architectures": [named]}) == read(tmp_path, config)
    critic = critic_config(config | {"architectures": [named]}, None)
    assert read(tmp_path, critic).value_head
    for other in (["NewForCausalLM"], [named, "NewForCausalLM"], [named.replace("CausalLM", "RewardModel")], named):
        message = rf"config.json: architectures is {re.escape(json.dumps(other))}; for the family .* only {named}, or"
        with pytest.raises(ValueError, match=message):
            read(tmp_path, config | {"architectures": other})


def test_missing_and_broken_configurations(tmp_path):
    with pytest.raises(ValueError, match="has no config.json"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        read_shape(tmp_path)


@pytest.mark.parametrize("config", [QWEN3, LLAMA, DEEPSEEK, MIXTRAL, QWEN3_MOE], ids=lambda c: c["model_type"])
def test_the_base_of_rotation_that_config_json_leaves_out_is_the_familys(tmp_path, config):
    without = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_parameters")}
    expected = FAMILIES[config["model_type"]].absent.get("rope_theta", 10_000)
    assert read(tmp_path, without).attention.rope.theta == expected


@pytest.mark.deep
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"kimi_k2"}))  # it is DeepSeek-V3 to transformers
def test_every_familys_base_of_rotation_is_transformers(family):
    with lasting():  # the import takes seconds, and sets a variable of the environment
        from transformers import AutoConfig

        config = AutoConfig.for_model(family)
    absent, theta = FAMILIES[family].absent, config.default_theta
    bases = theta if isinstance(theta, dict) else {"global": theta}
    assert absent.get("rope_theta", 10_000) == bases["global"]
    assert absent.get("rope_local_base_freq") == bases.get("local")


BASES = {
    "llama": LLAMA,
    "qwen2": QWEN3 | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    "qwen3": QWEN3 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    "qwen3_moe": QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 8},
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_text": QWEN3_NEXT | {"model_type": "qwen3_5_text"},
    "qwen3_5_moe_text": QWEN3_NEXT | {"model_type": "qwen3_5_moe_text"},
    "mistral": MIXTRAL | {"model_type": "mistral", "sliding_window": 8},
    "mixtral": MIXTRAL | {"sliding_window": 8},
    "olmo2": LLAMA | {"model_type": "olmo2"},
    "olmo3": OLMO3,
    "deepseek_v3": DEEPSEEK,
    "kimi_k2": DEEPSEEK | {"model_type": "kimi_k2"},
    "glm4_moe_lite": DEEPSEEK | {"model_type": "glm4_moe_lite"},
    "glm4_moe": GLM,
    "gpt_oss": GPT_OSS,
    "minimax_m2": MINIMAX,
    "gemma3_text": GEMMA,
    "nemotron_h": NEMOTRON_H,
}
"""A configuration of each family, which has windows if the family can have them."""
ENGINES = {
    "qwen3_5_text": ("qwen3_5", "qwen3_next:Qwen3NextAttention"),
    "qwen3_5_moe_text": ("qwen3_5", "qwen3_next:Qwen3NextAttention", "qwen3_next:Qwen3NextSparseMoeBlock"),
    "mistral": ("mistral", "llama"),
    "gemma3_text": ("gemma3",),
    "olmo2": ("transformers/base", "transformers/causal"),
    "olmo3": ("transformers/base", "transformers/causal"),
    "deepseek_v3": ("deepseek_v2",),
    "kimi_k2": ("deepseek_v2",),
}
"""The files of vLLM's classes, and after the colon the one class that is used, where a file is not named like the
family."""
UNREAD = {
    "_attn_implementation": "it chooses a kernel",
    "dtype": "model.dtype decides",
    **dict.fromkeys(("get_text_config", "get_nemotron_h_config_for_layer"), "it is a method"),
    **dict.fromkeys(
        ("num_mtp_layers", "num_mtp_modules", "num_nextn_predict_layers", "mtp_layers_block_type"),
        "it is of the multi-token head",
    ),
    **dict.fromkeys(("chunk_size", "use_mamba_kernels", "moe_shared_expert_overlap"), "it is of kernels"),
    **dict.fromkeys(("expand", "time_step_limit", "num_logits_to_keep"), "no model computes with it"),
    **dict.fromkeys(
        ("time_step_max", "time_step_floor", "rescale_prenorm_residual"), "it is of the first values of weights"
    ),
    "time_step_min": "only transformers bounds step sizes by it, and not while it generates",
    "mamba_ssm_cache_dtype": "it is of the engine's cache",
    "ada_rms_norm_t_cond_dim": "vLLM reads it only with ada_rms_norm_t_cond, which is refused",
    "max_model_len": "vLLM sets it",
    "target_layer_count": "it is of a draft model",
    "quantization_config": "`quantised` reads it",
    **dict.fromkeys(("num_experts", "qk_nope_head_dim", "qk_rope_head_dim"), "it is of layers of other families"),
    **dict.fromkeys(
        ("index_head_dim", "index_n_heads", "index_skip_topk_offset", "index_topk_freq", "index_topk_pattern",
         "indexer_rope_interleave"),
        "vLLM reads it only with index_topk, which is refused",
    ),
    **dict.fromkeys(
        ("boi_token_id", "boi_token_index", "eoi_token_id", "eoi_token_index", "image_token_index",
         "mm_tokens_per_image", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
         "vision_config", "text_config"),
        "it is of the vision tower, which `composite` leaves out",
    ),
}  # fmt: skip
"""Why a key that a class computes with is not read and not refused."""


def keys_of_class(path: Path, only: str) -> Iterator[str]:
    """The keys of config.json that a file of transformers or vLLM reads.

    Args:
        only: the one class to look at; empty: all but those of a vision tower.
    """

    def is_config(node: ast.AST) -> bool:
        """`config`, or `self.config`."""
        name = node.attr if isinstance(node, ast.Attribute) and is_self(node.value) else getattr(node, "id", "")
        return name in ("config", "text_config", "hf_config")

    def is_self(node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == "self"

    def walk(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.ClassDef) and "Vision" in node.name:
            return
        match node:
            case ast.Attribute(value=holder, attr=key) if is_config(holder):
                yield key
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[holder, ast.Constant(value=key), *_]) if (
                is_config(holder)
            ):
                yield key
            case ast.ClassDef(name=name, body=body) if name.endswith("Config"):
                for line in body:
                    match line:
                        case ast.AnnAssign(target=ast.Name(id=key)):
                            yield key
                        case ast.Assign(targets=[ast.Name(id="attribute_map")], value=names):
                            yield from (key for pair in ast.literal_eval(names).items() for key in pair)
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    for node in ast.parse(path.read_text()).body:
        if not only or getattr(node, "name", "") == only:
            yield from walk(node)


def keys_of_vendors(family: str) -> set[str]:
    """The keys that the family's classes of transformers and of vLLM compute with. Their code is not run."""
    theirs, engine = (Path(find_spec(name).origin).parent for name in ("transformers", "vllm"))
    module = {"kimi_k2": "deepseek_v3"}.get(family, family.removesuffix("_text"))
    files = [theirs / "models" / module / f"{kind}_{module}.py" for kind in ("modeling", "configuration")]
    keys = {key for path in files for key in keys_of_class(path, "")}
    for name in ENGINES.get(family, (family,)):
        file, _, only = name.partition(":")
        keys |= set(keys_of_class(engine / "model_executor" / "models" / f"{file}.py", only))
    return keys


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "M-*MX"}, "hybrid_override_pattern is 'M-.MX'; supported is .* of M, .*, -, E"),
        ({"hybrid_override_pattern": "M-MME"}, "has the blocks M-MME; at least one Mamba-2 and one attention"),
        ({"hybrid_override_pattern": "-*-*E"}, "at least one Mamba-2 and one attention"),
        ({"hybrid_override_pattern": None}, "the key 'hybrid_override_pattern' is missing"),
        ({"num_hidden_layers": 6}, "num_hidden_layers is 6, but hybrid_override_pattern has 5 layers"),
        ({"layers_block_type": ["mamba", "mlp", "attention", "moe", "mamba"]}, "make them equal"),
        ({"layers_block_type": ["mamba", "rnn"]}, "layers_block_type is .*'rnn'.*; supported is a block"),
        ({"mamba_num_heads": 6}, "mamba_num_heads is 6, which must be a multiple of n_groups, 4"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2; only 1 is supported"),
        ({"moe_latent_size": 16}, "moe_latent_size is 16; only None is supported"),
        ({"n_group": 2}, "n_group is 2; only 1"),
        ({"use_conv_bias": False}, "use_conv_bias is False; for the family nemotron_h only True"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; for the family nemotron_h only 'relu2'"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1; for the family nemotron_h only 0"),
        ({"block_configs": [{}]}, "block_configs is "),
        ({"intermediate_size": [48, 48]}, "intermediate_size must be a whole number"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True; .* only False"),
    ],
)
def test_another_hybrid_than_the_tables_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, NEMOTRON_H | changes)


def test_each_layer_of_a_hybrid_has_one_block(tmp_path):
    """The list of transformers means the same as the pattern of the published files, with and without the number."""
    shape = read(tmp_path, NEMOTRON_H)
    mamba = Mamba2(num_key_heads=4, num_value_heads=8, key_size=10, value_size=6, convolution=4)
    assert [layer.attention for layer in shape.layers] == [mamba, NO_ATTENTION, shape.attention, mamba, NO_ATTENTION]
    experts = SquaredReluMixture(4, 2, 24, 20, "sigmoid", scaling_factor=2.5, router_bias=True)
    assert [layer.mlp for layer in shape.layers] == [NO_MLP, SquaredReluMlp(48), NO_MLP, NO_MLP, experts]
    assert shape.attention.rotary_dim == 0 and shape.norm_eps == 1e-5
    kinds = ["linear_attention", "mlp", "full_attention", "linear_attention", "moe"]
    without = {
        key: value for key, value in NEMOTRON_H.items() if key not in ("hybrid_override_pattern", "num_hidden_layers")
    }
    assert read(tmp_path, without | {"layers_block_type": kinds}) == shape
    assert read(tmp_path, NEMOTRON_H | {"layers_block_type": kinds}) == shape


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_the_vendors_classes_compute_with_is_read_or_refused(tmp_path, family):
    """A value that no key can have is refused with the key's name wherever the key is read at all."""
    base, silent = BASES[family], set()
    read(tmp_path, base)
    keys = keys_of_vendors(family)
    rotated = {"rope_parameters"} if FAMILIES[family].rotary_share != 0.0 else set()
    assert keys > {"hidden_size", "num_attention_heads"} | rotated
    for key in keys - HARMLESS:
        try:
            read(tmp_path, base | {key: "odd"})
        except ValueError as error:
            assert key in str(error)
        else:
            silent.add(key)
    assert silent <= UNREAD.keys()


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (QWEN3, {"is_causal": False}, "is_causal is False; for the family qwen3 only True"),
        (LLAMA, {"per_layer_config": {"1": {"intermediate_size": 8}}}, "per_layer_config is .* only None"),
        (LLAMA, {"rotary_pct": 0.25}, "rotary_pct is 0.25; .* only None"),
        (LLAMA, {"sliding_window": 4096}, "sliding_window is 4096; for the family llama only None"),
        (LLAMA, {"layer_types": ["full_attention"] * 79 + ["sliding_attention"]},
         "layer_types has sliding_attention; only full_attention is supported for the family llama"),
        (LLAMA, {"layer_types": ["full_attention"]}, "layer_types has 1 entries, but num_hidden_layers is 80"),
        (GLM, {"sliding_window": 8}, "sliding_window is 8"),
        (QWEN3, {"layer_types": ["sliding_attention"], "sliding_window": 8},
         "only full_attention is supported without use_sliding_window"),
        (QWEN3, {"layer_types": "sliding"}, 'layer_types must be a list with one entry for each layer.*"sliding"'),
        (QWEN3, {"use_sliding_window": "yes"}, 'use_sliding_window must be true or false, but it is "yes"'),
        (QWEN3, {"use_sliding_window": True, "max_window_layers": 0}, "the key 'sliding_window' is missing"),
        (QWEN3_MOE, {"use_sliding_window": True}, "the key 'sliding_window' is missing"),
        (MIXTRAL, {"sliding_window": 8, "layer_types": ["full_attention"] * 80},
         "layer_types has full_attention; only sliding_attention is supported with sliding_window 8"),
        (QWEN3_MOE, {"num_local_experts": 64}, "num_local_experts is 64, but by another key the model has 128 experts"),
        (DEEPSEEK, {"num_local_experts": 8}, "num_local_experts is 8, but by another key the model has 256"),
        (MIXTRAL, {"num_experts": 16}, "num_experts is 16, but by another key the model has 8"),
        (DEEPSEEK, {"head_dim": 192}, "head_dim is 192; only 64 is supported"),
        (GEMMA, {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; .* only 'gelu_pytorch_tanh'"),
        (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (GEMMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        (GEMMA, {"sliding_window_pattern": 0}, "sliding_window_pattern must be a whole number above 0"),
        (GEMMA, {"rope_local_base_freq": None}, "rope_local_base_freq must be a number above 0, but it is null"),
        (GEMMA, {"rope_scaling": None, "rope_parameters": {"rope_theta": 1e4}}, "'rope_theta' outside the sections"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "'linear' is not supported"),
        (MINIMAX, {"scoring_func": "softmax"}, "scoring_func is 'softmax'; for the family minimax_m2 only 'sigmoid'"),
        (MINIMAX, {"use_routing_bias": False}, "use_routing_bias is False; .* only True"),
        (MINIMAX, {"rotary_dim": 32}, "rotary_dim is 32, but 64 of the 128 dims of a head"),
        (MINIMAX, {"attn_type_list": [1, 0]}, r"attn_type_list is \[1, 0\]; only 1"),
        (MINIMAX, {"qk_norm_type": "per_head"}, "qk_norm_type is 'per_head'; .* only 'per_layer'"),
        (MINIMAX, {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        (QWEN3_MOE, {"mlp_only_layers": "0"}, 'mlp_only_layers must be a list of whole numbers of at least 0.*"0"'),
        (QWEN3_NEXT, {"rope_parameters": PARAMETERS | {"mrope_section": [1, "1", 0]}},
         r'mrope_section must be a list of whole numbers of at least 0, but it is \[1, "1", 0\]'),
        (QWEN3_NEXT, {"rope_scaling": PARAMETERS | {"mrope_section": 2}}, "mrope_section must be a list .* it is 2"),
        (QWEN3_NEXT, {"rope_parameters": PARAMETERS | {"mrope_section": [1, 1, 1]}}, "mrope_section is .* sum is 2"),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_key_that_changes_what_transformers_or_vllm_computes_is_refused(tmp_path, config, changes, message):
    read(tmp_path, config)
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        read(tmp_path, config | changes)


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (QWEN3_NEXT, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
        (QWEN3, {"sliding_window": 8, "max_window_layers": 0, "layer_types": ["full_attention"]}),
        (LLAMA, {"layer_types": ["full_attention"] * 80, "sliding_window": None, "use_sliding_window": True}),
        (MIXTRAL, {"layer_types": ["sliding_attention"] * 80}),
        (DEEPSEEK, {"head_dim": 64, "num_local_experts": 256}),
        (QWEN3_MOE, {"shared_expert_intermediate_size": 0, "num_local_experts": 128}),
    ],
    ids=lambda value: value.get("model_type", ""),
)
def test_a_key_that_transformers_and_vllm_ignore_changes_nothing(tmp_path, config, changes):
    assert read(tmp_path, config | changes) == read(tmp_path, config)


def nested(**sections: dict) -> dict:
    """The configuration of an OLMo 3 with these sections about rotation."""
    kept = {key: value for key, value in OLMO3.items() if key not in ("rope_theta", "rope_scaling")}
    return kept | {"rope_parameters": sections}


BASE_5 = {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (QWEN3 | {"rope_parameters": {"full_attention": PARAMETERS}},
         "rope_parameters has the section full_attention, but all layers of the family qwen3 are rotated alike"),
        (LLAMA | {"rope_scaling": {"sliding_attention": PARAMETERS}}, "rope_scaling has the section sliding_attention"),
        (nested(full_attention=PARAMETERS), "must be rotated by .* 1e\\+06, but transformers .* 'default' and 500000"),
        (nested(full_attention=BASE_5, sliding_attention=BASE_5 | {"rope_type": "yarn"}), "rotates them by 'yarn' and"),
        (nested(full_attention=5), "rope_parameters.full_attention must be a mapping, but it is 5"),
        (nested(**BASE_5), "rope_parameters has the key 'rope_theta' outside the sections full_attention and sliding"),
        (OLMO3 | {"rope_theta": 1e4}, "the rope_theta of the others, 10000, but transformers .* 'default' and 500000"),
    ],
)  # fmt: skip
def test_sections_of_rotation_that_transformers_reads_otherwise_are_refused(tmp_path, config, message):
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        read(tmp_path, config)


def test_a_section_of_rotation_that_is_missing_is_unscaled_as_in_transformers(tmp_path):
    whole = read(tmp_path, nested(full_attention=BASE_5, sliding_attention=BASE_5))
    for config in (nested(full_attention=BASE_5), nested(sliding_attention=BASE_5), nested(full_attention=None)):
        assert read(tmp_path, config) == whole
