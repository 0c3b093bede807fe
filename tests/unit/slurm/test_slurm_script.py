"""The job's script as a pure function, and what bash and Slurm's own commands make of it."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megatron_rl.commands import slurm
from megatron_rl.commands.slurm import TRAIN, Job, options, read_job, render, submit
from megatron_rl.config.load import load_config, validate
from megatron_rl.config.schema import SftRunConfig
from megatron_rl.config.slurm import SlurmConfig

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parent / "golden"

ONE_NODE = SlurmConfig(gpus_per_node=8, partition="h100", account="lab", time_limit_h=3.5, seeds=(0, 7))
TWO_NODES = SlurmConfig(
    rollout_nodes=1,
    notice_s=600,
    requeue=False,
    container="/shared/images/rl.sqsh",
    mounts=("/shared/models:/shared/models", "/scratch:/scratch"),
    options=("--qos=high", "--dependency=singleton", "--comment=two words"),
)
MANY_NODES = SlurmConfig(
    nodes=8, rollout_nodes=20, gpus_per_node=8, time_limit_h=24, environment='source "$HOME/my venv/bin/activate"'
)
TWO_KINDS = MANY_NODES.model_copy(update={"rollout_options": ("--partition=l40s", "--gpus-per-node=4")})


def job(section: SlurmConfig, **changes) -> Job:
    usual = Job(
        slurm=section,
        name="sums",
        recipe="grpo",
        arguments=["configs/run/tiny_grpo.yaml", "run.steps=10", "rewards=[{kind: exact_answer}]"],
        working_folder=Path("/home/me/my project"),
        folder=Path("/shared/runs/sums/slurm"),
        python=Path("/home/me/venv/bin"),
        train=Path("/home/me/my project/slurm/train.sbatch"),
    )
    return replace(usual, **changes)


CASES = {
    "1_node_array": job(ONE_NODE),
    "2_nodes_container": job(TWO_NODES),
    "28_nodes": job(MANY_NODES),
    "8_and_20_nodes_of_two_kinds": job(TWO_KINDS),
}


@pytest.mark.parametrize("name", CASES)
def test_golden_scripts(name):
    """A script that changed on purpose is rewritten with: python tests/unit/slurm/test_slurm_script.py"""
    assert render(CASES[name]) == (GOLDEN / f"{name}.sbatch").read_text()


SCRIPTS = [*sorted(GOLDEN.glob("*.sbatch")), *sorted(ROOT.glob("slurm/*.s[bh]*")), *sorted(ROOT.glob("tests/**/*.sh"))]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_clean(path):
    assert {"ray_up.sh", "train.sbatch", "28_nodes.sbatch"} <= {script.name for script in SCRIPTS}
    assert subprocess.run(["bash", "-n", path], capture_output=True, text=True).stderr == ""
    checker = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([checker, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@given(arguments=st.lists(words, max_size=4), name=words)
def test_every_argument_and_variable_arrives_unchanged(tmp_path_factory, arguments, name):
    folder = tmp_path_factory.mktemp("a folder with 'quotes' and spaces")
    listing = folder / "train.sbatch"
    listing.write_text('printf "%s\\0" "$MEGATRON_RL_LOGS" "${MEGATRON_RL_ENVIRONMENT:-}" "$@"\n')
    section = SlurmConfig(environment=name or None)
    text = render(job(section, arguments=arguments, train=listing, folder=folder))
    done = subprocess.run(["bash", "-c", text], capture_output=True, check=True)
    assert done.stdout.decode() == "\0".join([str(folder), name, "grpo", *arguments, ""])


def test_a_percent_sign_of_a_name_is_no_pattern_of_slurm():
    """sbatch puts the number of the job for %j in the name of a log, and train.sbatch the task's for %a."""
    named = job(ONE_NODE, name="lr_50%a", arguments=["a.yaml", "data.system_prompt=%a"], folder=Path("/runs/lr_50%j"))
    assert "--output=/runs/lr_50%%j/%A_%a.log" in options(named)[0]
    assert slurm.arguments(named)[1:] == ["data.system_prompt=%%a", "run.seed=%a", "run.name=lr_50%%a/seed_%a"]
    alone = replace(named, slurm=MANY_NODES)
    assert "--output=/runs/lr_50%%j/%j.log" in options(alone)[0] and slurm.arguments(alone) == alone.arguments


