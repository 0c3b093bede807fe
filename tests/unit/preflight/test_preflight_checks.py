"""Each fault that would stop a run in its first minutes, on real files, and a whole run folder that has none."""

from __future__ import annotations

import io
import json
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from numbered import SHAPES
from rich.console import Console
from small_models import changed
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from megatron_rl.commands.size_run import read
from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig, RewardModelRunConfig, SftRunConfig
from megatron_rl.data import ItemSource, ShuffledStream
from megatron_rl.models import FAMILIES, obstacle_to_fused_layers, read_shape
from megatron_rl.models.peft import base_digest, require_fitting
from megatron_rl.observe.provenance import write_provenance
from megatron_rl.planning.shapes import planned_shape
from megatron_rl.preflight import checks as module
from megatron_rl.preflight import devices, engine_options
from megatron_rl.preflight import rows as rows_module
from megatron_rl.preflight.adapters import faults_of_adapters
from megatron_rl.preflight.checks import check_before_start, preflight
from megatron_rl.preflight.model import faults_of_division, faults_of_model
from megatron_rl.rollout import plugins
from megatron_rl.types import Adapters, DeltaNet, Mixture, ModelShape
from megatron_rl.types.mamba import Mamba2, SquaredReluMixture

CONFIGS = Path(__file__).parents[3] / "configs" / "model"
CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "intermediate_size": 16,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
}
VOCABULARY = ["<eos>", "<unk>", "</think>", "<u>", *"0123456789+= abcdefghijklmnopqrstuvwxyz"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    "<u>{{ m.content }}<eos>{% endfor %}"
)


