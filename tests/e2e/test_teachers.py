"""Teachers in the real loop: engines of their own, a server, and the policy behind another prompt."""

from __future__ import annotations

import json
import random

import numpy as np
import psutil
import pytest
import torch
from service_server import serving

from megatron_rl.data.saved_rollouts import read_step
from megatron_rl.observe.records import METRICS, read_lines
from megatron_rl.processes import descendants

DATASETS = ("engine", "policy", "server", "none")
TEACHERS = (
    "[{{path: {teacher}, datasets: [engine]}}, {{prompt: other, datasets: [policy], weight: 0.5}}, "
    "{{server: '{url}', datasets: [server]}}]"
)


@pytest.fixture
def rows(tmp_path):
    """Sums of four data sets; the other prompt of a row has the numbers in the other order, and is longer."""
    path, rng = tmp_path / "rows.jsonl", random.Random(0)
    with path.open("w") as file:
        for i in range(32):
            a, b = rng.randint(100, 999), rng.randint(100, 999)
            row = {"prompt": f"{a}+{b}=", "ground_truth": str(a + b), "dataset": DATASETS[i % 4]}
            file.write(json.dumps(row | {"other": f"{b}+{a}={b}+{a}="}) + "\n")
    return path


class Scores:
    """The log-probs of a model's folder, as a server gives them. Rows of the vocabulary without a token are never
    sampled."""

    def __init__(self, folder):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def of(self, ids) -> list[float]:
        """One for each token but the first."""
        ids = torch.tensor(list(map(int, ids)))
        logits = self.model(ids[None]).logits[0, :-1]
        known = torch.tensor(sorted(self.tokenizer.get_vocab().values()))
        only = torch.full_like(logits, -torch.inf).index_copy(1, known, logits[:, known])
        return only.log_softmax(-1).gather(1, ids[1:, None])[:, 0].tolist()

    def reply(self, body, earlier):
        ids = body["prompt"]
        told = [
            {str(token): {"logprob": logp, "rank": 1, "decoded_token": self.tokenizer.decode([token])}}
            for token, logp in zip(ids[1:], self.of(ids), strict=True)
        ]
        return 200, {"choices": [{"prompt_logprobs": [None, *told]}]}


def arguments(name, task, rows, teachers, *more):
    return (
        "grpo",
        "configs/run/tiny_grpo.yaml",
        f"run.name={name}",
        f"model.path={task}/model",
        f"data.train={rows}",
        "data.eval=null",
        "policy.parallel.tensor=1",
        "rollout.prompts_per_step=32",
        "rollout.samples_per_prompt=2",
        "rollout.max_response_tokens=24",
        "rollout.dump=true",
        f"teachers={teachers}",
        "algorithm.distillation={outcome: true}",
        "checkpoint.every=0",
        *more,
    )


@pytest.mark.deep
def test_each_row_is_scored_by_its_teacher_and_a_replay_is_the_same(recipe, task, rows):
    """By what transformers says of the tokens. The policy at the first step is the folder's."""
    warm_start = "recipes/tiny/data/warm_start"
    teacher, policy = Scores(recipe.folder / warm_start), Scores(task / "model")
    with serving(teacher.reply) as server:
        given = TEACHERS.format(teacher=warm_start, url=server.url)
        run = recipe.run(*arguments("first", task, rows, given, "run.steps=2"))
    assert run.returncode == 0, run.stdout + run.stderr
    folder = recipe.folder / "runs" / "first"
    records = [record for record in read_lines(folder / METRICS) if "loss" in record]
    assert all(0 < record["teacher/scored"] <= 1 and np.isfinite(record["teacher/kl"]) for record in records)
    tokenizer, seen = policy.tokenizer, set()
    for group in read_step(folder / "rollouts", 0).groups:
        dataset, num = group.prompt.columns["dataset"], len(group.prompt.token_ids)
        seen.add(dataset)
        for tokens in group.payload:
            ids, first = tokens.ids.tolist(), int(tokens.action_mask.argmax())
            if dataset == "none":
                assert tokens.logp_teacher is None
                continue
            if dataset == "policy":
                other = tokenizer(group.prompt.columns["other"], add_special_tokens=False)["input_ids"]
                expected = policy.of([*other, *ids[num:]])[-(len(ids) - first) :]
            else:
                expected = teacher.of(ids)[first - 1 :]
            # Both compute in fp32, and the trained teacher's logits are sharp.
            assert tokens.logp_teacher[first:] == pytest.approx(expected, abs=1e-4), dataset
            assert not tokens.logp_teacher[:first].any()
    assert seen == set(DATASETS)
    saved = ("rollout.dump=false", f"rollout.replay={folder}/rollouts")
    again = recipe.run(*arguments("again", task, rows, given, "run.steps=2", *saved))
    assert again.returncode == 0, again.stdout + again.stderr
    replayed = [r for r in read_lines(recipe.folder / "runs" / "again" / METRICS) if "loss" in r]
    for name in ("loss", "grad_norm", "teacher/kl", "teacher/scored"):
        assert [r[name] for r in replayed] == [r[name] for r in records], name


