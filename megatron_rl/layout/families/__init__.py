"""The families that exist, by the `model_type` of their HF config.json."""

from __future__ import annotations

from megatron_rl.layout.families.qwen3 import QWEN3
from megatron_rl.layout.family import Family

FAMILIES: dict[str, Family] = {family.name: family for family in (QWEN3,)}
