"""Reads from config.json which layers have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.models.config_values import flag, kinds_of_layers, size

FULL, SLIDING = "full_attention", "sliding_attention"
"""The entries of `layer_types` for layers without a window and with it."""
SCALED = {"olmo3": False, "gpt_oss": True}
"""The families that have both windows and a scaling of the rotary frequencies, and whether layers with a window scale
them as the others do. If not, config.json has `rope_parameters` for each of the two kinds of layers."""


def window(config: Mapping[str, Any], layers: list[int], needed: bool = False) -> dict[str, Any]:
    """A sliding window in the given layers, as `config.Special` has it. If config.json has `layer_types`, this key
    decides instead of `layers`.

    Args:
        needed: whether `sliding_window` must be there if a layer has one. If not, the window of a model without
            `layer_types` may be null or missing, and then no layer has one.

    Raises:
        KeyError, ValueError: see `checked.size` and `checked.kinds_of_layers`.
    """
    if types := kinds_of_layers(config, (SLIDING, FULL)):
        layers = [layer for layer, kind in enumerate(types) if kind == SLIDING]
    if not layers or not (types or needed or config.get("sliding_window") is not None):
        return {}
    return {"window": size(config, "sliding_window"), "windowed": tuple(layers)}


def upper_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen's rule: with use_sliding_window, the layers from max_window_layers upwards have the window.

    Raises:
        KeyError, ValueError: see `window`; or `layer_types` has the window without use_sliding_window; transformers'
            classes then end with an error.
    """
    if not _is_switched_on(config):
        kinds_of_layers(config, (FULL,), " without use_sliding_window")
        return {}
    return window(config, list(range(size(config, "max_window_layers", least=0), config["num_hidden_layers"])))


def all_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rule of families whose classes read `sliding_window` alone: every layer has the window, or none if it is
    null.

    Raises:
        ValueError: see `checked.size`; or `layer_types` has a layer without the window, which vLLM would obey and
            transformers would not.
    """
    if config.get("sliding_window") is None:
        return {}
    kinds_of_layers(config, (SLIDING,), f" with sliding_window {config['sliding_window']}")
    return window(config, list(range(config["num_hidden_layers"])))


def all_layers_if_switched_on(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same with use_sliding_window, and else no layer.

    Raises:
        KeyError, ValueError: see `all_layers`.
    """
    return all_layers(config) if _is_switched_on(config) else {}


def _is_switched_on(config: Mapping[str, Any]) -> bool:
    """
    Raises:
        KeyError: config.json leaves the window to transformers' default.
        ValueError: see `checked.flag`.
    """
    if not flag(config, "use_sliding_window"):
        return False
    config["sliding_window"]
    return True
