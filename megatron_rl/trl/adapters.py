"""This maps PEFT's LoraConfig, which scripts give GRPOTrainer as `peft_config`, to `policy.lora`.

PEFT need not be installed here: the attributes are read by their names, as in PEFT's tuners/lora/config.py. Invariant
(tests/unit/trl): an attribute that changes what is trained is mapped, or refused by its name.
"""

from __future__ import annotations

import re
from typing import Any

DEFAULTS = {"r": 8, "lora_alpha": 8, "target_modules": None, "use_rslora": False}
"""PEFT's."""
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "task_type": ((None, "CAUSAL_LM"), "the model predicts tokens: CAUSAL_LM"),
    "lora_dropout": ((0,), "adapters have no dropout, so that trainer and engine compute the same; write 0"),
    "bias": (("none",), "biases are frozen; write 'none'"),
    "init_lora_weights": ((True,), "B is zero at the start, and A uniform; write True"),
    "modules_to_save": ((None, []), "all other weights are frozen"),
    "exclude_modules": ((None, []), "write the names of the layers that have adapters into target_modules"),
}
"""The attributes that have another value than nothing by default, or that scripts set often."""
FREE = (
    *("peft_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version"),
    *("runtime_config", "megatron_core"),
)
"""Attributes that do not change what is trained."""


def adapters_of(peft_config: Any) -> dict[str, Any]:
    """The section `policy.lora`.

    Args:
        peft_config: a `LoraConfig` of PEFT, or an object with its attributes.

    Raises:
        ValueError: it is of another method, or has attributes that cannot be expressed; the message has all of them.
    """
    kind = getattr(peft_config, "peft_type", None)
    if str(getattr(kind, "value", kind)) != "LORA":
        raise ValueError(
            f"peft_config: {type(peft_config).__name__} is no LoraConfig of PEFT; of its methods only LoRA is there"
        )
    given = vars(peft_config)
    r, alpha, modules, is_stabilised = (given.get(name, default) for name, default in DEFAULTS.items())
    faults = []
    if isinstance(modules, str):
        targets: Any = modules if modules == "all-linear" else None
    else:
        targets = sorted(map(str, modules or ()))
        targets = targets if all(re.fullmatch(r"\w+", one) for one in targets) else None
    if not targets:
        faults.append(
            f"target_modules={modules!r}: write 'all-linear', or a list of the last parts of layers' names such as "
            "['q_proj', 'v_proj']"
        )
    for name, value in given.items():
        if name in (*DEFAULTS, *FREE):
            continue
        known, why = ONLY.get(name, ((), "policy.lora has nothing like it"))
        plain = getattr(value, "value", value)
        if plain not in known if known else value:
            faults.append(f"{name}={plain!r}: {why}")
    if faults:
        raise ValueError("peft_config does not fit policy.lora: " + "; ".join(faults))
    return {"rank": r, "alpha": alpha, "targets": targets, "rank_stabilised": bool(is_stabilised)}
