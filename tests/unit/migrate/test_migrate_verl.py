"""megatron-rl from-verl: what each key of verl becomes, with the numbers, and that no key is lost."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from leaks import lasting

from megatron_rl.__main__ import main as command
from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.migrate.verl.call import read_overrides
from megatron_rl.migrate.verl.command import main
from megatron_rl.migrate.verl.content import local_model
from megatron_rl.migrate.verl.conversion import Converted, check_types, convert
from megatron_rl.migrate.verl.keys import DEFAULTS, ROWS
from megatron_rl.migrate.verl.layout import converted
from megatron_rl.migrate.verl.lexer import ScriptError
from megatron_rl.migrate.verl.settings import Settings
from megatron_rl.migrate.verl.shell import read_script

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
GRPO = (
    "algorithm.adv_estimator=grpo",
    f"{MODEL}.path=models/unknown-7B",
    f"{ROLLOUT}.n=8",
    "data.train_files=gsm8k/train.parquet",
    "data.val_files=gsm8k/test.parquet",
    "trainer.total_training_steps=100",
)
MEGATRON = (f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=4")


def settings_of(*overrides: str, rows: int | None = None) -> Settings:
    settings = Settings(read_overrides([*GRPO, *overrides]), None if rows is None else [rows])
    check_types(settings)
    return settings


def found_of(*overrides: str, rows: int | None = None) -> Converted:
    return convert(settings_of(*overrides, rows=rows))


def value(found: Converted, key: str) -> Any:
    """The value of one of our keys; `missing` if the configuration does not have it."""
    place: Any = found.configuration
    for name in key.split("."):
        if not isinstance(place, dict) or name not in place:
            return "missing"
        place = place[name]
    return place


def status(found: Converted, key: str) -> str:
    return next(row.status for row in found.rows if row.key == key)


# Overrides -> one of our keys, and its value by hand.
NUMBERS: list[tuple[tuple[str, ...], str, Any]] = [
    (("data.train_batch_size=512",), "rollout.prompts_per_step", 512),
    ((), "rollout.prompts_per_step", 1024),
    ((), "rollout.samples_per_prompt", 8),
    (("data.max_prompt_length=2048",), "rollout.max_prompt_tokens", 2048),
    (("data.max_response_length=8192",), "rollout.max_response_tokens", 8192),
    # 512 prompts of a step, 32 of a mini-batch; verl's default is 256 of 1024
    (("data.train_batch_size=512", f"{ACTOR}.ppo_mini_batch_size=32"), "algorithm.updates_per_step", 16),
    ((), "algorithm.updates_per_step", 4),
    (("data.train_batch_size=64",), "algorithm.updates_per_step", 1),
    ((f"{ACTOR}.ppo_epochs=2",), "algorithm.epochs", 2),
    ((f"{ACTOR}.ppo_epochs=2",), "algorithm.reshuffle", False),
    ((f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.shuffle=True"), "algorithm.reshuffle", True),
    ((f"{ACTOR}.shuffle=True",), "algorithm.reshuffle", "missing"),
    ((f"{ACTOR}.ppo_epochs=2", "algorithm.adv_estimator=gae", "critic.ppo_epochs=3"), "critic.epochs", 3),
    ((f"{ACTOR}.ppo_epochs=1", "algorithm.adv_estimator=gae", "critic.ppo_epochs=3"), "algorithm.reshuffle", False),
    # a warm-up of 5 training steps, with 4 mini-batches in 2 epochs each
    ((f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.optim.lr_warmup_steps=5"), "policy.optimizer.warmup_steps", 40),
    # tokens of a micro-batch: of all ranks of a sequence, and not below the longest answer
    ((f"{ACTOR}.use_dynamic_bsz=True",), "balance.max_tokens_per_microbatch", 16384),
    (
        (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=20480"),
        "balance.max_tokens_per_microbatch",
        20480,
    ),
    (
        (
            f"{ACTOR}.use_dynamic_bsz=True",
            f"{ACTOR}.ppo_max_token_len_per_gpu=20480",
            f"{ACTOR}.ulysses_sequence_parallel_size=4",
        ),
        "balance.max_tokens_per_microbatch",
        81920,
    ),
    (
        (
            *MEGATRON,
            f"{ACTOR}.use_dynamic_bsz=True",
            f"{ACTOR}.ppo_max_token_len_per_gpu=4096",
            f"{ACTOR}.megatron.context_parallel_size=2",
        ),
        "balance.max_tokens_per_microbatch",
        8192,
    ),
    (
        (
            f"{ACTOR}.use_dynamic_bsz=True",
            f"{ACTOR}.ppo_max_token_len_per_gpu=1000",
            "data.max_prompt_length=1000",
            "data.max_response_length=1000",
        ),
        "balance.max_tokens_per_microbatch",
        2048,
    ),
    (("data.max_response_length=20000",), "balance.max_tokens_per_microbatch", 20608),
    # verl counts the warm-up in training steps: 10 x 4 updates; 0.1 x 100 steps x 4
    ((f"{ACTOR}.optim.lr_warmup_steps=10",), "policy.optimizer.warmup_steps", 40),
    ((f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1",), "policy.optimizer.warmup_steps", 40),
    (
        (f"{ACTOR}.optim.lr_warmup_steps=3", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"),
        "policy.optimizer.warmup_steps",
        12,
    ),
    ((f"{ACTOR}.optim.lr=2e-6",), "policy.optimizer.lr", 2e-6),
    ((), "policy.optimizer.weight_decay", 0.01),
    ((), "policy.optimizer.betas", [0.9, 0.999]),
    ((f"{ACTOR}.grad_clip=0.5",), "policy.optimizer.clip_grad", 0.5),
    ((*MEGATRON, f"{ACTOR}.optim.clip_grad=0.5"), "policy.optimizer.clip_grad", 0.5),
    ((*MEGATRON, f"{ACTOR}.grad_clip=0.5"), "policy.optimizer.clip_grad", "missing"),
    ((f"{ACTOR}.optim.warmup_style=cosine",), "policy.optimizer.min_lr_ratio", 0.0),
    (
        (*MEGATRON, f"{ACTOR}.optim.lr_decay_style=cosine", f"{ACTOR}.optim.lr=1e-6", f"{ACTOR}.optim.min_lr=5e-7"),
        "policy.optimizer.min_lr_ratio",
        0.5,
    ),
    (
        (f"+{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True",),
        "policy.optimizer.offload",
        True,
    ),
    # losses
    ((), "algorithm.loss", {"kind": "dual_clip", "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}),
    ((f"{ACTOR}.clip_ratio_high=0.28", f"{ACTOR}.clip_ratio_c=10.0"), "algorithm.loss.clip_ratio_high", 0.28),
    ((f"{ACTOR}.clip_ratio=0.3",), "algorithm.loss.clip_ratio_low", 0.2),
    ((f"{ACTOR}.clip_ratio=0.3", f"{ACTOR}.clip_ratio_low=null"), "algorithm.loss.clip_ratio_low", 0.3),
    (
        (f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.clip_ratio_low=3e-4", f"{ACTOR}.clip_ratio_high=4e-4"),
        "algorithm.loss",
        {"kind": "gspo", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4},
    ),
    (
        (f"{ACTOR}.policy_loss.loss_mode=kl_cov", f"{ACTOR}.policy_loss.kl_cov_ratio=0.002"),
        "algorithm.loss",
        {"kind": "kl_cov", "share": 0.002, "coef": 0.1},
    ),
    ((f"{ACTOR}.policy_loss.loss_mode=sapo",), "algorithm.loss", {"kind": "sapo", "tau_pos": 1.0, "tau_neg": 1.05}),
    (
        (f"{ACTOR}.policy_loss.loss_mode=dro", f"{ACTOR}.policy_loss.dro_beta=0.05"),
        "algorithm.loss",
        {"kind": "dro", "beta": 0.05},
    ),
    ((), "algorithm.loss_agg_mode", "token-mean"),
    # verl's gspo averages answers with every loss_agg_mode
    ((f"{ACTOR}.policy_loss.loss_mode=gspo",), "algorithm.loss_agg_mode", "missing"),
    ((f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",), "algorithm.loss_agg_tokens", 512),
    # advantages
    ((), "algorithm.adv_estimator", {"kind": "grpo", "std": "group"}),
    (("algorithm.norm_adv_by_std_in_grpo=False",), "algorithm.adv_estimator.std", "none"),
    (("algorithm.adv_estimator=rloo",), "algorithm.adv_estimator", {"kind": "rloo"}),
    (
        ("algorithm.adv_estimator=gae", "algorithm.lam=0.95"),
        "algorithm.adv_estimator",
        {"kind": "gae", "gamma": 1.0, "lam": 0.95},
    ),
    ((), "algorithm.drop_zero_signal", False),
    # KL and entropy
    ((), "algorithm.kl", "missing"),
    (
        (f"{ACTOR}.use_kl_loss=True",),
        "algorithm.kl",
        {"place": "loss", "estimator": "k3", "coefficient": {"kind": "fixed", "value": 0.001}},
    ),
    ((f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.0"), "algorithm.kl", "missing"),
    ((f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=k3+"), "algorithm.kl.straight_through", True),
    ((f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=mse"), "algorithm.kl.estimator", "k2"),
    (
        (
            "algorithm.adv_estimator=gae",
            "algorithm.use_kl_in_reward=True",
            "algorithm.kl_ctrl.type=adaptive",
            "algorithm.kl_ctrl.kl_coef=0.02",
        ),
        "algorithm.kl",
        {
            "place": "reward",
            "estimator": "k1",
            "coefficient": {"kind": "adaptive", "initial": 0.02, "target": 0.1, "horizon": 10000},
        },
    ),
    ((f"{ACTOR}.entropy_coeff=0.01",), "algorithm.entropy.coefficient", {"kind": "fixed", "value": 0.01}),
    # the correction of log-probs
    ((), "algorithm.correction", None),
    (
        ("algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=5.0"),
        "algorithm.correction.weight",
        {"kind": "truncate", "level": "token", "cap": 5.0, "normalise": False},
    ),
    # verl's k1 is the inverse of our ratio: (0.5, 4) -> (1/4, 1/0.5)
    (
        (
            "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
            "algorithm.rollout_correction.rollout_rs_threshold=0.5_4.0",
        ),
        "algorithm.correction.reject",
        [{"level": "sequence", "statistic": "k1", "over": "mean", "low": 0.25, "high": 2.0}],
    ),
    (("algorithm.rollout_correction.bypass_mode=True",), "algorithm.anchor", "engine"),
    (
        ("algorithm.rollout_correction.bypass_mode=True", "algorithm.rollout_correction.rollout_is=token"),
        "algorithm.correction",
        None,
    ),
    # DAPO
    (
        (
            "data.max_response_length=8192",
            "reward_model.reward_manager=dapo",
            "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
            "+reward_model.reward_kwargs.overlong_buffer_cfg.len=4096",
            "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0",
            "+reward_model.reward_kwargs.max_resp_len=8192",
        ),
        "algorithm.shaping",
        [{"kind": "soft_overlong", "max_tokens": 8192, "cache_tokens": 4096}],
    ),
    (("algorithm.filter_groups.enable=True",), "rollout.active_sampling", True),
    (
        ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=10"),
        "rollout.active_sampling",
        10,
    ),
    (("algorithm.filter_groups.enable=True",), "cluster.colocate", True),
    # GPUs: 16 = TP4 x PP2 x DP2; engines of 2
    (("trainer.nnodes=2", *MEGATRON, f"{ACTOR}.megatron.pipeline_model_parallel_size=2"), "policy.parallel.data", 2),
    (("trainer.nnodes=2",), "rollout.num_engines", 8),
    (("trainer.nnodes=2",), "cluster.ray_address", "auto"),
    ((f"{ROLLOUT}.tensor_model_parallel_size=4",), "rollout.num_engines", 2),
    # half of 32 GPUs are of engines; an engine of 16 is TP8 x PP2
    (
        ("trainer.nnodes=4", f"{ROLLOUT}.tensor_model_parallel_size=16", "rollout.nnodes=2"),
        "rollout.parallel.pipeline",
        2,
    ),
    (
        (f"{ACTOR}.policy_loss.loss_mode=cispo", f"{ACTOR}.clip_ratio_low=10"),
        "algorithm.loss",
        {"kind": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 0.2},
    ),
    ((*MEGATRON, f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=null"), "policy.parallel.virtual", "missing"),
    (
        (*MEGATRON, f"+{ACTOR}.megatron.override_transformer_config.recompute_granularity=full"),
        "model.recompute",
        "full",
    ),
    ((f"{MODEL}.enable_gradient_checkpointing=False",), "model.recompute", "none"),
    ((), "cluster.colocate", True),
    ((), "rollout.gpu_memory_utilization", 0.5),
    ((), "model.dtype", "bfloat16"),
    ((f"{ROLLOUT}.dtype=float16", f"{ACTOR}.fsdp_config.dtype=float16"), "model.dtype", "float16"),
    ((*MEGATRON, f"{ROLLOUT}.dtype=float16", f"{ACTOR}.megatron.dtype=float16"), "model.dtype", "float16"),
    # rows, rewards, evaluations, steps, folders
    (("data.filter_overlong_prompts=True",), "data.on_bad_row", "skip"),
    ((), "data.on_bad_row", "fail"),
    ((f"{ROLLOUT}.val_kwargs.n=16",), "eval.samples_per_prompt", 16),
    (("trainer.test_freq=5",), "eval.every", 5),
    (("trainer.test_freq=-1", "trainer.val_before_train=False"), "data.eval", None),
    (("trainer.save_freq=-1",), "checkpoint.every", 0),
    (("trainer.save_freq=20",), "checkpoint.keep_every", 20),
    (("trainer.save_freq=20", "trainer.max_actor_ckpt_to_keep=3"), "checkpoint.keep", 3),
    ((), "run.steps", 100),
    (
        ("custom_reward_function.path=my/score.py", "+custom_reward_function.reward_kwargs.scale=2"),
        "rewards",
        [{"kind": "compute_score", "path": "my/score.py:compute_score", "arguments": {"scale": 2}}],
    ),
    (
        ("trainer.project_name=p", "trainer.experiment_name=e", "trainer.default_local_dir=/ckpts/p/e"),
        "run",
        {"name": "p/e", "folder": "/ckpts", "steps": 100},
    ),
    (
        ("trainer.logger=[console,wandb,tensorboard]", "trainer.project_name=p"),
        "observe",
        [{"kind": "wandb", "project": "p"}, {"kind": "tensorboard"}],
    ),
    # the critic: verl's critic_warmup counts from step 1
    (("algorithm.adv_estimator=gae", "trainer.critic_warmup=10"), "critic.warmup_steps", 9),
    (("algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=128"), "critic.updates_per_step", 8),
    (("algorithm.adv_estimator=gae",), "critic.optimizer.lr", 1e-5),
    (("critic.optim.lr=1e-5",), "critic", "missing"),
    ((f"{MODEL}.path=a/Qwen3-VL-8B",), "policy.vision_tower", "trained"),
    ((f"{MODEL}.path=a/Qwen3-VL-8B", f"{MODEL}.lora_rank=8"), "policy.vision_tower", "missing"),
    ((f"{MODEL}.path=a/Qwen3.5-27B",), "policy.vision_tower", "trained"),
    ((f"{MODEL}.path=models/Qwen3.5-27B-text",), "policy.vision_tower", "missing"),
]


@pytest.mark.parametrize(("overrides", "key", "expected"), NUMBERS, ids=lambda one: str(one)[-60:])
def test_the_numbers(overrides, key, expected):
    assert value(found_of(*overrides), key) == expected


@pytest.mark.parametrize(
    ("override", "expected", "why"),
    [
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu=32", "implied", "packed"),
        (f"{ACTOR}.ppo_epochs=1", "implied", "once"),
        (f"{ROLLOUT}.top_p=1.0", "implied", "all tokens"),
        (f"{ROLLOUT}.top_p=0.9", "refused", "full distribution"),
        (f"{ROLLOUT}.top_k=-1", "implied", "all tokens"),
        (f"{ROLLOUT}.temperature=0.8", "used", ""),
        (f"{ROLLOUT}.val_kwargs.temperature=0.6", "left out", "as training does, with temperature 1.0"),
        (f"{ROLLOUT}.tensor_model_parallel_size=16", "mapped", "in one node"),
        (f"{ROLLOUT}.n=1", "refused", "use 2 or more"),
        (f"{ROLLOUT}.dtype=float16", "refused", "verl's trainer computes in bfloat16; give both the same"),
        ("trainer.test_freq=False", "mapped", "after the last one"),
        (f"{ROLLOUT}.name=sglang", "left out", "vLLM answers"),
        (f"{MODEL}.lora_rank=0", "implied", "all weights"),
        (f"{ROLLOUT}.multi_turn.enable=True", "refused", "rollout.environment"),
        (f"{ACTOR}.fsdp_config.param_offload=True", "implied", "node's memory"),
        (f"{ACTOR}.fsdp_config.fsdp_size=32", "mapped", "Megatron-Core"),
        (f"{MODEL}.path=Qwen/Qwen2.5-VL-7B-Instruct", "mapped", "verl trains the vision tower, too"),
        (f"data.image_key=images {MODEL}.path=a/Qwen3-VL-8B", "implied", "by its name"),
        (f"data.image_key=pictures {MODEL}.path=a/Qwen3-VL-8B", "used", ""),
        (f"data.image_key=images {MODEL}.path=google/gemma-3-4b-it", "left out", "trained as its model of text"),
        (f"{ACTOR}.freeze_vision_tower=True {MODEL}.path=a/Qwen3-VL-8B", "used", ""),
        (f"{ACTOR}.freeze_vision_tower=False {MODEL}.path=a/Qwen3-VL-8B", "used", ""),
        (f"+data.mm_processor_kwargs.max_pixels=9 {MODEL}.path=a/Qwen3-VL-8B", "refused", "preprocessor_config.json"),
        (f"{MODEL}.path=google/gemma-2-2b-it", "refused", "family is not here"),
        (f"{MODEL}.path=Qwen/Qwen3-8B", "mapped", "hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B"),
        (f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=kl", "refused", "gradient of k1"),
        ("algorithm.use_kl_in_reward=True", "refused", "use_kl_loss"),
        ("algorithm.adv_estimator=optimal_token_baseline", "mapped", "their advantages are 0"),
        ("algorithm.adv_estimator=tir_optimal_token_baseline", "refused", "no such estimator"),
        ("algorithm.rollout_correction.rollout_is=sequence", "refused", "each token has its own weight"),
        (
            "algorithm.rollout_correction.bypass_mode=True algorithm.rollout_correction.loss_type=reinforce",
            "refused",
            "only loss_type ppo_clip",
        ),
        ("trainer.resume_mode=auto", "implied", "--resume auto"),
        ("trainer.logger=[console,swanlab]", "left out", "swanlab"),
        ("trainer.device=npu", "left out", "CUDA"),
        ("data.shuffle=False", "used", ""),
        ("critic.optim.lr=1e-5", "implied", "no critic"),
        ("no.such_key=1", "refused", "no such key"),
        ("data.train_batch_sise=1", "refused", "did you mean data.train_batch_size?"),
        ("~data.seed", "refused", "removed"),
        ("reward_model.reward_kwargs.overlong_buffer_cfg.len=1", "implied", "off"),
    ],
)
def test_the_verdicts(override, expected, why):
    words = override.split()
    found = found_of(*words)
    row = next(row for row in reversed(found.rows) if row.key == words[0].partition("=")[0])
    assert row.status == expected and why in row.why


def test_epochs_become_steps_where_the_rows_are_known():
    without = [one for one in GRPO if "total_training_steps" not in one]
    words = [*without, "trainer.total_epochs=15", "data.train_batch_size=1024"]
    known = convert(Settings(read_overrides(words), [7473]))
    assert known.configuration["run"]["steps"] == 15 * 7
    both = convert(Settings(read_overrides([*words, "trainer.total_training_steps=500"]), [7473]))
    assert both.configuration["run"]["steps"] == 105  # verl ends when the epochs do
    unknown = convert(Settings(read_overrides(words)))
    assert "steps" not in unknown.configuration["run"]
    row = next(row for row in unknown.rows if row.key == "trainer.total_epochs")
    assert row.status == "refused"
    assert row.why.startswith("the steps are 15 x (rows of data.train_files // 1024); give --rows N")


def test_a_key_that_is_given_twice_has_two_rows_and_its_last_value():
    found = found_of("data.train_batch_size=32", "data.train_batch_size=64")
    rows = [row for row in found.rows if row.key == "data.train_batch_size"]
    assert [row.status for row in rows] == ["implied", "used"]
    assert rows[0].why == "it is given again, and the last value counts"
    assert found.configuration["rollout"]["prompts_per_step"] == 64


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train_batch_size=many", "data.train_batch_size is 'many', but must be an integer"),
        ("data.train_batch_size=1.5", "must be an integer"),
        ("data.train_batch_size=null", "data.train_batch_size is null, but must be a value such as 1024"),
        (f"{ACTOR}.use_kl_loss=maybe", "must be True or False"),
        (f"{MODEL}.path=null", "null, but must be a value such as"),
        (f"{ACTOR}.policy_loss.loss_mode=null", "null, but must be a value such as vanilla"),
        (f"{ACTOR}.grad_clip=null", "null, but must be a value such as 1.0"),
        (f"{ACTOR}.optim.lr=fast", "must be a number"),
        (f"{MODEL}.path=[a,b]", "must be a text"),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error(override, message):
    with pytest.raises(ScriptError, match=message.replace("[", r"\[")):
        found_of(override)


def test_every_override_has_one_row_in_its_order():
    """Also unknown, repeated, removed and computed ones, and every key that the table knows."""
    keys = list(dict.fromkeys(row.pattern.replace("*", "x") for row in ROWS if row.pattern != "GROUP"))
    script = "X=$(date)\npython3 -m verl.trainer.main_ppo --config-name=mine \\\n  trainer.experiment_name=$X nobody=1"
    call = read_script(script, {})
    call.overrides += read_overrides([*GRPO, *(f"{key}=null" for key in keys if key not in DEFAULTS), "~a.b"]).overrides
    found = convert(Settings(call))
    expected = ["--config-name", *(one.prefix + one.key for one in call.overrides)]
    assert [row.key for row in found.rows] == expected
    assert all(row.status in ("used", "mapped", "implied", "left out", "refused") for row in found.rows)
    assert all(row.to for row in found.rows if row.status in ("used", "mapped"))
    assert all(row.why for row in found.rows if row.status in ("implied", "left out", "refused"))
    assert sum(found.counts().values()) == len(expected)


def test_every_row_says_one_thing_of_keys_that_no_other_row_has():
    says = ("use", "by", "same", "only", "never", "refuse", "leave")
    keys = [row.pattern for row in ROWS]
    assert [key for key in keys if keys.count(key) > 1] == []
    for row in ROWS:
        found = [word for word in says if word in row.words]
        assert found[:1] + found[1:2] in ([found[0]], [found[0], "refuse"], ["only", "leave"]), row.words
        assert ("here" in row.words) == ("by" in row.words), row.words


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        MEGATRON,
        ("algorithm.adv_estimator=gae",),
        ("algorithm.adv_estimator=gae", *MEGATRON, "critic.megatron.tensor_model_parallel_size=4"),
        ("algorithm.adv_estimator=rloo", "trainer.nnodes=2"),
        ("algorithm.filter_groups.enable=True",),
        (f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.use_kl_loss=True"),
    ],
)
def test_the_configuration_is_valid(overrides):
    configuration = converted(settings_of(*overrides))[0].configuration
    config = validate(GrpoRunConfig, configuration)
    assert config.policy.parallel.mesh.world_size in (4, 8, 16)


def test_adapters_that_engines_do_not_serve_are_merged():
    words = (*MEGATRON, f"{ACTOR}.megatron.expert_model_parallel_size=2", f"{MODEL}.lora.rank=8")
    found, notes = converted(settings_of(f"{MODEL}.path=models/Qwen3-30B-A3B", *words))
    assert found.configuration["rollout"]["lora"] == "merged"
    assert notes[-1].startswith("rollout.lora is merged, because engines do not serve these adapters: policy.lora.t")
    found, _ = converted(settings_of(f"{MODEL}.path=models/Qwen3-8B", *MEGATRON, f"{MODEL}.lora.rank=8"))
    assert "lora" not in found.configuration["rollout"]


def test_a_model_that_fits_into_no_layout_is_to_add(capsys):
    words = [*GRPO, f"{MODEL}.path=models/DeepSeek-V3", *MEGATRON, f"{ACTOR}.megatron.expert_tensor_parallel_size=1"]
    assert main([*words, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["to_add"] == [
        "no layout of the trainer fits on 8 GPUs of 80 GB; set trainer.nnodes higher, or cluster.gpu_memory_gb to the "
        "memory of your GPUs"
    ]


def test_no_family_that_is_here_is_refused():
    folder = Path(__file__).parents[3] / "configs/model"
    names = [path.stem for path in folder.glob("*.json")]
    names += [
        "Moonlight-16B-A3B",
        "Mixtral-8x7B",
        "GLM-4.5",
        "gpt-oss-20b-bf16",
        "Qwen3.5-27B",
        "Llama-3.1-8B",
        "OLMo-2",
        "Mistral-Nemo-Instruct-2407",
    ]
    assert len(names) > 20
    for name in names:
        row = next(row for row in found_of(f"{MODEL}.path={name}").rows if row.key == f"{MODEL}.path" and row.to)
        assert row.status in ("used", "mapped"), f"{name}: {row.why}"
    for name in ("Hy3", "DeepSeek-V4-Flash", "GLM-5", "GLM-4.1V-9B", "Pixtral-12B", "gemma-2-2b"):
        found = found_of(f"{MODEL}.path={name}")
        assert found.rows[-1].status == "refused" and name not in found.rows[-1].why
        assert found.refused and found.refused[-1].startswith(f"{MODEL}.path=")


def test_the_page_of_keys_has_every_row(capsys):
    assert main(["--markdown"]) == 0
    page = capsys.readouterr().out
    assert all(f"`{pattern}`" in page for row in ROWS for pattern in re.sub(r",\s+", ",", row.words["keys"]).split())


def test_the_planner_chooses_a_layout_for_fsdp(tmp_path):
    found, _ = converted(settings_of(f"{MODEL}.path=models/Qwen3-8B", f"{ACTOR}.ulysses_sequence_parallel_size=2"))
    config = validate(GrpoRunConfig, found.configuration)
    assert config.policy.parallel.mesh.world_size == 8
    assert (config.policy.parallel.context, config.model.recompute) == (2, "full")
    row = next(row for row in found.defaults if row.key == "trainer.nnodes")
    assert row.to["policy.parallel.data"] == config.policy.parallel.data


def test_the_command_writes_a_file_that_passes_the_dry_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script, out = tmp_path / "run.sh", tmp_path / "run.yaml"
    script.write_text(
        "set -x\nN=${N:-8}\npython3 -m verl.trainer.main_ppo \\\n"
        + " \\\n".join(GRPO).replace("unknown-7B", "Qwen3-8B").replace("n=8", "n=$N")
    )
    assert command(["from-verl", str(script), "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["configuration"] == yaml.safe_load(out.read_text())
    assert told["counts"] == {"used": 5, "mapped": 1, "implied": 0, "left out": 0, "refused": 0}
    assert [row["line"] for row in told["keys"]] == [4, 5, 6, 7, 8, 9]
    assert told["to_add"] == [] and told["command"] == f"megatron-rl grpo {out} --dry-run"
    with lasting("session"):  # the recipe sets variables when it is imported
        assert command(["grpo", str(out), "observe=[]", "--dry-run"]) == 0


def test_rows_are_counted_where_the_file_is_here(capsys):
    rows = Path(__file__).parents[3] / "recipes/tiny/data/gsm8k_verl.parquet"
    words = [f"data.train_files={rows}", "data.train_batch_size=10", "trainer.total_epochs=3", "trainer.save_freq=2"]
    main(["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=8", *words, "--json"])
    told = json.loads(capsys.readouterr().out)
    number = len(import_module("pyarrow.parquet").read_table(rows))
    assert told["configuration"]["run"]["steps"] == number // 10 * 3 > 0


def test_a_name_on_the_hub_is_no_folder():
    assert local_model("Qwen/Qwen3-8B")[1] == "hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B"
    for path in ("models/Qwen3-8B", "/data/Qwen3-8B", "Qwen3-8B", "a/b/c"):
        assert local_model(path) == (Path(path), "")


def test_the_file_has_no_anchors(capsys, tmp_path):
    out = tmp_path / "ppo.yaml"
    assert main([*GRPO, "algorithm.adv_estimator=gae", "--out", str(out)]) == 0
    assert "&" not in out.read_text() and "next: megatron-rl ppo" in capsys.readouterr().out
    assert main([*GRPO, "algorithm.adv_estimator=gae", "--out", str(out)]) == 0, "its own file may be replaced"
    (tmp_path / "mine.txt").write_text("mine")
    assert main([*GRPO, "--out", str(tmp_path / "mine.txt")]) == 2 and (tmp_path / "mine.txt").read_text() == "mine"
    assert "mine.txt was not written by this command; give another --out" in capsys.readouterr().err
    betas = yaml.safe_load(out.read_text())
    assert betas["policy"]["optimizer"]["betas"] == betas["critic"]["optimizer"]["betas"] == [0.9, 0.999]


def test_the_command_prints_its_tables_and_what_is_to_add(capsys):
    words = [one for one in GRPO if "total_training_steps" not in one]
    assert main([*words, "trainer.total_epochs=2"]) == 1
    printed = capsys.readouterr().out
    for part in ("algorithm.adv_estimator=grpo", "refused: trainer.total_epochs=2: the steps are", "next: give values"):
        assert part in printed


def test_a_script_that_cannot_be_read_is_an_error(tmp_path, capsys, monkeypatch):
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo \\\n  data.train_files=$DATA/train.parquet\n")
    assert main([str(script)]) == 2
    assert "line 2: the variable DATA is not set; give it with --set DATA=VALUE" in capsys.readouterr().err
    assert main([str(script), "--set", "DATA=/d", "--rows", "7473"]) == 0
    script.write_text(
        "A=$LR\npython3 -m verl.trainer.main_ppo \\\n  data.train_files=$DATA/$SET/train.parquet \\\n  x.y=$A a.b=$LR\n"
    )
    monkeypatch.setenv("SET", "gsm8k")
    assert main([str(script)]) == 2
    told = capsys.readouterr().err
    assert [re.findall(f"variable {name} is not set; give it with --set", told) for name in ("DATA", "SET", "LR")] == [
        [f"variable {name} is not set; give it with --set"] for name in ("DATA", "SET", "LR")
    ], "each once, and all at once"
    assert told.rstrip().endswith('This shell has a value: --set SET="$SET"')
    assert main([str(Path("nowhere.sh"))]) == 2
