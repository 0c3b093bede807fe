"""Folders that transformers writes for models with a vision tower: the text model alone comes out, bit for bit."""

from __future__ import annotations

import json
import shutil

import cover
import pytest
import torch
import transformers
from composites import HEAD, MODELS, OF_HEADS, Made
from folders import assert_same, back, read, write, write_folder
from safetensors.torch import save_file
from test_convert_int4 import INT4, write_int4

from megatron_rl.commands import hf_to_megatron, megatron_to_hf
from megatron_rl.convert import Options, Verification, open_checkpoint, to_open, to_ranks
from megatron_rl.models import check_model, read_shape
from megatron_rl.models.composite import COMPOSITES, check_text_alone
from megatron_rl.types import Mesh

PARTS = {
    **{"qwen3_5": {"model.visual"}, "qwen3_5_moe": {"model.visual"}, "kimi_k25": {"vision_tower", "mm_projector"}},
    **{"qwen2_5_vl": {"visual"}, "qwen3_vl": {"model.visual"}, "qwen3_vl_moe": {"model.visual"}},
    "gemma3": {"vision_tower", "multi_modal_projector"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root, known = tmp_path_factory.mktemp("composites"), {}

    def of(name: str) -> Made:
        if name not in known:
            known[name] = Made(name, root)
        return known[name]

    return of


@pytest.mark.parametrize("name", cover.essential(MODELS, "qwen3_5_moe"))
def test_the_text_model_comes_out_with_the_same_bits(made, tmp_path, name):
    one = made(name)
    drop = Options(multi_token="drop")
    assert_same(read(back(one.folder, tmp_path / "hub", drop)), one.tensors)
    write(to_open(open_checkpoint(one.folder), drop), tmp_path / "open")
    assert_same(read(back(tmp_path / "open", tmp_path / "from_open")), one.tensors)
    mesh = Mesh(tensor=2, pipeline=2)
    write(to_ranks(open_checkpoint(one.folder), mesh, False, drop), tmp_path / "ranks")
    assert_same(read(back(tmp_path / "ranks", tmp_path / "from_ranks")), one.tensors)


@pytest.mark.parametrize("name", cover.essential(MODELS, "qwen3_5_moe"))
def test_transformers_computes_the_same_logits_of_text(made, tmp_path, name):
    one = made(name)
    folder = back(one.folder, tmp_path / "hub")
    config = json.loads((folder / "config.json").read_text())
    assert not {"text_config", "vision_config", "auto_map"} & config.keys()
    assert not (folder / "preprocessor_config.json").exists() and (folder / "tokenizer.json").exists()
    if name == "kimi_k25":
        assert config["architectures"] == ["DeepseekV3ForCausalLM"] and config["model_type"] == "kimi_k2"
        known = transformers.DeepseekV3Config(**config | {"model_type": "deepseek_v3"})
        text = transformers.DeepseekV3ForCausalLM.from_pretrained(folder, config=known)
    else:
        text = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert config["architectures"] == [type(text).__name__]
    ids = torch.arange(1, 25)[None]
    with torch.no_grad():
        whole, alone = one.model(input_ids=ids).logits, text(ids).logits
    torch.testing.assert_close(alone, whole, rtol=0, atol=1e-6)  # logits of order 1 in fp32; the same operations
    assert whole.std() > 0.1


@pytest.mark.parametrize("name", cover.essential(MODELS, "qwen3_5_moe", "kimi_k25"))
def test_what_is_left_out_is_told_by_the_beginnings_of_names(made, tmp_path, capsys, name):
    one = made(name)
    assert hf_to_megatron.main([str(one.folder), str(tmp_path / "open"), "--workers", "1"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    for part in PARTS[name]:
        count = sum(key.startswith(f"{part}.") for key in read(one.folder))
        assert count and f"{count} tensors were left out: {part}.* is another part of the model than its text" in told
    if name in OF_HEADS:
        assert f"{len(HEAD)} tensors of the multi-token head were kept as they are" in told


def test_qwen2_5_vl_has_two_forms_of_names():
    """Of the hub and transformers 5, and of transformers 4.52 to 4.57."""
    names = COMPOSITES["qwen2_5_vl"]
    for theirs in ("model.norm.weight", "model.language_model.norm.weight"):
        assert names.own_name(theirs) == "model.norm.weight"
    assert names.own_name("lm_head.weight") == "lm_head.weight"
    assert [names.own_name(f"{start}visual.merger.ln_q.weight") for start in ("", "model.")] == [None, None]
    assert [names.part(f"{start}visual.merger.ln_q.weight") for start in ("", "model.")] == ["visual.", "model.visual."]


def test_stacked_experts_may_be_transposed(made, tmp_path):
    """As Qwen3-VL is published; transformers 5 writes them otherwise."""
    one = made("qwen3_vl_moe")
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_bytes((one.folder / "config.json").read_bytes())
    turned = {
        key: tensor.transpose(1, 2).contiguous() if ".experts." in key else tensor
        for key, tensor in read(one.folder).items()
    }
    save_file(turned, tmp_path / "whole" / "model.safetensors")
    assert_same(read(back(tmp_path / "whole", tmp_path / "hub")), one.tensors)


def test_experts_that_are_not_stacked_are_read_too(made, tmp_path):
    """As in folders that were made from the text model."""
    one = made("qwen3_5_moe")
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_bytes((one.folder / "config.json").read_bytes())
    named = {key.replace("model.", "model.language_model.", 1): tensor for key, tensor in one.tensors.items()}
    save_file(named, tmp_path / "whole" / "model.safetensors")
    assert_same(read(back(tmp_path / "whole", tmp_path / "hub")), one.tensors)


def test_the_multi_token_head_goes_through_a_checkpoint_with_the_same_bits(made, tmp_path):
    one = made("qwen3_5_moe")
    write(to_open(open_checkpoint(one.folder)), tmp_path / "open")
    found = read(back(tmp_path / "open", tmp_path / "again"))
    assert_same(found, one.tensors | one.head)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    assert megatron_to_hf.main([str(tmp_path / "open"), str(tmp_path / "without"), "--multi-token", "drop"]) == 0
    assert_same(read(tmp_path / "without"), one.tensors)
    assert json.loads((tmp_path / "without" / "config.json").read_text())["mtp_num_hidden_layers"] == 0


def test_the_head_is_verified_too(made, tmp_path):
    one, target = made("qwen3_5_moe"), tmp_path / "open"
    write(to_open(open_checkpoint(one.folder)), target)
    done = Verification(target, one.folder).run(1, lambda done_bytes: None)
    assert done.num_compared == done.num_tensors + len(one.head)
    other = tmp_path / "other"
    shutil.copytree(one.folder, other)
    save_file(one.head | {"mtp.norm.weight": torch.zeros(32)}, other / "more.safetensors")
    with pytest.raises(ValueError, match="multi_token.safetensors.*mtp.norm.weight.*row 0"):
        Verification(target, other).run(1, lambda done_bytes: None)
    path = target / "hf" / "multi_token.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    with pytest.raises(ValueError, match=r"multi_token.safetensors: tensor mtp.\S+ is damaged"):
        Verification(target).run(1, lambda done_bytes: None)


def test_a_head_that_config_json_does_not_name_is_named_when_it_is_left_out(tmp_path):
    """vLLM takes one layer for granted in Qwen3-Next (qwen3_next_mtp.py)."""
    folder = write_folder(tmp_path / "model", "qwen3_next")
    plain = (folder / "config.json").read_bytes()
    assert (back(folder, tmp_path / "plain") / "config.json").read_bytes() == plain
    save_file({"mtp.fc.weight": torch.ones(2, 3)}, folder / "more.safetensors")
    assert (back(folder, tmp_path / "kept") / "config.json").read_bytes() == plain
    dropped = back(folder, tmp_path / "dropped", Options(multi_token="drop"))
    assert json.loads((dropped / "config.json").read_text()) == json.loads(plain) | {"num_nextn_predict_layers": 0}


def test_a_run_begins_with_the_folder_unless_its_engines_load_weights_from_it(made, tmp_path):
    folder = made("kimi_k25").folder
    check_model(folder, read_shape(folder), Mesh())
    with pytest.raises(ValueError, match=f"tower .*`megatron-rl convert to-hf {folder} TARGET`, and give TARGET"):
        check_text_alone(folder)
    assert megatron_to_hf.main([str(folder), str(tmp_path / "text")]) == 0
    check_text_alone(tmp_path / "text")


@pytest.mark.parametrize("where", cover.essential(["text_config", "whole", "both"], "text_config"))
def test_kimi_is_int4_inside(tmp_path, where):
    """As Kimi-K2.5 is published, with the quantisation told in one place or in both."""
    meaning = write_int4(tmp_path / "text")
    target = tmp_path / "published"
    target.mkdir()
    tensors = {f"language_model.{name}": tensor for name, tensor in read(tmp_path / "text").items()}
    tensors |= {
        "vision_tower.patch_embed.proj.weight": torch.ones(2, 3, 4, 4),
        "mm_projector.proj.0.bias": torch.ones(2),
    }
    save_file(tensors, target / "model.safetensors")
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    whole = {"model_type": "kimi_k25", "text_config": text, "torch_dtype": text.pop("torch_dtype")}
    assert text["quantization_config"] == INT4
    if where != "text_config":
        whole["quantization_config"] = INT4
    if where == "whole":
        del text["quantization_config"]
    (target / "config.json").write_text(json.dumps(whole))
    write(to_open(open_checkpoint(target)), tmp_path / "open")
    assert_same(read(back(tmp_path / "open", tmp_path / "again")), meaning)
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["model_type"] == "kimi_k2" and "quantization_config" not in written


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"text_config": {"model_type": "qwen3"}},
            "text_config is 'qwen3', but in a kimi_k25 only kimi_k2 or deepseek",
        ),
        ({"text_config": None}, "the model_type of text_config is missing"),
        (
            {"architectures": ["NewModel"]},
            r'architectures is \["NewModel"\]; for a kimi_k25 only KimiK25For',
        ),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true, but false in text_config; make them equal"),
    ],
)
def test_what_contradicts_itself_is_named(tmp_path, changes, message):
    text = json.loads((write_folder(tmp_path / "text", "kimi_k2") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text} | changes))
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        read_shape(tmp_path)


def test_a_tensor_of_the_text_model_that_is_missing_or_unknown_is_named(made, tmp_path):
    one = made("kimi_k25")
    (tmp_path / "config.json").write_bytes((one.folder / "config.json").read_bytes())
    tensors = read(one.folder)
    name = "language_model.model.layers.1.mlp.experts.0.down_proj.weight"
    for change, message in (
        ({f"{name}x": tensors[name].clone()}, "tensor model.layers.1.mlp.experts.0.down_proj.weightx .* is unknown"),
        ({name: None}, "1 tensors are missing, the first is model.layers.1.mlp.experts.0.down_proj.weight"),
    ):
        changed = {key: tensor for key, tensor in (tensors | change).items() if tensor is not None}
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            open_checkpoint(tmp_path)
