"""Jobs under a real Slurm, with the real Ray, Megatron and vLLM: whatever Slurm does to a job, the run goes on with the
same numbers, and a job that has ended leaves nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from megatron_rl.processes import command_line

ON_TWO_NODES = ("slurm={nodes: 1, rollout_nodes: 1, time_limit_h: 1}", "checkpoint.every=1")


@pytest.fixture(scope="module")
def whole(slurm) -> list[dict]:
    """The metrics of a run that nothing disturbs: the first node trains, and the second one rolls out."""
    before = slurm.unused_shared_memory()
    slurm.close_gate()
    number = slurm.submit("grpo", *slurm.recipe("whole", *ON_TWO_NODES))
    slurm.wait_at_gate(number)
    assert slurm.nodes_of(number, "ray::TrainerRank") == {"n1"}
    assert slurm.nodes_of(number, "ray::EngineRank") == {"n2"}
    token = next(filter(None, (process.environ().get("RAY_AUTH_TOKEN") for process in slurm.processes(number))))
    lines = [command_line(process) for process in slurm.processes(number)]
    assert len(token) == 64 and not any(token in line for line in lines)
    slurm.open_gate()
    assert slurm.ends(number) == ("COMPLETED", "0"), slurm.output(number)

    run = slurm.folder / "runs" / "whole"
    assert (run / "report.html").exists() and (run / "hf" / "model.safetensors").exists()
    logs = {path.name for path in (run / "slurm").iterdir()}
    expected = {f"{number}.log", f"{number}_ray_train_n1.log", f"{number}_ray_rollout_n2.log", "train.sbatch"}
    assert expected <= logs
    texts = [path for path in run.rglob("*") if path.suffix in (".log", ".json", ".jsonl", ".sbatch", ".html")]
    assert len(texts) > 8 and not any(token in path.read_text() for path in texts)
    assert token not in slurm.call("scontrol", "show", "job", str(number))
    assert slurm.processes(number) == [] and slurm.unused_shared_memory() <= before
    records = slurm.metrics("whole")
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4]
    assert records[0]["loss"] != records[1]["loss"] and max(r.get("mismatch/mean_abs", 0) for r in records) < 1e-4
    return records


def test_two_nodes_with_one_that_only_rolls_out(whole):
    """The fixture has run it."""
    assert whole


def test_a_preempted_job_saves_waits_and_continues_with_the_same_numbers(slurm, whole):
    slurm.close_gate()
    number = slurm.submit("grpo", *slurm.recipe("preempted", *ON_TWO_NODES, "checkpoint.every=0"))
    slurm.wait_at_gate(number)
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
    slurm.open_gate()
    assert slurm.ends(number) == ("COMPLETED", "0"), slurm.output(number)
    assert slurm.job(number)["Restarts"] == "1"
    assert "Continuing with step 1." in slurm.output(number)
    assert slurm.metrics("preempted") == whole


def test_scancel_leaves_nothing_and_the_next_of_a_singleton_chain_continues(slurm, whole):
    before = slurm.unused_shared_memory()
    slurm.close_gate()
    number = slurm.submit("grpo", *slurm.recipe("chain", *ON_TWO_NODES))
    script = slurm.folder / "runs" / "chain" / "slurm" / "train.sbatch"
    successor = int(slurm.call("sbatch", "--parsable", "--dependency=singleton", script))
    slurm.wait_at_gate(number)
    assert slurm.job(successor)["JobState"] == "PENDING"
    assert len(slurm.processes(number)) > 10
    slurm.call("scontrol", "hold", str(successor))
    slurm.call("scancel", str(number))
    assert slurm.ends(number)[0] == "CANCELLED"
    slurm.wait_until(lambda: not slurm.processes(number), number)
    assert slurm.unused_shared_memory() <= before
    slurm.open_gate()
    slurm.call("scontrol", "release", str(successor))
    assert slurm.ends(successor) == ("COMPLETED", "0"), slurm.output(successor)
    assert "Continuing with step 1." in slurm.output(successor)
    assert slurm.metrics("chain") == whole


def test_a_dead_node_costs_the_steps_since_the_last_checkpoint(slurm, whole):
    slurm.close_gate()
    number = slurm.submit("grpo", *slurm.recipe("node", *ON_TWO_NODES))
    slurm.wait_at_gate(number)
    slurm.kill_node("n2")
    slurm.wait_until(lambda: slurm.job(number)["Restarts"] != "0", number)
    slurm.open_gate()
    assert slurm.ends(number) == ("COMPLETED", "0"), slurm.output(number)
    assert "Ray on n2 ended" in slurm.output(number)
    assert slurm.job(number)["NodeList"] == "n[1,3]", "the dead node is not used again"
    assert slurm.metrics("node") == whole


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


def test_nemo_run_submits_the_same_job(slurm, whole):
    """NeMo-Run's time limit sends SIGUSR1 to all steps, Ray's too; so does this test."""
    root = Path(__file__).parents[2]
    python = root / ".venv-nemo" / "bin" / "python"
    assert python.exists(), "NeMo-Run's environment is missing; make test-slurm makes it"
    environment = json.dumps(f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH")
    arguments = [*slurm.recipe("nemo", *ON_TWO_NODES), f"slurm.environment={environment}"]
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
    assert "export MEGATRON_RL_TRAIN_NODES=1" in shown and "#SBATCH --signal=USR1@300" in shown
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