def safetensors(tensors: dict[str, tuple[int, ...]], metadata: dict[str, str] | None = None) -> bytes:
    header, at = {"__metadata__": metadata} if metadata else {}, 0
    for name, extents in tensors.items():
        size = 4
        for extent in extents:
            size *= extent
        header[name] = {"dtype": "F32", "shape": list(extents), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def write_tokenizer(folder: Path, vocabulary=VOCABULARY) -> None:
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("<u>|<eos>|</think>|."), "isolated")
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "unk_token": {"content": "<unk>"}}))


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(devices, "CPU_HEAD_DIMS", (*devices.CPU_HEAD_DIMS, 2))  # the model below has tiny heads
    """A working folder with a whole tiny model in two shards, rows and a reward function."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    tensors = FAMILIES["qwen3"].hf_tensors(read_shape(model))
    names = sorted(tensors)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for shard, held in shards.items():
        (model / shard).write_bytes(safetensors({name: tensors[name] for name in held}))
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    write_tokenizer(model)
    rows = [{"prompt": f"{i}+1=", "ground_truth": str(i + 1)} for i in range(9)]
    for name in ("train.jsonl", "eval.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_rewards.py").write_text(
        "raise SystemExit('this module must not be run')\n"
        "def short(prompts, completions, completion_ids, **columns):\n    return [1.0 for _ in completions]\n"
    )
    return tmp_path


def grpo(**changes) -> GrpoRunConfig:
    merged = {
        "run": {"name": "adds/first", "steps": 3},
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "train.jsonl", "eval": "eval.jsonl"},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_prompt_tokens": 8, "max_response_tokens": 20},
        "balance": {"max_tokens_per_microbatch": 96},
        "rewards": [{"kind": "exact_answer"}, {"kind": "function", "path": "my_rewards:short"}],
    }
    for path, value in changes.items():
        section, _, key = path.partition("__")
        merged[section] = merged.get(section, {}) | {key: value} if key else value
    return validate(GrpoRunConfig, merged)


def sft(**changes) -> SftRunConfig:
    merged = {"run": {"name": "warm", "steps": 3}, "model": {"path": "model"}, "sft": {"rows": "rows.jsonl"} | changes}
    merged["sft"].setdefault("max_tokens", 8)
    return validate(SftRunConfig, merged | {"balance": {"max_tokens_per_microbatch": 96}})


def faults(config, **how) -> list[str]:
    return preflight(config, lambda note: None, **how)


def test_a_run_without_fault_passes_and_leaves_nothing_behind(home):
    before = sorted(home.rglob("*"))
    notes = []
    assert preflight(grpo(), notes.append) == [] and notes == []
    assert sorted(home.rglob("*")) == before


def test_a_folder_with_a_vision_tower_is_refused_only_where_engines_load_weights_from_it(home):
    windows = {"head_dim": 32, "sliding_window": 8, "sliding_window_pattern": 2, "tie_word_embeddings": True}
    text = CONFIG | windows | {"model_type": "gemma3_text"}
    (home / "model/config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    shape = read_shape(home / "model")
    tensors = {f"language_model.{name}": size for name, size in FAMILIES["gemma3_text"].hf_tensors(shape).items()}
    for path in (home / "model").glob("*.safetensors*"):
        path.unlink()
    (home / "model/model.safetensors").write_bytes(safetensors(tensors | {"vision_tower.pos_embed.weight": (4, 8)}))
    assert faults(grpo()) == faults(grpo(policy={"lora": {}}, rollout__lora="merged")) == []
    [told] = faults(grpo(policy={"lora": {}}))
    assert (
        told.startswith("model.path: model has a vision tower") and "`megatron-rl convert to-hf model TARGET`" in told
    )


def test_adapters_that_cannot_be_trained_or_served_are_named(home):
    def lora(**keys):
        return grpo(policy={"lora": keys})

    assert faults(lora()) == faults(lora(targets=["q_proj", "down_proj"], rank=3)) == []
    assert faults(lora(targets=["q_proj", "k_prj"])) == [
        "policy.lora.targets has k_prj, but the linear layers of qwen3 are q_proj, k_proj, v_proj, o_proj, gate_proj, "
        "up_proj, down_proj, lm_head"
    ]
    [missing] = faults(lora(start="nowhere"))
    assert missing.startswith("policy.lora.start: nowhere has no adapter_config.json")
    given = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (home / "started").mkdir()
    (home / "started/adapter_config.json").write_text(json.dumps(given))
    prefix, tensors = "base_model.model.model.layers.{}.self_attn.q_proj.", {}
    for layer in range(2):
        tensors[f"{prefix.format(layer)}lora_A.weight"] = (4, 8)
        tensors[f"{prefix.format(layer)}lora_B.weight"] = (8, 4)
    held = home / "started/adapter_model.safetensors"
    held.write_bytes(safetensors(tensors))
    assert faults(lora(start="started", rank=4, alpha=8, targets=["q_proj"])) == []
    held.write_bytes(safetensors(dict(list(tensors.items())[1:])))
    [unfit] = faults(lora(start="started", rank=4, alpha=8, targets=["q_proj"]))
    assert unfit.endswith("does not fit model: it lacks base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight")
    held.write_bytes(safetensors(tensors, {"base_digest": "tensors:0123456789abcdef"}))
    [foreign] = faults(lora(start="started", rank=4, alpha=8, targets=["q_proj"]))
    assert foreign.startswith(
        "policy.lora.start: model is not the base model that the adapters in started were trained"
    )
    held.write_bytes(safetensors(tensors, {"base_digest": base_digest(home / "model")}))
    assert faults(lora(start="started", rank=4, alpha=8, targets=["q_proj"])) == []
    notes: list[str] = []
    held.write_bytes(safetensors(tensors, {"base_form": "fp8"}))
    assert preflight(lora(start="started", rank=4, alpha=8, targets=["q_proj"]), notes.append) == []
    assert notes == [
        "the adapters in started were trained on a base model with policy.lora.base fp8, and this run has unquantised, "
        "so it begins with a slightly different model"
    ]
    held.write_bytes(safetensors(tensors)[:-3])
    [truncated] = faults(lora(start="started", rank=4, alpha=8, targets=["q_proj"]))
    assert truncated.startswith("policy.lora.start: ") and "adapter_model.safetensors" in truncated
    held.write_bytes(safetensors(tensors).replace(b'"F32"', b'"I8" '))
    [integers] = faults(lora(start="started", rank=4, alpha=8, targets=["q_proj"]))
    assert "q_proj.lora_A.weight is I8, and only BF16, F16, F32, F64 are supported" in integers
    held.write_bytes(safetensors(tensors))
    assert [fault[:40] for fault in faults(lora(start="started", rank=4, alpha=16))] == [
        "policy.lora.alpha is 16, but the adapter",
        "policy.lora.start: the adapters in start",
    ]
    (home / "started/adapter_config.json").write_text(json.dumps(given | {"use_rslora": True}))
    assert faults(lora(start="started", rank=4, alpha=8, targets=["q_proj"])) == [
        "policy.lora.rank_stabilised is false, but use_rslora of the adapters in started is true; set it to true"
    ]
    assert faults(lora(start="started", rank=4, alpha=8, targets=["q_proj"], rank_stabilised=True)) == []
    everything = FAMILIES["qwen3"].hf_tensors(replace(read_shape(home / "model"), adapters=Adapters(4, 8.0)))
    held.write_bytes(safetensors({f"base_model.model.{k}": v for k, v in everything.items() if ".lora_" in k}))
    (home / "started/adapter_config.json").write_text(json.dumps(given | {"target_modules": "all-linear"}))
    assert faults(lora(start="started", rank=4, alpha=8)) == []
    assert faults(lora(rank=513)) == [
        "policy.lora.rank is 513, and vLLM serves at most 512; lower it, or set rollout.lora: merged"
    ]
    merged = {"rollout__lora": "merged"}
    assert faults(lora(base="fp8")) == [
        "policy.lora.base is fp8, and engines that serve adapters compute with weights that are not rounded to fp8; "
        "leave it out, or set rollout.lora: merged"
    ]
    assert faults(grpo(policy={"lora": {"rank": 513, "base": "fp8"}}, **merged)) == []
    (home / "started/adapter_config.json").write_text(json.dumps(given | {"use_dora": True}))
    [other] = faults(lora(start="started", rank=4, alpha=8, targets=["q_proj"]))
    assert "use_dora is True, and only False is supported" in other
    (home / "base").mkdir()
    weights = grpo(policy={"lora": {}}, model={"path": "model", "weights": "base", "dtype": "float32"})
    assert any("the engines load the base model from model.path" in fault for fault in faults(weights))
    weights = grpo(policy={"lora": {}}, model={"path": "model", "weights": "base", "dtype": "float32"}, **merged)
    assert not any("the engines load" in fault for fault in faults(weights))
    muon = grpo(policy={"lora": {}, "optimizer": {"kind": "muon"}})
    assert [fault for fault in faults(muon) if "Muon" in fault]


def test_an_adapter_of_the_output_layer_needs_a_layer_of_its_own_and_merged_pushes(home):
    untied = read_shape(CONFIGS / "Qwen3-8B.json")

    def found(how: str, targets=("q_proj", "lm_head"), shape=untied, **policy) -> list[str]:
        return faults_of_adapters(grpo(policy={"lora": {"targets": targets}, **policy}, rollout__lora=how), shape)

    assert found("merged") == found("merged", ["lm_head"]) == []
    assert found("served") == [
        "policy.lora.targets has lm_head, and engines serve no adapter of the output layer; leave it out, or set "
        "rollout.lora: merged"
    ]
    assert found("merged", shape=replace(untied, output="embedding")) == [
        "policy.lora.targets has lm_head, but the output layer of this model is its embedding (tie_word_embeddings), "
        "which has no adapter; leave it out"
    ]
    assert found("merged", ["lm_head"], parallel={"pipeline": 2}) == [
        "policy.lora.targets is lm_head alone, so only the last pipeline stage would train; name another layer, too, "
        "or set policy.parallel.pipeline to 1"
    ]
    critic = grpo(algorithm__adv_estimator={"kind": "gae"}, critic={"lora": {"targets": ["q_proj", "lm_head"]}})
    assert faults_of_adapters(critic, untied) == [
        "critic.lora.targets has lm_head, and a critic has a value head in its place; leave it out"
    ]
    (home / "started").mkdir()
    given = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["lm_head"]}
    (home / "started/adapter_config.json").write_text(json.dumps(given))
    shape = replace(read_shape(home / "model"), adapters=Adapters(4, 8.0, ("lm_head",)))
    names = [name for name in FAMILIES["qwen3"].hf_tensors(shape) if ".lora_" in name]
    assert names == ["lm_head.lora_A.weight", "lm_head.lora_B.weight"]
    tensors = {f"base_model.model.{name}": FAMILIES["qwen3"].hf_tensors(shape)[name] for name in names}
    held = home / "started/adapter_model.safetensors"
    held.write_bytes(safetensors(tensors))
    require_fitting(home / "started", shape, home / "model")
    copied = {"base_model.model.lm_head.base_layer.weight": (shape.vocab_size, shape.hidden_size)}
    held.write_bytes(safetensors(tensors | copied))
    with pytest.raises(ValueError, match="PEFT's copy .*save_embedding_layers=False"):
        require_fitting(home / "started", shape, home / "model")


OF_SHAPES = {
    "Qwen3-30B-A3B": {
        "lora": {},
        "served": ["adapters of experts; choose q_proj, k_proj, v_proj, o_proj", "a kernel for GPUs alone"],
    },
    "DeepSeek-V3": {"lora": {}, "served": ["adds no adapter to them", "adapters of experts", "for GPUs alone"]},
    "Qwen3-8B": {"lora": {}, "quantization": "fp8", "served": ["quantization is fp8: it has not been tried"]},
    "Qwen3-Next-80B-A3B-Instruct": {
        "lora": {},
        "served": ["not been tried in a model with linear attention", "in_proj_qkvz, in_proj_ba", "for GPUs alone"],
    },
}


@pytest.mark.parametrize("name", OF_SHAPES)
def test_what_vllm_cannot_serve_can_be_merged(name):
    """Every refusal says so, and merged there is none."""
    given, shape = OF_SHAPES[name], read_shape(CONFIGS / f"{name}.json")

    def found(how: str) -> list[str]:
        rollout = {"rollout__lora": how, "rollout__quantization": given.get("quantization")}
        return faults_of_adapters(grpo(policy={"lora": given["lora"]}, **rollout), shape)

    served = found("served")
    assert all(fault.endswith(", or set rollout.lora: merged") for fault in served)
    assert len(served) == len(given["served"])
    assert all(part in fault for part, fault in zip(given["served"], served, strict=True)), served
    assert found("merged") == []


def test_blocks_of_hybrid_models_are_served_no_adapters_either():
    """Mamba-2 is linear attention, and experts with a squared ReLU are experts."""
    found = faults_of_adapters(grpo(policy={"lora": {}}, rollout__lora="served"), SHAPES["nemotron_h"])
    parts = ["linear attention", "adapters of experts", "for GPUs alone"]
    assert len(found) == 3 and all(part in fault for part, fault in zip(parts, found, strict=True))


def test_a_layer_that_is_not_there_has_one_fault():
    """It is not told as a layer of experts, too."""
    lora = {"targets": ["gate", "q_proj"]}
    [fault, _] = faults_of_adapters(grpo(policy={"lora": lora}), read_shape(CONFIGS / "Qwen3-30B-A3B.json"))
    assert fault.startswith(
        "policy.lora.targets has gate, but the linear layers of qwen3_moe are q_proj, k_proj, v_proj"
    )


def test_targets_are_names_of_the_family():
    shape = read_shape(CONFIGS / "Qwen3.5-35B-A3B-text.json")
    wrong = {"lora": {"targets": ["in_proj_z", "in_proj_qkvz"]}}
    [fault] = faults_of_adapters(grpo(policy=wrong, rollout__lora="merged"), shape)
    assert fault == (
        "policy.lora.targets has in_proj_qkvz, but the linear layers of qwen3_5_moe_text are out_proj, in_proj_qkv, "
        "in_proj_z, in_proj_b, in_proj_a, gate_proj, up_proj, down_proj, q_proj, k_proj, v_proj, o_proj, lm_head"
    )


def test_merged_weights_need_adapters():
    with pytest.raises(ValueError, match="rollout.lora.*policy.lora"):
        grpo(rollout__lora="merged")


def with_head(home: Path, **head: tuple[int, ...]) -> ModelShape:
    """Make the model a Qwen3-Next with these tensors of a multi-token head."""
    config = CONFIG | {"model_type": "qwen3_next", "layer_types": ["full_attention"] * CONFIG["num_hidden_layers"]}
    config |= {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    (home / "model/config.json").write_text(json.dumps(config | {"shared_expert_intermediate_size": 8}))
    (home / "model/model.safetensors.index.json").unlink(missing_ok=True)
    for path in (home / "model").glob("*.safetensors"):
        path.unlink()
    tensors = FAMILIES["qwen3_next"].hf_tensors(read_shape(home / "model"))
    (home / "model/a.safetensors").write_bytes(safetensors(tensors))
    (home / "model/b.safetensors").write_bytes(safetensors(head))
    return read_shape(home / "model")


def test_mamba_is_linear_attention_to_transformer_engines_layers():
    mamba = changed(read_shape(CONFIGS / "Qwen3-Next-80B-A3B-Instruct.json"), (0,), attention=Mamba2(2, 2, 4, 4, 4))
    assert "linear attention takes no packed rows" in (obstacle_to_fused_layers(mamba, 1) or "")


def test_a_multi_token_head_is_told_and_one_that_is_missing_is_a_fault(home):
    shape = with_head(home)
    notes = []
    keep = grpo(policy={"multi_token": "keep"})
    assert faults(keep) == [
        "policy.multi_token is keep, but model has no multi-token head; convert the model with --multi-token keep, or "
        "leave the key out"
    ]
    (home / "model/b.safetensors").write_bytes(safetensors({"mtp.fc.weight": (2, 3)}))
    assert preflight(keep, notes.append) == preflight(grpo(), notes.append) == []
    assert ["have as they are the 1 tensors" in notes[0], "leave out the 1 tensors" in notes[1]] == [True, True]
    train = grpo(policy={"multi_token": "train"})
    [fault] = faults(train)
    assert "model has no mtp.layers.0.input_layernorm.weight (" in fault and "multi-token head are missing" in fault
    head = FAMILIES["qwen3_next"].head_tensors(replace(shape, multi_token=True))
    (home / "model/b.safetensors").write_bytes(safetensors(head | {"mtp.fc.weight": head["mtp.fc.weight"][::-1]}))
    [fault] = faults(train)
    assert "mtp.fc.weight of the multi-token head has the extents (16, 8), but config.json means (8, 16)" in fault
    (home / "model/b.safetensors").write_bytes(safetensors(head))
    notes.clear()
    assert preflight(train, notes.append) == []
    assert f"the {len(head)} tensors of the model's multi-token head are trained, and not sent" in notes[0]
    drafting = grpo(policy={"multi_token": "train"}, rollout__speculative={"kind": "multi_token"})
    preflight(drafting, notes.append)
    assert "are trained, and sent to the engines, which draft with them" in notes[1]
    held = json.loads((home / "model/config.json").read_text())
    (home / "model/config.json").write_text(json.dumps(held | {"num_nextn_predict_layers": 2}))
    [several] = faults(train)
    assert "config.json has num_nextn_predict_layers 2; a head of 1 layer can be trained" in several
    (home / "model/config.json").write_text(json.dumps(held))
    adapted = grpo(policy={"multi_token": "train", "lora": {}})
    assert any("policy.multi_token is train, but policy.lora freezes" in fault for fault in faults(adapted))


def test_context_parallelism_on_gpus_needs_transformer_engines_layers(home):
    def found(dtype, lora=None, **changes):
        (home / "model/config.json").write_text(json.dumps(CONFIG | changes))
        gpus = {"cluster__gpus_per_trainer": 1, "cluster__gpus_per_engine_rank": 1}
        model = {"path": "model", "dtype": dtype}
        return faults(grpo(model=model, policy={"parallel": {"context": 2}, "lora": lora}, **gpus), planning=True)

    assert found("bfloat16") == found("bfloat16", lora={"rank": 4}) == []
    needs = "policy.parallel.context above 1 needs Transformer Engine's layers on GPUs, but "
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    assert found("bfloat16", **windows) == [
        f"{needs}their attention takes no sliding windows with policy.parallel.context above 1; "
        "set policy.parallel.context to 1"
    ]
    assert found("float32") == [
        f"{needs}model.layers is auto and model.dtype float32; set policy.parallel.context to 1"
    ]
    assert faults(grpo(policy={"parallel": {"context": 2}}, model={"path": "model", "dtype": "float32"})) == []


def test_what_a_model_refuses_is_known_without_rows_and_weights(home):
    """Transformer Engine's layers have no sinks, and a CPU runs local ones whatever is asked for."""

    def found(name, on_gpus=1, **model):
        (home / "model/config.json").write_text((CONFIGS / f"{name}.json").read_text())
        gpus = {"cluster__gpus_per_trainer": on_gpus, "cluster__gpus_per_engine_rank": on_gpus}
        run, shape = grpo(model={"path": "model"} | model, **gpus), read_shape(home / "model")
        return faults_of_division(run, shape) + faults_of_model(run, shape)

    [fault] = found("gpt-oss-120b", layers="transformer_engine")
    assert fault.startswith("model.layers is transformer_engine, but ") and fault.endswith("set model.layers to local")
    assert found("gpt-oss-120b", layers="local") == []
    assert "model.layers" not in str(found("gpt-oss-120b", 0, layers="transformer_engine"))
    [wrong] = found("GLM-4.6", dtype="float16")
    assert "vLLM adds up the experts of glm4_moe with another factor" in wrong


