"""What a script should know although it is not refused."""

from __future__ import annotations

import warnings

_TOLD: dict[object, object] = {}


def tell(text: str) -> None:
    """Warn, and say the same only once: arguments are read when they are given and again when a run begins."""
    warnings.warn_explicit(text, UserWarning, "megatron_rl.trl", 1, registry=_TOLD)  # type: ignore[arg-type]
