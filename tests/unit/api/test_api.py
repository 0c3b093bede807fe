"""What a call from Python writes for its run. That the run trains is shown in tests/e2e/test_coming_from.py."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from decimal import Decimal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
from patience import deadline

from megatron_rl import Run, api, grpo, plan, sft
from megatron_rl.config.function import short_path
from megatron_rl.config.load import load_config
from megatron_rl.config.rewards import FunctionReward
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.preflight.reward_source import fault_of_reward
from megatron_rl.recipes.tiny.from_trl import accuracy

ROWS = [{"prompt": "1+1=", "ground_truth": "2"}, {"prompt": "größer?", "ground_truth": "ja"}]


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """The runs that would have begun: the path of each configuration."""
    paths = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "_run", lambda path, run, watch=None: paths.append(path) or run)
    return paths


def test_a_call_has_the_configuration_of_the_command(begun, tmp_path):
    run = grpo(Path("model"), ROWS, "exact_answer", 7, name="mine", rollout={"prompts_per_step": 4}, run={"seed": 3})
    assert run == Run(tmp_path / "runs" / "mine") and begun == [run.folder / "inputs" / "grpo.yaml"]
    of_call = load_config(GrpoRunConfig, [str(begun[0])])
    rows = f"data.train={run.folder}/inputs/train.jsonl"
    words = ["run.name=mine", "run.steps=7", "run.seed=3", "model.path=model", rows, "rollout.prompts_per_step=4"]
    assert of_call == load_config(GrpoRunConfig, [*words, "rewards=[{kind: exact_answer}]"])
    assert [json.loads(line) for line in (run.folder / "inputs/train.jsonl").read_text().splitlines()] == ROWS


def test_files_come_first_and_sections_last(begun, tmp_path):
    (tmp_path / "base.yaml").write_text("rollout: {prompts_per_step: 4, samples_per_prompt: 2}\nrun: {steps: 9}\n")
    grpo("model", "rows.jsonl", "text", 5, files=["base.yaml"], rollout={"prompts_per_step": 8})
    config = load_config(GrpoRunConfig, [str(begun[0])])
    assert (config.rollout.prompts_per_step, config.rollout.samples_per_prompt, config.run.steps) == (8, 2, 5)
    assert str(config.data.train) == "rows.jsonl", "a path stays one"
    sft("model", ROWS, name="taught", run={"epochs": 2})
    assert yaml.safe_load(begun[1].read_text())["run"]["steps"] is None, "the recipe counts them"
    assert yaml.safe_load(begun[1].read_text())["sft"]["rows"].endswith("taught/inputs/train.jsonl")


def test_a_model_may_be_the_section_of_a_file(begun):
    grpo({"path": "model", "dtype": "float32"}, ROWS, "text")
    assert yaml.safe_load(begun[0].read_text())["model"] == {"path": "model", "dtype": "float32"}


FACTOR = 3


def test_functions_reach_other_processes(begun):
    """Called in a process that has nothing of this one."""
    shift = 10

    def scored(completions, **columns):
        return [FACTOR * len(text) + shift for text in completions]

    grpo(
        "model", ROWS, [scored, {"kind": "function", "path": lambda completions: [1.0], "weight": 0.5}, partial(max, 2)]
    )
    paths = [entry["path"] for entry in yaml.safe_load(begun[0].read_text())["rewards"]]
    assert [path.rpartition(":")[2] for path in paths] == ["scored", "lambda", "partial"]
    code = """
