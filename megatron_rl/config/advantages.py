"""Advantage estimators: one section each, a union by `kind`."""

from __future__ import annotations

from typing import Literal

from megatron_rl.config.section import Section


class GrpoAdvantage(Section):
    """Group-relative advantages (Shao et al. 2024, arXiv:2402.03300)."""

    kind: Literal["grpo"] = "grpo"
    std: Literal["group", "none"] = "group"
    """none: Dr. GRPO (Liu et al. 2025, arXiv:2503.20783)."""
