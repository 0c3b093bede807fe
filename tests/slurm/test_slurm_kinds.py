"""Kinds of jobs under a real Slurm: an array, a heterogeneous job, and the shipped script as it is."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.deep


def test_an_array_has_a_run_for_each_seed(slurm):
    files = [f"model.path={slurm.task}/model", f"sft.rows={slurm.task}/demonstrations.jsonl"]
    changes = ["run.name=seeds", "run.steps=2", "sft.rows_per_step=8", "slurm.seeds=[0, 3]"]
    number = slurm.submit("sft", "configs/run/tiny_sft.yaml", *files, *changes)
    for seed in (0, 3):
        assert slurm.ends(f"{number}_{seed}") == ("COMPLETED", "0"), slurm.output(f"{number}_{seed}")
        assert (slurm.folder / "runs" / "seeds" / "slurm" / f"{number}_{seed}.log").exists()
    losses = {seed: [record["loss"] for record in slurm.metrics(f"seeds/seed_{seed}")] for seed in (0, 3)}
    assert len(losses[0]) == len(losses[3]) == 2 and losses[0] != losses[3]


def test_the_components_of_a_heterogeneous_job_are_pools(slurm):
    changes = ["slurm={rollout_nodes: 1, gpus_per_node: 1, rollout_options: ['--gpus-per-node=2']}", "run.steps=1"]
    number = slurm.submit("grpo", *slurm.recipe("two kinds", *changes))
    assert slurm.ends(number) == ("COMPLETED", "0"), slurm.output(number)
    logs = {path.name for path in (slurm.folder / "runs" / "two kinds" / "slurm").glob("*_ray_*")}
    assert {re.sub(r"n\d", "", name) for name in logs} == {f"{number}_ray_train_.log", f"{number}_ray_rollout_.log"}


def test_the_shipped_script_runs_as_it_is(slurm):
    """Submitted from the clone, with the options on the command line."""
    root = Path(__file__).parents[2]
    files = [f"model.path={slurm.task}/model", f"sft.rows={slurm.task}/demonstrations.jsonl"]
    changes = ["run.name=plain", f"run.folder={slurm.folder}/runs", "run.steps=1", "sft.rows_per_step=8"]
    options = [f"--chdir={root}", "--parsable", f"--output={slurm.folder}/%j.log"]
    bin_folder = Path(sys.executable).parent
    environment = [
        "env",
        "-C",
        root,
        f"PATH={bin_folder}:{os.environ['PATH']}",
        f"MEGATRON_RL_LOGS={slurm.folder}/plain",
    ]
    script = ["slurm/train.sbatch", "sft", "configs/run/tiny_sft.yaml", *files, *changes]
    number = int(slurm.call(*environment, "sbatch", *options, *script))
    assert slurm.ends(number) == ("COMPLETED", "0"), slurm.output(number)
    assert len(slurm.metrics("plain")) == 1
