"""Training on preferences from rows to a model: what is planted is learnt, a kill changes no number, and the reference
scores once."""

from __future__ import annotations

import json
import random

import pytest
from test_resume import lines

from megatron_rl.observe.records import read_metrics
from megatron_rl.recipes.tiny.demo import WARM_START

KEYS = ["run.steps=12", "dpo.rows_per_step=32", "dpo.eval=eval.jsonl", "dpo.eval_every=4", "dpo.max_tokens=48"]
KEYS += ["policy.optimizer.lr=1e-3", "policy.parallel.data=2", "model.dtype=float32", "checkpoint={every: 2, keep: 9}"]
KEYS += ["cluster.device=cpu", "balance.max_tokens_per_microbatch=256", "run.folder=runs", "observe=[]"]


def write_pairs(folder, num: int = 200) -> None:
    """Sums whose better answer begins with 7."""
    rng, rows = random.Random(0), []
    for _ in range(num):
        chosen, rejected = (f"{left}{rng.randrange(100, 999)}" for left in (7, rng.choice("1234568")))
        prompt = f"{rng.randrange(100, 999)}+{rng.randrange(100, 999)}="
        rows.append(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}))
    (folder / "pairs.jsonl").write_text("\n".join(rows[:150]) + "\n")
    (folder / "eval.jsonl").write_text("\n".join(rows[150:]) + "\n")


@pytest.mark.deep
@pytest.mark.deadline(900)
@pytest.mark.parametrize(("kind", "least"), [("dpo", 0.9), ("kto", 0.6)])
def test_a_planted_preference_is_learnt_and_a_kill_changes_no_number(recipe, kind, least):
    write_pairs(recipe.folder)
    asked = ["dpo", f"model.path={WARM_START}", "dpo.rows=pairs.jsonl", f"dpo.loss.kind={kind}", *KEYS]
    done = recipe.run(*asked, "run.name=whole")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the reference model scores the rows" in done.stdout
    whole = recipe.folder / "runs" / "whole"
    expected = lines(whole)
    assert (whole / "hf" / "model.safetensors").exists()
    accuracy = [record["eval/accuracy"] for record in read_metrics(whole) if "eval/accuracy" in record]
    assert len(accuracy) == 4 and accuracy[0] == 0 and accuracy[-1] >= least
    if kind == "dpo":
        assert expected[0]["loss"] == pytest.approx(0.6931, abs=1e-4), "log 2: policy and reference are equal"
    run = recipe.start(*asked, "run.name=killed")
    killed = recipe.folder / "runs" / "killed"
    recipe.wait_until(run, (killed / "checkpoints" / "step_000004").exists)
    run.kill()
    run.wait(recipe.deadline_s)
    resumed = recipe.run(*asked, "run.name=killed", "--resume", "auto")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "the reference model scores" not in resumed.stdout, "runs/reference has the scores"
    assert lines(killed) == expected
