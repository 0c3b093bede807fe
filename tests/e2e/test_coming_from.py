"""Rows and rewards in the forms of other projects, and a mixture of domains, through the real loop."""

from __future__ import annotations

import json
import re
import signal

import cover
import psutil
import pytest
from answering import answered
from pages import ROOT, blocks

from megatron_rl.commands.grpo import read_prompts
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data.tokenizer import open_tokenizer
from megatron_rl.observe.records import METRICS, read_lines
from megatron_rl.processes import descendants
from megatron_rl.recipes.tiny.gsm8k import write_model
from megatron_rl.verifiers import RewardSet, TrainerState

OTHERS = "configs/run/gsm8k_tiny_cpu.yaml"
FROM = "configs/run/from_{}.yaml"


@pytest.fixture
def run_of(recipe):
    write_model(recipe.folder / "runs" / "gsm8k_tiny")

    def records(*arguments: str) -> list[dict]:
        run = recipe.run("grpo", *arguments)
        assert run.returncode == 0, run.stdout + run.stderr
        [metrics] = (recipe.folder / "runs" / "gsm8k_tiny").glob(f"*/{METRICS}")
        return [record for record in read_lines(metrics) if "reward/mean" in record]

    return records


SCRIPT = """
import json, os, re, signal
from transformers import TrainerCallback
from megatron_rl.recipes.tiny.from_trl import digits
from megatron_rl.trl import GRPOConfig, GRPOTrainer

rows = [json.loads(line) for line in open("recipes/tiny/data/gsm8k_trl.jsonl")]
PATTERN = re.compile(r"-?[0-9]+")

def has_number(completions, **columns):
    return [float(bool(PATTERN.search(turns[0]["content"]))) for turns in completions]

class Interrupted(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print("SEEN", state.global_step, flush=True)
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGINT)

def trainer_with(**changed):
    args = GRPOConfig(output_dir="out/mine", per_device_train_batch_size=16, max_completion_length=32,
                      reward_weights=[1.0, 0.5], logging_steps=10, lr_scheduler_type="constant",
                      sections={"data": {"on_bad_row": "skip"}, "rollout": {"max_prompt_tokens": 320}},
                      **{"max_steps": 3, "learning_rate": 1e-4, "num_generations": 4, **changed})
    return GRPOTrainer(model="runs/gsm8k_tiny/model", reward_funcs=[has_number, digits], args=args,
                       train_dataset=rows, callbacks=[Interrupted])

trainer = trainer_with()
trainer.train()
run = trainer.run
assert run.model is None, "it was stopped"
print("RESUMED", len(run.metrics))
try:
    trainer_with(num_generations=8).train(resume_from_checkpoint=True)
except RuntimeError:
    print("REFUSED")
trainer = trainer_with(max_steps=4, learning_rate=5e-5)
done = trainer.train(resume_from_checkpoint=True)
assert done.global_step == 4 and done.training_loss == done.metrics["train_loss"]
trainer.save_model("saved")
print("LOGS", json.dumps([log for log in trainer.state.log_history if "reward" in log]))
"""


