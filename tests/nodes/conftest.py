from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from leaks import lasting
from ray_nodes import ROOT, Cluster

from megatron_rl.tools.bench.namespaces import why_not


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A folder as a shared file system would have it."""
    from megatron_rl.recipes.tiny.task import write_task

    with lasting():  # the first import of this library sets variables of the environment
        from transformers import AutoModelForCausalLM  # noqa: F401
    folder = tmp_path_factory.mktemp("shared")
    write_task(folder / "task")
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    shutil.copyfile(ROOT / "tests" / "e2e" / "rewards.py", folder / "rewards.py")
    return folder


@pytest.fixture(scope="module")
def cluster(shared) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(f"this machine cannot have nodes: {reason}")
    with Cluster(shared) as nodes:
        yield nodes
