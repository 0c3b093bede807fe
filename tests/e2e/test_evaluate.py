"""An evaluation with a real engine, stopped on its way."""

from __future__ import annotations

import json
import re
import signal
from statistics import fmean

import pytest

from megatron_rl.recipes.tiny.demo import WARM_START

NUM_PROMPTS = 120


@pytest.mark.deep
def test_a_stopped_evaluation_goes_on_and_counts_each_prompt_once(recipe, task):
    """The demo's first weights answer 37 % of the sums right."""
    rows = (task / "eval.jsonl").read_text().splitlines()[:NUM_PROMPTS]
    (recipe.folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    command = ["evaluate", str(WARM_START), "rows.jsonl", "--k", "1", "3", "4", "--out", "result"]
    command += ["rollout.max_sequences=8", "model.dtype=float32"]
    answers = recipe.folder / "result" / "answers.jsonl"
    run = recipe.start(*command)
    recipe.wait_until(run, lambda: answers.exists() and answers.stat().st_size)
    run.send_signal(signal.SIGTERM)
    assert run.wait(recipe.deadline_s) == 143
    first = answers.read_text().splitlines()
    said = (recipe.folder / "out.txt").read_text()
    assert 0 < len(first) < NUM_PROMPTS and f"has the answers to {len(first)} prompts; the same command" in said

    again = recipe.run(*command)
    assert again.returncode == 0, again.stdout + again.stderr
    lines = answers.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert lines[: len(first)] == first and len({record["uid"] for record in records}) == NUM_PROMPTS
    truths = {f"rows.jsonl:{number}": json.loads(row)["ground_truth"] for number, row in enumerate(rows, start=1)}
    for record in records:
        for answer in record["answers"]:
            assert answer["is_right"] == (answer["final_answer"] == truths[record["uid"]]), answer
            assert answer["final_answer"] is None or answer["final_answer"] in answer["text"]
    result = json.loads((recipe.folder / "result" / "result.json").read_text())
    right = [[answer["is_right"] for answer in record["answers"]] for record in records]
    assert result["eval/accuracy"] == pytest.approx(fmean(map(fmean, right))) and 0.25 < result["eval/accuracy"] < 0.5
    assert result["eval/pass@4"] == pytest.approx(fmean(map(any, right)))
    assert 0.5 < result["eval/pass@3"] < result["eval/pass@4"]
    assert f"pass@1 (accuracy)  {result['eval/accuracy']:.3f}" in again.stdout

    at = command.index("--k")
    fewer = recipe.run(*command[:at], "--k", "2", *command[at + 4 :])
    assert fewer.returncode == 0 and "120 prompts, 4 answers to each" in fewer.stdout, fewer.stdout + fewer.stderr
    assert answers.read_text().splitlines() == lines
    more = recipe.run(*command[:at], "--k", "8", *command[at + 4 :])
    assert more.returncode == 1 and "has 4 answers to each prompt, and --k 8 needs more" in more.stdout


@pytest.mark.deep
def test_an_evaluation_whose_reward_raises_on_every_answer_fails_and_keeps_no_answer(recipe, task):
    (recipe.folder / "rows.jsonl").write_bytes((task / "eval.jsonl").read_bytes())
    (recipe.folder / "mine.py").write_text("def right(completions, **columns):\n    raise KeyError('answer')\n")
    reward = "rewards=[{kind: function, path: 'mine.py:right', name: right}]"
    command = ["evaluate", str(WARM_START), "rows.jsonl", "--out", "result", reward, "eval.verifier=right"]
    run = recipe.run(*command, "rollout.max_sequences=8", "model.dtype=float32")
    assert run.returncode == 1, run.stdout + run.stderr
    said = " ".join(run.stdout.split())
    assert re.search(r"the rewards scored none of \d+ answers; .*KeyError: 'answer'.*Correct the reward", said), said
    assert not (recipe.folder / "result" / "answers.jsonl").read_text()