@pytest.mark.deep
def test_a_teacher_that_dies_is_replaced(recipe, task, rows):
    """While engines and trainer work at the same time."""
    given = "[{path: recipes/tiny/data/warm_start}]"
    run = recipe.start(*arguments("dies", task, rows, given, "run.steps=6", "rollout.max_lag=1"))
    folder = recipe.folder / "runs" / "dies"
    log = folder / "logs" / "teacher_0_engine_0.log"
    recipe.wait_until(run, lambda: (folder / METRICS).exists() and len(list(read_lines(folder / METRICS))) >= 1)
    [teacher] = [p for p in descendants(psutil.Process(run.pid)) if is_of(p, log)]
    teacher.kill()
    assert run.wait(recipe.deadline_s) == 0, (recipe.folder / "out.txt").read_text()
    records = [record for record in read_lines(folder / METRICS) if "loss" in record]
    assert len(records) == 6 and all(record["teacher/scored"] == 1 for record in records)
    assert "teacher 0 engine 0" in (folder / "logs" / "driver.log").read_text()


@pytest.mark.deep
def test_teachers_that_take_turns_with_the_engines_give_the_same_numbers_also_after_a_death(recipe, task, rows):
    """One teacher has engines of its own, which sleep until all answers are there; the other one is the policy."""
    given = "[{path: recipes/tiny/data/warm_start, datasets: [engine, server]}, {prompt: other, datasets: [policy]}]"
    apart = recipe.run(*arguments("apart", task, rows, given, "run.steps=4"))
    assert apart.returncode == 0, apart.stdout + apart.stderr
    run = recipe.start(*arguments("turns", task, rows, given, "run.steps=4", "cluster.colocate=true"))
    folder = recipe.folder / "runs" / "turns"
    log = folder / "logs" / "teacher_0_engine_0.log"
    recipe.wait_until(run, lambda: (folder / METRICS).exists() and len(list(read_lines(folder / METRICS))) >= 1)
    [teacher] = [p for p in descendants(psutil.Process(run.pid)) if is_of(p, log)]
    teacher.kill()
    assert run.wait(recipe.deadline_s) == 0, (recipe.folder / "out.txt").read_text()
    told = (folder / "logs" / "driver.log").read_text()
    assert "teacher 0 engine 0" in told and "is replaced" in told
    order = [line.partition(": phase ")[2] for line in told.splitlines() if ": phase " in line]
    assert order[:5] == ["weight sync", "generating", "scoring", "training", "weight sync"]
    records = [
        [r for r in read_lines(recipe.folder / "runs" / name / METRICS) if "loss" in r] for name in ("apart", "turns")
    ]
    for name in ("loss", "grad_norm", "teacher/kl", "teacher/scored", "reward/mean"):
        assert [r[name] for r in records[0]] == [r[name] for r in records[1]], name
    assert all(0 < record["teacher/scored"] <= 1 for record in records[0])


def is_of(process: psutil.Process, log) -> bool:
    try:
        return str(log) in {file.path for file in process.open_files()}
    except psutil.Error:
        return False