def rows(name: str, *lines) -> None:
    Path(name).write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")


def test_rows_of_a_reward_model_are_checked_for_margins_and_reasoning(home):
    """A run scores the text after the reasoning, so a model that was trained with it would read other texts."""
    merged = {
        "run": {"name": "scorer", "steps": 1},
        "model": {"path": "model"},
        "reward_model": {"rows": "pairs.jsonl"},
    }
    config, notes = validate(RewardModelRunConfig, merged), []
    plain = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    rows("pairs.jsonl", plain)
    assert rows_module.faults_of_rows(config, None, notes.append) == notes == []
    rows("pairs.jsonl", plain, plain | {"chosen": "<think>1</think>2"})
    assert rows_module.faults_of_rows(config, None, notes.append) == []
    [note] = notes
    assert "</think> is in an answer of 1 row, such as pairs.jsonl:2" in note
    rows("pairs.jsonl", plain | {"margin": "big"})
    [fault] = rows_module.faults_of_rows(config, None, notes.append)
    assert "`margin` is 'big'" in fault


GOOD = {"prompt": "1+1=", "ground_truth": "2"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD, '{"prompt": "1+'], "data.train: train.jsonl:2: the row is not JSON"),
        ([GOOD, {"question": "1+1="}], "train.jsonl:2: a row must have either `messages` (chat turns) or `prompt`"),
        ([GOOD, {"prompt": "1"}], "train.jsonl:2: column `ground_truth` is missing; the configured rewards need it"),
        ([{"prompt": "123456789", "ground_truth": 1}], "the prompt has 9 tokens, rollout.max_prompt_tokens is 8"),
        ([" "], "data.train: train.jsonl holds no row"),
        (["{", "{", GOOD], "train.jsonl:1: the row is not JSON"),
        (["{", "{", GOOD], "(2 of 3 rows that were checked are bad); correct it, or set data.on_bad_row to skip"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(home, lines, message):
    rows("train.jsonl", *lines)
    [fault] = faults(grpo())
    assert message in fault


def test_an_estimator_of_pass_rates_needs_the_column(home):
    rows("train.jsonl", {**GOOD, "pass_rate": 0.5}, GOOD)
    algorithm = {"adv_estimator": {"kind": "a2po"}, "loss": {"kind": "a2po"}}
    [fault] = faults(grpo(algorithm=algorithm))
    assert "train.jsonl:2: `pass_rate` must be a number from 0 to 1, but it is None" in fault


def test_rows_that_will_be_skipped_are_counted(home):
    rows("train.jsonl", GOOD, "{", {"prompt": "123456789", "ground_truth": 1})
    notes = []
    assert preflight(grpo(data__on_bad_row="skip"), notes.append) == []
    assert len(notes) == 1 and notes[0].startswith("data.train: 2 of 3 rows of train.jsonl will be skipped; the first")
    rows("train.jsonl", "{")
    assert "no good row is left" in faults(grpo(data__on_bad_row="skip"))[0]


def test_missing_files(home):
    (home / "train.jsonl").unlink()
    (home / "eval.jsonl").unlink()
    (home / "eval.jsonl").mkdir()
    found = faults(grpo())
    assert ["data.train: there is no file train.jsonl" in found[0], "data.eval: there is no file" in found[1]] == [1, 1]


def test_every_source_of_a_mixture_is_checked_as_the_run_reads_it(home):
    rows("more.jsonl", {"question": "1+1=", "answer": "2"})
    more = {"path": "more.jsonl", "weight": 1, "columns": {"prompt": "question", "ground_truth": "answer"}}
    first = {"path": "train.jsonl", "weight": 3, "name": "sums"}
    rewards = [{"kind": "exact_answer", "datasets": ["sums", "more"]}]
    rows("train.jsonl", GOOD)
    notes = []
    assert preflight(grpo(data__train=[first, more], data__eval=None, rewards=rewards), notes.append) == []
    assert notes == []
    [fault] = faults(grpo(data__train=[first, {"path": "more.jsonl", "weight": 1}]))
    assert fault.startswith("data.train.1: more.jsonl:1: a row must have either `messages` (chat turns) or `prompt`")
    assert (
        "data.train.1: there is no file gone.jsonl"
        in faults(grpo(data__train=[first, more | {"path": "gone.jsonl"}]))[0]
    )
    [fault] = faults(grpo(data__train=[first, more | {"weight": 0.12345678}]))
    assert fault.startswith("data.train: the shares {'sums': 3.0, 'more': 0.12345678} of the sources repeat only after")


def test_when_the_time_is_up_the_number_of_checked_rows_is_told(home, monkeypatch):
    monkeypatch.setattr(rows_module, "ROWS_S", -1.0)
    rows("train.jsonl", *[GOOD] * 150, "{")
    notes = []
    assert preflight(grpo(), notes.append) == []
    assert notes == [
        "data.train: the first 100 rows of train.jsonl were checked, the others were left out to save time"
    ]


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("two", "ground_truth 'two' holds no number"),
        ([2, 3], "the exact_answer reward needs one ground truth, but the row has [2, 3]"),
    ],
)
def test_a_row_that_cannot_be_scored_is_an_abstention_or_a_fault(home, truth, message):
    rows("train.jsonl", GOOD, {"prompt": "1", "ground_truth": truth})
    reward = {"kind": "exact_answer", "answer": "last_number"}
    notes = []
    assert preflight(grpo(rewards=[reward]), notes.append) == []
    assert len(notes) == 1 and "1 of the rows will have no reward" in notes[0] and message in notes[0]
    assert f"train.jsonl:2: {message}" in faults(grpo(rewards=[{**reward, "on_error": "stop"}]))[0]


