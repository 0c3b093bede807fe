"""Reads from config.json which layers have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SCALED = {"olmo3": False, "gpt_oss": True}
"""The families that have both windows and a scaling of the rotary frequencies, and whether layers with a window scale
them as the others do."""


def window(config: Mapping[str, Any], layers: list[int]) -> dict[str, Any]:
    """ModelShape's fields for a sliding window in the given layers. If config.json has `layer_types`, this key decides
    instead of `layers`."""
    if types := config.get("layer_types"):
        foreign = sorted(set(types) - {"sliding_attention", "full_attention"})
        if foreign:
            raise ValueError(f"layer_types has {foreign[0]}; supported are sliding_attention and full_attention")
        layers = [layer for layer, kind in enumerate(types) if kind == "sliding_attention"]
    if not layers or config.get("sliding_window") is None:
        return {}
    return {"sliding_window": config["sliding_window"], "sliding_layers": tuple(layers)}


def upper_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen's rule: with use_sliding_window, the layers from max_window_layers upwards have the window."""
    if not config.get("use_sliding_window", False):
        return {}
    return window(config, list(range(config["max_window_layers"], config["num_hidden_layers"])))


def all_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    return window(config, list(range(config["num_hidden_layers"])))
