"""The rows of reasoning-gym as the project reads them, and what the tool refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from megatron_rl.commands import reasoning_gym_rows
from megatron_rl.commands.reasoning_gym_rows import HASH_SEED, main, write_rows
from megatron_rl.config.rewards import ReasoningGymReward
from megatron_rl.data.files import load_rows
from megatron_rl.data.forms import Reading
from megatron_rl.data.prompts import question_of
from megatron_rl.verifiers.columns import fault_of_row
from megatron_rl.verifiers.reasoning_gym import verify


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", HASH_SEED)


def written(out, *arguments: str) -> list[dict]:
    assert main([*arguments, "--out", str(out)]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_the_rows_are_prompts_whose_own_answers_score_1(tmp_path):
    out = tmp_path / "rows.jsonl"
    written(out, "leg_counting", "rearc", "--size", "2", "--seed", "5")
    questions, skipped = load_rows(out, lambda uid, row: (uid, question_of(row, ("ground_truth",), Reading())), "fail")
    assert [uid for uid, _ in questions] == [f"rows.jsonl:{number}" for number in (1, 2, 3, 4)] and not skipped
    names = [question.columns["dataset"] for _, question in questions]
    assert names == ["reasoning_gym/leg_counting"] * 2 + ["reasoning_gym/rearc"] * 2
    for _, question in questions:
        [turn] = question.messages
        assert turn["role"] == "user" and turn["content"]
        assert fault_of_row(ReasoningGymReward(), question.columns) is None
        truth = question.columns["ground_truth"]
        assert verify(truth["answer"], truth).score == 1.0
    assert "how many legs" in questions[0][1].messages[0]["content"]


def test_settings_come_from_arguments_and_files_and_reach_the_scorer(tmp_path):
    (tmp_path / "tasks.yaml").write_text("leg_counting: {min_animals: 2, max_animals: 9}\nchain_sum: {max_terms: 2}\n")
    settings = ["--config", str(tmp_path / "tasks.yaml"), "--config", "leg_counting.max_animals=2"]
    rows = written(tmp_path / "rows.jsonl", "leg_counting", "chain_sum", "--size", "3", *settings)
    truths = [row["ground_truth"] for row in rows]
    assert [truth["config"] for truth in truths] == [{"min_animals": 2, "max_animals": 2}] * 3 + [{"max_terms": 2}] * 3
    assert [truth["metadata"]["num_animals"] for truth in truths[:3]] == [2] * 3


@pytest.mark.deep
def test_the_same_arguments_give_the_same_file_whatever_the_hashes_are(tmp_path):
    """These tasks draw from sets."""
    tasks, files = ["isomorphic_strings", "polynomial_multiplication", "ransom_note"], []
    for seed in "01":
        files.append(tmp_path / seed)
        command = [sys.executable, "-m", "megatron_rl", "reasoning-gym-rows", *tasks, "--size", "3", "--out", files[-1]]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert len(files[0].read_text().splitlines()) == 9
    written(tmp_path / "3", *tasks, "--size", "3", "--seed", "1")
    assert files[0].read_bytes() != (tmp_path / "3").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["leg_count"], "there is no task 'leg_count'; the nearest is leg_counting; --list prints all tasks"),
        (["composite"], "the task composite has no rows: it is a mixture; name its tasks one by one"),
        (["lcm", "gcd", "lcm"], "the task lcm is named twice"),
        ([], "name one or more tasks"),
        (["lcm", "--size", "0"], "--size 0 must be 1 or more"),
        (["lcm", "--config", "lcm.max_value"], "lcm.max_value: No such file or directory"),
        (["lcm", "--config", "max_value=3"], "must have the form task.key=value"),
        (["lcm", "--config", "lcm.max_value=["], "the value is not YAML"),
        (["lcm", "--config", "gcd.max_value=3"], "gcd is none of the tasks lcm; remove it"),
        (["lcm", "--config", "lcm.max_valu=3"], "lcm has no setting 'max_valu'; the nearest is max_value; it has ["),
        (["lcm", "--config", "lcm.seed=3"], "--config lcm.seed: give it for all tasks, with --seed"),
        (["lcm", "--config", "lcm.max_value=0"], "lcm refuses its configuration: AssertionError"),
        (["lcm", "--config", "lcm.max_value=2024-01-01"], "lcm refuses its configuration: TypeError"),
    ],
)
def test_wrong_arguments_say_what_to_do_and_write_nothing(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--out", str(tmp_path / "rows.jsonl")])
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_row_without_a_form_in_json_names_its_task(tmp_path, monkeypatch, capsys):
    class Library:
        def create_dataset(self, task, size, seed, **config):
            return [{"question": "q", "answer": "a", "metadata": {"x": value}} for value in (1, {1, 2})]

    monkeypatch.setattr(reasoning_gym_rows, "library", Library)
    (tmp_path / "rows.jsonl").write_text("earlier rows")
    with pytest.raises(SystemExit):
        main(["lcm", "--size", "2", "--out", str(tmp_path / "rows.jsonl")])
    assert "lcm, row 2: its ground truth has no form in JSON: Object of type set" in capsys.readouterr().err
    assert (tmp_path / "rows.jsonl").read_text() == "earlier rows" and len(list(tmp_path.iterdir())) == 1


def test_a_file_has_its_name_when_it_is_complete(tmp_path):
    out = tmp_path / "rows.jsonl"

    def rows():
        yield {"a": 1}
        assert not out.exists()
        yield {"a": "é"}

    assert write_rows(out, rows()) == 2
    assert out.read_text(encoding="utf-8") == '{"a": 1}\n{"a": "é"}\n' and len(list(tmp_path.iterdir())) == 1


def test_the_list_has_all_tasks_that_can_be_written(capsys):
    assert main(["--list"]) == 0
    names = capsys.readouterr().out.split()
    assert {"leg_counting", "puzzle24", "mini_sudoku"} < set(names) and "composite" not in names


def test_without_the_library_the_tool_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setattr("megatron_rl.verifiers.reasoning_gym.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["--list"])
    assert "pip install 'megatron-rl[reasoning-gym]'" in capsys.readouterr().err
