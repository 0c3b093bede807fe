"""Files that ship with the package, `configs/...` and `recipes/...`, are found from any working folder."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def find_shipped(path: Path) -> Path:
    """The package's file of this path if the working folder has none; else the path itself.

    Example: `configs/run/tiny_grpo.yaml` is found in a clone and in an installed package alike.
    """
    shipped = PACKAGE / path
    inside = path.parts[:1] in (("configs",), ("recipes",))
    return shipped if inside and not path.exists() and shipped.exists() else path
