"""megatron-rl from-verl: no key of verl that changes what is trained is dropped, with any value.

verl_keys.txt has each key of the configurations that verl generates, an engine that has it, and its default. Here every
key gets another value, next to the settings that make verl read it. It must then be mapped, or refused, or be in the
list below of keys that train the same with every value.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.migrate.verl.call import read_overrides
from megatron_rl.migrate.verl.command import main
from megatron_rl.migrate.verl.conversion import Converted, check_types, convert
from megatron_rl.migrate.verl.keys import old_name, row_of
from megatron_rl.migrate.verl.settings import Settings

LINES = (Path(__file__).parent / "verl_keys.txt").read_text().splitlines()
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
BASE = (
    "data.train_files=a.parquet",
    "custom_reward_function.path=r.py",
    f"{MODEL}.path=models/unknown-7B",
    f"{ROLLOUT}.n=5",
)
READ_WITH = {
    r"critic\.|algorithm\.(gamma|lam)|trainer\.critic_warmup|reward": "algorithm.adv_estimator=gae",
    r".*\.kl_loss_(coef|type)": f"{ACTOR}.use_kl_loss=True",
    r"algorithm\.kl_": "algorithm.adv_estimator=gae algorithm.use_kl_in_reward=True",
    r"algorithm\.kl_ctrl\.(horizon|target)": "algorithm.adv_estimator=gae algorithm.use_kl_in_reward=True "
    "algorithm.kl_ctrl.type=adaptive",
    r".*\.clip_cov_": f"{ACTOR}.policy_loss.loss_mode=clip_cov",
    r".*\.(kl_cov_ratio|ppo_kl_coef)": f"{ACTOR}.policy_loss.loss_mode=kl_cov",
    r".*\.tau_": f"{ACTOR}.policy_loss.loss_mode=sapo",
    r".*\.dro_beta": f"{ACTOR}.policy_loss.loss_mode=dro",
    r".*actor\.clip_ratio$": f"{ACTOR}.clip_ratio_low=null",
    r".*actor\.loss_scale_factor": f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
    r".*\.rollout_is_": "algorithm.rollout_correction.rollout_is=token",
    r".*\.rollout_rs_threshold": "algorithm.rollout_correction.rollout_rs=token_k1",
    r".*rollout_correction\.loss_type": "algorithm.rollout_correction.bypass_mode=True",
    r"algorithm\.filter_groups\.": "algorithm.filter_groups.enable=True",
    r"actor_rollout_ref\.model\.(lora_|target_)": f"model_engine=dp {MODEL}.lora_rank=8",
    r"actor_rollout_ref\.model\.exclude": f"model_engine=megatron {MODEL}.lora.rank=8",
    r"critic\.model\.exclude": "model_engine=megatron critic.model.lora.rank=8",
    r"actor_rollout_ref\.model\.lora\.": f"model_engine=megatron {MODEL}.lora.rank=8",
    r".*reward_model\.model.path|.*reward_model\.model_path": "reward.reward_model.enable=True",
    r"critic\.model\.(lora_|target_)": "model_engine=dp critic.model.lora_rank=8",
    r"critic\.model\.lora\.": "model_engine=megatron critic.model.lora.rank=8",
    r".*optim\.(min_lr|lr_min|min_lr_ratio|min_lr_factor|num_cycles)": "{owner}.optim.lr_scheduler_type=cosine "
    "{owner}.optim.lr_decay_style=cosine {owner}.optim.decay_type=linear",
    r".*multi_turn\.": f"{ROLLOUT}.multi_turn.enable=True",
    r".*token_len_per_gpu": f"{ACTOR}.use_dynamic_bsz=True",
    r".*override_transformer_config\.recompute": "{owner}.megatron.override_transformer_config."
    "recompute_granularity=full {owner}.megatron.override_transformer_config.recompute_method=block",
}
"""Keys that verl reads only if another key is set -> the words that set it."""


def another(default: Any, kinds: tuple[type, ...]) -> str:
    """A value that is not the default; of the row's type where the default is null or another key's."""
    if default is None or (isinstance(default, str) and "${" in default):
        return "True" if bool in kinds else "3" if int in kinds else "[0.5,0.6]" if list in kinds else "other"
    if isinstance(default, bool):
        return str(not default)
    if isinstance(default, int | float):
        return str(default + 2 if isinstance(default, int) else default / 2 + 0.125)
    return {list: "[other]", dict: "{other: 1}"}.get(type(default), "other")


def found_with(line: str) -> tuple[str, Converted, list[str]]:
    """The key of a line, the conversion with another value of it, and the words of the call."""
    engine, key, default = line.split(maxsplit=2)
    rule = row_of(old_name(key))
    assert rule is not None, f"{key} has no row"
    owner = "critic" if key.startswith("critic.") else ACTOR
    needed = [word for pattern, words in READ_WITH.items() if re.match(pattern, key) for word in words.split()]
    words = [*BASE, "algorithm.adv_estimator=grpo", f"model_engine={engine}"]
    words += [word.format(owner=owner) for word in needed]
    words.append(f"{key}={another(json.loads(default), rule.kinds)}")
    settings = Settings(read_overrides(words), [100_000])
    check_types(settings)
    return key, convert(settings), words


OWNERS = r"(actor_rollout_ref\.(actor|ref)|critic)"
ENGINES = r"(megatron|fsdp_config|fsdp|veomni|torchtitan)"
SAME_TRAINING = {
    "speed and memory": rf"""
        .*\.(entropy_checkpointing|entropy_from_logits_\w+|pad_\w+|use_remove_padding|use_torch_compile|seed)
        .*\.(\w+_offload|offload_policy|nccl_timeout|full_determinism|use_fused_kernels|fused_kernel_options\.\w+)
        .*(micro_batch_size\w*|max_token_len_per_gpu|use_dynamic_bsz|log_prob_\w+|tiled_mlp\.\w+|use_liger)
        {OWNERS}\.{ENGINES}\.(forward_prefetch|reshard_after_forward|strategy|use_orig_params|wrap_policy\.\w+)
        {OWNERS}\.{ENGINES}\.turbo_config\.distributed\.(\w+_size|fsdp_plan\.(fsdp_implementation|num_to_\w+))
        {OWNERS}\.megatron\.(dist_\w+|distrib_\w+|use_dist_\w+|dynamic_context_parallel|max_seqlen_per_dp_cp_rank)
        {OWNERS}\.megatron\.(use_megatron_fsdp|use_mbridge|vanilla_mbridge|use_distributed_optimizer|sequence_parallel)
        {OWNERS}\.megatron\.override_transformer_config\.(attention_backend|recompute_\w+)
        {OWNERS}\.veomni\.(\w+_implementation|activation_gpu_limit|basic_modules|ckpt_manager|enable_\w+|init_device)
        {OWNERS}\.veomni\.force_use_huggingface
        {OWNERS}\.torchtitan\.(activation_checkpoint|attn_type|data_parallel_\w+|max_seq_len|mixed_precision|spmd_backend)
        {OWNERS}\.(strategy|use_prefix_grouper|shuffle|data_loader_seed|rollout_n)
        actor_rollout_ref\.ref\.({ENGINES}\.)?(\w+_parallel_size|fsdp_size|forward_only|mode|pipeline_\w+)
        {OWNERS}\.optim\.(use_layer_wise_distributed_optimizer|use_precision_aware_optimizer|total_training_steps)
        .*model\.(enable_\w+|use_shm|trust_remote_code)|.*model\.lora\.(a2a_experimental|dropout_position)
        actor_rollout_ref\.rollout\.(name|mode|nnodes|n_gpus_per_node|data_parallel_size|load_format|layered_summon|mtp)
        actor_rollout_ref\.rollout\.(cudagraph_capture_sizes|disable_log_stats|enable_\w+|enforce_eager|free_cache_engine)
        actor_rollout_ref\.rollout\.(max_num_batched_tokens|multi_stage_wake_up|scheduling_policy|skip_tokenizer_init)
        actor_rollout_ref\.rollout\.(calculate_log_probs|agent\.num_workers|checkpoint_engine\.\w+|disaggregation\.\w+)
        actor_rollout_ref\.model\.mtp\.(enable_rollout|method|num_spec\w+|speculative_num_(steps|draft_tokens))|algorithm\.filter_groups\.max_inflight_gen_batches
        data\.(\w+_workers|use_shm|trust_remote_code|return_\w+)|transfer_queue\..*|ray_kwargs\..*
        trainer\.(balance_batch|device|use_v1|esi_redundant_time|ray_wait_register_center_timeout)
        trainer\.(default_hdfs_dir|del_local_ckpt_after_load)
    """,
    "records, checkpoints and evaluations": r"""
        .*profiler\..*|.*\.checkpoint\.\w+|.*\.(prometheus|trace)\.\w+|.*\.calculate_entropy
        actor_rollout_ref\.rollout\.(moe_load_balance_metrics_interval|val_kwargs\.\w+)
        data\.(val_\w+|validation_shuffle)|trainer\.(log_val_generations|validation_data_dir|logger|max_critic_\w+)
    """,
    "servers of the user's own": r"""
        (reward\.)?reward_model\.((model|rollout|megatron)\.(?!path|model_path).*|n_gpus_per_node|nnodes|num_workers)
        reward\.num_workers|(reward\.)?reward_model\.enable_resource_pool|(reward\.|reward_model\.)?sandbox_fusion\.m\w+
    """,
    "images, and engines and optimizers other than the run's": rf"""
        data\.(audio|image|video)_key|data\.(image_patch_size|mm_processor_kwargs|return_multi_modal_inputs)
        actor_rollout_ref\.actor\.freeze_vision_tower|actor_rollout_ref\.rollout\.engine_kwargs\.(sglang|trtllm)
        {OWNERS}\.optim\.(muon_\w+|lr_wsd_decay_style)|actor_rollout_ref\.ref\.optim\.\w+
    """,
    "not read unless a key is set that is refused": r"""
        algorithm\.pf_ppo\.\w+|distillation\.(?!enabled).*|skip\.\w+\.(action|dump_dir|steps)|.*\.qat(\.(?!enable)\w+)?
        .*\.model\.mtp\.(?!enable$|enable_train)\w+|.*reward_manager\.module\.name|trainer\.v1\.(?!trainer_mode).*
        .*\.router_replay\.(record|replay)_file|.*\.calculate_sum_pi_squared|trainer\.resume_from_path
    """,
    "of a critic": r"""
        critic\.(enable|loss_scale_factor)|critic\.model\.(tokenizer_path|custom_chat_template|lora\.merge)
    """,
}
"""Keys that train the same with every value; each line is an expression."""
SAME = re.compile("|".join(line for lines in SAME_TRAINING.values() for line in lines.split()))


@pytest.mark.parametrize("section", sorted({line.split()[1].partition(".")[0] for line in LINES}))
def test_a_key_that_changes_training_is_mapped_or_refused(section):
    for line in LINES:
        if line.split()[1].partition(".")[0] != section or ".actor.strategy " in line:
            continue  # another strategy is an engine that verl does not have, which is an error
        key, found, words = found_with(line)
        row = next(row for row in reversed(found.rows) if row.key == key)
        if row.status == "refused":
            assert any(one.startswith(f"{key}=") and row.why in one for one in found.refused), words
        elif row.status in ("implied", "left out"):
            assert SAME.fullmatch(key), f"{key} is {row.status}: {row.why}"
        else:
            assert row.to, words


@pytest.mark.parametrize("name", SAME_TRAINING)
def test_the_list_of_harmless_keys_has_no_line_without_a_key(name):
    keys = [line.split()[1] for line in LINES]
    for line in SAME_TRAINING[name].split():
        assert any(re.fullmatch(line, key) for key in keys), line


KNOWN = (
    f"+{ROLLOUT}.min_p=0.1",
    f"{ROLLOUT}.top_p=0.9",
    "algorithm.use_pf_ppo=True",
    f"+{ROLLOUT}.repetition_penalty=1.2",
    f"{ACTOR}.fsdp_config.dtype=float16",
    f"{ACTOR}.use_rollout_log_probs=True",
    f"+{ACTOR}.optim.override_optimizer_config={{adam_beta1: 0.8}}",
    "critic.loss_agg_mode=seq-mean-token-sum algorithm.adv_estimator=gae",
    f"{ACTOR}.loss_agg_mode=seq-mean-token-sum algorithm.adv_estimator=gae",
    "data.train_files=[a.parquet,b.parquet]",
    f"+{MODEL}.override_config.tie_word_embeddings=False",
    "reward.reward_kwargs.scale=0",
    "~data.seed",
    f"model_engine=megatron +{ACTOR}.megatron.override_transformer_config.moe_router_pre_softmax=False",
)


@pytest.mark.parametrize("override", KNOWN)
def test_a_refused_key_ends_the_conversion(override, tmp_path, capsys):
    out = tmp_path / "run.yaml"
    words = [*BASE, "algorithm.adv_estimator=grpo", *([override] if "{" in override else override.split())]
    assert main([*words, "--rows", "100000", "--out", str(out)]) == 1
    printed = capsys.readouterr().out
    assert "\nrefused: " in printed and "next: give values that are not refused" in printed
    assert not out.exists() and "rollout:" not in printed


def test_all_refused_keys_are_listed_at_once(capsys):
    assert main([*BASE, "algorithm.adv_estimator=grpo", *KNOWN[:5], "--rows", "100000", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [one.partition("=")[0] for one in told["refused"]] == [word.partition("=")[0] for word in KNOWN[:5]]
    assert told["configuration"] is None and told["to_add"] == []


def test_an_engine_that_has_more_ranks_than_there_are_gpus_is_refused(capsys):
    """Engines have one GPU of their own, and an engine has two by verl's default."""
    one = ["rollout.nnodes=1", "rollout.n_gpus_per_node=1", "--rows", "100000", "--json"]
    assert main([*BASE, "algorithm.adv_estimator=grpo", *one]) == 1
    [told] = json.loads(capsys.readouterr().out)["refused"]
    assert "tensor_model_parallel_size=2: 1 GPUs are left for engines, and one has 2" in told


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("actor.entropy_coef", f"{ACTOR}.entropy_coeff"),
        (f"{ACTOR}.entropy_coef", f"{ACTOR}.entropy_coeff"),
        ("rollout.top_p", f"{ROLLOUT}.top_p"),
        ("data.train_batch_sise", "data.train_batch_size"),
        (f"{ROLLOUT}.engine_kwarg.vllm.x", f"{ROLLOUT}.engine_kwargs.vllm"),
        ("algorithm.kl_ctrl.kl_coeff", "algorithm.kl_ctrl.kl_coef"),
        ("trainer.profiler.no_such_key", None),
        (f"{ACTOR}.checkpoint.no_such_key", None),
        ("data.return_no_such_key", None),
    ],
)
def test_an_invented_key_is_refused_with_the_nearest_real_one(key, meant):
    assert row_of(key) is None
    [told] = convert(Settings(read_overrides([*BASE, "algorithm.adv_estimator=grpo", f"{key}=1"]), [100_000])).refused
    assert told.startswith(f"{key}=1: verl has no such key; did you mean {meant or ''}")