import sys
from megatron_rl.config.function import load_function
scored, one, largest = map(load_function, sys.argv[1:])
print(scored(["ab"]), one(["x"]), largest(5))
"""
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, cwd="/")
    assert done.stdout == "[16] [1.0] 5\n", done.stderr
    assert short_path(paths[0]) == "scored", "the sentence of a verdict has no path into the run's folder"


def test_what_can_be_imported_goes_by_its_path(begun):
    grpo("model", ROWS, accuracy)
    [entry] = yaml.safe_load(begun[0].read_text())["rewards"]
    assert entry == {"kind": "function", "path": "megatron_rl.recipes.tiny.from_trl:accuracy"}
    assert not begun[0].with_name("functions.pickle").exists()


def test_data_may_be_the_section_of_a_file(begun):
    run = grpo("model", {"train": ROWS, "columns": {"ground_truth": "answer"}}, "text", name="mine")
    section = yaml.safe_load(begun[0].read_text())["data"]
    assert section == {"columns": {"ground_truth": "answer"}, "train": f"{run.folder}/inputs/train.jsonl"}
    with pytest.raises(ValueError, match="`train`"):
        grpo("model", {"columns": {}}, "text")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "must be rows, or a path of rows, but it is 3"),
        ([], "the data has no row"),
        (["a"], "row 1 of the data must be a mapping of its columns, but it is 'a'"),
    ],
)
def test_data_that_is_no_rows_is_told_before_a_run_begins(begun, data, message):
    with pytest.raises(ValueError, match=message):
        grpo("model", data, "text")
    assert begun == []


def test_numbers_of_numpy_are_numbers(begun):
    run = grpo("model", [{"prompt": "x", "ground_truth": np.float64(0.5), "n": np.int64(3)}], "text")
    assert json.loads((run.folder / "inputs/train.jsonl").read_text()) == {"prompt": "x", "ground_truth": 0.5, "n": 3}


@pytest.mark.parametrize("mode", ["r", "w", "rb"])
def test_an_open_file_is_not_copied(begun, tmp_path, mode):
    (tmp_path / "words").write_text("red")
    with (tmp_path / "words").open(mode) as words:

        def scored(completions):
            return [float(text in words) for text in completions]

        with pytest.raises(ValueError, match="'words'"):
            grpo("model", ROWS, scored)


def test_the_arguments_of_a_function_by_value_are_checked_like_those_in_a_file(begun):
    def scored(completions, colour, *, weight=1.0):
        return [weight] * len(completions)

    grpo("model", ROWS, scored)
    [entry] = yaml.safe_load(begun[0].read_text())["rewards"]
    reward = FunctionReward(path=entry["path"])
    assert fault_of_reward(reward, {"colour"}) is None
    fault = fault_of_reward(reward, {"ground_truth"})
    assert fault.startswith(
        "rewards: scored: scored(completions, colour, *, weight=None) asks for the argument 'colour'"
    )


def test_a_function_that_cannot_be_copied_is_refused_with_its_variable(begun, tmp_path):
    lock = threading.Lock()

    def scored(completions):
        with lock:
            return [1.0]

    with pytest.raises(ValueError, match="'lock'"):
        grpo("model", ROWS, scored)
    assert not (tmp_path / "runs").exists()


def test_a_row_that_is_no_json_is_refused_by_its_number(begun):
    with pytest.raises(ValueError, match="row 2 .*JSON"):
        grpo("model", [ROWS[0], {"prompt": {1, 2}}], "text", name="bad")
    grpo("model", ROWS, "text", name="bad")  # nothing has begun: the name is free


def test_a_run_that_has_steps_is_not_begun_again_but_resumed(begun):
    run = grpo("model", ROWS, "text", name="mine")
    (run.folder / "metrics.jsonl").write_text('{"step": 0, "loss": 1.5}\n')
    with pytest.raises(ValueError, match=r"mine is a run already; Run\('.*/mine'\).resume\(\) continues it"):
        grpo("model", ROWS, "text", name="mine")
    assert run.metrics == [{"step": 0, "loss": 1.5}] and run.model is None
    run.resume(run={"steps": 40})
    assert load_config(GrpoRunConfig, [str(begun[-1])]).run.steps == 40
    with pytest.raises(ValueError, match="rollout.prompts_per_stp"):
        run.resume(rollout={"prompts_per_stp": 1})
    with pytest.raises(ValueError, match="inputs/grpo.yaml"):
        Run("elsewhere").resume()


def test_a_plan_has_the_numbers_of_the_dry_run():
    found = plan(files=["configs/model/qwen3_32b.yaml", "configs/cluster/h100_8n8g.yaml", "configs/run/gsm8k_32b.yaml"])
    assert (found.trainer_ranks, found.engine_ranks, found.shape.num_layers) == (32, 32, 64)
    assert found.pushed_bytes == pytest.approx(16.38e9, rel=1e-3) and found.memory.problems == []
    assert "TP4 x PP4 x DP2 = 32 ranks" in str(found) and "16.38 GB" in str(found)
    assert plan("models/Qwen3-32B").shape == found.shape, "no rows, no name and no number of steps are needed"


class Rows(list):
    """The form of a data set of the library `datasets`."""

    format = {"type": None}

    def save_to_disk(self, path: str) -> None:
        if self.format["type"] == "custom":
            raise TypeError("a function cannot be saved")
        Path(path).mkdir()
        (Path(path) / "rows.arrow").write_bytes(b"rows")


def _first_run() -> Run:
    run = grpo("model", ROWS, "text", name="mine")
    (run.folder / "metrics.jsonl").write_text('{"step": 0, "loss": 1}\n')
    return run


@pytest.mark.parametrize("data", [[{"prompt": "a"}, {"prompt": b"b"}], ["a"], ({"prompt": 1 // i} for i in (1, 0))])
def test_a_refused_call_leaves_the_inputs_of_the_run_that_it_would_continue(begun, data):
    run = _first_run()
    before = {path.name: path.read_bytes() for path in (run.folder / "inputs").iterdir()}
    with pytest.raises((ValueError, ZeroDivisionError)):
        api.start("grpo", api.Inputs("model", data, None, "text"), "mine", (), {"run": {"steps": 3}}, continued=True)
    assert {path.name: path.read_bytes() for path in (run.folder / "inputs").iterdir()} == before
    assert {"grpo.yaml", "train.jsonl"} <= before.keys() and not (run.folder / "inputs.new").exists()


@pytest.mark.parametrize("has_gone_on", [False, True])
def test_a_change_that_the_run_refuses_leaves_its_inputs(begun, monkeypatch, has_gone_on):
    """The run itself compares rows with its checkpoint's, after the new inputs are written."""
    run = _first_run()
    before = {path.name: path.read_bytes() for path in (run.folder / "inputs").iterdir()}
    other = [{**ROWS[0], "prompt": "another"}, *ROWS[1:]]

    def refuse(path, run, watch=None):
        if has_gone_on:
            (run.folder / "metrics.jsonl").write_text('{"step": 0, "loss": 1}\n{"step": 1, "loss": 1}\n')
        raise RuntimeError("the run ended with status 1")

    monkeypatch.setattr(api, "_run", refuse)
    with pytest.raises(RuntimeError):
        api.start("grpo", api.Inputs("model", other, None, "text"), "mine", (), {"run": {"steps": 3}}, continued=True)
    now = {path.name: path.read_bytes() for path in (run.folder / "inputs").iterdir()}
    assert (now == before) != has_gone_on and not (run.folder / "inputs.earlier").exists()


