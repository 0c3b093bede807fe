"""megatron-rl from-verl: what verl's keys of LoRA become, for both of its trainers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.migrate.verl.call import read_overrides
from megatron_rl.migrate.verl.conversion import Converted, check_types, convert
from megatron_rl.migrate.verl.layout import converted
from megatron_rl.migrate.verl.lexer import ScriptError
from megatron_rl.migrate.verl.settings import Settings

MODEL = "actor_rollout_ref.model"
PPO = ("algorithm.adv_estimator=gae", "trainer.total_training_steps=100")
MEGATRON = ("actor_rollout_ref.actor.strategy=megatron", f"{MODEL}.lora.rank=16")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def found_of(*overrides: str) -> Converted:
    settings = Settings(read_overrides([*PPO, f"{MODEL}.path=models/unknown-7B", *overrides]))
    check_types(settings)
    return convert(settings)


def section(found: Converted, owner: str = "policy") -> Any:
    return found.configuration.get(owner, {}).get("lora")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((f"{MODEL}.lora_rank=32",), {"rank": 32, "alpha": 16, "targets": "all-linear"}),  # verl's defaults
        (
            (f"{MODEL}.lora_rank=8", f"{MODEL}.lora_alpha=64", f"{MODEL}.target_modules=[q_proj,v_proj]"),
            {"rank": 8, "alpha": 64, "targets": ["q_proj", "v_proj"]},
        ),
        ((f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=.*q_proj"), {"rank": 8, "alpha": 16}),
        (
            (f"{MODEL}.lora_rank=8", f"{MODEL}.lora_adapter_path=old"),
            {"rank": 8, "alpha": 16, "targets": "all-linear", "start": "old"},
        ),
        ((f"{MODEL}.lora_adapter_path=old",), {"start": "old"}),
        ((f"{MODEL}.lora_alpha=64", f"{MODEL}.target_modules=[q_proj]"), None),
        ((f"{MODEL}.lora.rank=16",), None),
        (MEGATRON, {"rank": 16, "alpha": 32, "targets": "all-linear"}),
        (
            (*MEGATRON, f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=4"),
            {"rank": 16, "alpha": 32, "targets": "all-linear"},
        ),
        (
            (*MEGATRON, f"{MODEL}.lora.alpha=8", f"{MODEL}.lora.target_modules=[linear_qkv,linear_proj]"),
            {"rank": 16, "alpha": 8, "targets": ATTENTION},
        ),
        (
            (*MEGATRON, f"{MODEL}.lora.target_modules=[linear_qkv,linear_proj,linear_fc1,linear_fc2]"),
            {"rank": 16, "alpha": 32, "targets": "all-linear"},
        ),
        (
            (*MEGATRON, f"{MODEL}.lora.target_modules=[linear_q,linear_fc1_up]", f"{MODEL}.lora.adapter_path=old"),
            {"rank": 16, "alpha": 32, "targets": ["q_proj", "up_proj"], "start": "old"},
        ),
        ((*MEGATRON, f"{MODEL}.lora.target_modules=['*.layers.0.*.linear_qkv']"), {"rank": 16, "alpha": 32}),
        ((MEGATRON[0], f"{MODEL}.lora.adapter_path=old"), None),  # the rank says whether there are adapters
    ],
)
def test_the_section(overrides, expected):
    assert section(found_of(*overrides)) == expected


def test_the_critic_has_its_own():
    found = found_of(
        f"{MODEL}.lora_rank=32", "critic.model.lora_rank=8", "critic.model.lora_alpha=4", "critic.model.lora.merge=True"
    )
    assert section(found, "critic") == {"rank": 8, "alpha": 4, "targets": "all-linear"}
    assert section(found)["rank"] == 32
    without = found_of("critic.model.lora_rank=8", "algorithm.adv_estimator=grpo")
    assert section(without, "critic") is None
    row = next(row for row in without.rows if row.key == "critic.model.lora_rank")
    assert (row.status, row.why) == ("implied", "this estimator has no critic")


@pytest.mark.parametrize(
    ("trainer", "override", "expected", "why"),
    [
        ((), f"{MODEL}.lora_rank=0", "implied", "all weights are trained"),
        ((), f"{MODEL}.lora.merge=True", "implied", "all weights are trained"),
        ((), f"{MODEL}.lora.rank=16", "refused", f"does not read it, but {MODEL}.lora_rank"),
        ((f"{MODEL}.lora_rank=8",), f"{MODEL}.lora_alpha=64", "used", ""),
        ((f"{MODEL}.lora_rank=8",), f"{MODEL}.target_modules=[q_proj]", "used", ""),
        ((f"{MODEL}.lora_rank=8",), f"{MODEL}.target_modules=null", "refused", "by the model's architecture"),
        ((f"{MODEL}.lora_rank=8",), f"{MODEL}.target_modules=[mlp.up_proj]", "refused", "the last parts"),
        ((f"{MODEL}.lora_rank=8",), f"{MODEL}.exclude_modules=lm_head", "refused", "into policy.lora.targets"),
        ((f"{MODEL}.lora_rank=8",), f"{MODEL}.exclude_modules=null", "implied", "it is off"),
        ((f"{MODEL}.lora_rank=8",), f"{MODEL}.modules_to_save=[lm_head]", "refused", "frozen"),
        ((f"{MODEL}.lora_rank=8",), f"{MODEL}.lora.merge=True", "mapped", "trainers merge the adapters"),
        (MEGATRON, f"{MODEL}.lora.merge=True", "mapped", "trainers merge the adapters"),
        ((f"{MODEL}.lora_rank=8",), f"{MODEL}.lora.merge=False", "implied", "the adapters alone"),
        (("critic.model.lora_rank=8",), "critic.model.lora.merge=True", "implied", "no engine has the critic"),
        ((f"{MODEL}.lora_rank=8",), f"{MODEL}.lora_adapter_path=old", "mapped", "adapter_config.json"),
        ((f"{MODEL}.lora_rank=8",), "actor_rollout_ref.rollout.layered_summon=True", "implied", "bridge"),
        (MEGATRON, f"{MODEL}.lora_rank=4", "refused", f"does not read it, but {MODEL}.lora.rank"),
        (MEGATRON, f"{MODEL}.target_modules=all-linear", "implied", f"but {MODEL}.lora.target_modules"),
        (MEGATRON, f"{MODEL}.lora.target_modules=[linear_fc1]", "mapped", "every layer has its own A"),
        (MEGATRON, f"{MODEL}.lora.target_modules=[router]", "refused", "router is none of linear_qkv"),
        (MEGATRON, f"{MODEL}.lora.dropout=0.1", "refused", "no dropout"),
        (MEGATRON, f"{MODEL}.lora.dropout=0.0", "implied", "no dropout"),
        (MEGATRON, f"{MODEL}.lora.type=dora", "refused", "plain LoRA"),
        (MEGATRON, f"{MODEL}.lora.type=canonical_lora", "implied", "plain LoRA"),
        (MEGATRON, f"{MODEL}.lora.lora_B_init_method=xavier", "refused", "B is zero"),
        (MEGATRON, f"{MODEL}.lora.fully_sharded_loras=True", "implied", "split"),
        (MEGATRON, f"{MODEL}.lora.normalize_moe_lora=True", "refused", "policy.lora has no such key"),
    ],
)
def test_the_verdicts(trainer, override, expected, why):
    row = found_of(*trainer, override).rows[-1]
    assert row.status == expected and why in row.why


def test_a_folder_that_is_here_says_what_its_adapters_are(tmp_path):
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"], "use_rslora": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    given = (f"{MODEL}.lora_rank=32", f"{MODEL}.lora_adapter_path={tmp_path}", f"{MODEL}.target_modules=[o_proj]")
    assert section(found_of(*given)) == {
        "rank": 4,
        "alpha": 8.0,
        "targets": ["q_proj", "v_proj"],
        "rank_stabilised": True,
        "start": str(tmp_path),
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    found = found_of(*given)
    assert section(found) is None and "use_dora is True" in found.rows[-1].why


def test_the_default_of_megatron_says_that_a_is_shared_there():
    row = found_of(*MEGATRON).rows[-1]
    assert row.status == "mapped" and "in verl q, k and v have one together" in row.why
    row = found_of(*MEGATRON, f"{MODEL}.lora.type=canonical_lora").rows[-2]
    assert (row.key, row.status, row.why) == (f"{MODEL}.lora.rank", "used", "")


def test_a_rank_is_a_whole_number():
    with pytest.raises(ScriptError, match="lora_rank is 'many'"):
        found_of(f"{MODEL}.lora_rank=many")


def test_the_configuration_is_valid():
    words = [*PPO, f"{MODEL}.path=models/unknown-7B", f"{MODEL}.lora_rank=8", "critic.model.lora_rank=4"]
    words.append(f"{MODEL}.lora.merge=True")
    config = validate(GrpoRunConfig, converted(Settings(read_overrides(words)))[0].configuration)
    assert (config.policy.lora.rank, config.policy.lora.alpha, config.policy.lora.targets) == (8, 16.0, "all-linear")
    assert config.critic.lora.rank == 4 and config.rollout.lora == "merged"