def test_an_override_behind_a_script_replaces_its_value(tmp_path, capsys):
    script = tmp_path / "run.sh"
    words = [*BASE, "algorithm.adv_estimator=grpo", f"{ROLLOUT}.top_p=0.9"]
    script.write_text(" ".join(("python3 -m verl.trainer.main_ppo", *words)))
    assert main([str(script), "--rows", "100000"]) == 1
    assert f"refused: line 1: {ROLLOUT}.top_p=0.9" in capsys.readouterr().out
    assert main([str(script), f"{ROLLOUT}.top_p=1.0", "--rows", "100000"]) == 0


def test_sizes_that_do_not_fit_are_printed_as_yaml(capsys):
    words = [
        *BASE,
        "algorithm.adv_estimator=grpo",
        "model_engine=megatron",
        f"{ACTOR}.megatron.tensor_model_parallel_size=4",
    ]
    assert main([*words, f"{ACTOR}.megatron.expert_model_parallel_size=4", "--rows", "100000"]) == 1
    assert "to add: policy.parallel: {data: 2, expert: 4, tensor: 4}: tensor x context" in capsys.readouterr().out


def test_several_files_are_mixed_by_their_rows(capsys):
    words = [*BASE, "algorithm.adv_estimator=grpo", "data.train_files=[x/a.parquet,x/b.parquet]"]
    assert main([*words, "--rows", "7000,5000", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["configuration"]
    assert [(one["name"], one["weight"]) for one in told["data"]["train"]] == [("a", 7000.0), ("b", 5000.0)]
    assert told["run"]["steps"] == 12000 // 1024 * 30
