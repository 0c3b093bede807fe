"""The filter of prompts with real engines: stopped, with a killed engine, and undisturbed, it gives the same rates."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

REWARDS = '''
def parity(completions, completion_ids, **columns):
    """1 or 0 as if by chance, so that a random model has all pass rates."""
    return [float(sum(ids) % 2) for ids in completion_ids]
'''
NUM_PROMPTS = 60


def rates(folder: Path) -> list[tuple[str, float]]:
    lines = [json.loads(line) for line in (folder / "pass_rates.jsonl").read_text().splitlines()]
    return sorted((line["uid"], line["pass_rate"]) for line in lines)


def test_a_stopped_filter_goes_on_and_a_killed_engine_changes_nothing(recipe, task):
    (recipe.folder / "my_rewards.py").write_text(REWARDS)
    rows = (task / "train.jsonl").read_text().splitlines()[:NUM_PROMPTS]
    (recipe.folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    command = [
        "tools/filter_difficulty.py",
        "configs/run/tiny_grpo.yaml",
        f"model.path={task}/model",
        "data={train: rows.jsonl, eval: null}",
        "rewards=[{kind: function, path: 'my_rewards:parity'}]",
        "eval.verifier=parity",
        "rollout.max_sequences=8",  # two groups are under way
        "--out",
    ]
    out = recipe.folder / "filtered"
    found = out / "pass_rates.jsonl"
    run = recipe.start(*command, "filtered")
    recipe.wait_until(run, lambda: found.exists() and found.stat().st_size)
    run.send_signal(signal.SIGINT)
    assert run.wait(recipe.deadline_s) == 130
    text = (recipe.folder / "out.txt").read_text()
    first = len(found.read_text().splitlines())
    assert 0 < first < NUM_PROMPTS, "it must have been stopped on its way"
    assert f"has the pass rates of {first} prompts; the same command goes on" in text and "Traceback" not in text

    run = recipe.start(*command, "filtered")
    recipe.wait_until(run, lambda: len(found.read_text().splitlines()) > first)
    recipe.process(run, "ray::EngineRank").kill()
    assert run.wait(recipe.deadline_s) == 0, (recipe.folder / "out.txt").read_text()
    assert re.search("engine 0 .*is replaced", (out / "logs" / "driver.log").read_text())
    given = rates(out)
    assert len(given) == NUM_PROMPTS and len({rate for _, rate in given}) > 2

    whole = recipe.run(*command, "again")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert rates(recipe.folder / "again") == given
    kept = [json.loads(line) for line in (recipe.folder / "again" / "rows.jsonl").read_text().splitlines()]
    assert [row["pass_rate"] for row in kept] == [
        rate for _, rate in sorted(given, key=lambda pair: int(pair[0].rpartition(":")[2])) if rate <= 0.625
    ]
    assert [{name: row[name] for name in row if name != "pass_rate"} for row in kept] == [
        row for row in map(json.loads, rows) if any(row.items() <= one.items() for one in kept)
    ]
