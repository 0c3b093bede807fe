"""Reads from config.json which layers have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.layout.checked import size

SCALED = {"olmo3": False, "gpt_oss": True}
"""The families that have both windows and a scaling of the rotary frequencies, and whether layers with a window scale
them as the others do."""


def window(config: Mapping[str, Any], layers: list[int], needed: bool = False) -> dict[str, Any]:
    """ModelShape's fields for a sliding window in the given layers. If config.json has `layer_types`, this key decides
    instead of `layers`.

    Args:
        needed: whether `sliding_window` must be there if a layer has one. If not, the window of a model without
            `layer_types` may be null or missing, and then no layer has one.

    Raises:
        KeyError, ValueError: see `checked.size`; or `layer_types` has another kind of attention, or not one entry for
            each layer.
    """
    if types := config.get("layer_types"):
        foreign = sorted(set(types) - {"sliding_attention", "full_attention"})
        if foreign:
            raise ValueError(f"layer_types has {foreign[0]}; supported are sliding_attention and full_attention")
        check_length(config, types)
        layers = [layer for layer, kind in enumerate(types) if kind == "sliding_attention"]
    if not layers or not (types or needed or config.get("sliding_window") is not None):
        return {}
    return {"sliding_window": size(config, "sliding_window"), "sliding_layers": tuple(layers)}


def check_length(config: Mapping[str, Any], types: Sequence[str]) -> None:
    """
    Raises:
        ValueError: `layer_types` has not one entry for each layer.
    """
    if len(types) != config["num_hidden_layers"]:
        raise ValueError(
            f"layer_types has {len(types)} entries, but num_hidden_layers is {config['num_hidden_layers']}"
        )


def upper_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen's rule: with use_sliding_window, the layers from max_window_layers upwards have the window."""
    if not config.get("use_sliding_window", False):
        return {}
    return window(config, list(range(size(config, "max_window_layers", least=0), config["num_hidden_layers"])))


def all_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    return window(config, list(range(config["num_hidden_layers"])))