def test_rows_of_other_forms_are_read_as_the_run_reads_them(home):
    rows("train.jsonl", {"prompt": [{"role": "user", "content": "1+1="}], "data_source": "sums", "reward_model": {}})
    assert "column `ground_truth` is missing" in faults(grpo())[0]
    (home / "model" / "chat_template.jinja").write_text("{% if short %}{{ messages | length }}{% endif %}" + TEMPLATE)
    verl = {
        "prompt": [{"role": "user", "content": "1+1="}],
        "data_source": "sums",
        "reward_model": {"ground_truth": "2"},
    }
    rows("train.jsonl", verl)
    rewards = [{"kind": "exact_answer", "datasets": ["sums"]}]
    notes = []
    assert preflight(grpo(data__eval=None, rewards=rewards), notes.append) == []
    assert [note.split(":")[:2] for note in notes] == [
        ["data.train", " 1 of the rows that were checked is in verl's form"]
    ]
    longer = grpo(data__eval=None, rewards=rewards, data__chat_template={"short": True}, rollout__max_prompt_tokens=6)
    assert "the prompt has 7 tokens" in faults(longer)[0]
    rows("train.jsonl", {"question": "1+1=", "answer": "2"})
    columns = {"prompt": "question", "ground_truth": "answer"}
    assert faults(grpo(data__eval=None, data__columns=columns)) == []
    Path("train.jsonl").rename("train.parquet")
    assert "train.parquet cannot be read as parquet" in faults(grpo(data__eval=None, data__train="train.parquet"))[0]


CHAT = {"messages": [{"role": "user", "content": "1+1="}], "ground_truth": "2"}
CALLS_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{% for name, value in call.function.arguments | items %}{{ name }}{% endfor %}{% endfor %}{% endfor %}"
)
CALL = {"type": "function", "function": {"name": "area", "arguments": '{"w": 6}'}}
CALLED = {
    "messages": [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "42"},
    ],
    "ground_truth": "42",
}


@pytest.mark.parametrize(
    ("template", "line", "message"),
    [
        (None, CHAT, "has no chat template, and rows have `messages`"),
        (TEMPLATE, CHAT | {"messages": [{"role": "system", "content": "1"}]}, "refuses `messages`: no system turns"),
        (TEMPLATE, CHAT | {"messages": [{"role": "user", "content": "1234567"}]}, "the prompt has 9 tokens"),
        (TEMPLATE, CHAT, None),
        ("{{ 1 + messages[0].content }}", CHAT, "train.jsonl:1: the chat template fails on this row: TypeError"),
        (
            CALLS_TEMPLATE,
            CALLED,
            "the chat template fails on this row: TypeError: .*; the arguments of a tool call are text, and this",
        ),
        (
            CALLS_TEMPLATE.replace(" | items", ".items()"),
            CALLED,
            "fails on this row: UndefinedError: 'str object' has no attribute 'items'; the arguments of a tool call",
        ),
    ],
)
def test_chats_go_through_the_template(home, template, line, message):
    if template:
        (home / "model" / "chat_template.jinja").write_text(template)
    rows("train.jsonl", line)
    found = faults(grpo())
    assert found == [] if message is None else re.search(message, found[0])


def test_a_template_of_transformers_own_tags_is_left_to_transformers(home):
    (home / "model" / "chat_template.jinja").write_text("{% generation %}{% endgeneration %}")
    rows("train.jsonl", CHAT | {"messages": [{"role": "user", "content": "1" * 99}]})
    notes = []
    assert preflight(grpo(), notes.append) == []
    assert "can be rendered by transformers alone" in notes[0]


def test_a_template_with_an_error_is_a_fault_with_its_line(home):
    (home / "model" / "chat_template.jinja").write_text("{{ messages }}\n{% if %}")
    rows("train.jsonl", CHAT)
    assert faults(grpo()) == [
        "model.path: the chat template has an error in line 2: Expected an expression, got 'end of statement block'"
    ]


def test_a_data_set_that_no_row_has_is_told(home):
    notes = []
    reward = {"kind": "exact_answer", "datasets": ["gsm8k", "maht"]}
    rows("train.jsonl", {"prompt": "1", "ground_truth": "1", "dataset": "gsm8k"})
    assert preflight(grpo(rewards=[reward]), notes.append) == []
    assert "rewards: no row that was checked has the `dataset` 'maht', which `datasets` there names" in notes


def test_weights_of_megatrons_form_are_checked_by_their_manifest(home):
    """`model.path` then needs no weights of its own."""
    for path in (home / "model").glob("*.safetensors*"):
        path.unlink()
    weights = home / "open"
    config = grpo(model={"path": "model", "weights": str(weights)})
    weights.mkdir()
    assert "open has no manifest.json; give a folder" in faults(config)[0]
    (weights / "a.distcp").write_bytes(bytes(10))
    shape = read_shape(home / "model")
    saved = {"family": shape.family, "num_layers": 2, "hidden_size": shape.hidden_size, "vocab_size": shape.vocab_size}
    manifest = {"shape": saved, "files": {"a.distcp": {"bytes": 10}}}
    (weights / "manifest.json").write_text(json.dumps(manifest))
    assert faults(config) == []
    quantise(home)
    assert "fp8 weights" in faults(config)[0], "vLLM would build quantised layers from config.json"
    (home / "model" / "config.json").write_text(json.dumps(CONFIG))
    (weights / "a.distcp").write_bytes(bytes(9))
    assert "a.distcp is missing or has another size than the manifest says (1 of 1 files)" in faults(config)[0]
    manifest["shape"]["num_layers"] += 1
    (weights / "manifest.json").write_text(json.dumps(manifest))
    assert "holds a model with num_layers" in faults(config)[0]
    (weights / "manifest.json").write_text("[]")
    assert "manifest.json cannot be read" in faults(config)[0]


