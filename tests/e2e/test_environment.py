"""The real loop with answers of several turns: environments in processes of their own, and an agent with an address."""

from __future__ import annotations

import json
import shutil
from math import fsum
from pathlib import Path

import pytest

from megatron_rl.data.journal import read_journal
from megatron_rl.observe.records import METRICS, read_lines


@pytest.fixture
def rows(recipe) -> Path:
    from megatron_rl.recipes.calculator.task import write_model

    write_model(recipe.folder / "model", seed=0)
    for name in ("guesses.py", "agents.py"):
        shutil.copyfile(Path(__file__).parent / name, recipe.folder / name)
    rows = [
        {"messages": [{"role": "user", "content": f"{i}*2"}], "ground_truth": "fails" if i % 4 == 0 else "0"}
        for i in range(1, 33)
    ]
    path = recipe.folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.deep
def test_rewards_of_turns_reach_the_trainer_and_a_fault_is_counted(recipe, rows):
    run = recipe.run(
        "grpo",
        "configs/run/calculator_tiny_cpu.yaml",
        "run.name=digits",
        "run.steps=3",
        "model.path=model",
        f"data.train={rows}",
        "data.eval=null",
        "policy.parallel.tensor=1",
        "rollout.max_lag=1",
        "rollout.prompts_per_step=8",
        "rollout.samples_per_prompt=8",
        "rollout.environment={kind: class, path: 'guesses.py:Digits', processes: 2, max_turns: 3}",
        "rewards=[{kind: environment}]",
        "checkpoint.every=1",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    folder = recipe.folder / "runs" / "digits"
    records = [record for record in read_lines(folder / METRICS) if "environment/turns_mean" in record]
    assert len(records) == 3
    assert any(record["environment/turns_max"] == 3 for record in records)
    assert any(record["environment/failed"] > 0 for record in records)
    first = records[0]
    assert first["lag/max"] == 0 and first["mismatch/mean_abs"] < 1e-5
    assert "step raised OSError: the disk is gone" in (folder / "logs" / "rewards.log").read_text()
    assert {path.name for path in (folder / "logs").glob("*environments*")} == {
        "engine_0_environments_0.log",
        "engine_0_environments_1.log",
    }
    samples = [sample for group in read_journal(folder / "journal").values() for sample in group.rollouts]
    whole = [sample for sample in samples if not sample.episode.fault]
    assert all(sample.verdict.score is None for sample in samples if sample.episode.fault)
    for sample in whole:
        scores = [reward.value for reward in sample.token_rewards]
        assert sample.verdict.score == (fsum(scores) if scores else None)
    assert any(len(sample.token_rewards) > 1 for sample in whole)


@pytest.mark.deep
def test_an_agent_of_somebody_else_is_trained(recipe, rows):
    """Each answer is two conversations that begin alike, so a group has twice as many samples."""
    run = recipe.run(
        "grpo",
        "configs/run/calculator_tiny_cpu.yaml",
        "run.name=agent",
        "run.steps=2",
        "model.path=model",
        f"data.train={rows}",
        "data.eval=null",
        "policy.parallel.tensor=1",
        "rollout.prompts_per_step=8",
        "rollout.samples_per_prompt=4",
        "rollout.environment={kind: agent, path: 'agents.py:asks_twice'}",
        "rewards=[{kind: environment}]",
        "checkpoint.every=0",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    folder = recipe.folder / "runs" / "agent"
    records = [record for record in read_lines(folder / METRICS) if "environment/turns_mean" in record]
    assert len(records) == 2
    for record in records:
        failed = record["environment/failed"]
        assert 0 < failed < 1 and failed == record["reward/environment/failed"]
        # An answer that failed has one conversation, without a token; the others have two, which share the first of
        # their two turns.
        assert record["rollout/num_samples"] == 32
        assert record["environment/conversations"] == pytest.approx(2 - failed)
        assert record["environment/turns_max"] == 3
        # The same weights, and tokens that nobody has tokenised twice: both sides compute in fp32.
        assert record["mismatch/mean_abs"] < 1e-5 and record["grad_norm"] > 0
    assert "asks_twice raised OSError: the disk is gone" in (folder / "logs" / "rewards.log").read_text()
