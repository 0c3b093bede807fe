"""Tiny models, and dry runs through the door with the objects of TRL, PEFT and datasets: `make test-trl`."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import families
import pytest

from megatron_rl import api
from megatron_rl.commands import dpo, grpo, reward_model, sft


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """The working folder of the tests: a folder for each family, which tests name by its relative path."""
    folder = tmp_path_factory.mktemp("doors")
    families.write(folder)
    return folder


@pytest.fixture
def dry(models, monkeypatch):
    """In the place of each run its dry run, which raises what it prints if something would stop the run."""

    def run(path: Path, run: Any, watch: Any = None) -> Any:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            commands = {"grpo": grpo, "sft": sft, "dpo": dpo, "reward_model": reward_model}
            status = commands[path.stem].main([str(path), "--dry-run"])
        if status:
            raise RuntimeError(said.getvalue())
        return run

    monkeypatch.chdir(models)
    monkeypatch.setattr(api, "_run", run)
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    return models