def truncate(home):
    path = home / "model" / "b.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def spoil_header(home):
    path = home / "model" / "a.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"shape"', b'"shxpe"', 1))


def quantise(home):
    path = home / "model" / "config.json"
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path.write_text(json.dumps(CONFIG | {"quantization_config": blocks}))


def only_ranks(home):
    no_vocabulary(home)
    (home / "model" / "tiktoken.model").write_text("YQ== 0\n")


def no_vocabulary(home):
    (home / "model" / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (truncate, "b.safetensors has"),
        (spoil_header, "a.safetensors: the safetensors header is damaged"),
        (lambda home: (home / "model" / "b.safetensors").unlink(), "names b.safetensors, which is not there (1 of 2"),
        (lambda home: (home / "model" / "model.safetensors.index.json").write_text("{"), "index.json cannot be read"),
        (lambda home: shutil.rmtree(home / "model"), "model has no config.json"),
        (lambda home: (home / "model" / "config.json").write_text("{"), "config.json is no"),
        (quantise, "model holds fp8 weights in blocks of 128 x 128, with which no run can begin"),
        (no_vocabulary, "has no tokenizer: neither tokenizer.json nor tokenizer.model is there"),
        (only_ranks, "has a tokenizer of ranks and code (tiktoken.model), which no run executes; `megatron-rl convert"),
        (lambda home: (home / "model" / "tokenizer.json").write_text("{"), "tokenizer.json cannot be read"),
        (lambda home: (home / "model" / "tokenizer_config.json").write_text("{"), "tokenizer_config.json is not JSON"),
        (
            lambda home: write_tokenizer(home / "model", [*VOCABULARY, *map(str, range(100, 130))]),
            "has the token id 72, but the model's vocabulary ends at 63",
        ),
    ],
)
def test_a_spoilt_model_folder(home, spoil, message):
    spoil(home)
    [fault] = faults(grpo())
    assert message in fault


def test_a_sentencepiece_tokenizer_serves_supervised_training(home):
    no_vocabulary(home)
    (home / "model" / "tokenizer.model").write_bytes(b"pieces")
    rows("rows.jsonl", {"prompt": "1+1=", "completion": "2"})
    assert faults(sft()) == []
    assert "has no tokenizer.json" in faults(grpo())[0], "the engine's delimiter needs one"


@pytest.mark.parametrize(
    ("source", "path", "message"),
    [
        ("", "my_reward:short", "there is no module 'my_reward'"),
        ("", "my_rewards.inner:short", "there is no module 'my_rewards.inner'"),
        ("x = 1\ndef short(:\n", "my_rewards:short", "my_rewards.py:2: "),
        ("def long(): ...", "my_rewards:short", "my_rewards.py has no function 'short'"),
        ("def short(prompts, completions): ...", "my_rewards:short", None),
        ("async def short(completions, ground_truth, trainer_state, log_metric): ...", "my_rewards:short", None),
        (
            "def short(level, **columns): ...",
            "my_rewards:short",
            "short(level, **columns) asks for the argument 'level'",
        ),
        ("async def short(level): ...", "my_rewards:short", "which nobody offers (offered are completion_ids, compl"),
        ("def short(completions, rewards): ...", "my_rewards:short", "asks for the argument 'rewards'"),
        ("def short(completions, /, **columns): ...", "my_rewards:short", "takes 'completions' by its position alone"),
        ("@wrapped\ndef short(level): ...", "my_rewards:short", None),
        ("short = partial(print, level=3)", "my_rewards:short", None),
        ("def short(**columns): ...", "my_rewards.py:short", None),
        ("def long(**columns): ...", "my_rewards.py:short", "my_rewards.py has no function 'short'"),
        ("", "no/such/file.py:short", "there is no file no/such/file.py"),
        ("class short: ...", "my_rewards:short", "the class short has no method __call__"),
        ("class short(Judge): ...", "my_rewards:short", None),
        ("class short:\n    def __call__(self, level): ...", "my_rewards:short", "__call__(self, level) asks for"),
        ("class short:\n    async def __call__(self, completions, **columns): ...", "my_rewards:short", None),
        ("def short(**columns): ...", "my_rewards", "must read `package.module:function`"),
        ("def short(completions, level=1, *, ground_truth, **columns): ...", "my_rewards:short", None),
        ("from other import short", "my_rewards:short", None),
        ("from other import *", "my_rewards:short", None),
        ("try:\n    import x\nexcept ImportError:\n    short = print", "my_rewards:short", None),
        ("", "megatron_rl.recipes.tiny.rewards:digits_in_answer", None),
    ],
)
def test_a_reward_function_is_seen_in_its_source(home, source, path, message):
    if source:
        (home / "my_rewards.py").write_text(source)
    found = faults(grpo(rewards=[{"kind": "exact_answer"}, {"kind": "function", "path": path}]))
    assert found == [] if message is None else len(found) == 1 and message in found[0]


CLASS = "class Judge:\n    def __init__(self, model, *, port=1): ...\n    def __call__(self, solution_str): ...\n"


@pytest.mark.parametrize(
    ("source", "reward", "message"),
    [
        ("def f(completions, level): ...", {"kind": "function", "arguments": {"level": 1}}, None),
        ("def f(**given): ...", {"kind": "function", "arguments": {"level": 1}}, None),
        ("def f(completions): ...", {"kind": "function", "arguments": {"levl": 1}}, "does not take 'levl'"),
        (CLASS, {"kind": "compute_score", "path": "mine:Judge", "arguments": {"model": "m", "port": 2}}, None),
        (CLASS, {"kind": "compute_score", "path": "mine:Judge"}, "__init__(self, model, *, port=1) asks for the"),
        (CLASS, {"kind": "compute_score", "path": "mine:Judge", "arguments": {"modl": "m"}}, "does not take 'modl'"),
        ("def f(data_source, solution_str, ground_truth, extra_info): ...", {"kind": "compute_score"}, None),
        ("def f(solution_str, ground_truth, method='strict'): ...", {"kind": "compute_score"}, None),
        ("def f(completions, **columns): ...", {"kind": "compute_score"}, "'completions', which nobody offers"),
    ],
)
def test_a_reward_gets_the_arguments_that_it_takes(home, source, reward, message):
    (home / "mine.py").write_text(source)
    found = faults(grpo(rewards=[{"kind": "exact_answer"}, {"path": "mine:f"} | reward]))
    assert found == [] if message is None else len(found) == 1 and message in found[0]


def test_a_reward_cannot_ask_for_columns_of_rows_that_have_only_a_question(home):
    (home / "mine.py").write_text("def f(completions, solution, **columns): ...")
    rows("bare.jsonl", {"prompt": "1"})
    reward = {"kind": "function", "path": "mine:f"}
    [fault] = faults(grpo(rewards=[reward], data={"train": "bare.jsonl"}))
    assert "asks for the argument 'solution', which nobody offers" in fault
    rows("bad.jsonl", {"question": "1"})
    [fault] = faults(grpo(rewards=[reward], data={"train": "bad.jsonl"}))
    assert "bad.jsonl:1" in fault, "the columns of rows that cannot be read are not known"


def test_rows_whose_tests_pass_for_a_program_that_does_nothing_are_told(home):
    right = {"prompt": "1", "ground_truth": ["assert f(1) == 2"]}
    weak = {"prompt": "1", "ground_truth": ["assert all(a == b for a, b in zip(f(1), [2]))"]}
    empty = {"prompt": "1", "ground_truth": [{"input": "1\n", "output": ""}]}
    rows("train.jsonl", right, weak, empty)
    notes: list[str] = []
    assert preflight(grpo(rewards=[{"kind": "code"}], data={"train": "train.jsonl"}), notes.append) == []
    assert "1 of the rows will have no reward" in notes[0] and "every `output` is empty" in notes[0]
    [note] = [note for note in notes if "functions return the same" in note]
    assert "the tests of 1 of the 2 rows that were tried" in note and "[], as in 'assert all(" in note


