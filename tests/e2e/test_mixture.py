"""The real loop with a mixture of experts whose trainer replays the engines' choices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron_rl.data.journal import read_journal
from megatron_rl.loop.checkpoints import find_checkpoints
from megatron_rl.observe.records import METRICS, read_lines
from megatron_rl.processes import descendants


def arguments(task: Path, mixture: Path, steps: int) -> list[str]:
    return [
        "recipes/grpo.py",
        "configs/run/tiny_grpo.yaml",
        "run.name=mixture",
        f"run.steps={steps}",
        f"model.path={mixture}",
        f"data.train={task}/train.jsonl",
        "data.eval=null",
        "policy.parallel={tensor: 1, data: 2, expert: 2}",
        "policy.routing_replay=true",
        "policy.load_balancing_loss=0.01",
        "rollout.max_lag=1",
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=4",
        "rewards=[{kind: function, path: 'rewards:share_of_digits'}]",
        "checkpoint.every=1",
    ]


@pytest.mark.deep
@pytest.mark.deadline(900)
def test_a_run_that_was_killed_replays_the_choices_in_its_journal(recipe, task, mixture):
    folder = recipe.folder / "runs" / "mixture"
    run = recipe.start(*arguments(task, mixture, 1000))
    recipe.wait_until(run, lambda: len(find_checkpoints(folder / "checkpoints")) > 1)
    for process in [psutil.Process(run.pid), *descendants(psutil.Process(run.pid))]:
        process.kill()
    run.wait()
    groups = read_journal(folder / "journal").values()
    assert groups and all(len(t.routes) == len(t.ids) - 1 for group in groups for t in group.payload)

    last = max(find_checkpoints(folder / "checkpoints")) + 3
    resumed = recipe.run(*arguments(task, mixture, last), "--resume", "auto")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    trained = [record for record in read_lines(folder / METRICS)[:-1] if "loss" in record]
    assert len(trained) >= last - 1
    for record in trained:
        # Each answer has about 70 tokens, of which the last one has no choice.
        assert 0.9 < record["routing/replayed"] < 1 and record["routing/differing"] < 0.5
        assert 1 <= record["experts/load_mean"] <= record["experts/load/max"] <= 8 / 2
        assert record["experts/auxiliary_loss"] > 0 and np.isfinite(record["loss"])
        assert record.get("mismatch/mean_abs", 0) < 1e-4  # of the tokens that this step's weights sampled, if any
    assert "mismatch/mean_abs" in trained[0] and trained[0]["routing/differing"] < 1e-3
