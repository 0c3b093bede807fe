"""Every command and program of README, site and tutorials runs as it is printed, in the order of its page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PAGES, ROOT, blocks
from patience import deadline

from megatron_rl.recipes.tiny.gsm8k import write_model

RUN = [page for page in PAGES if any(block.mark == "run" for block in blocks(page))]


@pytest.fixture
def reader(tmp_path) -> tuple[Path, dict[str, str]]:
    """The folder of somebody who has installed the package, and no clone, and his environment."""
    folder, programs = tmp_path / "work", tmp_path / "programs"
    (folder / "models").mkdir(parents=True)
    write_model(tmp_path / "written")
    (tmp_path / "written" / "model").rename(folder / "models" / "tiny")
    programs.mkdir()
    for name, module in (("megatron-rl", "-m megatron_rl"), ("python", "")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        program.chmod(0o755)
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    return folder, os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


@pytest.mark.deep
@pytest.mark.deadline(900)
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_what_a_page_tells_to_run_runs(reader, page):
    folder, environment = reader
    for block in blocks(page):
        if block.file:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        if block.mark != "run":
            continue
        program = ["bash", "-euo", "pipefail", "-c", block.commands]
        if block.language == "python":
            (folder / "block.py").write_text(block.text)
            program = [sys.executable, "block.py"]
        done = subprocess.run(
            program, cwd=folder, env=environment, capture_output=True, text=True, timeout=deadline(300)
        )
        assert done.returncode == 0, f"{block.where}:\n{block.text}\n{done.stdout}\n{done.stderr}"
