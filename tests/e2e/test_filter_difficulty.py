"""The filter of prompts with real engines: with a killed engine, stopped, and undisturbed, it gives the same rates."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

REWARDS = '''
def parity(completions, completion_ids, **columns):
    """1 or 0 as if by chance, so that a random model has all pass rates."""
    return [float(sum(ids) % 2) for ids in completion_ids]
'''
NUM_PROMPTS = 60


def rates(folder: Path) -> list[str]:
    return (folder / "pass_rates.jsonl").read_text().splitlines(keepends=True)


@pytest.mark.deep
def test_a_stopped_filter_goes_on_and_a_killed_engine_changes_nothing(recipe, task):
    """The engine is killed, and then the filter is stopped. It goes on undisturbed, without what it found after the
    kill, which it then finds again: so nothing depends on the kill, on the stop, or on the prompts that are left."""
    (recipe.folder / "my_rewards.py").write_text(REWARDS)
    rows = (task / "train.jsonl").read_text().splitlines()[:NUM_PROMPTS]
    (recipe.folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    command = [
        "filter-difficulty",
        "configs/run/tiny_grpo.yaml",
        f"model.path={task}/model",
        "data={train: rows.jsonl, eval: null}",
        "rewards=[{kind: function, path: 'my_rewards:parity'}]",
        "eval.verifier=parity",
        "rollout.max_sequences=8",  # two groups are under way
        "--out",
        "filtered",
    ]
    out = recipe.folder / "filtered"
    found, log = out / "pass_rates.jsonl", out / "logs" / "driver.log"
    run = recipe.start(*command)
    recipe.wait_until(run, lambda: found.exists() and found.stat().st_size)
    recipe.process(run, "ray::EngineRank").kill()
    before = len(rates(out))
    recipe.wait_until(run, lambda: len(rates(out)) > before + 4)
    run.send_signal(signal.SIGINT)
    assert run.wait(recipe.deadline_s) == 130
    assert re.search("engine 0 .*is replaced", log.read_text())
    text = (recipe.folder / "out.txt").read_text()
    first = rates(out)
    assert before + 4 < len(first) < NUM_PROMPTS, "it must have been stopped on its way"
    assert f"has the pass rates of {len(first)} prompts; the same command goes on" in text and "Traceback" not in text

    found.write_text("".join(first[:before]))
    again = recipe.run(*command)
    assert again.returncode == 0, again.stdout + again.stderr
    given = [json.loads(line) for line in rates(out)]
    assert len(given) == len({line["uid"] for line in given}) == NUM_PROMPTS
    assert set(rates(out)) >= set(first) and rates(out)[:before] == first[:before]
    assert log.read_text().count("is replaced") == 1 and len({line["pass_rate"] for line in given}) > 2
    kept = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    in_order = sorted(given, key=lambda line: int(line["uid"].rpartition(":")[2]))
    assert [row["pass_rate"] for row in kept] == [rate for line in in_order if (rate := line["pass_rate"]) <= 0.625]
    assert [{name: row[name] for name in row if name != "pass_rate"} for row in kept] == [
        row for row in map(json.loads, rows) if any(row.items() <= one.items() for one in kept)
    ]
