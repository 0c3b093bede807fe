"""tools/bench_process_rewards.py compares ways that answer alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from patience import deadline

from megatron_rl.recipes.process_rewards.task import question, write_model
from megatron_rl.tools.bench_process_rewards import saved

ROOT = Path(__file__).parents[3]


def test_what_is_saved_is_a_share_of_what_is_added_in_the_same_round():
    seconds = {"none": [1.0, 2.0, 9.0], "shadow": [1.5, 2.5, 9.5], "after": [2.0, 3.0, 11.0]}
    assert saved(seconds) == pytest.approx(0.5)


@pytest.mark.deep
def test_an_engine_answers_alike_in_all_ways(tmp_path):
    """A random model, whose passages are those of the largest length."""
    write_model(tmp_path / "model", seed=0)
    rows = [{"prompt": question(10000 + i, 20000), "ground_truth": str(30000 + i)} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = [f"model.path={tmp_path}/model", f"data.train={tmp_path}/train.jsonl", "data.eval=null"]
    command = [sys.executable, "tools/bench_process_rewards.py", "--json", "--rounds", "1", "--runs", "0", *changes]
    smaller = ["rollout.prompts_per_step=2", "rollout.samples_per_prompt=2"]
    done = subprocess.run([*command, *smaller], cwd=ROOT, capture_output=True, text=True, timeout=deadline(120))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["steps"] is None
    engine = report["engine"]
    assert engine["tokens_per_answer"] > 1 and engine["passages_per_answer"] > 0
    # The values of the prompts are asked once for each group, and those of passages for each of them.
    assert engine["requests_per_answer"] == pytest.approx(engine["passages_per_answer"] + 1 / 2)
    assert 0 <= engine["cached_share"] < 1
    assert all(engine[f"{way}{suffix}"] > 0 for way in ("none", "shadow", "after") for suffix in ("_s", "_cpu_s"))
