"""PEFT's LoraConfig as policy.lora: what is mapped, and that nothing else is lost."""

from __future__ import annotations

from enum import StrEnum
from types import SimpleNamespace

import pytest

from megatron_rl.config.policy import LoraConfig
from megatron_rl.trl import GRPOConfig, GRPOTrainer
from megatron_rl.trl.adapters import adapters_of


class PeftType(StrEnum):
    LORA = "LORA"
    ADALORA = "ADALORA"


UNTOUCHED = {
    **{"task_type": None, "peft_type": PeftType.LORA, "auto_mapping": None, "peft_version": "0.18.0"},
    **{"base_model_name_or_path": None, "revision": None, "inference_mode": False},
    **{"r": 8, "target_modules": None, "exclude_modules": None, "lora_alpha": 8, "lora_dropout": 0.0},
    **{"fan_in_fan_out": False, "bias": "none", "use_rslora": False, "modules_to_save": None},
    **{"init_lora_weights": True, "layers_to_transform": None, "layers_pattern": None, "rank_pattern": {}},
    **{"alpha_pattern": {}, "megatron_config": None, "megatron_core": "megatron.core", "loftq_config": {}},
    **{"use_dora": False, "layer_replication": None, "runtime_config": SimpleNamespace(), "_custom_modules": None},
}
"""The attributes of PEFT's LoraConfig with its defaults (its tuners/lora/config.py, tuners' base class config.py)."""
EXPRESSED = {"r": 16, "lora_alpha": 32, "target_modules": {"v_proj", "q_proj"}}
"""PEFT makes a set of the list."""


def peft(**values) -> SimpleNamespace:
    return SimpleNamespace(**UNTOUCHED | EXPRESSED | values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, LoraConfig(rank=16, alpha=32, targets=("q_proj", "v_proj"))),
        ({"target_modules": "all-linear", "task_type": "CAUSAL_LM"}, LoraConfig(rank=16, alpha=32)),
        (
            {"use_rslora": True, "r": 4},
            LoraConfig(rank=4, alpha=32, targets=("q_proj", "v_proj"), rank_stabilised=True),
        ),
    ],
)
def test_the_section(values, expected):
    assert LoraConfig.model_validate(adapters_of(peft(**values))) == expected


def test_attributes_that_are_not_there_have_the_defaults_of_peft():
    least = SimpleNamespace(peft_type="LORA", target_modules=["q_proj"])
    assert adapters_of(least) == {"rank": 8, "alpha": 8, "targets": ["q_proj"], "rank_stabilised": False}


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("target_modules", None, "PEFT has no default for model_type None; write 'all-linear', or a list"),
        ("target_modules", ".*q_proj", "write 'all-linear', or a list"),
        ("target_modules", ["layers.0.q_proj"], "write 'all-linear', or a list"),
        ("bias", "all", "biases are frozen"),
        ("task_type", "SEQ_CLS", "predicts tokens"),
        ("init_lora_weights", "pissa", "B is zero at the start"),
        ("init_lora_weights", False, "B is zero at the start"),
        ("modules_to_save", ["lm_head"], "all other weights are frozen"),
        ("exclude_modules", {"o_proj"}, "into target_modules"),
        ("use_dora", True, "nothing like it"),
        ("rank_pattern", {"q_proj": 4}, "nothing like it"),
        ("layers_to_transform", [0], "nothing like it"),
        ("an_attribute_of_tomorrow", 1, "nothing like it"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_its_name(name, value, why):
    with pytest.raises(ValueError, match=f"peft_config does not fit policy.lora: {name}=.*: .*{why}"):
        adapters_of(peft(**{name: value}))


def test_all_faults_are_told_together_and_other_methods_are_refused():
    with pytest.raises(ValueError, match="bias='all'.*use_dora=True"):
        adapters_of(peft(bias="all", use_dora=True))
    with pytest.raises(ValueError, match="peft_config: SimpleNamespace is no LoraConfig of PEFT"):
        adapters_of(peft(peft_type=PeftType.ADALORA))


def test_the_trainers_run_has_the_adapters_and_sections_have_the_last_word(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    given = {"model": str(tmp_path), "train_dataset": [{"prompt": "1+1="}], "reward_funcs": len, "peft_config": peft()}
    own = {"policy": {"lora": {"rank": 2}}}
    plain = GRPOTrainer(**given, args=GRPOConfig())._all_given().sections(tmp_path / "run")
    changed = GRPOTrainer(**given, args=GRPOConfig(sections=own))._all_given().sections(tmp_path / "run")
    assert plain["policy"]["lora"] == adapters_of(peft())
    assert changed["policy"]["lora"] == adapters_of(peft()) | {"rank": 2}
    model = SimpleNamespace(peft_config={"default": peft(), "other": peft()}, get_base_model=None)
    with pytest.raises(ValueError, match="adapters default, other"):
        GRPOTrainer(**given | {"model": model})
    without = GRPOTrainer(**given | {"peft_config": None})._all_given().sections(tmp_path / "run")
    assert "lora" not in without["policy"]
