"""PPO in the real loop: a critic on its own ranks learns beside the policy, and both go on from a checkpoint and after
a kill, also where policy, critic and engines share their machine's memory in phases."""

from __future__ import annotations

import shutil

import pytest
from recipe_runs import of_two_engines
from test_resume import NOT_COMPARED

from megatron_rl.layout import read_shape
from megatron_rl.observe.records import METRICS, read_lines


def arguments(task, name: str, *more: str) -> list[str]:
    return [
        "recipes/ppo.py",
        "configs/run/tiny_ppo.yaml",
        f"run.name={name}",
        "run.steps=6",
        f"model.path={task}/model",
        f"data.train={task}/train.jsonl",
        "data.eval=null",
        "rollout.prompts_per_step=16",
        "rollout.max_response_tokens=16",
        "rewards=[{kind: function, path: 'rewards:share_of_digits'}]",
        "algorithm.updates_per_step=2",
        "algorithm.kl={estimator: k2, place: reward, coefficient: {kind: fixed, value: 0.05}}",
        "policy.parallel.data=2",
        "critic.parallel.tensor=2",
        "critic.updates_per_step=2",
        "critic.warmup_steps=1",
        "checkpoint.every=2",
        *more,
    ]


def metrics_of(folder) -> list[dict]:
    return [record for record in read_lines(folder / METRICS) if "critic/loss" in record]


def check_same(records: list[dict], others: list[dict]) -> None:
    for first, second in zip(records, others, strict=True):
        for name, value in first.items():
            if not NOT_COMPARED.fullmatch(name):
                assert second[name] == value, name


@pytest.mark.deep
@pytest.mark.deadline(900)
def test_a_critic_learns_beside_the_policy_and_both_go_on_to_the_bit(recipe, task):
    run = recipe.run(*arguments(task, "whole"))
    assert run.returncode == 0, run.stdout + run.stderr
    runs = recipe.folder / "runs"
    whole = metrics_of(runs / "whole")
    assert [record["step"] for record in whole] == list(range(6))
    assert "loss" not in whole[0] and all(record["grad_norm"] > 0 for record in whole[1:])  # the critic's warm-up
    assert whole[0]["critic/value_mean"] == 0 and whole[1]["critic/value_mean"] != 0
    assert all(record["critic/grad_norm"] > 0 for record in whole)
    assert read_shape(runs / "whole" / "critic_hf").value_head
    assert sorted(path.name for path in (runs / "whole" / "checkpoints" / "critic").iterdir()) == [
        "step_000004",
        "step_000006",
    ]

    # Another run goes on from step 4. Policy, critic and engines share their memory, and the critic is lost in step 5,
    # while the engines have it.
    shutil.copytree(runs / "whole", runs / "lost")
    (recipe.folder / "gate").touch()
    shared = ["cluster.colocate=true", "rollout.num_engines=2", "--resume", "4"]
    run = recipe.start(*arguments(task, "lost", *shared))
    recipe.wait_until(run, (recipe.folder / "waiting").exists)
    recipe.process(run, "ray::CriticRank").kill()
    (recipe.folder / "gate").unlink()
    said = recipe.folder / "out.txt"
    assert run.wait(recipe.deadline_s) == 0, said.read_text()
    assert "Continuing with step 4" in said.read_text() and "was restarted" in said.read_text()
    lost = metrics_of(runs / "lost")
    assert lost[:4] == whole[:4] and lost[4:] != whole[4:], "two steps were done again, in other times"
    check_same(of_two_engines(whole[4:]), lost[4:])
    log = (runs / "lost" / "logs" / "critic_1.log").read_text()
    assert "entered the phase generating" in log and "entered the phase training" in log
