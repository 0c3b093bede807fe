"""Reward functions, losses and estimators of the user are seen in their source, which is not run."""

from __future__ import annotations

import pytest
from run_home import faults, grpo, rows

from megatron_rl.preflight.checks import preflight


@pytest.mark.parametrize(
    ("source", "path", "message"),
    [
        ("", "my_reward:short", "there is no module 'my_reward'"),
        ("", "my_rewards.inner:short", "there is no module 'my_rewards.inner'"),
        ("x = 1\ndef short(:\n", "my_rewards:short", "my_rewards.py:2: "),
        ("def long(): ...", "my_rewards:short", "my_rewards.py has no function 'short'"),
        ("def short(prompts, completions): ...", "my_rewards:short", None),
        ("async def short(completions, ground_truth, trainer_state, log_metric): ...", "my_rewards:short", None),
        (
            "def short(level, **columns): ...",
            "my_rewards:short",
            "short(level, **columns) asks for the argument 'level'",
        ),
        ("async def short(level): ...", "my_rewards:short", "which nobody offers (offered are completion_ids, compl"),
        ("def short(completions, rewards): ...", "my_rewards:short", "asks for the argument 'rewards'"),
        ("def short(completions, /, **columns): ...", "my_rewards:short", "takes 'completions' by its position alone"),
        ("@wrapped\ndef short(level): ...", "my_rewards:short", None),
        ("short = partial(print, level=3)", "my_rewards:short", None),
        ("def short(**columns): ...", "my_rewards.py:short", None),
        ("def long(**columns): ...", "my_rewards.py:short", "my_rewards.py has no function 'short'"),
        ("", "no/such/file.py:short", "there is no file no/such/file.py"),
        ("class short: ...", "my_rewards:short", "the class short has no method __call__"),
        ("class short(Judge): ...", "my_rewards:short", None),
        ("class short:\n    def __call__(self, level): ...", "my_rewards:short", "__call__(self, level) asks for"),
        ("class short:\n    async def __call__(self, completions, **columns): ...", "my_rewards:short", None),
        ("def short(**columns): ...", "my_rewards", "must read `package.module:function`"),
        ("def short(completions, level=1, *, ground_truth, **columns): ...", "my_rewards:short", None),
        ("from other import short", "my_rewards:short", None),
        ("from other import *", "my_rewards:short", None),
        ("try:\n    import x\nexcept ImportError:\n    short = print", "my_rewards:short", None),
        ("", "megatron_rl.recipes.tiny.rewards:digits_in_answer", None),
    ],
)
def test_a_reward_function_is_seen_in_its_source(home, source, path, message):
    if source:
        (home / "my_rewards.py").write_text(source)
    found = faults(grpo(rewards=[{"kind": "exact_answer"}, {"kind": "function", "path": path}]))
    assert found == [] if message is None else len(found) == 1 and message in found[0]


CLASS = "class Judge:\n    def __init__(self, model, *, port=1): ...\n    def __call__(self, solution_str): ...\n"


@pytest.mark.parametrize(
    ("source", "reward", "message"),
    [
        ("def f(completions, level): ...", {"kind": "function", "arguments": {"level": 1}}, None),
        ("def f(**given): ...", {"kind": "function", "arguments": {"level": 1}}, None),
        ("def f(completions): ...", {"kind": "function", "arguments": {"levl": 1}}, "does not take 'levl'"),
        (CLASS, {"kind": "compute_score", "path": "mine:Judge", "arguments": {"model": "m", "port": 2}}, None),
        (CLASS, {"kind": "compute_score", "path": "mine:Judge"}, "__init__(self, model, *, port=1) asks for the"),
        (CLASS, {"kind": "compute_score", "path": "mine:Judge", "arguments": {"modl": "m"}}, "does not take 'modl'"),
        ("def f(data_source, solution_str, ground_truth, extra_info): ...", {"kind": "compute_score"}, None),
        ("def f(solution_str, ground_truth, method='strict'): ...", {"kind": "compute_score"}, None),
        ("def f(completions, **columns): ...", {"kind": "compute_score"}, "'completions', which nobody offers"),
    ],
)
def test_a_reward_gets_the_arguments_that_it_takes(home, source, reward, message):
    (home / "mine.py").write_text(source)
    found = faults(grpo(rewards=[{"kind": "exact_answer"}, {"path": "mine:f"} | reward]))
    assert found == [] if message is None else len(found) == 1 and message in found[0]


