"""Adapters that a model or an engine cannot have are named before a run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from numbered import SHAPES
from run_home import CONFIGS, faults, grpo, safetensors

from megatron_rl.models import FAMILIES, read_shape
from megatron_rl.models.peft import base_digest, require_fitting
from megatron_rl.preflight.adapters import faults_of_adapters
from megatron_rl.preflight.checks import preflight
from megatron_rl.types import Adapters


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
