"""This maps PEFT's LoraConfig, which scripts give GRPOTrainer as `peft_config`, to `policy.lora`.

PEFT need not be installed here: the attributes are read by their names, as in PEFT's tuners/lora/config.py. Invariant
(tests/unit/trl, tests/doors): an attribute that changes what is trained is mapped, told, or refused by its name; one
that has PEFT's own default changes nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from megatron_rl.trl.notices import tell

DEFAULTS = {"r": 8, "lora_alpha": 8, "target_modules": None, "use_rslora": False}
"""PEFT's."""
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "task_type": ((None, "CAUSAL_LM"), "the model predicts tokens: CAUSAL_LM"),
    "bias": (("none",), "biases are frozen; write 'none'"),
    "init_lora_weights": ((True,), "B is zero at the start, and A uniform; write True"),
    "modules_to_save": ((None, []), "all other weights are frozen"),
    "exclude_modules": ((None, []), "write the names of the layers that have adapters into target_modules"),
}
"""The attributes that have another value than nothing by default, or that scripts set often."""
FREE = (
    *("peft_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version"),
    *("runtime_config", "megatron_core", "lora_dropout"),
)
"""Attributes that do not change what is trained, and the dropout, which is told."""
OF_HEAD: dict[str, tuple[Any, ...]] = {"task_type": ("SEQ_CLS",), "modules_to_save": (["score"],)}
"""What a reward model may have besides, whose head is always trained."""
ANY_LAYER = "'all-linear', or a list of the last parts of layers' names such as ['q_proj', 'v_proj']"


def adapters_of(
    peft_config: Any, model_type: str | None = None, layers: Collection[str] | None = None, has_head: bool = False
) -> dict[str, Any]:
    """The section `policy.lora`.

    Args:
        peft_config: a `LoraConfig` of PEFT, or an object with its attributes.
        model_type: of the model's config.json, by which PEFT's table finds default layers.
        layers: the names of the model's layers; None if they are not known. Of the names that are
            not among them nothing is trained, as in PEFT, and they are told.
        has_head: whether it is a reward model.

    Raises:
        ValueError: it is of another method, or has attributes that cannot be expressed; the message has all of them.
    """
    kind = getattr(peft_config, "peft_type", None)
    if str(getattr(kind, "value", kind)) != "LORA":
        raise ValueError(
            f"peft_config: {type(peft_config).__name__} is no LoraConfig of PEFT; of its methods only LoRA is there"
        )
    given, untouched = vars(peft_config), _defaults(peft_config)
    r, alpha, modules, is_stabilised = (given.get(name, default) for name, default in DEFAULTS.items())
    faults: list[str] = []
    targets = _targets(modules, model_type, layers, faults)
    for name, value in given.items():
        if name in (*DEFAULTS, *FREE) or (name in untouched and value == untouched[name]):
            continue
        known, why = ONLY.get(name, ((), "policy.lora has nothing like it"))
        plain, known = getattr(value, "value", value), (*known, *(OF_HEAD.get(name, ()) if has_head else ()))
        if plain not in known if known else value:
            faults.append(f"{name}={plain!r}: {why}")
    if faults:
        raise ValueError("peft_config does not fit policy.lora: " + "; ".join(faults))
    if dropout := given.get("lora_dropout"):
        tell(
            f"lora_dropout={dropout}: adapters have no dropout here, so that trainer and engine compute the same; the "
            "run trains without it, as if it were 0"
        )
    return {"rank": r, "alpha": alpha, "targets": targets, "rank_stabilised": bool(is_stabilised)}


def _targets(
    modules: Any, model_type: str | None, layers: Collection[str] | None, faults: list[str]
) -> str | list[str] | None:
    if modules is None:
        modules = _table_of_peft().get(model_type or "")
        if modules is None:
            faults.append(f"target_modules=None: PEFT has no default for model_type {model_type!r}; write {ANY_LAYER}")
            return None
    if modules == "all-linear":
        return "all-linear"
    ends = Counter(name.rpartition(".")[2] for name in layers or ())
    names = [] if isinstance(modules, str) else sorted(map(str, modules))
    whole = Counter(name.rpartition(".")[2] for name in names if name in (layers or ()))
    if names and whole.total() == len(names) and all(ends[end] == count for end, count in whole.items()):
        names = sorted(whole)  # each layer by its whole name, as PEFT writes all-linear into a model's configuration
    if not names or not all(re.fullmatch(r"\w+", one) for one in names):
        faults.append(f"target_modules={modules!r}: write {ANY_LAYER}")
        return None
    absent = [] if layers is None else [name for name in names if name not in ends]
    if absent and len(absent) < len(names):
        tell(f"target_modules: the model has no layer {', '.join(absent)}, so there is no adapter for it")
        return [name for name in names if name not in absent]
    return names


def _table_of_peft() -> Mapping[str, Any]:
    """The layers that have adapters by default, by `model_type`; nothing without PEFT."""
    try:
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TABLE
    except ImportError:
        return {}
    return dict(TABLE)


def _defaults(peft_config: Any) -> dict[str, Any]:
    """The default values of a configuration's fields."""
    found: dict[str, Any] = {}
    for one in fields(peft_config) if is_dataclass(peft_config) else ():
        if one.default is not MISSING:
            found[one.name] = one.default
        elif one.default_factory is not MISSING:
            found[one.name] = one.default_factory()
    return found
