"""Every command and program of README, site and tutorials runs as it is printed, in the order of its page."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PAGES, ROOT, blocks
from patience import deadline

from megatron_rl.observe.records import METRICS, read_lines
from megatron_rl.recipes.calculator.task import write_model as write_calculator
from megatron_rl.recipes.tiny.gsm8k import write_model

FUNCTIONS = [
    (file, keys)
    for page in PAGES
    for file, keys in itertools.pairwise(blocks(page))
    if file.file and file.language == "python" and keys.mark == "keys" and file.file in keys.text
]
"""The functions and classes that pages give a run, each with the keys that name it."""
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
        program = ["bash", "-euo", "pipefail", "-c", block.text]
        if block.language == "python":
            (folder / "block.py").write_text(block.text)
            program = [sys.executable, "block.py"]
        done = subprocess.run(
            program, cwd=folder, env=environment, capture_output=True, text=True, timeout=deadline(300)
        )
        assert done.returncode == 0, f"{block.where}:\n{block.text}\n{done.stdout}\n{done.stderr}"


@pytest.mark.deep
@pytest.mark.parametrize("shown", FUNCTIONS, ids=lambda shown: shown[0].file)
def test_a_function_of_a_page_trains_as_it_is_printed(reader, shown):
    """In a folder that is not on PYTHONPATH, and from where no process can import it by name."""
    (folder, environment), (file, keys) = reader, shown
    write_calculator(folder / "models" / "calculator", seed=0)
    (folder / file.file).write_text(file.text)
    rows = [
        {"messages": [{"role": "user", "content": f"{i}*2"}], "task": f"{i}*2", "ground_truth": str(i % 10), "start": i}
        for i in range(8)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "page.yaml").write_text(keys.text)
    (folder / "rewarding.py").write_text(
        "def digits(completions, **columns):\n"
        "    texts = [turns[-1]['content'] for turns in completions]\n"
        "    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in texts]\n"
    )
    own_reward = [] if "rewards:" in keys.text else ["rewards=[{kind: function, path: 'rewarding.py:digits'}]"]
    done = subprocess.run(
        ["megatron-rl", "grpo", "page.yaml", *own_reward]
        + ["run.name=page", "run.steps=3", "model={path: models/calculator, dtype: float32}", "data.train=rows.jsonl"]
        + ["rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.max_response_tokens=24"]
        + ["rollout.max_prompt_tokens=32", "rollout.delimiter=", "checkpoint.every=0"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=deadline(120),
    )
    assert done.returncode == 0, f"{file.where}:\n{done.stdout}\n{done.stderr}"
    steps = {record["step"]: record for record in read_lines(folder / "runs" / "page" / METRICS)}
    assert {0, 1, 2} <= steps.keys(), done.stdout
    if own_reward:  # the others give all random answers the same one
        assert all("loss/penalty" in steps[step] or "penalty" in steps[step] for step in range(3)), steps[2]
