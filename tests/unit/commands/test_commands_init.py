"""The file that `megatron-rl init` writes is one that a run takes."""

from __future__ import annotations

import pytest
import yaml

from megatron_rl.commands.init import STARTERS, main
from megatron_rl.config.load import load_config
from megatron_rl.config.reference import find
from megatron_rl.config.schema import GrpoRunConfig, SftRunConfig


@pytest.mark.parametrize(("kind", "schema"), [("grpo", GrpoRunConfig), ("sft", SftRunConfig)])
def test_a_written_file_is_a_valid_configuration_and_says_what_its_keys_mean(tmp_path, capsys, kind, schema):
    file = tmp_path / "run.yaml"
    assert main([str(file), "--kind", kind, "run.steps=7", "policy.optimizer.lr=3e-6", "cluster.mirror=true"]) == 0
    assert f"megatron-rl {kind} {file} --dry-run" in capsys.readouterr().out
    config = load_config(schema, [str(file)])
    assert (config.run.steps, config.policy.optimizer.lr, config.cluster.mirror) == (7, 3e-6, True)
    written = yaml.safe_load(file.read_text())
    assert written.keys() == STARTERS[kind].keys() | {"cluster"}
    lines = [line.strip() for line in file.read_text().splitlines()]
    for key in ("run.steps", "checkpoint.every", "policy.parallel.tensor", "cluster.mirror"):
        at = next(i for i, line in enumerate(lines) if line.startswith(f"{key.rpartition('.')[2]}: "))
        assert (
            lines[at - 1].startswith("#")
            and lines[at - 1].removeprefix("# ").split(".")[0] in find(key)[0].keys[0].meaning
        )


def test_epochs_take_the_place_of_steps(tmp_path):
    assert main([str(tmp_path / "run.yaml"), "run.epochs=2"]) == 0
    run = yaml.safe_load((tmp_path / "run.yaml").read_text())["run"]
    assert run["epochs"] == 2 and "steps" not in run


def test_what_cannot_be_written_is_told(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("mine")
    assert main([str(file)]) == 1 and "is there already; give another name" in capsys.readouterr().err
    assert file.read_text() == "mine"
    assert main([str(tmp_path / "a.yaml"), "run.stepz=3"]) == 1
    assert "did you mean run.steps" in capsys.readouterr().err and not (tmp_path / "a.yaml").exists()
    assert main([str(tmp_path / "none" / "a.yaml")]) == 1 and "none/a.yaml cannot be written" in capsys.readouterr().err
