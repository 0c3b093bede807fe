"""Models as transformers computes them, for comparison."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers


def open_model(folder: Path, dtype: torch.dtype = torch.float32, **options: str) -> torch.nn.Module:
    """Kimi-K2 is opened by the name of its architecture. The norms of compressed q, k and v get `rms_norm_eps` of
    config.json, as in vLLM and Megatron-Core; transformers has 1e-6 there for every model, and GLM-4.7-Flash and
    Moonlight say 1e-5. A folder with a vision tower is opened whole."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "kimi_k2":
        known = transformers.DeepseekV3Config(**config | {"model_type": "deepseek_v3"})
        model = transformers.DeepseekV3ForCausalLM.from_pretrained(folder, config=known, dtype=dtype, **options)
    else:
        known = (
            transformers.AutoModelForImageTextToText if "vision_config" in config else transformers.AutoModelForCausalLM
        )
        model = known.from_pretrained(folder, dtype=dtype, **options)
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = config.get("text_config", config)["rms_norm_eps"]
    return model
