"""The package as pip installs it: commands and configurations work in any folder, without the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from leaks import lasting

ROOT = Path(__file__).parents[2]
PLAN = ["configs/model/qwen3_32b.yaml", "configs/cluster/h100_8n8g.yaml", "configs/run/gsm8k_32b.yaml", "--dry-run"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Where pip has put the package, alone: what it depends on is the environment's."""
    source, target = tmp_path_factory.mktemp("source") / "tree", tmp_path_factory.mktemp("installed")
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    command = ["install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([sys.executable, "-m", "pip", *command, "--target", target, source], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return target


def run(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """The command's own script, which finds the installed package alone."""
    environment = os.environ | {"PYTHONPATH": str(installed), "COLUMNS": "100"}
    script = [sys.executable, installed / "bin" / "megatron-rl"]
    return subprocess.run([*script, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.deep
def test_a_dry_run_needs_no_repository(installed, tmp_path):
    done = run(installed, tmp_path, "grpo", *PLAN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "32,762,123,264 parameters" in done.stdout
    assert not list(tmp_path.iterdir()), "a plan leaves nothing behind"


@pytest.mark.deep
def test_only_one_name_is_installed_and_the_data_is_inside(installed):
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names - {"bin", "__pycache__"} == {"megatron_rl"}
    assert (installed / "megatron_rl" / "configs" / "run" / "tiny_grpo.yaml").is_file()
    page = {path.name for path in (installed / "megatron_rl" / "observe").iterdir()}
    assert {"page.html.jinja", "page.css", "page.js"} <= page
    assert (installed / "megatron_rl" / "recipes" / "tiny" / "data" / "gsm8k_train_sample.jsonl").is_file()
    assert list(installed.glob("*.dist-info/licenses/LICENSE"))
    assert (installed / "megatron_rl" / "migrate" / "verl" / "keys.yaml").is_file()
    assert not (installed / "megatron_rl" / "tools").exists()


@pytest.mark.deep
def test_every_command_has_a_help_and_a_wrong_one_is_told(installed, tmp_path):
    from megatron_rl.__main__ import COMMANDS

    listing = run(installed, tmp_path)
    expected = [name for name, (module, _) in COMMANDS.items() if not module.startswith("tools.bench.")]
    listed = [line[2:22].strip() for line in listing.stdout.splitlines() if line.startswith("  ")]
    assert listing.returncode == 0 and listed == expected
    wrong = run(installed, tmp_path, "convert", "misspelt")
    assert wrong.returncode == 2 and "there is no command 'convert misspelt'" in wrong.stderr
    for name in ("grpo", "convert to-hf", "report"):
        done = run(installed, tmp_path, *name.split(), "--help")
        assert done.returncode == 0 and done.stdout.startswith(f"usage: megatron-rl {name} "), done.stdout + done.stderr


def test_every_command_has_a_help_in_the_repository(monkeypatch, capsys):
    from megatron_rl.__main__ import COMMANDS, main

    for name in COMMANDS:  # recipes and tools set variables when they are imported
        with lasting(), pytest.raises(SystemExit) as ended:
            main([*name.split(), "--help"])
        assert ended.value.code == 0 and f"megatron-rl {name} " in capsys.readouterr().out
