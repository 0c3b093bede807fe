"""The real loop when processes are killed: an engine's death is repaired at the next push, a trainer's ends the run."""

from __future__ import annotations

import json
import re
import time

import psutil


def arguments(task, *more: str) -> list[str]:
    return [
        "recipes/grpo.py",
        "configs/run/tiny_grpo.yaml",
        "run.name=faults",
        "run.steps=2",
        f"model.path={task}/model",
        f"data.train={task}/train.jsonl",
        "data.eval=null",
        "rollout.prompts_per_step=8",
        "rollout.samples_per_prompt=4",
        "rollout.max_response_tokens=24",
        "rewards=[{kind: function, path: 'rewards:share_of_digits'}]",
        "checkpoint.every=0",
        *more,
    ]


def kill_at_the_gate(recipe, arguments: list[str], name: str) -> tuple[int, str]:
    """Start a run, kill the newest process of this name while step 1 waits for its rewards, let it go on.

    Returns:
        The exit status and what the run said.
    """
    (recipe.folder / "gate").touch()
    run = recipe.start(*arguments)
    end = time.monotonic() + 240
    while not (recipe.folder / "waiting").exists():
        assert run.poll() is None and time.monotonic() < end, (recipe.folder / "out.txt").read_text()
        time.sleep(0.1)
    family = psutil.Process(run.pid).children(recursive=True)
    victims = [process for process in family if name in " ".join(process.cmdline())]
    victims[-1].kill()
    (recipe.folder / "gate").unlink()
    return run.wait(timeout=240), (recipe.folder / "out.txt").read_text()


def test_an_engine_that_died_is_replaced_at_the_next_push(recipe, task):
    """Two engines, one fed by the other; the run goes on and says what happened."""
    engines = ["rollout.num_engines=2", "bridge.chains=1"]
    status, text = kill_at_the_gate(recipe, arguments(task, *engines), "ray::EngineRank")
    assert status == 0, text
    folder = recipe.folder / "runs" / "faults"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2]
    assert [record["sync/replaced_engines"] for record in records] == [0, 0, 1]
    assert max(record.get("mismatch/mean_abs", 0) for record in records) < 1e-4
    assert re.match(r"version 2: engine \d died", (folder / "logs" / "bridge.log").read_text())


def test_a_trainer_rank_that_died_ends_the_run_with_its_name(recipe, task):
    status, text = kill_at_the_gate(recipe, arguments(task), "ray::TrainerRank")
    assert status == 1 and re.search(r"trainer rank \d died", text), text
