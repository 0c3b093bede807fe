"""A model's folder that is spoilt, or that trainer or engines cannot compute, is named before a run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
from run_home import (
    CONFIG,
    CONFIGS,
    VOCABULARY,
    faults,
    grpo,
    rows,
    safetensors,
    sft,
    truncate,
    with_head,
    write_tokenizer,
)
from small_models import changed

from megatron_rl.models import FAMILIES, obstacle_to_fused_layers, read_shape
from megatron_rl.preflight import devices
from megatron_rl.preflight.checks import preflight
from megatron_rl.preflight.model import faults_of_division, faults_of_model
from megatron_rl.types import Mixture
from megatron_rl.types.mamba import Mamba2, SquaredReluMixture


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


def test_a_models_name_on_the_hub_is_recognised(home):
    [fault] = faults(grpo(model__path="owner/name"))
    assert "does not exist" in fault and "`hf download owner/name --local-dir models/name`" in fault
    for path in ("model/name", "/owner/name", "name", "a/b/name"):
        assert "hf download" not in "".join(faults(grpo(model__path=path)))
    notes = []
    preflight(grpo(model__path="Qwen/Qwen3-32B"), notes.append, planning=True)
    assert "hf download Qwen/Qwen3-32B" in notes[0]


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