def test_rows_that_compute_score_could_not_score_are_told(home):
    (home / "mine.py").write_text("def f(solution_str, ground_truth): ...")
    rows("train.jsonl", {"prompt": "1"}, {"prompt": "1", "reward_model": {"ground_truth": "2"}})
    reward, notes = {"kind": "compute_score", "path": "mine:f"}, []
    data = {"train": "train.jsonl"}
    assert preflight(grpo(rewards=[reward], data=data), notes.append) == []
    assert "1 of the rows will have no reward" in notes[0] and "neither `ground_truth` nor `rewar" in notes[0]
    [found] = faults(grpo(rewards=[{**reward, "on_error": "stop"}], data=data))
    assert "train.jsonl:1: the row has neither `ground_truth`" in found


def test_a_column_with_the_name_of_an_argument_is_refused(home):
    rows("train.jsonl", {"prompt": "1+1=", "ground_truth": "2", "trainer_state": 1, "data_source": "x"})
    [found] = faults(grpo())
    assert "the training rows have a column 'trainer_state', but my_rewards:short gets an argument of this" in found
    (home / "mine.py").write_text("def f(data_source, solution_str, ground_truth): ...")
    assert faults(grpo(rewards=[{"kind": "compute_score", "path": "mine:f"}])) == []


def test_a_loss_and_an_estimator_of_ones_own_are_seen_in_their_source(home):
    (home / "mine.py").write_text("raise SystemExit('this module must not be run')\ndef loss(terms): ...\n")

    def algorithm(loss: str, estimator: str) -> dict:
        paths = {"loss": f"mine:{loss}", "adv_estimator": estimator}
        return {key: {"kind": "function", "path": path} for key, path in paths.items()}

    assert faults(grpo(algorithm=algorithm("loss", "mine:loss"))) == []
    absent, nowhere = faults(grpo(algorithm=algorithm("misspelt", "no_such_module:f")))
    assert absent.startswith("algorithm.loss: mine:misspelt: ") and "has no function 'misspelt'" in absent
    assert nowhere.startswith("algorithm.adv_estimator: no_such_module:f: there is no module 'no_such_module'")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout__max_response_tokens": 57}, "max_response_tokens (57) = 65 exceeds the 64 positions"),
        (
            {"policy": {"parallel": {"tensor": 8}}},
            "4 attention heads, which policy.parallel.tensor=8 does not divide; it may be 1, 2 or 4",
        ),
        (
            {"rollout__parallel": {"tensor": 3}},
            "with rollout.parallel.tensor=3 the engines cannot split it: it may be 1, 2 or 4",
        ),
        ({"policy": {"routing_replay": True}}, "policy.routing_replay is True, but the model has no experts"),
        ({"rollout__delimiter": "</thought>"}, "rollout.delimiter '</thought>' is not in the vocabulary"),
        (
            {"rollout__thinking": {"thought_tokens": 12, "response_tokens": 7}, "rollout__delimiter": "end"},
            "the closing's 3 tokens + response_tokens = 22; raise it",
        ),
        ({"run__name": "x" * 300}, "run.name has a part of 300 bytes"),
        ({"run__name": ""}, "run.name '' names no folder"),
        ({"run__name": "."}, "run.name '.' names no folder below run.folder"),
        ({"run__name": "../../x"}, "run.name '../../x' names no folder below run.folder"),
        ({"run__name": "a/../../x"}, "names no folder below run.folder"),
        ({"run__folder": "train.jsonl"}, "train.jsonl: Not a directory)"),
        ({"run__folder": "/proc/runs"}, "cannot be written (/proc: "),
    ],
)
def test_what_does_not_fit(home, changes, message):
    [fault] = faults(grpo(**changes))
    assert message in fault


def test_a_row_without_its_thinking_budget_is_named(home):
    rows("train.jsonl", *({"prompt": "1", "ground_truth": "2", "n": n} for n in (3, 9)))
    tokens = {"kind": "column", "name": "n", "high": 8}
    section = {"thought_tokens": tokens, "response_tokens": 4}
    [fault] = faults(grpo(rollout__thinking=section, rollout__delimiter="end", data={"train": "train.jsonl"}))
    assert "train.jsonl:2: column `n` has 9, but rollout.thinking.thought_tokens needs an integer from 0 to 8" in fault


def test_a_full_disk_is_told_with_both_numbers(home, monkeypatch):
    """In fp32 a parameter takes 4 bytes of weights and 8 of state."""
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, 10**4))
    [fault] = faults(grpo())
    parameters = FAMILIES["qwen3"].num_parameters(read_shape(Path("model")))
    assert f"has 0.01 MB free, and two checkpoints need {2 * 12 * parameters / 1e6:.2f} MB" in fault


@pytest.mark.parametrize(("choice", "of_head"), [("drop", 0), ("keep", 4), ("train", 12)])
def test_the_disk_has_room_for_a_multi_token_head_too(home, monkeypatch, choice, of_head):
    """One that is kept has 4 bytes of each fp32 number of its files, and one that is trained has a state, too."""
    shape = with_head(home)
    tensors = FAMILIES["qwen3_next"].head_tensors(replace(shape, multi_token=True))
    with_head(home, **tensors)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, 10**4))
    [fault] = faults(grpo(policy={"multi_token": choice}))
    needed = 12 * FAMILIES["qwen3_next"].num_parameters(shape) + of_head * sum(map(prod, tensors.values()))
    assert f"two checkpoints need {2 * needed / 1e6:.2f} MB" in fault


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints/step_000002"])
def test_a_used_run_folder_needs_resume(home, left):
    path = home / "runs" / "adds" / "first" / left
    path.parent.mkdir(parents=True)
    path.mkdir() if "step" in left else path.touch()
    [fault] = faults(grpo())
    assert "--resume auto" in fault
    assert faults(grpo(), resume="auto") == []
    [fault] = faults(grpo(), resume=99)
    assert fault.endswith(f"holds no checkpoint of step 99; it has {[2] if 'step' in left else 'none at all'}")


def test_a_folder_of_something_else_never_becomes_a_runs(home):
    """The run's config.json would take the place of a model's, and its export of what is in `hf`."""
    folder = home / "runs" / "adds" / "first"
    shutil.copytree(home / "model", folder)
    for how in ({}, {"planning": True}, {"resume": "auto"}):
        [fault] = faults(grpo(model={"path": str(folder), "dtype": "float32"}), **how)
        assert fault.startswith("run.name: runs/adds/first has config.json, which is no run's")
    own = write_provenance(home, grpo()).read_text()
    for left in ("hf/config.json", "critic_hf/config.json", "exports/step_000002/a", "manifest.json", "a.distcp"):
        shutil.rmtree(folder)
        (folder / left).parent.mkdir(parents=True)
        (folder / left).touch()
        [fault] = faults(grpo())
        assert f"has {Path(left).parts[0]}, which is no run's" in fault
        (folder / "config.json").write_text(own)
        assert faults(grpo()) == [], "the rest of a run that has written its config.json"
    (folder / "config.json").write_text("")
    assert "has config.json" in faults(grpo(), resume="auto")[0]
    shutil.rmtree(folder)
    for kept in ("logs/driver.log", "lock", "notes.md", "model/config.json", "rows/train.jsonl"):
        (folder / kept).parent.mkdir(parents=True, exist_ok=True)
        (folder / kept).touch()
    assert faults(grpo()) == [], "what a run leaves as it is"


def test_a_run_that_goes_on_needs_room_for_one_more_checkpoint(home, monkeypatch):
    needed = 12 * FAMILIES["qwen3"].num_parameters(read_shape(Path("model")))
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, needed))
    assert "two checkpoints need" in faults(grpo(), resume="auto")[0], "nothing is there yet"
    (home / "runs" / "adds" / "first" / "checkpoints" / "step_000002").mkdir(parents=True)
    assert faults(grpo(), resume="auto") == []
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, needed - 1))
    assert "a further checkpoint needs" in faults(grpo(), resume="auto")[0]


