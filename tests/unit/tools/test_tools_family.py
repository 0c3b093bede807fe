"""The proposal of a table, checked with transformers' own model and Megatron."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file, save_file

from megatron_rl.tools.bench.family.command import main, read, tiny_config

SIZES = dict(
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=60,
    max_position_embeddings=128,
    pad_token_id=0,
)


def write(folder: Path, family: str) -> Path:
    more = {"head_dim": 16, "sliding_window": 8} if family == "Ministral" else {}
    config = getattr(transformers, f"{family}Config")(**SIZES, **more)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    return folder


@pytest.mark.deep
@pytest.mark.parametrize(
    ("family", "nearest", "fits"),
    [
        ("SeedOss", "qwen2", True),
        ("Ministral", "mistral", True),
        ("Ernie4_5", "llama", False),
        ("Exaone4", "olmo3", False),
    ],
)
def test_a_model_without_a_table_is_proposed_and_checked(tmp_path, family, nearest, fits):
    """Seed-OSS has Qwen2's tensors and forward pass, Ministral Mistral's. ERNIE 4.5 has Llama's tensors, but it rotates
    pairs; EXAONE 4 has windows as OLMo 3, but it rotates nothing in the other layers."""
    folder = write(tmp_path / "model", family)
    command = [sys.executable, "-m", "megatron_rl", "family", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    told = json.loads(done.stdout)
    assert (done.returncode, told["nearest"], told["unknown"], told["missing"]) == (0 if fits else 1, nearest, {}, {})
    of_logprobs = told["checks"].pop("Megatron's log-probs equal transformers'")
    assert set(told["checks"].values()) == {None}
    assert of_logprobs is None if fits else "the forward pass is another one" in of_logprobs


USED_AS_PRINTED = """
import json, sys
from pathlib import Path
from megatron_rl.models import FAMILIES
from megatron_rl.models.hub import read_header
from megatron_rl.tools.bench.family.command import check, read
from megatron_rl.tools.bench.family.proposal import propose

folder = Path(sys.argv[1])
config = read(folder)
tensors = {name: held[1] for name, held in read_header(folder / "model.safetensors").items()}
del FAMILIES[config["model_type"]]
names = {}
exec(propose(config, tensors).source(), names)
FAMILIES[config["model_type"]] = names[config["model_type"].upper()]
proposal = propose(config, tensors)
print(json.dumps({"is_known": proposal.is_known, "checks": check(proposal, config)}))
"""
"""Puts the file that the command prints for a model whose family is taken away in the family's place, unchanged."""


@pytest.mark.deep
def test_the_printed_file_of_minimax_m2_computes_as_transformers(tmp_path):
    config = dict(SIZES, head_dim=16, num_local_experts=8, num_experts_per_tok=2)
    transformers.MiniMaxM2ForCausalLM(transformers.MiniMaxM2Config(**config)).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields |= {"rotary_dim": 8, "scoring_func": "sigmoid", "use_routing_bias": True, "attn_type_list": [1] * 4}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    command = [sys.executable, "-c", USED_AS_PRINTED, str(tmp_path)]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout)
    assert told["is_known"] and len(told["checks"]) == 4 and set(told["checks"].values()) == {None}


def hybrid(folder: Path, **settings) -> Path:
    """A Nemotron-H whose first layers have no attention, as the published ones."""
    config = transformers.NemotronHConfig(
        **{key: value for key, value in SIZES.items() if key != "num_hidden_layers"},
        layers_block_type=["mamba", "mlp", "mamba", "mlp", "mamba", "moe", "full_attention", "mlp"],
        **dict(mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=8, n_groups=2, head_dim=16, n_routed_experts=8),
        **dict(num_experts_per_tok=2, moe_intermediate_size=16, moe_shared_expert_intermediate_size=16),
    )
    transformers.NemotronHForCausalLM(config).save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.deep
