"""A known model whose family is taken away: the proposal has its rows again."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
from test_models_config import BASES as OF_FAMILIES
from test_models_config import DEEPSEEK as PUBLISHED
from test_models_config import MINIMAX, MIXTRAL, QWEN3

from megatron_rl.models import FAMILIES
from megatron_rl.models.config import shape_of
from megatron_rl.models.families import module_of
from megatron_rl.models.families.rows import rows_of
from megatron_rl.models.family import Family
from megatron_rl.tools.bench.family.proposal import Proposal, propose

DEEPSEEK = PUBLISHED | {"num_hidden_layers": 5, "n_routed_experts": 16, "n_group": 4, "topk_group": 2}
GLM = {key: value for key, value in DEEPSEEK.items() if "lora" not in key} | {
    "model_type": "glm4_moe",
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
}
BASES = {"full_attention": 1e6, "sliding_attention": 1e4}
CONFIGS = {
    "qwen3": QWEN3,
    "mixtral": MIXTRAL | {"num_hidden_layers": 2},
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": GLM,
    "kimi_k2": DEEPSEEK | {"model_type": "kimi_k2"},
    "olmo3": QWEN3 | {"model_type": "olmo3", "sliding_window": 8, "rope_theta": 5e5},
    "minimax_m2": MINIMAX | {"num_hidden_layers": 2},
    "gemma3_text": QWEN3
    | {
        **{"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 8},
        "rope_parameters": {kind: {"rope_theta": base} for kind, base in BASES.items()},
    },
}


def forgotten(monkeypatch, name: str, **more) -> tuple[Proposal, Family]:
    """The proposal for a model whose family is unknown, and the family.

    Args:
        more: tensors that the model has besides.
    """
    family, config = FAMILIES[name], CONFIGS[name]
    tensors = {key: held.extents for key, held in family.file_tensors(shape_of(family, config)).items()}
    monkeypatch.delitem(FAMILIES, name)
    return propose(config, tensors | more), family


BEGUN = {
    "qwen3": {"llama"},
    "olmo3": {"olmo2"},
    "deepseek_v3": {"kimi_k2", "glm4_moe_lite"},
    "kimi_k2": {"deepseek_v3", "glm4_moe_lite"},
    "glm4_moe": {"qwen3"},
}
"""The families that each proposal may begin with, if there are those of `FIRST` alone."""
FIRST = {"llama", "qwen2", "qwen3_moe", "mixtral", "olmo2", "glm4_moe_lite", *BEGUN}


@pytest.mark.parametrize("name", BEGUN)
def test_a_proposal_begins_with_the_nearest_family(monkeypatch, name):
    for later in FAMILIES.keys() - FIRST:  # one of them may be nearer
        monkeypatch.delitem(FAMILIES, later)
    assert forgotten(monkeypatch, name)[0].nearest in BEGUN[name]


@pytest.mark.parametrize("name", BEGUN)
def test_the_rows_of_a_known_family_are_found_without_it(monkeypatch, name):
    found, family = forgotten(monkeypatch, name)
    shape = shape_of(family, CONFIGS[name])
    assert found.nearest != name and not found.unknown and not found.missing
    assert found.family.hf_tensors(found.shape) == family.hf_tensors(shape)
    for layer, other in zip(shape.layers, found.shape.layers, strict=True):
        wanted = {(rule.split, rule.hf, rule.megatron, rule.vllm, rule.fused) for rule in family.layer_rules(layer)}
        rows = found.family.layer_rules(other)
        assert {(rule.split, rule.hf, rule.megatron, rule.vllm, rule.fused) for rule in rows} == wanted


@pytest.mark.parametrize("name", FAMILIES)
def test_a_proposal_knows_the_module_of_each_family(name):
    """It is imported there by the proposals that begin with the family."""
    module = import_module(f"megatron_rl.models.families.{module_of(name)}")
    assert getattr(module, name.upper()) is FAMILIES[name]


def test_the_text_is_the_table(monkeypatch):
    found, _ = forgotten(monkeypatch, "glm4_moe")
    names: dict = {}
    exec(found.source(), names)
    written = names["GLM4_MOE"]
    assert written.rules == found.family.rules and written.known == found.family.known
    assert (written.name, written.rotary_share, written.read_config) == ("glm4_moe", 0.5, found.family.read_config)
    assert shape_of(written, GLM) == found.shape


def test_keys_that_nothing_reads_and_tensors_without_a_row_are_told(monkeypatch):
    monkeypatch.setitem(CONFIGS, "qwen3", QWEN3 | {"residual_multiplier": 0.5, "use_cache": True, "hidden_act": "gelu"})
    monkeypatch.setitem(FAMILIES, "qwen3", FAMILIES["qwen3"])
    config, family = CONFIGS["qwen3"], FAMILIES["qwen3"]
    tensors = {key: held.extents for key, held in family.file_tensors(shape_of(family, QWEN3)).items()}
    tensors["model.layers.0.self_attn.gate.weight"] = (3, 5)
    tensors["model.norm.weight"] = (7,)
    found = propose(config, tensors)
    assert found.unread == {"residual_multiplier": 0.5, "hidden_act": "gelu"}
    assert found.unknown == {"model.layers.0.self_attn.gate.weight": (3, 5)}
    assert found.differing == {"model.norm.weight": ((QWEN3["hidden_size"],), (7,))} and not found.missing
    assert found.understood == len(tensors) - 2


def test_a_row_is_taken_by_its_extents_and_not_by_its_name_alone():
    """Norms of q and k over all heads together, as OLMo 2 has them, in a model that is otherwise Qwen3."""
    family = FAMILIES["qwen3"]
    shape = shape_of(family, QWEN3)
    tensors = {key: held.extents for key, held in family.file_tensors(shape).items()}
    query, key, _ = shape.attention.widths
    widths = {"q": query, "k": key}
    for layer in range(shape.num_layers):
        for which, width in widths.items():
            tensors[f"model.layers.{layer}.self_attn.{which}_norm.weight"] = (width,)
    found = propose(QWEN3 | {"model_type": "new"}, tensors)
    assert not found.unknown and not found.missing and found.understood == len(tensors)
    assert found.shape.attention.norms == "full"


def test_a_row_is_taken_for_a_tensor_that_another_module_holds(monkeypatch):
    """MiniMax-M2 has a router's bias as DeepSeek-V3, in Mixtral's module."""
    found, family = forgotten(monkeypatch, "minimax_m2")
    assert found.nearest == "mixtral" and not found.unknown and not found.missing and not found.differing
    shape = shape_of(family, CONFIGS["minimax_m2"])
    assert found.family.hf_tensors(found.shape) == family.hf_tensors(shape)
    name = "block_sparse_moe.e_score_correction_bias"
    assert rows_of(found.family, name) == rows_of(family, name) and found.shape.mixture.router_bias


@pytest.mark.parametrize("published", [True, False])
def test_the_text_reads_how_a_router_scores_and_how_many_dims_are_rotated(monkeypatch, published):
    """The file of MiniMax-M2, unchanged, reads the same layers as its own table. In a folder that transformers wrote,
    config.json has no key for the scores, and none for the rotation if heads are rotated whole."""
    name, more = "minimax_m2", {"use_qk_norm": True, "shared_intermediate_size": 0}
    of_own = MINIMAX | {"num_hidden_layers": 2} | more
    family, config = FAMILIES[name], dict(of_own)
    if not published:
        family, of_own = replace(family, rotary_share=1.0), of_own | {"rotary_dim": of_own["head_dim"]}
        config = {key: of_own[key] for key in of_own.keys() - {"scoring_func", "use_routing_bias", "rotary_dim", *more}}
    wanted = shape_of(family, of_own)
    monkeypatch.delitem(FAMILIES, name)
    found = propose(config, {key: held.extents for key, held in family.file_tensors(wanted).items()})
    names: dict = {}
    exec(found.source(), names)
    written = names["MINIMAX_M2"]
    assert written.rules == found.family.rules and written.known == found.family.known
    assert shape_of(written, config) == found.shape == wanted
    assert found.unread.keys() == ({"use_routing_bias", *more} if published else set())
    for key, other in {"scoring_func": "softmax", "rotary_dim": 32, "use_routing_bias": False}.items():
        if published or key != "use_routing_bias":
            with pytest.raises(ValueError, match=f"{key} is "):
                shape_of(written, config | {key: other})


@pytest.mark.parametrize(("lost", "num_missing"), [("up_proj", 4), ("norm", 17)])
def test_the_table_of_a_family_that_is_there_is_checked_as_it_is(lost, num_missing):
    family, shape = FAMILIES["olmo3"], shape_of(FAMILIES["olmo3"], CONFIGS["olmo3"] | {"num_hidden_layers": 4})
    tensors = {name: held.extents for name, held in family.file_tensors(shape).items() if lost not in name}
    found = propose(CONFIGS["olmo3"] | {"num_hidden_layers": 4}, tensors)
    assert found.is_known and found.family.rules == family.rules and not found.refused
    assert len(found.missing) == num_missing and all(lost in name for name in found.missing)


def test_a_proposal_goes_on_after_a_value_that_every_family_refuses(monkeypatch):
    """Two rotary bases, as Gemma 3 has."""
    found, _ = forgotten(monkeypatch, "gemma3_text")
    assert "rope_parameters" in found.unread and "rope_parameters" in found.refused[found.nearest]
    assert {name.rpartition("layers.")[2].partition(".")[2] for name in found.unknown} == {
        "pre_feedforward_layernorm.weight"
    }


@pytest.mark.parametrize("name", ["llama", "minimax_m2"])
def test_no_family_is_nearer_that_has_no_more_of_the_names(name):
    config = {"llama": QWEN3, "minimax_m2": MINIMAX | {"num_hidden_layers": 2}}[name]
    tensors = {key: held.extents for key, held in FAMILIES[name].file_tensors(shape_of(FAMILIES[name], config)).items()}
    assert propose(config | {"model_type": "new"}, tensors).refused == {}


def test_a_config_json_that_no_family_reads_is_refused_with_each_fault_once():
    with pytest.raises(ValueError, match="config.json:\nllama, .*: .*num_attention_heads") as told:
        propose({"model_type": "new"}, {})
    assert str(told.value).count("num_attention_heads") == 1


def test_a_nearer_family_that_refuses_config_json_is_told():
    """Its table may be the right beginning, when the key is understood."""
    family, config = FAMILIES["deepseek_v3"], DEEPSEEK | {"model_type": "new", "num_key_value_heads": 2}
    tensors = {key: held.extents for key, held in family.file_tensors(shape_of(family, DEEPSEEK)).items()}
    found = propose(config, tensors)
    assert found.nearest not in ("deepseek_v3", "kimi_k2", "glm4_moe_lite") and found.unknown
    assert found.refused == dict.fromkeys(
        ("deepseek_v3", "kimi_k2", "glm4_moe_lite"), "num_key_value_heads is 2; only 128 is supported"
    )
    without = {
        key: value for key, value in config.items() if key not in ("first_k_dense_replace", "num_key_value_heads")
    }
    assert propose(without, tensors).refused["kimi_k2"] == "the key 'first_k_dense_replace' is missing"
    assert not propose(DEEPSEEK, tensors).refused


@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_claims_to_read_a_key_that_it_does_not_know(monkeypatch, name):
    """A reader that copies config.json would hide what a model computes with."""
    config = OF_FAMILIES[name] | {"model_type": "new", "residual_multiplier": 0.2}
    for other in FAMILIES.keys() - {name}:
        monkeypatch.delitem(FAMILIES, other)
    found = propose(config, {})
    assert found.unread["residual_multiplier"] == 0.2 and "'residual_multiplier': 0.2" in found.source()
    assert "# residual_multiplier" not in found.source() and "no log-probs" in found.source(is_compared=False)
