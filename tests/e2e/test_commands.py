"""Supervised training from rows to a model, what a person reads when the input is wrong, and stops before the first
step."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import cover
import pytest
from safetensors import safe_open


@pytest.mark.deep
def test_supervised_training_learns_though_nobody_reads_its_output_any_more(recipe, run_here, task):
    """As with `| head` and a lost connection: the reader of the output goes, and the terminal hangs up."""
    lines = (task / "demonstrations.jsonl").read_text().splitlines()
    (recipe.folder / "heldout.jsonl").write_text("\n".join(lines[200:240]) + "\n")
    lines = lines[:200]
    (recipe.folder / "rows.jsonl").write_text("\n".join([*lines, '{"prompt": "1+1="}']) + "\n")
    arguments = ["sft", "configs/run/tiny_sft.yaml", f"model.path={task}/model", "sft.rows=rows.jsonl"]
    arguments += ["policy.parallel.tensor=1"]
    refused = run_here(*arguments)
    assert refused.returncode == 1 and "rows.jsonl:201" in refused.stdout
    arguments += ["sft.on_bad_row=skip", "run.epochs=3.8", "run.steps=null", "policy.optimizer.warmup_steps=2"]
    arguments += ["sft.eval=heldout.jsonl", "sft.eval_every=4", "checkpoint={every: 4, keep: 1, keep_best: eval/loss}"]
    command = recipe.command(*arguments)
    started = subprocess.Popen(
        command,
        cwd=recipe.folder,
        env=recipe.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    said = ""
    while "rows.jsonl: 1 of 201 rows skipped" not in said:
        line = started.stdout.readline()
        assert line, said
        said += line
    run = recipe.folder / "runs" / "tiny" / "warm_start"
    recipe.wait_until(started, (run / "logs" / "trainer_0.log").exists)  # Ray's processes hear it too
    started.stdout.close()
    os.killpg(started.pid, signal.SIGHUP)
    assert started.wait(recipe.deadline_s) == 0, (run / "logs" / "driver.log").read_text()
    assert "the output cannot be written any more" in (run / "logs" / "driver.log").read_text()
    assert (run / "report.html").exists()
    *records, last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(record["perf/tokens_per_s"] > 0 and "perf/mfu" not in record for record in records)
    # An update of Adam changes a parameter by about its learning rate; a process with torch has some 100 MB.
    assert all(0 < record["update_ratio"] < 0.1 and record["memory/trainer_bytes/max"] > 1e8 for record in records)
    losses = [record["loss"] for record in records]
    assert losses[0] == pytest.approx(math.log(64), abs=0.1), "random weights: uniform over the vocabulary"
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.5, "3.8 epochs of 201 rows, 64 in a step"
    heldout = {record["step"]: record["eval/loss"] for record in [*records, last] if "eval/loss" in record}
    assert sorted(heldout) == [0, 4, 8, 12] and heldout[0] == pytest.approx(losses[0], abs=0.05)
    kept = {int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_*")}
    assert kept == {12, min((4, 8, 12), key=heldout.get)}
    assert (run / "hf" / "model.safetensors").exists()


def tiny(task, *changes: str) -> list[str]:
    files = [f"model.path={task}/model", f"data.train={task}/train.jsonl", f"data.eval={task}/eval.jsonl"]
    return ["grpo", "configs/run/tiny_grpo.yaml", *files, *changes]


def broken_model(folder, task):
    shutil.copytree(task / "model", folder / "model")
    weights = folder / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return "model.path=model"


def broken_row(folder, task):
    lines = (task / "train.jsonl").read_text().splitlines()
    (folder / "rows.jsonl").write_text("\n".join([lines[0], '{"prompt": "1+', lines[1]]) + "\n")
    return "data.train=rows.jsonl"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rollout.num_engine=2", "did you mean rollout.num_engines?"),
        ("cluster.world_size=3", "2 x 1 x 1 x 1 = 2 ranks"),
        ("policy.parallel.tensor=8", "4 attention heads, which policy.parallel.tensor=8 does not divide"),
        ("model.path=nowhere", "nowhere has no config.json"),
        (broken_model, "model.safetensors has"),
        (broken_row, "rows.jsonl:2"),
        ("rollout.max_prompt_tokens=7", "the prompt has 8 tokens, rollout.max_prompt_tokens is 7"),
        ("rewards=[{kind: function, path: 'rewards:misspelt'}]", "misspelt"),
        ("configs/run/none.yaml", "no such file"),
    ],
)
def test_wrong_input_is_named_before_anything_starts(recipe, run_here, task, change, message):
    change = change(recipe.folder, task) if callable(change) else change
    done = run_here(*tiny(task, change))
    assert done.returncode == 1
    assert message in " ".join(done.stdout.split()), done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not (recipe.folder / "runs" / "tiny" / "grpo").exists()


def test_a_shell_sees_a_refusal_as_status_1_and_no_traceback(recipe, task):
    done = recipe.run(*tiny(task, broken_row(recipe.folder, task)))
    assert done.returncode == 1 and "rows.jsonl:2" in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stdout and done.stderr == ""


STOPS = [(signal.SIGUSR1, 75, "driver.log"), (signal.SIGTERM, 143, "trainer_0.log")]


@pytest.mark.parametrize(("number", "status", "when"), cover.essential(STOPS, STOPS[0]))
def test_a_stop_while_starting_is_prompt_and_says_that_nothing_was_saved(recipe, task, number, status, when):
    """Before Ray starts, and when its processes do."""
    run = recipe.start(*tiny(task, "run.name=stopped", "policy.parallel.tensor=1"))
    folder = recipe.folder / "runs" / "stopped"
    recipe.wait_until(run, (folder / "logs" / when).exists)
    run.send_signal(number)
    assert run.wait(recipe.deadline_s) == status
    said = " ".join((recipe.folder / "out.txt").read_text().split())
    assert "stopping" in said and "No step was done, so there was nothing to save." in said, said
    assert "Traceback" not in said and not (folder / "metrics.jsonl").exists()


@pytest.mark.deep
def test_the_demo_begins_with_a_model_of_its_task_and_what_it_tells_to_try_works(recipe, run_here, task, capsys):
    """The weights that the package ships have the form of the task's model. The commands are planned here."""
    before = dict(os.environ)
    from megatron_rl.recipes.tiny.demo import WARM_START, tell_more  # which sets variables

    os.environ.clear()
    os.environ.update(before)
    shipped, made = WARM_START, task / "model"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        ours, theirs = (json.loads((folder / name).read_text()) for folder in (shipped, made))
        assert {**ours, "dtype": None} == {**theirs, "dtype": None}, f"{name}: make demo --from-scratch, and copy"
    with safe_open(shipped / "model.safetensors", "pt") as ours, safe_open(made / "model.safetensors", "pt") as theirs:
        assert {name: ours.get_slice(name).get_shape() for name in ours.keys()} == {
            name: theirs.get_slice(name).get_shape() for name in theirs.keys()
        }
    given = ["configs/run/tiny_grpo.yaml", f"model.path={shipped}", f"data.train={task}/train.jsonl"]
    capsys.readouterr()
    tell_more([*given, f"data.eval={task}/eval.jsonl"], Path("runs/tiny/seed_0/grpo"))
    told = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line.startswith("     ")]
    names = [words[words.index("megatron_rl") + 1 if "-m" in words else 1] for words in told]
    assert names == ["grpo", "report", "demo-real", "grpo"]
    for words in (told[0], told[3]):
        arguments = [word for word in words[words.index("grpo") + 1 :] if word != "--dry-run"]
        done = run_here("grpo", *arguments, "--dry-run")
        assert done.returncode == 0 and "parameters" in done.stdout, done.stdout
