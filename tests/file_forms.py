"""Families whose files hold the experts of a Qwen3-MoE in the forms of other models, and such files, made in plain
steps. The mathematics and all other tensors are Qwen3-MoE's.

Sources of the forms: transformers 5, modeling_gpt_oss.py, modeling_llama4.py, modeling_qwen3_5_moe.py. The last two
forms are no model's: they have each property without stacking.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.models import FAMILIES, Family
from megatron_rl.models.view import InFile

Tensors = dict[str, Tensor]


def _mixed(gate_E: Tensor, up_E: Tensor, dim: int) -> Tensor:
    """Slices of gate and up by turns along a dim."""
    return torch.stack((gate_E, up_E), dim + 1).flatten(dim, dim + 1)


def _gpt_oss(gate_E: Tensor, up_E: Tensor, down_E: Tensor) -> Tensors:
    gate_E, up_E, down_E = (x_E.transpose(1, 2) for x_E in (gate_E, up_E, down_E))
    return {"gate_up_proj": _mixed(gate_E, up_E, 2), "down_proj": down_E}


def _llama4(gate_E: Tensor, up_E: Tensor, down_E: Tensor) -> Tensors:
    gate_E, up_E, down_E = (x_E.transpose(1, 2) for x_E in (gate_E, up_E, down_E))
    return {"gate_up_proj": torch.cat((gate_E, up_E), 2), "down_proj": down_E}


def _qwen3_5(gate_E: Tensor, up_E: Tensor, down_E: Tensor) -> Tensors:
    return {"gate_up_proj": torch.cat((gate_E, up_E), 1), "down_proj": down_E}


def _each_transposed(gate_E: Tensor, up_E: Tensor, down_E: Tensor) -> Tensors:
    held = {}
    for i, (gate, up, down) in enumerate(zip(gate_E, up_E, down_E, strict=False)):
        held |= {f"{i}.gate_up_proj.weight": _mixed(gate.T, up.T, 1), f"{i}.down_proj.weight": down.T}
    return held


def _each_mixed(gate_E: Tensor, up_E: Tensor, down_E: Tensor) -> Tensors:
    held = {}
    for i, (gate, up, down) in enumerate(zip(gate_E, up_E, down_E, strict=False)):
        held |= {f"{i}.gate_up_proj.weight": _mixed(gate, up, 0), f"{i}.down_proj.weight": down}
    return held


WRITERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensors]] = {
    "like_gpt_oss": _gpt_oss,
    "like_llama4": _llama4,
    "like_qwen3_5": _qwen3_5,
    "each_transposed": _each_transposed,
    "each_mixed": _each_mixed,
}
"""From gate and up [experts, ffn, hidden] and down [experts, hidden, ffn] of a layer to the tensors of its files."""


def _family(name: str, *, stacked: bool, transposed: bool, interleaved: bool) -> Family:
    prefix, end = ("mlp.experts.", "") if stacked else ("mlp.experts.{}.", ".weight")
    both = InFile(prefix + "gate_up_proj" + end, 0, 2, interleaved, transposed)
    files = {
        "mlp.experts.{}.gate_proj.weight": both,
        "mlp.experts.{}.up_proj.weight": replace(both, part=1),
        "mlp.experts.{}.down_proj.weight": InFile(prefix + "down_proj" + end, transposed=transposed),
    }
    plain = FAMILIES["qwen3_moe"]
    mixture = (
        replace(rule, hf=tuple(replace(tensor, file=files.get(tensor.name)) for tensor in rule.hf))
        for rule in plain.mixture
    )
    return replace(plain, name=name, mixture=tuple(mixture))


FORMS = {
    family.name: family
    for family in (
        _family("like_gpt_oss", stacked=True, transposed=True, interleaved=True),
        _family("like_llama4", stacked=True, transposed=True, interleaved=False),
        _family("like_qwen3_5", stacked=True, transposed=False, interleaved=False),
        _family("each_transposed", stacked=False, transposed=True, interleaved=True),
        _family("each_mixed", stacked=False, transposed=False, interleaved=True),
    )
}


@contextmanager
def known() -> Iterator[None]:
    """The families are known inside the block, in this process and in its forks."""
    FAMILIES.update(FORMS)
    try:
        yield
    finally:
        for name in FORMS:
            del FAMILIES[name]


def in_files(form: str, hf: Tensors, num_layers: int, num_experts: int) -> Tensors:
    """The tensors of a Qwen3-MoE's files in another form."""
    held = dict(hf)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        if f"{prefix}0.gate_proj.weight" not in held:
            continue  # a dense layer
        gate_E, up_E, down_E = (
            torch.stack([held.pop(f"{prefix}{expert}.{name}_proj.weight") for expert in range(num_experts)])
            for name in ("gate", "up", "down")
        )
        held |= {prefix + name: tensor.contiguous() for name, tensor in WRITERS[form](gate_E, up_E, down_E).items()}
    return held


def write_form(form: str, plain: Path, target: Path) -> Path:
    """The folder of a Qwen3-MoE with its weights in another form, in one file."""
    shutil.copytree(plain, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((plain / "config.json").read_text()) | {"model_type": form}
    (target / "config.json").write_text(json.dumps(config))
    hf: Tensors = {}
    for path in plain.glob("*.safetensors"):
        hf |= load_file(path)
    held = in_files(form, hf, config["num_hidden_layers"], config.get("num_experts") or config["num_local_experts"])
    save_file(held, target / "model.safetensors", metadata={"format": "pt"})
    return target
