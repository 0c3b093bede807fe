"""Trainers and engines that share their machine's memory in phases: the numbers are those of a run in which each side
keeps its own, also after processes died."""

from __future__ import annotations

import json
from pathlib import Path

from test_resume import arguments, lines

from megatron_rl.tools import hf_to_megatron


def test_a_run_that_shares_its_memory_has_the_same_numbers_also_after_deaths(recipe, task):
    shared = ["rollout.num_engines=2", "eval.every=2", "checkpoint.every=1", "run.steps=3"]
    apart = recipe.run(*arguments(task, "apart"), *shared)
    assert apart.returncode == 0, apart.stdout + apart.stderr

    opened = recipe.folder / "open"  # this run begins with Megatron's form of the weights
    hf_to_megatron.main([f"{task}/model", str(opened)])
    shared += [f"model.path={opened}/hf", f"model.weights={opened}", "cluster.colocate=true"]
    folder = recipe.folder / "runs" / "together"
    (recipe.folder / "gate").touch()
    run = recipe.start(*arguments(task, "together"), *shared)
    recipe.wait_until(run, (recipe.folder / "waiting").exists)
    recipe.process(run, "ray::TrainerRank").kill()  # while the engines have its memory
    (recipe.folder / "gate").unlink()
    engine, log = recipe.process(run, "ray::EngineRank"), folder / "logs" / "engine_0.log"
    recipe.wait_until(run, lambda: "version 2: answering" in log.read_text())
    engine.kill()
    assert run.wait(recipe.deadline_s) == 0, (recipe.folder / "out.txt").read_text()

    assert lines(folder) == lines(recipe.folder / "runs" / "apart")
    evaluations = [held_out(recipe.folder / "runs" / name) for name in ("apart", "together")]
    assert len(evaluations[0]) == 3 and evaluations[0] == evaluations[1]
    driver = (folder / "logs" / "driver.log").read_text()
    assert "the trainer was started anew" in (folder / "logs" / "warnings.log").read_text()
    assert "is replaced" in driver
    order = [line.rpartition(" ")[2] for line in driver.splitlines() if ": phase " in line]
    assert order[:4] == ["pushing", "generating", "training", "pushing"]


def held_out(folder: Path) -> list[float]:
    """The results of the evaluations."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["eval/reward_mean"] for record in records if "eval/reward_mean" in record]
