"""Reads the rotary embeddings of a model from config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron_rl.models.config_values import flag, number, size
from megatron_rl.models.families.windows import FULL, SCALED, SLIDING
from megatron_rl.models.family import Family
from megatron_rl.types import LinearRope, Llama3Rope, Rope, Scaling, YarnRope

_MROPE = ("mrope_section", "mrope_interleaved")
"""Keys that have no meaning for text alone; `families.delta` checks them."""
_LOCAL = "rope_local_base_freq"
"""The base of the rotation of layers with a window, in families that have one of their own."""
_YARN = {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"}


def _rope_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What transformers reads: `rope_scaling` alone, if there is one, and else `rope_parameters`. So with both of them
    `rope_theta` in `rope_parameters` is lost, which nobody means.

    Raises:
        ValueError: both are there and differ, or one is no mapping.
    """
    sections = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)}
    for key, section in sections.items():
        if not isinstance(section, Mapping):
            raise ValueError(f"{key} must be a mapping, but it is {section!r}")
    if len(sections) == 2 and sections["rope_parameters"] != sections["rope_scaling"]:
        whole = {**sections["rope_parameters"], **sections["rope_scaling"]}
        raise ValueError(
            "it has both rope_parameters and rope_scaling; transformers reads rope_scaling alone, and forgets "
            f"what only rope_parameters has. Remove rope_scaling, and write rope_parameters: {json.dumps(whole)}"
        )
    return next(iter(sections.values()), {})


def _rotary_share(config: Mapping[str, Any], family: Family) -> float:
    """The share of each head's dims that are rotated. As in transformers, a value inside the section about rotation
    comes first, then a value outside the section; then the family's.

    Raises:
        ValueError: the family rotates whole heads, or this is no share.
    """
    if family.rotary_share == 0.0:  # no class reads the keys
        return 0.0
    section = _rope_section(config)
    section = section.get(FULL) or section
    where = section if "partial_rotary_factor" in section else config
    share = float(number(where, "partial_rotary_factor", family.rotary_share or 1.0))
    if share != 1.0 and family.rotary_share is None:
        raise ValueError(f"partial_rotary_factor is {share}, but heads of the family {family.name} are rotated whole")
    if not 0.0 < share <= 1.0:
        raise ValueError(f"partial_rotary_factor must be above 0 and at most 1, but it is {share}")
    return share


def read_ropes(config: Mapping[str, Any], table: Family) -> tuple[Rope, Rope | None]:
    """The rotation of layers without a window, and of the layers with one if config.json has one for them. transformers
    5 writes rope_parameters, in some families separately for each kind of attention; earlier versions wrote rope_theta,
    rope_local_base_freq and rope_scaling."""
    rope, local = dict(_rope_section(config)), None
    where = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    apart = sorted(rope.keys() & {FULL, SLIDING})
    if _LOCAL in table.absent:
        sections = _sections(rope, where)
        rope, local = dict(sections[FULL]), {"rope_theta": number(config, _LOCAL), **sections[SLIDING]}
    elif SCALED.get(table.name) is False:
        rope = _of_full_attention(config, rope, where, table.absent.get("rope_theta", 10_000.0))
    elif apart:
        raise ValueError(
            f"{where} has the section {apart[0]}, but all layers of the family {table.name} are rotated alike, and "
            f"transformers reads no section; write the keys of the section into {where} itself"
        )
    full, share = _rope(config, table, rope, where), _rotary_share(config, table)
    own = None if local is None else Rope(*_rope(config, table, local, f"{where}.{SLIDING}"), share)
    return Rope(*full, share), own


def _rope(config: Mapping[str, Any], table: Family, rope: dict[str, Any], where: str) -> tuple[float, Scaling | None]:
    """The base and the scaling of a section about rotation."""
    theta = float(number(rope if "rope_theta" in rope else config, "rope_theta", 10_000.0))
    rope.pop("rope_theta", None)
    kind = rope.pop("rope_type", None) or rope.pop("type", "default")
    rope.pop("type", None)
    rope.pop("partial_rotary_factor", None)  # `_rotary_share` reads it
    scaling: Scaling | None = None
    known: set[str] = set()
    # transformers prefers the number outside the section to the one in it.
    if kind in ("llama3", "yarn") and config.get("original_max_position_embeddings") is not None:
        rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    if kind == "llama3":
        known = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
        scaling = Llama3Rope(
            factor=number(rope, "factor"),
            low_freq_factor=number(rope, "low_freq_factor"),
            high_freq_factor=number(rope, "high_freq_factor"),
            original_max_positions=number(rope, "original_max_position_embeddings"),
        )
    elif kind == "yarn":
        known = {"factor", "original_max_position_embeddings", "truncate", *_YARN}
        scaling = YarnRope(
            factor=number(rope, "factor"),
            original_max_positions=number(
                rope, "original_max_position_embeddings", size(config, "max_position_embeddings")
            ),
            truncate=flag(rope, "truncate", absent=True),
            # 0 switches an mscale off.
            **{key: rope[key] and number(rope, key) for key in _YARN if rope.get(key) is not None},
        )
    elif kind == "linear" and _LOCAL in table.absent:
        known, scaling = {"factor"}, LinearRope(number(rope, "factor"))
    elif kind != "default":
        raise ValueError(f"{where}.rope_type: rope scaling {kind!r} is not supported; supported are llama3 and yarn")
    if foreign := sorted(rope.keys() - known - set(_MROPE if table.linear else ())):
        raise ValueError(f"{where}: rope scaling {kind!r} has the key {foreign[0]!r}, which is not supported")
    return theta, scaling


def _of_full_attention(
    config: Mapping[str, Any], rope: Mapping[str, Any], where: str, default: float
) -> dict[str, Any]:
    """The rotation of the layers without a window, of a family that has one for each kind of layers. The section of a
    kind may be missing, as in transformers: it is then unscaled. A `rope_theta` outside the sections and a
    `rope_scaling` are of the layers without a window alone.

    Raises:
        ValueError: there are other keys than sections, which transformers would ignore, or layers with a window are
            rotated otherwise than unscaled with the same base.
    """
    sections = _sections(rope, where)
    outside = sections[FULL] if "rope_theta" in sections[FULL] else config
    base, of_windows = number(outside, "rope_theta", default), number(sections[SLIDING], "rope_theta", default)
    kind = sections[SLIDING].get("rope_type", "default")
    if kind != "default" or base != of_windows:
        raise ValueError(
            f"layers with a window must be rotated by rope_type 'default' and the rope_theta of the others, {base:g}, "
            f"but transformers rotates them by {kind!r} and {of_windows:g}; see {SLIDING} of rope_parameters"
        )
    return dict(sections[FULL])


def _sections(rope: Mapping[str, Any], where: str) -> dict[str, Mapping[str, Any]]:
    """The sections about rotation of both kinds of attention; `rope_scaling` is of the layers without a window."""
    if where == "rope_scaling":
        rope = {FULL: rope}
    if foreign := sorted(rope.keys() - {FULL, SLIDING}):
        raise ValueError(
            f"{where} has the key {foreign[0]!r} outside the sections {FULL} and {SLIDING}, where transformers reads "
            "nothing; write it into both"
        )
    sections = {kind: rope.get(kind) or {} for kind in (FULL, SLIDING)}
    for kind, section in sections.items():
        if not isinstance(section, Mapping):
            raise ValueError(f"{where}.{kind} must be a mapping, but it is {json.dumps(section)}")
    return sections
