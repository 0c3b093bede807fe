"""verl's own run scripts: what bash passes to verl (verl_scripts.json), and what the configuration has of it.

The file has names and numbers of verl's repository (the commit is in it), which bash has told with a Python that only
prints its words; `tools/bench/verl_scripts.py SNAPSHOT --bash` compares whole scripts again.
"""

from __future__ import annotations

import json
from math import ceil, prod
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.migrate.verl.call import VerlCall, read_overrides
from megatron_rl.migrate.verl.command import main, problems_of
from megatron_rl.migrate.verl.conversion import check_types, convert
from megatron_rl.migrate.verl.expansion import Word
from megatron_rl.migrate.verl.keys import old_name, row_of
from megatron_rl.migrate.verl.lexer import ScriptError
from megatron_rl.migrate.verl.settings import NoSuchEngine, Settings

FACTS = json.loads((Path(__file__).parent / "verl_scripts.json").read_text())
NAMES = [line.split()[1] for line in (Path(__file__).parent / "verl_keys.txt").read_text().splitlines()]
SCRIPTS = {name: script for name, script in FACTS["scripts"].items() if "keys" in script}
CONVERTED = {name: script for name, script in SCRIPTS.items() if "mlite_actor" not in script["keys"].values()}
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
SIZES = {
    **{"tensor": "tensor_model_parallel_size", "pipeline": "pipeline_model_parallel_size"},
    **{"context": "context_parallel_size", "expert": "expert_model_parallel_size"},
    **{"expert_tensor": "expert_tensor_parallel_size", "virtual": "virtual_pipeline_model_parallel_size"},
}
LOSSES = {None: "dual_clip", "vanilla": "dual_clip", "gspo": "gspo"}


