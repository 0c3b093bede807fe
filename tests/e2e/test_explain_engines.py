"""`explain` on a run whose engines really are faulty: it names the engine, and what is wrong with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from faulty_engine import DAMAGED, DAMAGED_ENGINE, STALE, STALE_ENGINE

from megatron_rl.observe.records import METRICS, read_lines


@pytest.mark.deep
@pytest.mark.deadline(900)
def test_a_damaged_weight_and_a_missed_push_are_named_with_their_engines(recipe, task):
    """Both come after the push was verified, so that the run cannot know of them."""
    shutil.copy(Path(__file__).parent / "faulty_engine.py", recipe.folder)
    done = recipe.run(
        "grpo",
        "configs/run/tiny_grpo.yaml",
        "run.name=faulty",
        f"run.steps={STALE + 1}",
        f"model.path={task}/model",
        f"data.train={task}/train.jsonl",
        "data.eval=null",
        "rollout.prompts_per_step=8",
        "rollout.samples_per_prompt=4",
        "rollout.max_response_tokens=24",
        "rollout.num_engines=2",
        "rollout.backend=faulty_engine.py:FaultySampler",
        "rollout.dump=true",
        "rewards=[{kind: function, path: 'rewards:share_of_digits'}]",
        "policy.parallel.tensor=1",
        "checkpoint.every=3",
        "algorithm.max_mismatch=1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = read_lines(recipe.folder / "runs" / "faulty" / METRICS)
    odd = [record["step"] for record in records if record.get("mismatch/mean_abs", 0.0) > 1e-3]
    assert odd == [DAMAGED, STALE], "a push mends both"

    told = explained(recipe, DAMAGED)
    [said] = [cause for cause in told["causes"] if "engine" in cause]
    assert said.startswith("an engine with other weights: in ") and f"; engine {DAMAGED_ENGINE} gave them (" in said
    assert "no weights of the versions 0 to 1 fit them either" in said

    told = explained(recipe, STALE)
    [said] = [cause for cause in told["causes"] if "engine" in cause]
    assert said.startswith("a stale engine: ") and f"; engine {STALE_ENGINE} gave them (" in said
    assert f"the weights of version {STALE - 1} in place of {STALE}" in said
    # The passes with older weights have changed nothing.
    assert told["gradient"]["norm"] == pytest.approx(records[STALE]["grad_norm"], rel=1e-6)


def explained(recipe, step: int) -> dict:
    done = recipe.run("explain", "runs/faulty", "--step", str(step), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])
