"""Reward models from pairs of answers to a run that they score: what is planted is learnt, transformers gives the same
scores as a run, and kills change no number."""

from __future__ import annotations

import json

import psutil
import pytest
import torch
from recipe_runs import Recipe
from test_preferences import write_pairs
from test_resume import lines

from megatron_rl.observe.records import read_lines, read_metrics
from megatron_rl.processes import descendants
from megatron_rl.recipes.tiny.demo import WARM_START

KEYS = ["run.steps=12", "reward_model.rows=pairs.jsonl", "reward_model.rows_per_step=32", "reward_model.max_tokens=48"]
KEYS += ["reward_model.eval=eval.jsonl", "reward_model.eval_every=4", "policy.optimizer.lr=1e-3"]
KEYS += ["policy.parallel.data=2", "model.dtype=float32", "checkpoint={every: 2, keep: 9}", "cluster.device=cpu"]
KEYS += ["balance.max_tokens_per_microbatch=256", "run.folder=runs", "observe=[]", f"model.path={WARM_START}"]
UNFINISHED = -3.0


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Recipe:
    """A folder with a run `whole`."""
    recipe = Recipe(tmp_path_factory.mktemp("reward_model"))
    write_pairs(recipe.folder)
    done = recipe.run("reward-model", *KEYS, "run.name=whole")
    assert done.returncode == 0, done.stdout + done.stderr
    return recipe


def scores_of(folder, texts: list[str]) -> list[float]:
    """transformers' scores, one text at a time."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    scores = []
    for text in texts:
        given = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            scores.append(model(**given).logits.item())
    return scores


@pytest.mark.deep
@pytest.mark.deadline(1200)
def test_a_planted_preference_is_learnt_and_a_kill_changes_no_number(trained):
    whole, killed = trained.folder / "runs" / "whole", trained.folder / "runs" / "killed"
    records = [record for record in read_metrics(whole) if "eval/accuracy" in record]
    assert len(records) == 4 and records[0]["eval/accuracy"] == 0 and records[-1]["eval/accuracy"] >= 0.8
    pairs = [json.loads(line) for line in (trained.folder / "eval.jsonl").read_text().splitlines()]
    chosen, rejected = (
        torch.tensor(scores_of(whole / "hf", [f"{row['prompt']}{row[key]}<eos>" for row in pairs]))
        for key in ("chosen", "rejected")
    )
    assert (chosen > rejected).double().mean().item() == records[-1]["eval/accuracy"]
    loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean().item()
    assert loss == pytest.approx(records[-1]["eval/loss"], abs=1e-5)

    run = trained.start("reward-model", *KEYS, "run.name=killed")
    trained.wait_until(run, (killed / "checkpoints" / "step_000004").exists)
    run.kill()
    run.wait(trained.deadline_s)
    resumed = trained.run("reward-model", *KEYS, "run.name=killed", "--resume", "auto")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert lines(killed) == lines(whole)


@pytest.mark.deep
@pytest.mark.deadline(1200)
def test_a_run_has_transformers_scores_and_kills_change_no_number(trained, task):
    hf, runs = trained.folder / "runs" / "whole" / "hf", trained.folder / "runs"
    asked = ["grpo", "configs/run/tiny_grpo.yaml", f"model.path={WARM_START}", f"data.train={task}/train.jsonl"]
    asked += ["data.eval=null", "eval.every=0", "run.steps=3", "policy.parallel.tensor=1", "checkpoint.every=1"]
    asked += ["rollout.prompts_per_step=8", "rollout.samples_per_prompt=4", "run.recorded_answers=32"]
    asked += [f"rewards=[{{kind: reward_model, path: '{hf}', unfinished_score: {UNFINISHED}}}]", "run.folder=runs"]
    done = trained.run(*asked, "run.name=scored")
    assert done.returncode == 0, done.stdout + done.stderr
    samples = list(read_lines(runs / "scored" / "samples.jsonl"))
    ended = [one for one in samples if one["finish"] == "stop" and one["thought"]]
    assert len(samples) == 96 and len(ended) > 48
    expected = scores_of(hf, [f"{one['prompt']}{one['answer']}" for one in ended])
    assert [one["reward"] for one in ended] == pytest.approx(expected, abs=1e-5)
    assert {one["reward"] for one in samples if one not in ended} <= {UNFINISHED}

    run, killed = trained.start(*asked, "run.name=killed_run"), runs / "killed_run"
    log = killed / "logs" / "reward_model.log"
    trained.wait_until(run, lambda: log.exists() and "scored" in log.read_text())
    [scorer] = [one for one in descendants(psutil.Process(run.pid)) if str(log) in _outputs(one)]
    scorer.kill()
    trained.wait_until(run, (killed / "checkpoints" / "step_000002").exists)
    run.kill()
    run.wait(trained.deadline_s)
    resumed = trained.run(*asked, "run.name=killed_run", "--resume", "auto")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert lines(killed) == lines(runs / "scored")


def _outputs(process: psutil.Process) -> list[str]:
    try:
        return [file.path for file in process.open_files()]
    except psutil.Error:
        return []
