"""The meaning of verl's settings of low-rank adapters, which are policy.lora and critic.lora here.

verl's FSDP and VeOmni trainers read `model.lora_rank`, `lora_alpha`, `target_modules` and `lora_adapter_path`, and make
adapters with PEFT. Its Megatron trainer reads `model.lora.*`, and makes them with Megatron-Bridge. Neither reads these
keys of the other (verl's docs/advance/ppo_lora.rst and trainer/config/model/hf_model.yaml). All read
`model.lora.merge`: the engines then get merged weights (`get_per_tensor_param` of its workers/engine).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megatron_rl.migrate.verl.settings import Meaning, Settings, implied, mapped, owner_of, refused
from megatron_rl.models.peft import read_adapters

FSDP = {"lora_rank": "rank", "lora_alpha": "alpha", "target_modules": "targets", "lora_adapter_path": "start"}
MEGATRON = {
    **{"lora.rank": "rank", "lora.alpha": "alpha"},
    **{"lora.target_modules": "targets", "lora.adapter_path": "start"},
}
"""The keys that a trainer of verl reads -> ours."""
LAYERS = {
    **{"linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_fc1": ("gate_proj", "up_proj")},
    **{"linear_q": ("q_proj",), "linear_k": ("k_proj",), "linear_v": ("v_proj",), "linear_proj": ("o_proj",)},
    **{"linear_fc1_gate": ("gate_proj",), "linear_fc1_up": ("up_proj",), "linear_fc2": ("down_proj",)},
    **{"linear_q_proj": ("q_proj",), "linear_q_down_proj": ("q_a_proj",), "linear_q_up_proj": ("q_b_proj",)},
    **{"linear_kv_down_proj": ("kv_a_proj_with_mqa",), "linear_kv_up_proj": ("kv_b_proj",)},
}
"""Megatron-Bridge's names of layers (its peft/lora.py and peft/canonical_lora.py) -> the names in the checkpoint."""
EVERY_LAYER = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
FUSED = {"linear_qkv", "linear_fc1"}
SHARED_A = "every layer has its own A; in verl q, k and v have one together, and so have gate and up"


def lora(settings: Settings, key: str, value: Any) -> Meaning:
    owner = owner_of(key)
    if owner == "critic" and not settings.has_critic:
        return implied("this estimator has no critic")
    prefix = _prefix(owner)
    name = key.removeprefix(prefix)
    read, unread = (MEGATRON, FSDP) if settings.is_megatron else (FSDP, MEGATRON)
    is_off = value in (None, False, 0, "", [], {})
    if name in unread and not is_off:
        instead = next(theirs for theirs, ours in read.items() if ours == unread[name])
        why = f"verl's {settings.trainer} trainer does not read it, but {prefix}{instead}"
        return refused(why) if unread[name] in ("rank", "start") else implied(why)
    if settings.engine == "torchtitan" and not is_off and read.get(name) in ("rank", "start"):
        return refused("verl's TorchTitan trainer makes no adapters; remove the key")
    if not has_adapters(settings, key):
        return implied("all weights are trained")
    if name in read:
        return _of_section(settings, owner, read[name], value)
    if name == "lora.merge" and owner == "critic":
        return implied("no engine has the critic")
    if name == "lora.merge" and not is_off:
        return mapped({"rollout.lora": "merged"}, "trainers merge the adapters while they send the weights")
    if is_off:
        return implied("engines get the adapters alone" if name == "lora.merge" else "it is off")
    return refused(f"{owner}.lora has no such key")


def _prefix(owner: str) -> str:
    return "critic.model." if owner == "critic" else "actor_rollout_ref.model."


def _read(settings: Settings, owner: str) -> dict[str, Any]:
    """verl's values of the adapters, by our names."""
    names = MEGATRON if settings.is_megatron else FSDP
    return {ours: settings[_prefix(owner) + theirs] for theirs, ours in names.items()}


def has_adapters(settings: Settings, key: str) -> bool:
    """Whether verl makes adapters for the owner of a key; Megatron-Bridge does by the rank alone."""
    read = _read(settings, owner_of(key))
    return bool(read["rank"] or (not settings.is_megatron and read["start"]))


def _of_section(settings: Settings, owner: str, ours: str, value: Any) -> Meaning:
    """The meaning of a key that the trainer reads. The key of the rank, or of the folder, has the whole section."""
    read = _read(settings, owner)
    targets, problem = _targets(settings, read["targets"])
    try:
        values, why = _values(settings, owner, read | {"targets": targets})
    except (ValueError, OSError) as error:
        return refused(str(error))
    if ours == "targets" and problem and "targets" not in values:
        return refused(f"{problem}; without {owner}.lora.targets all linear layers have adapters")
    if ours in ("alpha", "targets"):
        values = {ours: values[ours]} if ours in values else {}
    if not values or value is None or (ours == "start" and not value):
        return implied("verl's default" if ours != "start" else "B is zero at the start")
    is_same = values.get(ours) == value and not why
    return Meaning("used" if is_same else "mapped", {f"{owner}.lora.{k}": one for k, one in values.items()}, why)


def _values(settings: Settings, owner: str, read: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The values of the section `lora`, and how they differ from verl's.

    Raises:
        ValueError: the folder of adapters cannot be used.
    """
    folder = Path(str(read["start"])).expanduser() if read["start"] else None
    if folder is not None and folder.exists() and not settings.is_megatron:
        found = read_adapters(folder)
        values: dict[str, Any] = {"rank": found.rank, "alpha": found.alpha, "rank_stabilised": found.rank_stabilised}
        values |= {"targets": list(found.targets) or "all-linear", "start": str(folder)}
        return values, "rank, alpha and targets are the folder's, as in verl"
    values = {ours: read[ours] for ours in ("rank", "alpha", "targets") if read["rank"] and read[ours] is not None}
    if folder is not None:
        why = "rank, alpha and targets must be as in the folder's adapter_config.json, which PEFT writes"
        return values | {"start": str(folder)}, why
    is_fused = settings.is_megatron and settings[f"{_prefix(owner)}lora.type"] in (None, "lora")
    modules = settings[f"{_prefix(owner)}lora.target_modules"]
    return values, SHARED_A if is_fused and FUSED & set(modules or FUSED) else ""


def _targets(settings: Settings, modules: Any) -> tuple[Any, str]:
    """The value of `targets`, or None and why there is none."""
    if modules == "all-linear" or (settings.is_megatron and not modules):
        return "all-linear", ""
    if modules is None:
        return None, "PEFT then chooses the layers by the model's architecture"
    if not isinstance(modules, list) or not modules or not all(re.fullmatch(r"\w+", str(one)) for one in modules):
        return None, "only a list of the last parts of layers' names can be given"
    if not settings.is_megatron:
        return [str(one) for one in modules], ""
    if unknown := [str(one) for one in modules if one not in LAYERS]:
        return None, f"{', '.join(unknown)} is none of {', '.join(LAYERS)}"
    layers = list(dict.fromkeys(layer for one in modules for layer in LAYERS[one]))
    return ("all-linear" if set(layers) == EVERY_LAYER else layers), ""