def test_a_reward_cannot_ask_for_columns_of_rows_that_have_only_a_question(home):
    (home / "mine.py").write_text("def f(completions, solution, **columns): ...")
    rows("bare.jsonl", {"prompt": "1"})
    reward = {"kind": "function", "path": "mine:f"}
    [fault] = faults(grpo(rewards=[reward], data={"train": "bare.jsonl"}))
    assert "asks for the argument 'solution', which nobody offers" in fault
    rows("bad.jsonl", {"question": "1"})
    [fault] = faults(grpo(rewards=[reward], data={"train": "bad.jsonl"}))
    assert "bad.jsonl:1" in fault, "the columns of rows that cannot be read are not known"


def test_rows_whose_tests_pass_for_a_program_that_does_nothing_are_told(home):
    right = {"prompt": "1", "ground_truth": ["assert f(1) == 2"]}
    weak = {"prompt": "1", "ground_truth": ["assert all(a == b for a, b in zip(f(1), [2]))"]}
    empty = {"prompt": "1", "ground_truth": [{"input": "1\n", "output": ""}]}
    rows("train.jsonl", right, weak, empty)
    notes: list[str] = []
    assert preflight(grpo(rewards=[{"kind": "code"}], data={"train": "train.jsonl"}), notes.append) == []
    assert "1 of the rows will have no reward" in notes[0] and "every `output` is empty" in notes[0]
    [note] = [note for note in notes if "functions return the same" in note]
    assert "the tests of 1 of the 2 rows that were tried" in note and "[], as in 'assert all(" in note


def test_rows_that_compute_score_could_not_score_are_told(home):
    (home / "mine.py").write_text("def f(solution_str, ground_truth): ...")
    rows("train.jsonl", {"prompt": "1"}, {"prompt": "1", "reward_model": {"ground_truth": "2"}})
    reward, notes = {"kind": "compute_score", "path": "mine:f"}, []
    data = {"train": "train.jsonl"}
    assert preflight(grpo(rewards=[reward], data=data), notes.append) == []
    assert "1 of the rows will have no reward" in notes[0] and "neither `ground_truth` nor `rewar" in notes[0]
    [found] = faults(grpo(rewards=[{**reward, "on_error": "stop"}], data=data))
    assert "train.jsonl:1: the row has neither `ground_truth`" in found


def test_a_column_with_the_name_of_an_argument_is_refused(home):
    rows("train.jsonl", {"prompt": "1+1=", "ground_truth": "2", "trainer_state": 1, "data_source": "x"})
    [found] = faults(grpo())
    assert "the training rows have a column 'trainer_state', but my_rewards:short gets an argument of this" in found
    (home / "mine.py").write_text("def f(data_source, solution_str, ground_truth): ...")
    assert faults(grpo(rewards=[{"kind": "compute_score", "path": "mine:f"}])) == []


def test_a_loss_and_an_estimator_of_ones_own_are_seen_in_their_source(home):
    (home / "mine.py").write_text("raise SystemExit('this module must not be run')\ndef loss(terms): ...\n")

    def algorithm(loss: str, estimator: str) -> dict:
        paths = {"loss": f"mine:{loss}", "adv_estimator": estimator}
        return {key: {"kind": "function", "path": path} for key, path in paths.items()}

    assert faults(grpo(algorithm=algorithm("loss", "mine:loss"))) == []
    absent, nowhere = faults(grpo(algorithm=algorithm("misspelt", "no_such_module:f")))
    assert absent.startswith("algorithm.loss: mine:misspelt: ") and "has no function 'misspelt'" in absent
    assert nowhere.startswith("algorithm.adv_estimator: no_such_module:f: there is no module 'no_such_module'")


def test_a_reward_whose_package_is_missing(home, monkeypatch):
    config = grpo(rewards=[{"kind": "reasoning_gym", "datasets": ["reasoning_gym/lcm"]}, {"kind": "exact_answer"}])
    assert faults(config) == []
    monkeypatch.setattr("megatron_rl.verifiers.reasoning_gym.find_spec", lambda name: None)
    [fault] = faults(config)
    assert fault.startswith("rewards: reasoning_gym: ") and "pip install 'megatron-rl[reasoning-gym]'" in fault
