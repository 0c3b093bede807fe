"""Merged weights, the digest of a base model, and what adapter_config.json may say."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from folders import read, write_folder
from numbered import SHAPES
from safetensors.torch import save_file

from megatron_rl.commands import export_checkpoint, merge
from megatron_rl.convert import adapters, manifest
from megatron_rl.convert.adapters import write_merged
from megatron_rl.convert.tensor_files import read_safetensors
from megatron_rl.models import critic_shape
from megatron_rl.models.peft import BASE, CONFIG, TENSORS, base_digest, read_adapters, require_base
from megatron_rl.planning.trainer import MERGED_BYTES
from megatron_rl.types import Adapters

WRITTEN = """{"alora_invocation_tokens": null, "alpha_pattern": {}, "arrow_config": null, "auto_mapping": null,
"base_model_name_or_path": "models/base", "bias": "none", "corda_config": null, "ensure_weight_tying": false,
"eva_config": null, "exclude_modules": null, "fan_in_fan_out": false, "inference_mode": true, "init_lora_weights": true,
"kasa_config": null, "layer_replication": null, "layers_pattern": null, "layers_to_transform": null, "loftq_config": {},
"lora_alpha": 7, "lora_bias": false, "lora_dropout": 0.05, "lora_ga_config": null, "megatron_config": null,
"megatron_core": "megatron.core", "modules_to_save": null, "monteclora_config": null, "peft_type": "LORA",
"peft_version": "0.21.2", "qalora_group_size": 16, "r": 3, "rank_pattern": {}, "revision": null,
"target_modules": ["v_proj", "q_proj"], "target_parameters": null, "task_type": "CAUSAL_LM",
"trainable_token_indices": null, "use_bdlora": null, "use_dora": false, "use_qalora": false, "use_rslora": false,
"velora_config": null}"""
"""adapter_config.json as PEFT 0.21.2 writes it."""


@pytest.fixture
def folder(tmp_path):
    tensors = {name: torch.arange(64.0).view(8, 8) + i for i, name in enumerate("abc")}
    for name, held in (("one", "ab"), ("two", "c")):
        save_file({key: tensors[key] for key in held}, tmp_path / f"{name}.safetensors")
    return tmp_path


def test_the_digest_does_not_depend_on_the_files_but_on_every_tensor(folder, tmp_path_factory):
    known, other = base_digest(folder), tmp_path_factory.mktemp("other")
    save_file({key: torch.arange(64.0).view(8, 8) + i for i, key in enumerate("abc")}, other / "model.safetensors")
    assert base_digest(other) == known
    for changed in "abc":
        tensors = {key: torch.arange(64.0).view(8, 8) + i for i, key in enumerate("abc")}
        tensors[changed][0, 3] += 1e-5
        save_file(tensors, other / "model.safetensors")
        assert base_digest(other) != known
    tensors = {key: torch.arange(64.0).view(4, 16) + i for i, key in enumerate("abc")}
    save_file(tensors, other / "model.safetensors")
    assert base_digest(other) != known, "extents count"


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(ValueError, match="manifest.json"):
        base_digest(tmp_path)


def test_a_tensor_of_another_dtype_is_named(tmp_path):
    path = tmp_path / "one.safetensors"
    save_file({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int8)}, path)
    with pytest.raises(ValueError, match="one.safetensors: tensor b is I8"):
        read_safetensors(path)


def test_only_digests_of_one_kind_are_compared(folder):
    """A converted folder without safetensors files says what its manifest says."""
    mine = base_digest(folder)
    for told in ("", mine, "manifest:0123456789abcdef"):
        require_base(told, folder, "the adapters")
    with pytest.raises(ValueError, match="is not the base model that the adapters were trained on: .* had tensors:0"):
        require_base("tensors:0123456789abcdef", folder, "the adapters")


def random(*extents: int) -> torch.Tensor:
    return torch.randn(extents, generator=torch.Generator().manual_seed(sum(extents)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_weight_is_rounded_once(dtype):
    weight, a, b = random(70, 50).to(dtype), random(4, 50).to(dtype), random(70, 4).to(dtype)
    exact = weight.double() + 0.5 * b.double() @ a.double()
    out = torch.empty_like(weight)
    write_merged(out, weight, a, b, 0.5)
    half_a_unit = torch.finfo(dtype).eps / 2
    float32 = 6 * 2.0**-24 * (weight.double().abs() + 0.5 * b.double().abs() @ a.double().abs())  # six operations
    assert ((out.double() - exact).abs() <= half_a_unit * exact.abs() + float32).all()
    wide = torch.empty(70, 50)
    write_merged(wide, weight, a, b, 0.5)
    assert torch.equal(wide, out.float()), "the model's dtype, whatever holds it"
    write_merged(weight, weight, a, b, 0.5)
    assert torch.equal(weight, out)


def test_every_rectangle_of_a_merged_weight_has_the_bits_of_the_whole_one(monkeypatch):
    """Of a matrix product it has not."""
    weight, a, b = random(1536, 576), random(32, 576), random(1536, 32)
    whole = torch.empty_like(weight)
    write_merged(whole, weight, a, b, 2.0)
    product, differ = weight + 2.0 * b @ a, 0
    monkeypatch.setitem(adapters.MERGED_ELEMENTS, "cpu", 999)
    for rows, columns in [(slice(3, 77), slice(5, 500)), (slice(1, 2), slice(None)), (slice(5, 1000), slice(7, 8))]:
        part = torch.empty_like(weight[rows, columns])
        write_merged(part, weight[rows, columns], a[:, columns], b[rows], 2.0)
        assert torch.equal(part, whole[rows, columns])
        differ += not torch.equal(weight[rows, columns] + 2.0 * b[rows] @ a[:, columns], product[rows, columns])
    assert differ


def test_the_planner_knows_what_is_merged_at_once():
    assert 2 * 4 * adapters.MERGED_ELEMENTS["cuda"] == MERGED_BYTES


def test_what_peft_writes_is_read(tmp_path):
    def found(**keys):
        (tmp_path / CONFIG).write_text(json.dumps(json.loads(WRITTEN) | keys))
        return read_adapters(tmp_path)

    assert found() == found(task_type=None, init_lora_weights="gaussian") == Adapters(3, 7.0, ("q_proj", "v_proj"))
    assert found(init_lora_weights="eva", eva_config={"rho": 1.0}, a_new_feature=None, another=[]) == found()
    assert found(use_rslora=True, lora_alpha=7.5) == Adapters(3, 7.5, ("q_proj", "v_proj"), True)
    assert found(target_modules="all-linear").targets == ()
    assert found(target_modules=["model.layers.0.self_attn.q_proj"]).targets == ("q_proj",)


def test_merge_refuses_what_is_not_finite_and_tells_what_it_did_not_check(tmp_path, capsys):
    base, start, target = tmp_path / "base", tmp_path / "start", tmp_path / "made" / "merged"
    write_folder(base, "qwen3", num_hidden_layers=1, hidden_size=8)
    start.mkdir()
    (start / CONFIG).write_text(WRITTEN)
    weights, prefix = read(base), "base_model.model.model.layers.0.self_attn"
    tensors = {}
    for name in ("q_proj", "v_proj"):
        rows, columns = weights[f"model.layers.0.self_attn.{name}.weight"].shape
        tensors[f"{prefix}.{name}.lora_A.weight"] = random(3, columns)
        tensors[f"{prefix}.{name}.lora_B.weight"] = random(rows, 3)

    def merged(**metadata: str) -> tuple[int, str, str]:
        save_file(tensors, start / TENSORS, metadata=metadata or None)
        status = merge.main([str(base), str(start), str(target)])
        said = capsys.readouterr()
        return status, said.out, said.err

    spoilt, before = tensors[f"{prefix}.v_proj.lora_B.weight"], sorted(tmp_path.iterdir())
    for value in (float("nan"), float("-inf")):
        kept, spoilt[1, 2] = spoilt[1, 2].item(), value
        status, _, error = merged()
        assert status == 1 and "v_proj.lora_B.weight has numbers that are not finite; give" in error
        assert sorted(tmp_path.iterdir()) == before, "nothing is written"
        spoilt[1, 2] = kept
    status, said, _ = merged()
    assert status == 0 and f"not checked, because {start} does not name its base model: whether that is {base}" in said
    changed = {
        name
        for name, tensor in read(target).items()
        if not torch.equal(tensor.nan_to_num(), weights[name].nan_to_num())
    }
    assert changed == {f"model.layers.0.self_attn.{name}.weight" for name in ("q_proj", "v_proj")}
    shutil.rmtree(target)
    status, said, _ = merged(**{BASE: base_digest(base)})
    assert status == 0 and "not checked" not in said
    shutil.rmtree(target)
    status, said, _ = merged(**{BASE: "manifest:0123456789abcdef"})
    assert status == 0 and f"not checked, because {start} names its base model in another form" in said


def test_a_critics_adapters_are_not_exported_without_its_value_head(tmp_path, capsys):
    checkpoint = tmp_path / "checkpoints" / "critic" / "step_000004"
    shape = replace(critic_shape(SHAPES["qwen3"]), adapters=Adapters(4, 8.0))
    checkpoint.mkdir(parents=True)
    text = manifest.describe(manifest.OPEN, shape, None, True, {}, training={"dtype": "float32"})
    (checkpoint / manifest.NAME).write_bytes(text)
    assert export_checkpoint.main([str(checkpoint), str(tmp_path / "exported")]) == 1
    assert "holds the adapters of a critic and its value head, " in (told := capsys.readouterr().err)
    assert "take the folder critic_hf" in told and not (tmp_path / "exported").exists()


FAULTS = {
    "lora_alpha must be a number above 0, but it is": [
        ("lora_alpha", one) for one in (float("nan"), 0, -32, "7", None)
    ],
    "r must be a whole number above 0, but it is": [("r", one) for one in (0, -4, "16", True, 16.0, None)],
    "use_rslora must be true or false, but it is": [("use_rslora", one) for one in ("yes", None, 1)],
    "only a list of names, or all-linear, is supported": [
        ("target_modules", one) for one in ([], None, r".*\.q_proj", [1], [""], {"q_proj": 1})
    ],
    "and only": [
        *(("peft_type", "IA3"), ("task_type", "SEQ_CLS"), ("bias", "all"), ("use_dora", True), ("lora_bias", True)),
        *(("modules_to_save", ["lm_head"]), ("rank_pattern", {"q_proj": 8}), ("alpha_pattern", {"q_proj": 8})),
        *(("layers_to_transform", [0]), ("target_parameters", ["experts"]), ("trainable_token_indices", [1])),
    ],
    "which changes the base model": [
        ("init_lora_weights", one) for one in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "new")
    ],
    "it may change what the adapters compute; if it does not, remove the key": [
        *(("alora_invocation_tokens", [1, 2]), ("use_qalora", True), ("arrow_config", {"top_k": 3})),
        *(
            ("layers_pattern", "h"),
            ("kasa_config", {"beta": 1}),
            ("use_bdlora", {"n": 2}),
        ),
        *(("monteclora_config", {"num_samples": 8}), ("velora_config", {"scale": 1}), ("a_new_feature", 3)),
    ],
}


@pytest.mark.parametrize("message", FAULTS)
def test_what_would_make_other_adapters_is_refused_with_file_and_key(message, tmp_path):
    for key, value in FAULTS[message]:
        (tmp_path / CONFIG).write_text(json.dumps(json.loads(WRITTEN) | {key: value}))
        with pytest.raises(ValueError) as refused:
            read_adapters(tmp_path)
        assert str(refused.value).startswith(f"{tmp_path / CONFIG}: {key} ") and message in str(refused.value)


def test_a_file_without_its_keys_is_refused(tmp_path):
    for key in ("r", "lora_alpha"):
        config = json.loads(WRITTEN)
        del config[key]
        (tmp_path / CONFIG).write_text(json.dumps(config))
        with pytest.raises(ValueError, match=f"adapter_config.json lacks the key '{key}'; give a folder that PEFT or"):
            read_adapters(tmp_path)
    for text, fault in (("[1]", "holds no mapping"), ("{", "is no JSON"), ("\xff", "is no JSON")):
        (tmp_path / CONFIG).write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=f"adapter_config.json {fault}"):
            read_adapters(tmp_path)
    for nowhere in (tmp_path / "absent", tmp_path / CONFIG):  # the second one is a file
        with pytest.raises(ValueError, match="has no adapter_config.json; give a folder that PEFT"):
            read_adapters(nowhere)