def test_the_shipped_script_has_the_options_of_a_made_one():
    """A made script replaces the header of train.sbatch, so the two must not drift apart."""
    shipped = set(re.findall(r"^#SBATCH (.+)$", TRAIN.read_text(), flags=re.MULTILINE))
    made = set(options(job(SlurmConfig()))[0])
    own = ("--job-name", "--output", "--chdir")
    assert {o for o in shipped if not o.startswith(own)} == {o for o in made if not o.startswith(own)}


@pytest.mark.parametrize("own", ["--mem=500G", "--mem-per-gpu=100G"])
def test_a_user_may_say_how_much_memory(own):
    made = options(job(TWO_KINDS.model_copy(update={"options": (own,)})))
    assert [[o for o in component if o.startswith("--mem")] for component in made] == [[own], ["--mem=0"]]


def test_a_time_limit_is_rounded_up_to_minutes():
    assert "--time=91" in options(job(SlurmConfig(time_limit_h=1.51)))[0]


@pytest.mark.parametrize(
    ("section", "fault"),
    [
        ({"rollout_options": ["--partition=a"]}, "rollout_nodes is 0"),
        ({"mounts": ["/a:/a"]}, "without a container"),
        ({"seeds": [0, 1], "rollout_nodes": 1, "rollout_options": ["-pa"]}, "no arrays of heterogeneous jobs"),
        ({"options": ["-q high"]}, "'-q high' is not an option of sbatch; write it as `--name=value`"),
        ({"options": ["qos=high"]}, "'qos=high' is not an option of sbatch"),
        ({"options": ["--qos=high\nrm"]}, "is not an option of sbatch"),
        ({"nodes": 0}, "greater than 0"),
        ({"gpus_per_nodes": 8}, "did you mean gpus_per_node?"),
    ],
)
def test_faults_of_the_section_are_named(section, fault):
    with pytest.raises(ValueError, match=re.escape(fault)):
        validate(SlurmConfig, section)


@pytest.fixture
def config(tmp_path, monkeypatch) -> SftRunConfig:
    monkeypatch.chdir(tmp_path)
    given = ["run={name: my run, steps: 1}", "model.path=m", "balance.max_tokens_per_microbatch=8192", "sft.rows=r"]
    return load_config(SftRunConfig, [*given, "slurm.seeds=[3, 4]"])


def stand_in(folder: Path, text: str) -> None:
    """A command `sbatch` in the folder."""
    folder.mkdir()
    (folder / "sbatch").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "sbatch").chmod(0o755)


def test_a_submission_writes_the_script_and_says_how_to_follow_it(config, tmp_path, monkeypatch, capsys):
    stand_in(tmp_path / "bin", 'echo "42;cluster"; cp "$2" submitted')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    submit(read_job(config, "sft", ["a.yaml"]), Console())
    script = tmp_path / "runs" / "my run" / "slurm" / "train.sbatch"
    assert script.read_text() == (tmp_path / "submitted").read_text() == render(read_job(config, "sft", ["a.yaml"]))
    said = capsys.readouterr().out
    for command in ("squeue --jobs 42", "scancel 42", f"tail -F '{script.parent}/42_3.log'", f"sbatch '{script}'"):
        assert command in said


def test_a_refused_submission_tells_why(config, tmp_path, monkeypatch):
    stand_in(tmp_path / "bin", "echo 'sbatch: error: invalid account' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    with pytest.raises(ValueError, match="sbatch: error: invalid account"):
        submit(read_job(config, "sft", []), Console())
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="this machine has no sbatch; the script is written"):
        submit(read_job(config, "sft", []), Console())


if __name__ == "__main__":
    for case, made in CASES.items():
        (GOLDEN / f"{case}.sbatch").write_text(render(made))