@pytest.mark.deep
@pytest.mark.deadline(600)
def test_a_script_of_trl_trains_is_interrupted_and_goes_on(recipe):
    """Its one changed line is the import. A reward of the script itself, which no other process can import, one of a
    module, a callback that sees each step once, and Ctrl-C, which the run answers with a checkpoint. It goes on with
    the arguments that were changed since; other meanings are refused."""
    write_model(recipe.folder / "runs" / "gsm8k_tiny")
    (recipe.folder / "train.py").write_text(SCRIPT)
    done = recipe.run(str(recipe.folder / "train.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Stopped after" in done.stdout and "Continuing with step" in done.stdout
    [resumed] = re.findall(r"RESUMED (\d)", done.stdout)
    assert 1 <= int(resumed) < 4
    [logs] = [json.loads(line.removeprefix("LOGS ")) for line in done.stdout.splitlines() if line.startswith("LOGS ")]
    assert [log["step"] for log in logs] == [1, 2, 3, 4]
    assert re.findall(r"SEEN (\d)", done.stdout) == ["1", "2", "3", "4"]
    assert "REFUSED" in done.stdout and "num_samples" in done.stdout + done.stderr
    assert [log["learning_rate"] for log in logs] == [1e-4] * int(resumed) + [5e-5] * (4 - int(resumed))
    for log in logs:
        parts = log["rewards/has_number/mean"] + 0.5 * log["rewards/digits/mean"]
        assert log["reward"] == pytest.approx(parts) and log["reward"] > 0 and log["grad_norm"] > 0
    assert (recipe.folder / "saved" / "model.safetensors").exists()


PROJECTS = [
    ("trl", "solution", "accuracy", {"digits"}),
    ("verl", "ground_truth", "compute_score", set()),
    ("open_instruct", "ground_truth", "mathematics", {"digits_in_answer"}),
]


@pytest.mark.parametrize(("project", "column", "deciding", "other"), cover.essential(PROJECTS, PROJECTS[0]))
def test_rows_and_rewards_of_another_project_score_answers_without_an_edit(
    recipe, monkeypatch, project, column, deciding, other
):
    """All rows, as a run reads them, with a right answer and a wrong one to each, as a verifier's process scores them.
    The run of TRL's rows shows that a loop trains on such scores."""
    monkeypatch.chdir(recipe.folder)
    write_model(recipe.folder / "runs" / "gsm8k_tiny")
    config = load_config(GrpoRunConfig, [OTHERS, FROM.format(project)])
    tokenizer = open_tokenizer(config.model.path)
    prompts = [prompt for _, prompt in read_prompts(config, tokenizer).train.take(16)]
    assert len({prompt.uid for prompt in prompts}) == 16
    answers = []
    for prompt in prompts:
        truth = prompt.columns[column]
        [number] = truth if isinstance(truth, list) else [truth]
        for text in (number, number + "1"):
            answers.append(answered(prompt, tokenizer.encode(f"</think>It is {text}"), "stop"))
    assert {reward.label for reward in config.rewards} == {deciding, *other}
    scoring = RewardSet(config.rewards, tokenizer, config.rollout.delimiter)
    for call in scoring.calls:
        for index, scored in zip(call, scoring.score(call, answers, TrainerState(0, 1)), strict=True):
            scores = [verdict.score for verdict in scored.verdicts]
            assert not any(verdict.failed for verdict in scored.verdicts) and all(0 <= score <= 1 for score in scores)
            if config.rewards[index].label == deciding:
                assert set(scores[::2]) == {1.0} and max(scores[1::2]) < 0.1
            else:
                assert min(scores) > 0, "the answers have digits"


@pytest.mark.deep
def test_each_domain_of_a_mixture_has_its_verifier(run_of):
    records = run_of("configs/run/olmo_tiny_cpu.yaml", "run.steps=2", "rollout.active_sampling=false")
    # Whether a step of a random model has a signal to learn from is chance; each step has its groups and verdicts.
    assert len(records) == 2
    for record in records:
        for dataset, reward in {"math": "mathematics", "code": "code", "ifeval": "instructions"}.items():
            assert record[f"dataset/{dataset}/groups"] == 2
            assert record[f"reward/{reward}/abstained"] == 0
        assert record["dataset/general-quality_ref/groups"] == 2 and record["reward/words/abstained"] == 0


@pytest.mark.deep
def test_the_readmes_program_ends_with_its_run_when_it_is_told_to(recipe):
    """SIGTERM comes to the program alone, as from a scheduler. It is passed on, and the run ends with a checkpoint."""
    [program] = [block for block in blocks(ROOT / "README.md") if block.mark == "run" and block.language == "python"]
    (recipe.folder / "readme.py").write_text(program.text)
    run = recipe.start(str(recipe.folder / "readme.py"))
    recipe.wait_until(run, lambda: any(recipe.folder.glob("runs/*/metrics.jsonl")))
    started = descendants(psutil.Process(run.pid))
    run.send_signal(signal.SIGTERM)
    assert run.wait(recipe.deadline_s) == 128 + signal.SIGTERM
    assert [process for process in started if process.is_running()] == []
    said = (recipe.folder / "out.txt").read_text()
    assert "SIGTERM: stopping" in said and re.search(r"Stopped after \d+ of 10 steps", said), said
    assert any(recipe.folder.glob("runs/*/checkpoints/step_*"))
