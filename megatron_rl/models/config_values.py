"""Reads single values of config.json and adapter_config.json. A value that is none of its kind is an error with key and
value.

A key that is missing is a KeyError, which `models.config` and `models.peft` turn into a sentence with the name of the
file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any


def size(
    config: Mapping[str, Any],
    key: str,
    absent: float | None = None,
    derived: int | None = None,
    least: int = 1,
    at_most: str | None = None,
) -> int:
    """A whole number.

    Args:
        absent: the default if the key is missing (null is refused).
        derived: the default if the key is missing or null.
        least: the smallest supported value.
        at_most: the key of another size, which this one may not exceed.

    Raises:
        KeyError: the key is missing and has no default.
        ValueError: it is no such number.
    """
    value = config.get(key, absent)
    if value is None and absent is None and (key not in config or derived is not None):
        if derived is None:
            raise KeyError(key)
        return derived
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        lowest = "above 0" if least == 1 else f"of at least {least}"
        raise ValueError(f"{key} must be a whole number {lowest}, but it is {json.dumps(value)}")
    if at_most and value > (largest := size(config, at_most)):
        raise ValueError(f"{key} must be at most {at_most}, which is {largest}, but it is {value}")
    return value


def number(section: Mapping[str, Any], key: str, default: float | None = None) -> Any:
    """A number above 0.

    Raises:
        KeyError: there is no such key, and no default.
        ValueError: its value is no number above 0.
    """
    value = section[key] if default is None else section.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{key} must be a number above 0, but it is {json.dumps(value)}")
    return value


def flag(config: Mapping[str, Any], key: str, absent: bool | None = False) -> bool:
    """True or false.

    Args:
        absent: the value if there is no such key; None if it must be there.

    Raises:
        KeyError: the key is missing and has no default.
        ValueError: it is neither of the two.
    """
    value = config[key] if absent is None else config.get(key, absent)
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, but it is {json.dumps(value)}")
    return value


def whole_numbers(config: Mapping[str, Any], key: str, least: int = 1) -> list[int]:
    """A list of whole numbers.

    Raises:
        KeyError: there is no such key.
        ValueError: it is no list of such numbers.
    """
    values = config[key]
    if not isinstance(values, list) or not all(
        isinstance(value, int) and not isinstance(value, bool) and value >= least for value in values
    ):
        lowest = "above 0" if least == 1 else f"of at least {least}"
        raise ValueError(f"{key} must be a list of whole numbers {lowest}, but it is {json.dumps(values)}")
    return values


def kinds_of_layers(config: Mapping[str, Any], supported: Sequence[str], when: str = "") -> list[str]:
    """`layer_types`, the kind of attention of each layer; empty if it is null or not there.

    Args:
        when: the condition of what is supported, for the error.

    Raises:
        ValueError: it is no list, has another kind, or has not one entry for each layer.
    """
    types = config.get("layer_types")
    if types is None:
        return []
    if not isinstance(types, list):
        raise ValueError(f"layer_types must be a list with one entry for each layer, but it is {json.dumps(types)}")
    if foreign := sorted(map(str, (kind for kind in types if kind not in supported))):
        are = "are" if len(supported) > 1 else "is"
        raise ValueError(f"layer_types has {foreign[0]}; only {' and '.join(supported)} {are} supported{when}")
    if len(types) != (num_layers := size(config, "num_hidden_layers")):
        raise ValueError(f"layer_types has {len(types)} entries, but num_hidden_layers is {num_layers}")
    return types
