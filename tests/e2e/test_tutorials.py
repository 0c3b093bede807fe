"""The tutorials run as they are printed. The first one is short enough for `make test`; each other one is a process of
its own in an empty folder, as a reader starts it, and what it shows at the end is compared."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl.tools.docs.tutorials import output_of

FOLDER = Path(__file__).parents[2] / "tutorials"
MOST_LINES = 120


def test_a_policy_learns_by_hand(monkeypatch):
    spec = importlib.util.spec_from_file_location("by_hand", FOLDER / "01_one_step_by_hand.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "by_hand", module)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    try:
        rewards = module.main(num_steps=8)
    finally:
        torch.set_num_threads(threads)
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.2, rewards


def test_a_tutorial_is_short_and_the_notebook_has_no_outputs():
    later = sorted(FOLDER.glob("0[2-9]*.py"))
    assert {path.name: len(path.read_text().splitlines()) for path in later if _is_long(path)} == {}
    cells = [cell for cell in json.loads((FOLDER / "05_own_model.ipynb").read_text())["cells"] if "outputs" in cell]
    assert len(cells) > 5 and not any(cell["outputs"] or cell["execution_count"] for cell in cells)


def _is_long(path: Path) -> bool:
    return len(path.read_text().splitlines()) > MOST_LINES


@pytest.fixture
def shown(recipe):
    """What a tutorial shows, which has the fixed lines of the output that the site shows."""
    seen: set[str] = set()

    def run(name: str, *arguments: str) -> str:
        done = recipe.run(str(FOLDER / name), *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        if not arguments and name not in seen:
            seen.add(name)
            text = without_numbers(done.stdout)  # in one line, because its lines may be broken at another width
            gone = {line for line in fixed_lines(output_of(FOLDER / name).read_text()) if line not in text}
            assert not gone, f"run python -m megatron_rl.tools.docs.tutorials {name[:2]}: the site shows {sorted(gone)}"
        return done.stdout

    return run


def fixed_lines(text: str) -> set[str]:
    """The lines that a tutorial prints in each run: neither the run's own lines nor answers, and without numbers."""
    run = r" *\d+\.\d s  | *step \d+ |[╭│╰]|.*(runs/|reward|█|■)"
    own = [line for line in text.splitlines() if not re.match(run, line)]
    return {shape for shape in map(without_numbers, own) if len(re.findall(r"[A-Za-z]{3,}", shape)) > 2}


def without_numbers(text: str) -> str:
    return " ".join(re.sub(r"[-+]?\d[\d,.e+-]*", "#", text).split())


def table(text: str, heading: str) -> list[list[str]]:
    """The words of the lines below the line that begins with the words of the heading, up to an empty one."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if " ".join(line.split()).startswith(heading))
    return [line.split() for line in lines[start + 1 : (lines + [""]).index("", start)]]


@pytest.mark.deep
def test_a_reward_of_ones_own(shown):
    text = shown("02_own_reward.py")
    assert "by hand: [0.75, None, 0.0]" in text
    steps = table(text, "step reward")
    assert [step[0] for step in steps] == ["0", "1", "2"]
    for number, step in enumerate(steps):
        abstained, failed = float(step[3]), float(step[-2])
        assert 0 < abstained < 1 and failed == (number == 1)
    assert "no score" in text and "OSError: the disk is gone" in text
    assert "wanted_digit returned None" in text and "'wanted_digit/digits': '" in text
    assert "64 failures in rewards.log" in text


@pytest.mark.deep
def test_a_loss_of_ones_own(shown, recipe):
    recipe.own_metrics = {"pull"}
    text = shown("03_own_loss.py")
    gradients = {
        tuple(line.split()[:4]): [float(x) for x in line.split()[4:]] for line in text.splitlines() if "A = " in line
    }
    of_gain = gradients["A", "=", "+1", "dual_clip"], gradients["A", "=", "+1", "simple"]
    assert of_gain[0][-1] == 0 < of_gain[1][-1], "the clip ends the gradient, and the square pulls back"
    assert of_gain[0][3] == of_gain[1][3] == -1
    above = next(line.split()[1:] for line in text.splitlines() if line.startswith("above_median"))
    assert [float(x) for x in above] == [-0.2, -0.1, 0, 0.1, 4.8]
    steps = table(text, "step reward")
    assert len(steps) == 2 and all(float(pull) > 0 for *_, pull in steps)


@pytest.mark.deep
def test_an_environment_of_ones_own(shown):
    text = shown("04_own_environment.py")
    assert re.search(r"'7' +-> \('5-6', 0.0, False\)", text) and re.search(r"'6' +-> \('', 1.0, True\)", text)
    turns = [float(number) for number in re.findall(r"environment/turns_mean ([\d.]+)", text)]
    assert len(turns) == 2 and min(turns) > 1.5, "the supervised steps have shown it where a turn ends"
    assert re.search(r"reward [-\d.]+: .*0-9.*\| .*<end><user>\d-\d<end><assistant>", text)


@pytest.mark.deep
def test_a_model_of_ones_own_in_a_notebook(recipe):
    done = recipe.run("tests/e2e/notebook.py", str(FOLDER / "05_own_model.ipynb"))
    assert done.returncode == 0, done.stdout + done.stderr
    files, config, planned, on_gpus, reward, run, curves, metrics, answer = json.loads(done.stdout.splitlines()[-1])
    assert "config.json" in files["value"] and "'model_type': 'qwen3'" in config["value"]
    assert "parameters" in planned["text"] and on_gpus["value"] == "[]"
    assert reward["value"] == f"[{2 / 3!r}]"
    assert "2 steps in" in run["text"] and len(run["text"].splitlines()) < 60, "the live table is not drawn again"
    assert curves["png"] > 10_000
    assert len(json.loads(metrics["value"].replace("(", "[").replace(")", "]"))) == 2
    assert "What is 10 + 11?" in answer["text"]


@pytest.mark.deep
def test_a_plan_of_32b(shown):
    text = shown("06_plan_32b.py")
    assert "32 GPUs train and 32 GPUs answer" in text
    layouts = table(text, "layout of the trainer")
    assert len(layouts) == 6 and {line[-1] for line in layouts if "not" not in line} == {"fits"}
    assert any("not" in line for line in layouts) and "; set model.recompute to full" in text
    for refused in ("policy.parallel.tensor=3 does not divide", "cluster.world_size is 32", "num_engine"):
        assert refused in text
    assert "balance.max_tokens_per_microbatch (16384) is below" in text


@pytest.mark.deep
def test_a_report_is_read_and_two_runs_are_compared(shown, recipe):
    first = shown("07_read_a_report.py")
    assert "\n5 steps" in first and "seconds of all steps, by phase" in first and "makes a second run" in first
    mismatch = float(re.search(r"largest mean mismatch of a step: (\S+)", first)[1])
    assert 0 < mismatch < 0.05, "1e-7 in float32; CPUs with units for bfloat16 compute in it, with 1e-2"
    assert "digits returned None" in first
    second = shown("07_read_a_report.py")
    page = recipe.folder / "comparison" / "comparison.html"
    assert "tutorial_07/fast" in second and str(page) in second and "policy.optimizer.lr" in page.read_text()
    assert "\n5 steps" in shown("07_read_a_report.py", "runs/tutorial_07/slow")