@pytest.mark.parametrize(
    ("num_rows", "on_bad_row", "told"),
    [(3, "fail", None), (4, "fail", "4 rows"), (1, "fail", "1 row"), (4, "skip", None), (2, "skip", "2 rows")],
)
def test_rows_that_came_or_went_since_the_checkpoint_are_told_with_their_numbers(home, num_rows, on_bad_row, told):
    folder = home / "runs" / "warm" / "checkpoints" / "step_000002"
    folder.mkdir(parents=True)
    config = sft(on_bad_row=on_bad_row)
    state = ShuffledStream({"sft.rows": ItemSource(range(3))}, 2, 0).state()
    (folder / "extra.json").write_text(json.dumps({"config": config.model_dump(mode="json"), "stream": state}))
    rows("rows.jsonl", *[{"prompt": "1+1=", "completion": "2"}] * num_rows)
    assert faults(config, resume=2) == faults(config, resume="auto")
    assert faults(config, resume="auto", planning=True) == (
        [
            f"sft.rows: rows.jsonl has {told}, and at runs/warm/checkpoints/step_000002 it had 3, so the run cannot go "
            "on in the order of then; give the rows of then, or begin a run with another run.name and, as model.path, "
            "what `megatron-rl export runs/warm FOLDER` writes"
        ]
        if told
        else []
    )
    assert faults(config, resume="auto") == faults(config, resume="auto", planning=True)


def test_a_tracker_whose_package_is_missing(home, monkeypatch):
    monkeypatch.setattr("megatron_rl.observe.trackers.find_spec", lambda name: None)
    assert "pip install mlflow" in faults(grpo(observe=[{"kind": "mlflow"}]))[0]


def test_a_reward_whose_package_is_missing(home, monkeypatch):
    config = grpo(rewards=[{"kind": "reasoning_gym", "datasets": ["reasoning_gym/lcm"]}, {"kind": "exact_answer"}])
    assert faults(config) == []
    monkeypatch.setattr("megatron_rl.verifiers.reasoning_gym.find_spec", lambda name: None)
    [fault] = faults(config)
    assert fault.startswith("rewards: reasoning_gym: ") and "pip install 'megatron-rl[reasoning-gym]'" in fault


def test_rows_of_the_hub_are_asked_for_before_a_run(home, monkeypatch):
    """Without the package `datasets`, and with one that knows no data set."""
    mixture = [{"path": "train.jsonl", "weight": 1}, {"path": "hf://owner/name", "weight": 1}]
    named = grpo(data__train=mixture)
    monkeypatch.setattr("megatron_rl.preflight.rows.find_spec", lambda name: None)
    [fault] = faults(named)
    assert fault.startswith("data.train.1: the rows of hf://owner/name can only") and "pip install datasets" in fault
    assert faults(grpo()) == faults(named, planning=True) == [], "a plan may be made elsewhere"
    monkeypatch.setattr("megatron_rl.preflight.rows.find_spec", lambda name: "found")

    def unknown(source: str) -> None:
        raise ValueError(f"{source} cannot be loaded")

    monkeypatch.setattr("megatron_rl.preflight.rows.check_hub", unknown)
    assert faults(named) == ["data.train.1: hf://owner/name cannot be loaded"]


def test_less_time_to_start_than_it_takes_is_refused(home):
    """A small model on GPUs: the imports take 20 s, and vLLM 9 s more. DeepSeek-V3's engines read a quarter of it on
    each of their nodes, 1,342 / 4 GB at 2 GB/s."""
    gpus = {"device": "gpu", "gpus_per_node": 8}
    [fault] = faults(grpo(cluster={**gpus, "start_timeout_s": 28}), planning=True)
    assert fault.startswith("cluster.start_timeout_s is 28, but a start is estimated to take 29 s: 20 s of imports")
    assert faults(grpo(cluster={**gpus, "start_timeout_s": 30}), planning=True) == []
    assert faults(grpo(cluster__start_timeout_s=5)) == [], "on CPUs nobody knows"
    [large] = (Path(__file__).parents[3] / "recipes/deepseek_v3").glob("*gspo*.yaml")
    config = read([str(large), "cluster.start_timeout_s=60"])
    [fault] = devices.faults_of_start_timeout(config, planned_shape(config))
    assert "estimated to take 197 s" in fault and "1,342 GB of weights at 2 GB/s" in fault


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1+1=", "completion": "234"}, None),
        ({"prompt": "1+1=", "completion": "2345"}, "the row has 9 tokens, but sft.max_tokens is 8"),
        ({"prompt": "1+1=", "completion": "234<eos>"}, None),
        ({"prompt": "1"}, "`completion` must be text"),
        ({"messages": [{"role": "user", "content": "1"}]}, "must end with a turn of the role assistant"),
        ({"messages": [{"role": "assistant", "content": "1234567"}]}, "the prompt has no tokens: turn 1 is the assist"),
    ],
)
def test_supervised_rows(home, row, message):
    (home / "model" / "chat_template.jinja").write_text(TEMPLATE)
    rows("rows.jsonl", {"prompt": "1", "completion": "2"}, row)
    found = faults(sft())
    assert found == [] if message is None else "rows.jsonl:2" in found[0] and message in found[0]


def test_a_models_name_on_the_hub_is_recognised(home):
    [fault] = faults(grpo(model__path="owner/name"))
    assert "does not exist" in fault and "`hf download owner/name --local-dir models/name`" in fault
    for path in ("model/name", "/owner/name", "name", "a/b/name"):
        assert "hf download" not in "".join(faults(grpo(model__path=path)))
    notes = []
    preflight(grpo(model__path="Qwen/Qwen3-32B"), notes.append, planning=True)
    assert "hf download Qwen/Qwen3-32B" in notes[0]


def test_engines_need_vllm_and_a_plan_does_not(home, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    [fault] = faults(grpo())
    assert fault.startswith("vLLM is not installed") and "tools/setup.sh" in fault
    assert faults(grpo(), planning=True) == []
    delta = DeltaNet(2, 2, 4, 4, convolution=4, interleaved=True)
    linear = changed(read_shape(home / "model"), (0,), attention=delta)
    on_gpus = grpo(cluster__gpus_per_trainer=1, cluster__gpus_per_engine_rank=1)
    [kernels, _] = module._packages(on_gpus, linear, planning=False)
    assert "has linear attention" in kernels and "install fla-core" in kernels
    mamba = changed(linear, (0,), attention=Mamba2(2, 2, 4, 4, convolution=4))
    for config, shape in ((grpo(), linear), (on_gpus, mamba)):
        assert len(module._packages(config, shape, planning=False)) == 1, "neither a CPU nor Mamba-2 needs kernels"
    assert module._packages(on_gpus, linear, planning=True) == []


def test_a_head_dim_that_vllm_cannot_compute_on_a_cpu_is_refused(home):
    path = home / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"head_dim": 16}))
    assert any("has the head dim 16, and vLLM's attention on CPUs knows 32, 64" in one for one in faults(grpo()))
    for elsewhere in (grpo(rollout__backend="my_rewards:short"), grpo(cluster__gpus_per_engine_rank=1)):
        assert not any("head dim" in one for one in faults(elsewhere))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("DeepSeek-V3", "latent attention, which vLLM on CPUs computes wrongly for several tokens"),
        ("Qwen3-Next-80B-A3B-Instruct", "linear attention, whose state would have wrong drafts"),
        ("GLM-4.6", ""),
    ],
)
def test_drafts_for_a_model_that_vllm_computes_wrongly_with_them_are_refused(name, told):
    shape = read_shape(CONFIGS / f"{name}.json")
    found = devices.faults_of_engine(grpo(model__dtype="bfloat16", rollout__speculative={}), shape)
    assert [told in one and "rollout.speculative: " in one for one in found] == [True] * bool(told)