def test_a_call_may_name_rows_that_are_inputs_of_the_run_itself(begun):
    run = _first_run()
    rows = run.folder / "inputs" / "train.jsonl"
    written = rows.read_text()
    api.start("grpo", api.Inputs("model", rows, None, "text"), "mine", (), {"run": {"steps": 3}}, continued=True)
    assert rows.read_text() == written and yaml.safe_load(begun[-1].read_text())["data"]["train"] == str(rows)


def test_numbers_of_numpy_are_numbers_of_a_configuration(begun):
    optimizer = {"lr": np.float32(1e-6), "betas": np.array([0.9, 0.99]), "eps": Decimal("1e-8")}
    grpo("model", ROWS, "text", np.int64(3), policy={"optimizer": optimizer}, algorithm={"overlong_filter": np.True_})
    config = load_config(GrpoRunConfig, [str(begun[0])])
    assert config.run.steps == 3 and config.policy.optimizer.betas == (0.9, 0.99) and config.algorithm.overlong_filter
    assert config.policy.optimizer.eps == 1e-8 and config.policy.optimizer.lr == pytest.approx(1e-6)
    with pytest.raises(ValueError, match="cluster.yaml"):
        grpo("model", ROWS, "text", files="cluster.yaml")


def test_a_data_set_that_cannot_be_saved_is_written_row_by_row_and_several_are_refused(begun):
    rows = Rows(ROWS)
    folder = grpo("model", rows, "text", name="saved").folder / "inputs"
    assert (folder / "train" / "rows.arrow").exists()
    rows.format = {"type": "custom"}
    folder = grpo("model", rows, "text", name="written").folder / "inputs"
    assert len((folder / "train.jsonl").read_text().splitlines()) == len(ROWS)
    several = type("DatasetDict", (dict,), {"save_to_disk": None})(train=rows, test=rows)
    with pytest.raises(ValueError, match="DatasetDict of 'train', 'test'"):
        grpo("model", several, "text")


WAITS = """
import sys
from megatron_rl.processes import ending_together
child = "import signal, sys; signal.signal(15, lambda *_: sys.exit(print('saved'))); print('up', flush=True)"
child += "; signal.pause()"
with ending_together([sys.executable, "-c", child]) as run:
    if sys.argv[1:]:
        raise KeyError("of the program")
    run.wait()
"""


def test_a_program_that_ends_takes_its_run_with_it():
    """SIGTERM comes to the program alone; its run gets it, ends in its own way, and is waited for."""
    program = subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True)
    assert program.stdout.readline() == "up\n"
    program.terminate()
    said, _ = program.communicate(timeout=deadline(60))
    assert (said, program.returncode) == ("saved\n", 128 + signal.SIGTERM)


def test_an_error_of_a_program_ends_its_run():
    done = subprocess.run([sys.executable, "-c", WAITS, "fail"], capture_output=True, text=True, timeout=deadline(60))
    assert done.returncode == 1 and "KeyError: 'of the program'" in done.stderr