def settings_of(script: dict[str, Any]) -> Settings:
    call: VerlCall = read_overrides([f"{key}={text}" for key, text in script["keys"].items()])
    if "config-name" in script:
        call.options["--config-name"] = Word(script["config-name"])
    settings = Settings(call)
    check_types(settings)
    files = settings["data.train_files"]
    number = len(files) if isinstance(files, list) else 1
    settings.rows = [100_000 // number] * number
    return settings


def sections(configuration: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The configuration by dotted keys."""
    found: dict[str, Any] = {}
    for name, value in configuration.items():
        found[prefix + name] = value
        if isinstance(value, dict):
            found |= sections(value, f"{prefix}{name}.")
    return found


def expected_of(script: dict[str, Any]) -> dict[str, Any]:
    """What the configuration must have, from the script's own values; None is a key that must not be there."""
    keys = script["keys"]

    def number(key: str, default: float | None = None) -> Any:
        text = keys.get(key)
        return default if text is None else None if text == "null" else float(text)

    named = (script.get("config-name", ""), keys.get(f"{ACTOR}.strategy", ""))
    engine = keys.get("model_engine") or ("megatron" if "megatron" in " ".join(named) else "dp")
    gpus = int(number("trainer.nnodes", 1) * number("trainer.n_gpus_per_node", 8))
    loss = LOSSES[keys.get(f"{ACTOR}.policy_loss.loss_mode")]
    found = {
        "rollout.prompts_per_step": number("data.train_batch_size", 1024),
        "rollout.samples_per_prompt": number(f"{ROLLOUT}.n", 1),
        "rollout.max_prompt_tokens": number("data.max_prompt_length", 512),
        "rollout.max_response_tokens": number("data.max_response_length", 512),
        "rollout.sampling.temperature": number(f"{ROLLOUT}.temperature", 1),
        "algorithm.updates_per_step": ceil(
            number("data.train_batch_size", 1024) / number(f"{ACTOR}.ppo_mini_batch_size", 256)
        ),
        "algorithm.adv_estimator.kind": keys["algorithm.adv_estimator"],
        "algorithm.loss.kind": loss,
        "algorithm.loss.clip_ratio_low": number(f"{ACTOR}.clip_ratio_low", 0.2),
        "algorithm.loss.clip_ratio_high": number(f"{ACTOR}.clip_ratio_high", 0.2),
        "algorithm.loss.clip_ratio_c": number(f"{ACTOR}.clip_ratio_c", 3) if loss == "dual_clip" else None,
        "algorithm.loss_agg_mode": keys.get(f"{ACTOR}.loss_agg_mode", "token-mean") if loss == "dual_clip" else None,
        "policy.optimizer.lr": number(f"{ACTOR}.optim.lr", 1e-6),
        "policy.optimizer.weight_decay": number(f"{ACTOR}.optim.weight_decay", 0.01),
    }
    if keys["algorithm.adv_estimator"] == "gae":
        found |= {"critic.optimizer.lr": number("critic.optim.lr", 1e-5)}
        found |= {f"algorithm.adv_estimator.{name}": number(f"algorithm.{name}", 1) for name in ("gamma", "lam")}
    else:
        by_std = keys.get("algorithm.norm_adv_by_std_in_grpo", "True") == "True"
        found["algorithm.adv_estimator.std"] = "group" if by_std else "none"
    has_kl = keys.get(f"{ACTOR}.use_kl_loss") == "True" and number(f"{ACTOR}.kl_loss_coef", 0.001) > 0
    found["algorithm.kl.place"] = "loss" if has_kl else None
    found["algorithm.kl.coefficient.value"] = number(f"{ACTOR}.kl_loss_coef", 0.001) if has_kl else None
    entropy = number(f"{ACTOR}.entropy_coeff", 0)
    found["algorithm.entropy.coefficient.value"] = entropy or None
    steps = number(f"{ACTOR}.optim.lr_warmup_steps", -1)
    found["policy.optimizer.warmup_steps"] = steps * found["algorithm.updates_per_step"] if steps > 0 else None
    if engine == "megatron":
        sizes = {ours: number(f"{ACTOR}.megatron.{theirs}") for ours, theirs in SIZES.items()}
        found |= {f"policy.parallel.{ours}": size for ours, size in sizes.items()}
        ways = prod(int(sizes[name] or 1) for name in ("tensor", "pipeline", "context"))
        found["policy.parallel.data"] = gpus / ways
    else:
        ranks = ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size")
        names = ("veomni.ulysses_parallel_size",) if engine == "veomni" else ranks
        found["policy.parallel.context"] = max(number(f"{ACTOR}.{name}", 1) for name in names)
        found["policy.parallel.data"] = gpus / found["policy.parallel.context"]
    name = "lora.rank" if engine == "megatron" else "lora_rank"
    rank = number(f"{MODEL}.{name}")
    found["policy.lora.rank"] = rank
    found["policy.lora.alpha"] = (
        number(f"{MODEL}.{name.replace('rank', 'alpha')}", 32 if engine == "megatron" else 16) if rank else None
    )
    found["policy.lora.targets"] = "all-linear" if rank else None
    found["rollout.lora"] = "merged" if keys.get(f"{MODEL}.lora.merge") == "True" else None
    return found


@pytest.mark.parametrize("name", CONVERTED)
def test_the_configuration_has_the_values_of_the_script(name):
    found = sections(convert(settings_of(SCRIPTS[name])).configuration)
    expected = expected_of(SCRIPTS[name])
    assert len(expected) > 20
    assert {key: found.get(key) for key in expected} == expected


def test_the_table_compares_what_differs_between_scripts():
    """Each of these has several values, so that a constant would not pass."""
    found = [expected_of(script) for script in CONVERTED.values()]
    for key in ("tensor", "pipeline", "context", "expert", "expert_tensor", "virtual", "data"):
        assert len({one.get(f"policy.parallel.{key}") for one in found}) > 1, key
    for key in ("lora.rank", "lora.alpha", "optimizer.lr", "optimizer.warmup_steps"):
        assert len({one[f"policy.{key}"] for one in found}) > 1, key
    for key in ("loss.kind", "adv_estimator.kind", "updates_per_step", "kl.place", "loss.clip_ratio_high"):
        assert len({one[f"algorithm.{key}"] for one in found}) > 1, key


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_converted_or_refused_for_its_reason(name):
    script = SCRIPTS[name]
    try:
        settings = settings_of(script)
        found = convert(settings)
        told = found.refused or problems_of(found.configuration)
    except NoSuchEngine as error:
        told = [str(error)]
    assert bool(told) == bool(script["status"]), told
    assert script.get("refused", "") in "\n".join(told)


def test_there_are_all_scripts_of_the_examples():
    """The numbers are on the page docs/coming_from_verl.md."""
    refused = [script["refused"] for script in FACTS["scripts"].values() if script["status"]]
    assert len(FACTS["scripts"]) == 54 and len(SCRIPTS) == 53 and len(refused) == 12
    parts = (
        "family is not here",
        "reads images",
        "names an engine",
        "is not a multiple",
        "ends here, before it has",
        "unfinished_score",
    )
    assert [sum(part in one for one in refused) for part in parts] == [4, 2, 2, 2, 1, 1]


def test_every_key_of_verl_has_a_row():
    """All keys of these scripts, and of the configurations that verl has generated for its engines."""
    assert len(FACTS["names"]) > 200 and len(NAMES) > 1200
    assert [name for name in (*FACTS["names"], *NAMES) if row_of(old_name(name)) is None] == []


@pytest.mark.parametrize(
    "place", ["", f"{ACTOR}.", f"{ROLLOUT}.", f"{MODEL}.", "algorithm.", "data.", "trainer.", "critic."]
)
def test_an_invented_key_has_no_row(place):
    assert row_of(f"{place}no_such_key") is None


SMALLEST = ("data.train_files=a.parquet", f"{MODEL}.path=models/unknown-7B", f"{MODEL}.lora.rank=32")


@pytest.mark.parametrize(
    ("words", "trainer"),
    [
        ((), "FSDP"),
        (("model_engine=dp",), "FSDP"),
        (("model_engine=megatron",), "Megatron"),
        (("model_engine=veomni",), "VeOmni"),
        (("model_engine=torchtitan",), "TorchTitan"),
        ((f"actor@{ACTOR}=megatron_actor",), "Megatron"),
        ((f"{ACTOR}.strategy=megatron",), "Megatron"),
        ((f"{ACTOR}.strategy=fsdp_turbo",), "FSDP"),
        (("model_engine=megatron", f"{ACTOR}.strategy=megatron"), "Megatron"),
    ],
)
def test_the_engine_is_what_verl_chooses(words, trainer):
    settings = Settings(
        read_overrides([*SMALLEST, *words, f"{ACTOR}.megatron.tensor_model_parallel_size=4"]), [100_000]
    )
    check_types(settings)
    found = sections(convert(settings).configuration)
    assert settings.trainer == trainer
    assert found.get("policy.lora.rank") == (32 if trainer == "Megatron" else None)
    assert found["policy.parallel.tensor"] == (4 if trainer == "Megatron" else 1)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("model_engine=mindspeed",),
            "model_engine=mindspeed names an engine that is not verl's own; verl has dp,",
        ),
        ((f"actor@{ACTOR}=mlite_actor",), "verl has dp_actor, megatron_actor, veomni_actor, torchtitan_actor. Choose"),
        (("model_engine=megatron", f"{ACTOR}.strategy=fsdp2"), "name different engines; keep one of them"),
    ],
)
def test_an_engine_that_verl_does_not_have_is_an_error(words, sentence, capsys):
    assert main([*SMALLEST, *words]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("engine", "words", "key", "expected"),
    [
        ("veomni", (), "policy.optimizer.schedule", "cosine"),
        ("veomni", (f"{ACTOR}.optim.lr_scheduler_type=constant",), "policy.optimizer.schedule", "constant"),
        ("veomni", (f"{ACTOR}.optim.lr=2e-6", f"{ACTOR}.optim.lr_min=1e-6"), "policy.optimizer.min_lr_ratio", 0.5),
        ("veomni", (f"{ACTOR}.optim.lr_warmup_steps=5",), "policy.optimizer.warmup_steps", None),
        ("torchtitan", (), "policy.optimizer.schedule", "linear"),
        ("torchtitan", (f"{ACTOR}.optim.min_lr_factor=0.1",), "policy.optimizer.min_lr_ratio", 0.1),
        ("torchtitan", (f"{ACTOR}.torchtitan.context_parallel_size=2",), "policy.parallel.context", 2),
        ("dp", (), "policy.optimizer.schedule", None),
        ("dp", (f"{ACTOR}.optim.clip_grad=0.5", f"{ACTOR}.grad_clip=2"), "policy.optimizer.clip_grad", 0.5),
        ("megatron", (f"{ACTOR}.optim.exp_avg_dtype=bf16",), "policy.optimizer.moments", "bfloat16"),
        ("megatron", (f"{ACTOR}.optim.main_grads_dtype=fp32",), "policy.optimizer.gradients", None),
        ("megatron", (f"+{ACTOR}.optim.override_optimizer_config.adam_eps=1e-6",), "policy.optimizer.eps", 1e-6),
        ("megatron", (f"{ACTOR}.megatron.router_replay.mode=R3",), "policy.routing_replay", True),
        ("megatron", (f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype=fp8",), "rollout.vllm.kv_cache_dtype", "fp8"),
    ],
)
def test_the_keys_of_an_engine(engine, words, key, expected):
    settings = Settings(read_overrides([*SMALLEST, f"model_engine={engine}", *words]), [100_000])
    check_types(settings)
    assert sections(convert(settings).configuration).get(key) == expected


FIELDS = "actor_rollout_ref.actor.megatron.override_transformer_config"


@pytest.mark.parametrize(
    ("words", "status", "why"),
    [
        ((f"+{FIELDS}.moe_aux_loss_coeff=0.01",), "used", ""),
        (
            (f"+{FIELDS}.moe_router_load_balancing_type=none", f"+{FIELDS}.moe_aux_loss_coeff=0.01"),
            "implied",
            "no load is balanced",
        ),
        (
            (f"+{FIELDS}.moe_router_load_balancing_type=seq_aux_loss", f"+{FIELDS}.moe_aux_loss_coeff=0.01"),
            "refused",
            "seq_aux_loss does not",
        ),
        ((f"+{FIELDS}.moe_router_bias_update_rate=0.001",), "used", ""),
        ((f"+{FIELDS}.hidden_dropout=0.1",), "refused", "no dropout"),
        ((f"+{FIELDS}.hidden_dropout=0.0",), "implied", "no dropout"),
        ((f"+{FIELDS}.moe_router_dtype=fp64",), "refused", "computes in fp32"),
        ((f"+{FIELDS}.apply_rope_fusion=True",), "implied", "how layers are computed"),
        ((f"+{FIELDS}.qk_clip=True",), "refused", "add it as policy.megatron.transformer.qk_clip"),
        ((f"+{FIELDS}.pipeline_model_parallel_layout='Et*4|t*4L'",), "mapped", "auto balances the stages"),
        (
            (f"+{ACTOR}.megatron.override_ddp_config.average_in_collective=True",),
            "refused",
            "policy.megatron.ddp",
        ),
        ((f"{ACTOR}.optim.weight_decay_incr_style=linear",), "refused", "the same in all steps"),
        ((f"{ACTOR}.optim.muon_momentum=0.9",), "implied", "not Muon"),
        ((f"{ACTOR}.optim.optimizer=muon",), "refused", "policy.optimizer.kind to muon"),
        ((f"{ACTOR}.optim.optimizer=muon", f"{ACTOR}.optim.muon_momentum=0.9"), "refused", "no such key"),
        ((f"{ACTOR}.megatron.qat.enable=True",), "refused", "not rounded during training"),
        ((f"{ACTOR}.policy_loss.dro_beta=0.1",), "implied", "loss_mode"),
        ((f"{ACTOR}.grad_clip=1.0",), "implied", "reads actor_rollout_ref.actor.optim.clip_grad"),
        ((f"{ROLLOUT}.response_length=1",), "refused", "engines read data.max_response_length"),
        ((f"{ROLLOUT}.max_model_len=100",), "refused", "one may have 1024 tokens"),
        ((f"+{ROLLOUT}.engine_kwargs.vllm.hf_overrides=x",), "refused", "rollout.vllm"),
        ((f"+{ROLLOUT}.engine_kwargs.sglang.attention_backend=x",), "implied", "another engine than vLLM"),
        (("distillation.enabled=True",), "refused", "write teachers and algorithm.distillation by hand"),
        (("trainer.v1.trainer_mode=separate_async",), "refused", "rollout.max_lag"),
        (("data.image_key=images",), "implied", "text alone"),
        (("data.image_key=pictures",), "implied", "text alone"),
        (("reward.reward_kwargs.scale=2",), "refused", "kind function"),
        ((f"{ACTOR}.model_engine=megatron",), "implied", "at the top alone"),
        ((f"{ACTOR}.model_engine=veomni",), "refused", "at the top alone"),
        (("critic@critic=mine",), "refused", "the file is not read"),
    ],
)
def test_the_verdicts_of_newer_keys(words, status, why):
    settings = Settings(read_overrides([*SMALLEST, "model_engine=megatron", *words]), [100_000])
    check_types(settings)
    row = convert(settings).rows[-1]
    assert (row.status, why in row.why) == (status, True), row.why


@pytest.mark.parametrize(
    ("words", "key", "expected"),
    [
        (
            ("reward.custom_reward_function.path=s.py", "reward.custom_reward_function.name=f"),
            "rewards",
            [{"kind": "compute_score", "path": "s.py:f"}],
        ),
        (
            ("reward.reward_model.enable=True", "reward.reward_model.model_path=m"),
            "rewards",
            [{"kind": "reward_model", "model": "m"}],
        ),
        (
            (
                "+reward.reward_kwargs.overlong_buffer_cfg.enable=True",
                "+reward.reward_kwargs.overlong_buffer_cfg.len=8",
            ),
            "algorithm.shaping",
            [{"kind": "soft_overlong", "max_tokens": 512, "cache_tokens": 8}],
        ),
        (
            (
                "algorithm.rollout_correction.rollout_is=token",
                "algorithm.rollout_correction.rollout_is_threshold=0.5_4.0",
            ),
            "algorithm.correction.weight",
            {"kind": "mask", "level": "token", "low": 0.5, "high": 4.0, "normalise": False},
        ),
    ],
)
def test_new_names_and_values(words, key, expected):
    settings = Settings(read_overrides([*SMALLEST, *words]), [100_000])
    assert sections(convert(settings).configuration)[key] == expected


def test_a_value_that_is_not_known_is_to_add(tmp_path, capsys):
    script = tmp_path / "run.sh"
    call = "python3 -m verl.trainer.main_ppo trainer.total_training_steps=5 data.train_files=a.parquet"
    script.write_text(f"LR=$(probe)\n{call} {MODEL}.path=models/unknown-7B {ACTOR}.optim.lr=$LR\n")
    assert main([str(script), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["refused"]
    assert told[0].endswith("$(probe) needs a shell, which is not run; give LR with --set LR=VALUE")
    assert main([str(script), "--json", "--set", "LR=1e-6"]) == 0


def test_a_wrong_threshold_is_no_number():
    with pytest.raises(ScriptError, match="null, but must be"):
        convert(Settings(read_overrides([*SMALLEST, "data.train_batch_size=null"])))
