"""Jobs under a real Slurm, with the real Ray, Megatron and vLLM: a job that is preempted, or submitted by NeMo-Run, has
the numbers of one that nothing disturbs."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import held_engine
import pytest
from held_engine import Holds
from two_engines import of_two_engines

pytestmark = pytest.mark.deep


def test_two_nodes_with_one_that_only_rolls_out(whole):
    """The fixture has run it."""
    assert whole


def test_a_preempted_job_saves_waits_and_continues_with_the_same_numbers(slurm, whole):
    """On one node, where trainers and engines share their memory. The answers of step 1 are under way in both engines
    when the signal comes."""
    shutil.copy(held_engine.__file__, slurm.folder)
    holds = Holds(slurm.folder)
    holds.stand(version=1)
    shared = ["cluster.colocate=true", "rollout.num_engines=2", "rollout.backend=held_engine.py:HeldSampler"]
    job = ["slurm={nodes: 1, time_limit_h: 1}", "checkpoint.every=0"]
    number = slurm.submit("grpo", *slurm.recipe("preempted", *job, *shared))
    slurm.wait_until(lambda: holds.num_told("stands") == 2 or slurm.has_ended(number), number)
    assert holds.num_told("stands") == 2, slurm.output(number)
    urgent = slurm.call(
        "sbatch",
        "--parsable",
        "--partition=urgent",
        "--nodelist=n1",
        "--exclusive",
        "--output=urgent.log",
        "--wrap=true",
    )
    assert slurm.ends(urgent.strip()) == ("COMPLETED", "0")
    assert "will continue from the newest checkpoint" in slurm.output(number)
    assert [path.name for path in (slurm.folder / "runs/preempted/checkpoints").iterdir()] == ["step_000001"]
    holds.let_go()
    assert slurm.ends(number) == ("COMPLETED", "0"), slurm.output(number)
    assert slurm.job(number)["Restarts"] == "1"
    assert "Continuing with step 1." in slurm.output(number)
    assert slurm.metrics("preempted") == of_two_engines(whole)


def test_nemo_run_submits_the_same_job(slurm, whole):
    """NeMo-Run's time limit sends SIGUSR1 to all steps, Ray's too; so does this test."""
    root = Path(__file__).parents[2]
    subprocess.run(["make", ".venv-nemo/installed"], cwd=root, check=True)  # a minute on a new machine
    python = root / ".venv-nemo" / "bin" / "python"
    environment = json.dumps(f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH")
    arguments = [*slurm.recipe("nemo", *slurm.ON_TWO_NODES), f"slurm.environment={environment}"]
    command = [
        "env",
        f"NEMORUN_HOME={slurm.daemons.parent / 'nemo'}",
        "COLUMNS=300",
        python,
        root / "slurm" / "launch.py",
    ]
    command += ["slurm", "grpo", *arguments]
    before = slurm.newest_job()
    shown = slurm.call(*command, "--dryrun")
    assert "export MEGATRON_RL_TRAIN_NODES=1" in shown
    assert "#SBATCH --signal=USR1@300" in shown and "#SBATCH --mem=0" in shown
    assert slurm.newest_job() == before, "nothing is submitted"

    slurm.close_gate()
    slurm.call(*command)
    number = slurm.newest_job()
    slurm.wait_at_gate(number)
    slurm.call("scancel", "--signal=USR1", str(number))
    slurm.wait_until(lambda: slurm.job(number)["Restarts"] == "1", number)
    slurm.open_gate()
    assert slurm.ends(number) == ("COMPLETED", "0"), slurm.output(number)
    assert slurm.metrics("nemo") == whole
