"""The real loop with engines that answer while it trains: an engine and then the whole run are killed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import psutil

from megatron_rl.data.journal import read_journal
from megatron_rl.processes import descendants
from megatron_rl.rollout.progress import MAX_SAMPLES, ROW

MAX_LAG = 2


def arguments(task: Path) -> list[str]:
    return [
        "recipes/grpo.py",
        "configs/run/tiny_grpo.yaml",
        "run.name=stream",
        "run.steps=8",
        f"model.path={task}/model",
        f"data.train={task}/train.jsonl",
        "data.eval=null",
        f"rollout.max_lag={MAX_LAG}",
        "rollout.num_engines=2",
        "rollout.prompts_per_step=8",
        "rollout.samples_per_prompt=4",
        "rewards=[{kind: function, path: 'rewards:share_of_digits'}]",
        "cluster.verifiers=2",
        "checkpoint.every=2",
    ]


def metrics(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kill_an_engine_in_a_generation(recipe, run, folder: Path) -> np.ndarray:
    """Returns what its record holds at that moment."""

    def busy() -> list[Path]:
        records = (folder / "unfinished").glob("engine_1_*.tokens")
        return [path for path in records if path.stat().st_size > 100 * ROW.itemsize]

    recipe.wait_until(run, busy)
    [record] = busy()
    family = descendants(psutil.Process(run.pid))
    engine = next(process for process in family if str(record) in {file.path for file in process.open_files()})
    engine.suspend()
    rows = np.fromfile(record, ROW)
    engine.kill()
    return rows


def test_kills_cost_no_token_and_no_group(recipe, task):
    folder = recipe.folder / "runs" / "stream"
    run = recipe.start(*arguments(task))
    rows = kill_an_engine_in_a_generation(recipe, run, folder)
    begun = {int(answer) for answer in np.unique(rows["answer"])}
    groups = {answer // MAX_SAMPLES for answer in begun}
    recipe.wait_until(run, lambda: groups <= read_journal(folder / "journal").keys() and len(metrics(folder)) >= 3)
    family = [psutil.Process(run.pid), *descendants(psutil.Process(run.pid))]
    for process in family:
        process.kill()
    run.wait()

    before = read_journal(folder / "journal")
    for answer in begun:
        tokens = before[answer // MAX_SAMPLES].tokens[answer % MAX_SAMPLES]
        actions, mine = tokens.action_mask, rows[rows["answer"] == answer]
        for name, column in (("token", tokens.ids), ("version", tokens.version), ("logp", tokens.logp_rollout)):
            assert column[actions][: len(mine)].tolist() == mine[name].tolist(), "no token was sampled again"

    resumed = recipe.run(*arguments(task), "--resume", "auto")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    records = metrics(folder)
    assert [record["step"] for record in records] == list(range(9))
    for record in records[:-1]:
        assert record["rollout/num_samples"] == 32 and record["lag/max"] <= MAX_LAG + 1
        assert record.get("mismatch/mean_abs", 0) < 1e-4 and np.isfinite(record["loss"])
    assert any(record["mismatch/judged"] > 0 for record in records if "mismatch/judged" in record)
    assert (folder / "logs" / "driver.log").read_text().count("is replaced") == 1

    after = read_journal(folder / "journal")
    for number in before.keys() & after.keys():
        same = zip(before[number].tokens, after[number].tokens, strict=True)
        assert all(a.ids.tolist() == b.ids.tolist() for a, b in same), "what was verified is not generated again"
    assert not (folder / "unfinished").exists()
