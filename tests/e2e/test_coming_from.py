"""Rows and rewards in the forms of other projects, and a mixture of domains, through the real loop."""

from __future__ import annotations

import pytest

from megatron_rl.observe.records import METRICS, read_lines
from megatron_rl.recipes.tiny.gsm8k import write_model

OTHERS = "configs/run/gsm8k_tiny_cpu.yaml"


@pytest.fixture
def run_of(recipe):
    write_model(recipe.folder / "runs" / "gsm8k_tiny")

    def records(*arguments: str) -> list[dict]:
        run = recipe.run("recipes/grpo.py", *arguments)
        assert run.returncode == 0, run.stdout + run.stderr
        [metrics] = (recipe.folder / "runs" / "gsm8k_tiny").glob(f"*/{METRICS}")
        return [record for record in read_lines(metrics) if "reward/mean" in record]

    return records


@pytest.mark.parametrize(
    ("project", "rewards"),
    [("trl", {"accuracy", "digits"}), ("verl", {"compute_score"}), ("open_instruct", {"mathematics"})],
)
def test_rows_and_rewards_of_another_project_train_without_an_edit(run_of, project, rewards):
    [record] = run_of(OTHERS, f"configs/run/from_{project}.yaml", "run.steps=1", "policy.parallel.tensor=1")
    assert record["reward/mean"] > 0 and record["grad_norm"] > 0
    for name in rewards:
        assert record[f"reward/{name}/abstained"] == record[f"reward/{name}/failed"] == 0


def test_each_domain_of_a_mixture_has_its_verifier(run_of):
    records = run_of("configs/run/olmo_tiny_cpu.yaml", "run.steps=2", "rollout.active_sampling=false")
    # Whether a step of a random model has a signal to learn from is chance; each step has its groups and verdicts.
    assert len(records) == 2
    for record in records:
        for dataset, reward in {"math": "mathematics", "code": "code", "ifeval": "instructions"}.items():
            assert record[f"dataset/{dataset}/groups"] == 2
            assert record[f"reward/{reward}/abstained"] == 0
        assert record["dataset/general-quality_ref/groups"] == 2 and record["reward/words/abstained"] == 0
