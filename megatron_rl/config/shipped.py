"""Files that ship with the package: `configs/...` and `recipes/...`, whatever the working folder is."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def find_shipped(path: Path) -> Path:
    """The path itself, or the package's file where the working folder has none of that name.

    Example: `configs/run/tiny_grpo.yaml` is found in a clone and in an installed package alike.
    """
    shipped = PACKAGE / path
    inside = path.parts[:1] in (("configs",), ("recipes",))
    return shipped if inside and not path.exists() and shipped.exists() else path
