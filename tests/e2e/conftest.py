from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
from recipe_runs import Recipe

from megatron_rl.__main__ import main
from megatron_rl.observe.metric_names import meaning
from megatron_rl.observe.records import read_metrics


@pytest.fixture(scope="session", autouse=True)
def libraries() -> None:
    """The first import of this library sets variables of the environment, for the rest of the process."""
    from transformers import AutoModelForCausalLM  # noqa: F401


@pytest.fixture(scope="session")
def task(tmp_path_factory) -> Path:
    """The demo's task with its random model."""
    from megatron_rl.recipes.tiny.task import write_task

    folder = tmp_path_factory.mktemp("task")
    write_task(folder)
    return folder


@pytest.fixture(scope="session")
def mixture(task, tmp_path_factory) -> Path:
    """The demo's model with experts, and its tokenizer."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("mixture") / "model"
    shutil.copytree(task / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    dense = json.loads((folder / "config.json").read_text())
    sizes = {key: value for key, value in dense.items() if key not in ("architectures", "model_type")}
    torch.manual_seed(0)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**(sizes | experts))).save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(tmp_path) -> Iterator[Recipe]:
    """The metrics of all its runs must be in the reference."""
    recipe = Recipe(tmp_path)
    yield recipe
    records = [record for path in tmp_path.rglob("metrics.jsonl") for record in read_metrics(path.parent)]
    unknown = {name for record in records for name in record if name != "step" and meaning(name) is None}
    unknown -= recipe.own_metrics
    assert not unknown, f"megatron_rl/observe/metric_names.py lacks {sorted(unknown)}"


@pytest.fixture
def run_here(recipe, monkeypatch, capsys) -> Callable[..., subprocess.CompletedProcess]:
    """Runs a command in the test's process, in the recipe's folder: for what ends before Ray, or needs none. A run that
    begins to train here fails the test."""

    def run(*arguments: str) -> subprocess.CompletedProcess:
        before = dict(os.environ)
        with monkeypatch.context() as patch:
            patch.chdir(recipe.folder)
            patch.setattr(sys, "path", list(sys.path))
            try:
                patch.setattr(sys, "argv", ["megatron-rl"])
                if arguments[0] in ("grpo", "ppo", "sft"):
                    module = import_module(f"megatron_rl.commands.{arguments[0]}")
                    patch.setattr(module, "run", lambda *_: pytest.fail("the run has begun"))
                status = main(arguments)
            finally:  # recipes set variables when they are imported
                os.environ.clear()
                os.environ.update(before)
        shown = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, status, shown.out, shown.err)

    return run