def test_a_model_of_layers_with_one_block_is_checked_with_a_layer_of_each_kind(tmp_path):
    command = [sys.executable, "-m", "megatron_rl", "family", str(hybrid(tmp_path)), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert set(json.loads(done.stdout)["checks"].values()) == {None} and done.returncode == 0


def test_a_config_json_that_transformers_refuses_is_told_and_ends_in_no_traceback(tmp_path, capsys):
    assert main([str(hybrid(tmp_path, use_cache="maybe")), "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert checks.pop("every tensor has its row") is None
    made, *others = checks.values()
    assert "transformers makes none of this config.json" in made and "use_cache" in made
    assert set(others) == {"not checked"}


@pytest.mark.deep
def test_rounding_of_norms_stored_minus_one_is_no_other_forward_pass(tmp_path):
    """transformers' own log-probs in float32 are further from float64 than 1e-4."""
    experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
    linear = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
    config = transformers.Qwen3NextConfig(**SIZES, **experts, **linear, head_dim=16)
    transformers.Qwen3NextForCausalLM(config).save_pretrained(tmp_path)
    command = [sys.executable, "-m", "megatron_rl", "family", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert set(json.loads(done.stdout)["checks"].values()) == {None} and done.returncode == 0


def test_the_class_of_a_config_json_without_one_is_transformers(tmp_path):
    def of(**config) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read(tmp_path)["architectures"]

    assert of(model_type="seed_oss") == of(model_type="seed_oss", architectures=[]) == ["SeedOssForCausalLM"]
    assert of(model_type="seed_oss", architectures=["Other"]) == ["Other"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "holds no mapping; give the folder of a Hugging Face checkpoint"),
        ({"architectures": ["LlamaForCausalLM"]}, "has no model_type"),
        ({"model_type": "new"}, "has no architectures, and transformers has no class for new"),
        ({"model_type": "new", "architectures": "New"}, 'must be a list of names, but it is "New"'),
        ({"model_type": "qwen3_5"}, "its family is there already"),
        ({"model_type": "new", "text_config": {}}, "has a text_config: new has other parts than text"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "it has no *.safetensors"),
    ],
)
def test_a_config_json_that_nothing_can_be_proposed_for_is_named(tmp_path, capsys, config, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main([str(tmp_path)]) == 1
    assert message in capsys.readouterr().err


def test_a_tiny_model_keeps_what_sizes_have_in_common():
    latent = {"num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 64, "qk_rope_head_dim": 64}
    assert tiny_config(latent) == dict.fromkeys(latent, 4) | {"head_dim": 8, "qk_rope_head_dim": 8}
    grouped = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64}
    small = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8}
    assert tiny_config(grouped) == small


def test_a_tiny_model_has_a_layer_of_each_kind():
    lists = {"layer_types": ["sliding"] * 5 + ["full"], "scales": [1, 1, 1, 2, 1, 1], "of_heads": [1] * 5}
    kept = {"layer_types": ["sliding", "sliding", "sliding", "full"], "scales": [1, 1, 2, 1], "of_heads": [1] * 5}
    assert tiny_config({"num_hidden_layers": 6} | lists) == {"num_hidden_layers": 4} | kept
    assert (
        tiny_config({"num_hidden_layers": 9, "hybrid_override_pattern": "M-M-ME*M-"})["hybrid_override_pattern"]
        == "M-E*"
    )
    assert tiny_config({"num_hidden_layers": 2, "layer_types": ["sliding", "full"]}) == {
        "num_hidden_layers": 4,
        "layer_types": ["sliding", "full", "full", "full"],
    }
    assert tiny_config({"layers_block_type": ["mamba"] * 5 + ["attention"]}) == {
        "layers_block_type": ["mamba", "mamba", "mamba", "attention"]
    }


def test_a_folder_that_holds_no_model_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    for name, message in (
        ("absent", "has no config.json, because it does not exist; give the folder"),
        ("file", "has no config.json, because it is a file; give the folder"),
        ("file/inside", "has no config.json, because it does not exist; give the folder"),
        (".", "has no config.json; give the folder"),
        ("broken", "config.json is no JSON"),
    ):
        assert main([str(tmp_path / name)]) == 1
        told = capsys.readouterr().err
        assert message in told and "Errno" not in told and told.count(str(tmp_path / name)) == 1


def test_each_fault_is_said_once(tmp_path, capsys, monkeypatch):
    """A model that transformers does not know, in whose files one matrix has a row less in each layer."""
    folder = write(tmp_path / "model", "Llama")
    fields = json.loads((folder / "config.json").read_text()) | {"model_type": "new"}
    (folder / "config.json").write_text(json.dumps(fields))
    path = folder / "model.safetensors"
    save_file({k: x[1:].clone() if "up_proj" in k else x for k, x in load_file(path).items()}, path)
    monkeypatch.setenv("COLUMNS", "200")
    assert main([str(folder)]) == 1
    told = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert told.count("it has other extents") == told.count("[47, 32], where a row asks for [48, 32]") == 1
    assert told.count("has no new; compare with its own code") == 1 and told.count("(not checked)") == 2
    assert "0 rows have no tensor, 4 tensors have other extents" in told and "refuse" not in told
