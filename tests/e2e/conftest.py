from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from recipe_runs import Recipe


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


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    return Recipe(tmp_path)


@pytest.fixture
def run_here(recipe, monkeypatch, capsys) -> Callable[..., subprocess.CompletedProcess]:
    """Runs the `main` of a recipe or a tool in the test's process, in the recipe's folder: for what ends before Ray, or
    needs none. A recipe that begins to train here fails the test."""

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess:
        before = dict(os.environ)
        with monkeypatch.context() as patch:
            patch.chdir(recipe.folder)
            patch.setattr(sys, "path", list(sys.path))
            try:
                module = import_module(f"megatron_rl.{program.removesuffix('.py').replace('/', '.')}")
                if program.startswith("recipes/"):
                    patch.setattr(module, "run", lambda *_: pytest.fail("the run has begun"))
                status = module.main(list(arguments))
            finally:  # recipes set variables when they are imported
                os.environ.clear()
                os.environ.update(before)
        shown = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, status, shown.out, shown.err)

    return run
