"""Kinds of jobs under a real Slurm: an array, a heterogeneous job, and the shipped script as it is."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.deep
ROOT = Path(__file__).parents[2]


def test_an_array_has_a_run_for_each_seed(slurm):
    files = [f"model.path={slurm.task}/model", f"sft.rows={slurm.task}/demonstrations.jsonl"]
    changes = ["run.name=seeds_50%a", "run.steps=2", "sft.rows_per_step=8", "slurm.seeds=[0, 3]"]
    number = slurm.submit("sft", "configs/run/tiny_sft.yaml", *files, *changes)
    for seed in (0, 3):
        assert slurm.ends(f"{number}_{seed}") == ("COMPLETED", "0"), slurm.output(f"{number}_{seed}")
        assert (slurm.folder / "runs" / "seeds_50%a" / "slurm" / f"{number}_{seed}.log").exists()
    losses = {seed: [record["loss"] for record in slurm.metrics(f"seeds_50%a/seed_{seed}")] for seed in (0, 3)}
    assert len(losses[0]) == len(losses[3]) == 2 and losses[0] != losses[3]


def test_the_components_of_a_heterogeneous_job_are_pools_and_each_step_may_have_a_container(slurm, monkeypatch):
    """Each `srun` has a mount namespace and a /tmp of its own, and a shell of 1,024 files submits."""
    if os.geteuid() != 0:
        pytest.skip("mount namespaces need root")
    programs = slurm.folder / "programs"
    programs.mkdir()
    (programs / "srun").symlink_to(Path(__file__).parent / "pyxis.sh")
    monkeypatch.setitem(slurm.environment, "PATH", f"{programs}:{os.environ['PATH']}")
    image = slurm.folder / "image.sqsh"
    image.touch()
    seen = "$(ulimit -Sn) $(readlink /proc/self/ns/mnt) $TRITON_CACHE_DIR"
    section = {
        "rollout_nodes": 1,
        "gpus_per_node": 1,
        "rollout_options": ["--gpus-per-node=2"],
        "container": str(image),
        "mounts": [f"{folder}:{folder}" for folder in (slurm.task, ROOT, sys.prefix)],
        "environment": f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH; echo {seen} >>steps",
    }
    arguments = slurm.recipe("two kinds", f"slurm={json.dumps(section)}", "run.steps=1")
    number = slurm.submit("grpo", *arguments, under=["prlimit", "--nofile=1024:"])
    assert slurm.ends(number) == ("COMPLETED", "0"), slurm.output(number)
    logs = {path.name for path in (slurm.folder / "runs" / "two kinds" / "slurm").glob("*_ray_*")}
    assert {re.sub(r"n\d", "", name) for name in logs} == {f"{number}_ray_train_.log", f"{number}_ray_rollout_.log"}
    steps = [line.split() for line in (slurm.folder / "steps").read_text().splitlines()]
    namespaces = {namespace for _, namespace, _ in steps}
    assert len(namespaces) == 3 and os.readlink("/proc/self/ns/mnt") not in namespaces, "two nodes and the command"
    files = min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    cache = f"/tmp/megatron_rl_{os.getuid()}/triton"
    assert [(limit, place) for limit, _, place in steps] == [(str(files), cache)] * 3


def test_the_shipped_script_runs_as_it_is(slurm):
    """Submitted from the clone, with the options on the command line."""
    files = [f"model.path={slurm.task}/model", f"sft.rows={slurm.task}/demonstrations.jsonl"]
    changes = ["run.name=plain", f"run.folder={slurm.folder}/runs", "run.steps=1", "sft.rows_per_step=8"]
    options = [f"--chdir={ROOT}", "--parsable", f"--output={slurm.folder}/%j.log"]
    bin_folder = Path(sys.executable).parent
    environment = [
        "env",
        "-C",
        ROOT,
        f"PATH={bin_folder}:{os.environ['PATH']}",
        f"MEGATRON_RL_LOGS={slurm.folder}/plain",
    ]
    script = ["slurm/train.sbatch", "sft", "configs/run/tiny_sft.yaml", *files, *changes]
    number = int(slurm.call(*environment, "sbatch", *options, *script))
    assert slurm.ends(number) == ("COMPLETED", "0"), slurm.output(number)
    assert len(slurm.metrics("plain")) == 1