def test_a_type_in_which_vllm_computes_a_model_wrongly_or_not_at_all_is_refused():
    glm, linear = (read_shape(CONFIGS / f"{name}.json") for name in ("GLM-4.6", "Qwen3-Next-80B-A3B-Instruct"))
    on_gpus = {"cluster__gpus_per_trainer": 1, "cluster__gpus_per_engine_rank": 1}
    [fault] = devices.faults_of_engine(grpo(model__dtype="float16", **on_gpus), glm)
    assert ": model.dtype is float16, in which vLLM" in fault and "routed_scaling_factor 2.5" in fault
    assert devices.faults_of_engine(grpo(model__dtype="bfloat16", **on_gpus), glm) == []
    minimax = changed(replace(glm, family="minimax_m2"), mlp=Mixture(8, 2, 8, score="sigmoid"))
    [fault] = devices.faults_of_engine(grpo(), minimax)
    assert "no sigmoid router without groups of experts" in fault
    assert devices.faults_of_engine(grpo(**on_gpus), minimax) == []
    ungated = changed(replace(glm, family="nemotron_h"), mlp=SquaredReluMixture(8, 2, 8))
    [fault] = devices.faults_of_engine(grpo(), ungated)
    assert "vLLM on CPUs computes only gated experts" in fault
    assert devices.faults_of_engine(grpo(**on_gpus), ungated) == []
    plain = replace(glm, layers=(replace(glm.layers[-1], mlp=replace(glm.mixture, scaling_factor=1.0)),))
    assert devices.faults_of_engine(grpo(model__dtype="float16", **on_gpus), plain) == []
    for dtype in ("float16", "float32"):
        [fault] = devices.faults_of_engine(grpo(model__dtype=dtype), linear)
        assert f": model.dtype is {dtype}, and vLLM's gated delta rule on CPUs" in fault
    assert devices.faults_of_engine(grpo(model__dtype="float16", **on_gpus), linear) == []
    assert devices.faults_of_engine(grpo(model__dtype="float16", rollout__backend="my_rewards:short"), linear) == []


def test_a_clone_whose_metadata_is_missing_is_named_before_a_run(home, monkeypatch):
    """As on PYTHONPATH alone: vLLM's processes would not find the bridge."""
    assert faults(grpo()) == []
    monkeypatch.setattr(plugins, "entry_points", lambda group: ())
    [fault] = faults(grpo())
    assert fault.startswith("the entry points vllm.general_plugins: megatron_rl_bridge, megatron_rl_rollout are not in")
    assert "pip install --no-deps -e ." in fault
    assert faults(grpo(), planning=True) == []
    assert not any("entry points" in one for one in faults(grpo(rollout__backend="my_rewards:short")))


def test_arguments_that_vllm_does_not_have_are_named_with_the_nearest_ones(home):
    options = {"moe_bakend": "triton", "max-num-batched-tokens": 4096, "zzz": 1, "max_num_seqs_": None}
    first, second, third, _ = told = faults(grpo(rollout__vllm=options), planning=True)
    assert first.startswith(
        "rollout.vllm.moe_bakend: the installed vLLM has no such argument; did you mean moe_backend"
    )
    assert "did you mean max_num_batched_tokens" in second and "vllm.EngineArgs" in third
    assert told == faults(grpo(rollout__vllm=options))


@pytest.mark.deep
def test_values_that_vllm_refuses_are_told_before_a_run(home):
    [fault] = faults(grpo(rollout__vllm={"moe_backend": "tritn", "max_num_batched_tokens": 4096}))
    assert fault.startswith('rollout.vllm.moe_backend: vLLM refuses "tritn": argument --moe-backend: invalid choice')


def test_without_vllm_a_plan_says_that_its_arguments_are_not_checked(home, monkeypatch):
    monkeypatch.setattr(engine_options, "find_spec", lambda name: None)
    notes = []
    assert preflight(grpo(rollout__vllm={"moe_bakend": "triton"}), notes.append, planning=True) == []
    assert notes == ["not checked, because vLLM is not installed here: rollout.vllm"]


def test_training_needs_the_full_distribution(home):
    assert faults(grpo(rollout__sampling={"top_p": 0.9})) == faults(grpo(rollout__sampling={"top_p": 0.9, "top_k": 0}))
    [fault] = faults(grpo(rollout__sampling={"top_k": 20}))
    assert fault.startswith("rollout.sampling: with top_p 1 and top_k 20 ") and fault.endswith("to 1 and top_k to 0")
    assert faults(grpo(rollout__sampling={"temperature": 0.6})) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_data_type_that_this_cpu_multiplies_slowly_is_told(home, monkeypatch, dtype):
    notes = []
    monkeypatch.setattr(module, "MUCH_SLOWER", 0)  # then any CPU is slow
    assert preflight(grpo(model__dtype=dtype), notes.append) == []
    [note] = [note for note in notes if "GFLOP/s" in note]
    assert note.startswith(f"model.dtype is {dtype}") and note.endswith("remove model.dtype, or set float32")
    told = len(notes)
    preflight(grpo(model__dtype="float32"), notes.append)
    preflight(grpo(model__dtype="bfloat16", cluster__gpus_per_trainer=1), notes.append)
    assert not any("GFLOP/s" in note for note in notes[told:])


def test_gpus_need_a_torch_that_can_use_them(home, monkeypatch):
    """The torch of the environment that the run will have: a plan may be made anywhere, and a job may have another."""
    (home / "torch").mkdir()
    version = home / "torch" / "version.py"
    (home / "torch" / "__init__.py").touch()
    version.write_text("cuda: Optional[str] = None\nhip: Optional[str] = None\n")
    gpus = {"cluster__gpus_per_trainer": 1}
    [fault] = faults(grpo(**gpus))
    assert "cluster.gpus_per_trainer is 1)" in fault and "`make gpu-env`" in fault and "cluster.device to cpu" in fault
    assert faults(grpo(**gpus), in_job=True) == faults(grpo(**gpus, slurm={"nodes": 2}), in_job=True) == [fault]
    for other in ({"container": "image.sqsh"}, {"environment": "source venv/bin/activate"}):
        assert faults(grpo(**gpus, slurm=other), in_job=True) == []
        assert faults(grpo(**gpus, slurm=other)) == [fault]
    told: dict[str, list[str]] = {"": [], "image.sqsh": []}
    for container, notes in told.items():
        assert (
            preflight(grpo(**gpus, slurm={"container": container or None}), notes.append, planning=True, in_job=True)
            == []
        )
    assert f"this Python cannot submit the job: {fault}" in told[""]
    assert not any("cannot submit" in note for note in told["image.sqsh"])
    assert faults(grpo(**gpus), planning=True) == faults(grpo()) == []
    version.write_text("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n")
    assert faults(grpo(**gpus)) == []


def test_all_faults_are_raised_together(home):
    (home / "train.jsonl").unlink()
    truncate(home)
    screen = io.StringIO()
    with pytest.raises(ValueError) as caught:
        check_before_start(grpo(run__name="x" * 300), Console(file=screen), resume=None)
    head, *told = str(caught.value).splitlines()
    assert head == "3 faults would stop this run:" and all(line.startswith("  - ") for line in told) and len(told) == 3


def test_a_plan_for_another_machine_says_what_was_not_checked(home):
    config = grpo(model__path="models/Qwen3-32B")
    notes = []
    assert preflight(config, notes.append, planning=True) == []
    assert notes[0].startswith("not checked, because the folder models/Qwen3-32B is not there: weights, tokenizer")
    [fault] = faults(config)
    assert "models/Qwen3-32B has no config.json" in fault


def test_a_dry_run_prints_the_plan_and_then_the_faults(home):
    (home / "run.yaml").write_text(json.dumps(json.loads(grpo().model_dump_json(exclude={"algorithm", "bridge"}))))
    rows("train.jsonl", GOOD, "{")
    command = [sys.executable, "-m", "megatron_rl", "grpo", "run.yaml", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=home)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.index("parameters") < done.stdout.index("data.train: train.jsonl:2: the row is not JSON")


def test_nothing_heavy_is_imported(home):
    code = (
        "import sys, megatron_rl.preflight.checks\n"
        "print(*sorted({'torch', 'transformers', 'vllm', 'ray', 'megatron'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
