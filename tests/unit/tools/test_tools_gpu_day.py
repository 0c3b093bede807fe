"""The checks of a GPU day on a CPU: all parts with tiny sizes, and what becomes of parts that fail, crash or hang."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event

import pytest
import torch
from patience import deadline

from megatron_rl.balance.hardware import PEAK_FLOPS
from megatron_rl.config.load import load_config
from megatron_rl.config.policy import ModelConfig, PolicyConfig
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.planning.rates import Rates
from megatron_rl.planning.trainer import trainer_memory
from megatron_rl.tools.bench.compare_layouts import Difference
from megatron_rl.tools.bench.gpu_day import command as gpu_day
from megatron_rl.tools.bench.gpu_day.command import PartJob, Record, run_jobs
from megatron_rl.tools.bench.gpu_day.node import numbers_of, problems_of
from megatron_rl.tools.bench.gpu_day.parts import BOUNDS, PARTS, judged
from megatron_rl.tools.bench.gpu_day.sizes import SIZES, write_config
from megatron_rl.tools.bench.gpu_day.training import lengths_that_fit

RECORD = Record("cpu", "gpu_day --out X", "c0ffee", "today")


def command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "megatron_rl.tools.bench.gpu_day.command", "--device", "cpu", "--out", str(folder)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What the command leaves on a CPU."""
    folder = tmp_path_factory.mktemp("day") / "record"
    done = subprocess.run(command(folder), capture_output=True, text=True, timeout=deadline(300))
    logs = {path.parent.name: path.read_text() for path in folder.glob("*/log.txt")}
    assert done.returncode == 0, (done.stdout, done.stderr, logs)
    return folder


@pytest.fixture(scope="module")
def numbers(folder) -> dict[str, dict]:
    """The numbers of each part."""
    record = json.loads((folder / "record.json").read_text())
    assert {part["name"]: part["status"] for part in record["parts"]} == dict.fromkeys(PARTS, "passed")
    return {part["name"]: part["numbers"] for part in record["parts"]}


@pytest.mark.deep
def test_every_part_passes_on_a_cpu(folder, numbers):
    text = (folder / "RECORD.md").read_text()
    assert f"**{len(PARTS)} of {len(PARTS)} parts have passed** on a CPU, with tiny sizes." in text
    for name, found in numbers.items():
        assert f"## {name}\n" in text
        assert all(f"| {number} | " in text for number in found)
    assert numbers["machine"]["torch"] == numbers["machine"]["torch"].strip() != ""
    assert sorted(path.name for path in (folder / "resume").iterdir()) == ["found.json", "log.txt"], "no model is left"


@pytest.mark.deep
def test_the_planner_reads_what_the_parts_have_measured(folder, numbers):
    rates = planned(folder / "calibration.json")
    measured = {"products", "dense", "host_bytes_per_s"}
    assert {name for name, rate in asdict(rates).items() if rate != asdict(Rates())[name]} == measured
    found = numbers["layers, recompute full"]["passes with their recomputation, TFLOP/s"]
    assert rates.dense * PEAK_FLOPS == pytest.approx(1e12 * found, rel=1e-12)  # quotients in float64


def test_the_layers_fit_on_the_card(tmp_path):
    """With 80 GB an update that keeps all activations has room for fewer tokens than one that computes them again."""
    shape = write_config(tmp_path / "model", SIZES["cuda"].layers)
    models = [ModelConfig(path=tmp_path, dtype="bfloat16", layers="local", recompute=how) for how in ("none", "full")]
    none, full = (lengths_that_fit(shape, model, (2048,) * 8, 76e9) for model in models)
    assert 1 <= len(none) < len(full) <= 8
    for model, lengths in zip(models, (none, full), strict=True):
        assert trainer_memory(shape, model, PolicyConfig(), sum(lengths), on_gpus=True).totals[0] <= 76e9
    assert lengths_that_fit(shape, models[0], (2048,) * 8, math.inf) == (2048,) * 8


@pytest.mark.deep
def test_a_cpu_agrees_with_itself(numbers):
    """In fp32 the two runs are the same program, so they agree to the bit; bf16 is another program."""
    found = numbers["layouts"]
    assert found["float32, gradient_difference"] == found["float32, loss_difference"] == 0
    assert 0 < found["bfloat16, gradient_difference"] <= BOUNDS["bfloat16"].gradient


@pytest.mark.deep
def test_the_bridge_pushes_every_byte_of_the_model(numbers):
    """Qwen3 with 2 layers, hidden size 32, 4 and 2 heads of 16, MLP 64, vocabulary 40: 27,360 numbers of bf16."""
    layer = 32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 64 + 2 * 32 + 2 * 16
    assert numbers["bridge"]["bytes"] == 2 * (2 * 40 * 32 + 2 * layer + 32)
    assert numbers["bridge"]["tensors with other bits"] == 0


@pytest.mark.deep
def test_the_flops_and_the_memory_of_layers_are_those_of_hand(numbers):
    """4 layers of hidden size 32, 4 and 2 heads of 16, MLP 48, vocabulary 96; 8 samples of 48 tokens."""
    multiplications = 2 * 32 * (4 + 2) * 16 + 3 * 32 * 48
    attention = 2 * 4 * (2 * 16) * 48 * 48 / 2
    forward = 4 * (2 * 384 * multiplications + 8 * attention)
    output = 2 * 32 * 96 * 384
    for mode, flops in {"none": 3 * (forward + output), "full": 4 * forward + 3 * output}.items():
        found = numbers[f"layers, recompute {mode}"]
        rate, seconds = found["passes with their recomputation, TFLOP/s"], found["forward and backward pass, seconds"]
        assert rate * 1e12 * seconds == pytest.approx(flops, rel=1e-12)  # products and quotients in float64
        assert found["update with the optimizer's step, seconds"] > seconds
    kept = {
        mode: numbers[f"layers, recompute {mode}"]["kept by a layer, predicted, bytes a token"]
        for mode in ("none", "full")
    }
    assert kept["full"] == 2 * 32 and kept["none"] > 10 * kept["full"]


@pytest.mark.deep
def test_a_resumed_step_has_the_same_numbers(numbers):
    found = numbers["resume"]
    for name in ("loss", "gradient norm"):
        assert found[f"{name} of the next step"] == found[f"{name} of the next step, resumed"] > 0


@pytest.mark.deep
def test_an_offloaded_state_has_the_bytes_of_hand(numbers):
    """27,360 numbers, as above, and the 24 rows with which embedding and output layer are padded to 64 tokens; each has
    an fp32 copy and two moments."""
    found = numbers["offload"]
    assert found["optimizer state, bytes"] == 12 * (27_360 + 2 * 24 * 32)
    assert min(found["optimizer's step, seconds"], found["optimizer's step, offloaded, seconds"]) > 0


@pytest.mark.deep
def test_communicators_and_log_probs_are_measured(numbers):
    assert numbers["communicators"]["communicators of one rank: 32, bytes"] > 0
    assert numbers["logprobs"]["plain_peak_bytes"] >= 256 * 4096 * 4, "all logits"


def job(name: str, code: str, limit_s: float = 120) -> PartJob:
    return PartJob(name, [sys.executable, "-c", code], deadline(limit_s))


def found_by(folder: Path, name: str, problems: list[str], rates: dict[str, float] | None = None) -> str:
    """Code that leaves this as what the job has found."""
    content = json.dumps({"numbers": {"tokens": 12345, "ratio": 0.5}, "problems": problems, "rates": rates or {}})
    return f"from pathlib import Path; Path({str(folder / name / 'found.json')!r}).write_text({content!r})"


def test_what_fails_does_not_stop_the_others(tmp_path, capsys):
    jobs = [
        job("raises", "raise ValueError('the GPU is on fire')"),
        job("crashes", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        job("finds nothing", "print('done')"),
        job("is wrong", found_by(tmp_path, "is wrong", ["The loss is 2.", "It must be 1."], {"products": 0.1})),
        job("passes", found_by(tmp_path, "passes", [], {"dense": 0.5, "host_bytes_per_s": 5e10})),
    ]
    outcomes = {outcome.name: outcome for outcome in run_jobs(jobs, tmp_path, dict(os.environ), RECORD, Event())}
    assert {name: outcome.status for name, outcome in outcomes.items()} == {
        **dict.fromkeys(["raises", "crashes", "finds nothing", "is wrong"], "failed"),
        "passes": "passed",
    }
    assert outcomes["raises"].why.startswith("It ended with exit status 1; the last line of ")
    assert outcomes["raises"].why.endswith("raises/log.txt is: ValueError: the GPU is on fire")
    assert outcomes["crashes"].why.startswith("It ended with signal SIGSEGV; ")
    assert outcomes["crashes"].why.endswith(" is: nothing")
    assert outcomes["finds nothing"].why.startswith("It ended with exit status 0; ")
    assert outcomes["is wrong"].why == "The loss is 2. It must be 1."
    assert outcomes["is wrong"].numbers == {"tokens": 12345, "ratio": 0.5}, "the numbers of a failure count"
    text = (tmp_path / "RECORD.md").read_text()
    assert "**1 of 5 parts have passed**" in text and "`gpu_day --out X`, begun today, at the commit `c0ffee`" in text
    assert "| tokens | 12,345 |\n| ratio | 0.5 |" in text
    statuses = [part["status"] for part in json.loads((tmp_path / "record.json").read_text())["parts"]]
    assert statuses == ["failed"] * 4 + ["passed"]
    shown = capsys.readouterr().out
    assert "crashes: failed in " in shown and "\n    tokens: 12,345\n    ratio: 0.5\n" in shown
    assert planned(tmp_path / "calibration.json") == replace(Rates(), dense=0.5, host_bytes_per_s=5e10)


def planned(calibration: Path) -> Rates:
    """The rates that the planner takes from the file."""
    path = Path(__file__).parents[3] / "recipes" / "qwen3_32b" / "qwen3_32b-dapo-4n8g-tp8.yaml"
    return Rates.of(load_config(GrpoRunConfig, [str(path), f"cluster.calibration={calibration}"]))


@pytest.mark.deep
def test_a_part_that_hangs_ends_at_its_deadline_with_what_it_has_started(tmp_path):
    """The pipe ends when no process holds its other end any more."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    mine = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    started = f"import os, signal; os.write(os.open({str(pipe)!r}, os.O_WRONLY), b'begun'); signal.pause()"
    code = f"import signal, subprocess, sys; subprocess.Popen([sys.executable, '-c', {started!r}]); signal.pause()"
    after = job("after", found_by(tmp_path, "after", []))
    late, fine = run_jobs([job("hangs", code, 5), after], tmp_path, dict(os.environ), RECORD, Event())
    assert (late.status, fine.status) == ("failed", "passed")
    assert late.why.startswith("It was ended at its deadline of ")
    assert os.read(mine, 100) == b"begun", "the process that the part has started did run"
    assert select.select([mine], [], [], deadline(30))[0] and os.read(mine, 1) == b"", "it has ended"
    os.close(mine)


@pytest.mark.deep
def test_a_part_that_hangs_writes_its_stacks_before_its_deadline(tmp_path):
    """This part waits for nothing else than its own stacks."""
    code = (
        "import os\n"
        "from pathlib import Path\n"
        "from megatron_rl.tools.bench.gpu_day import command, parts, sizes\n"
        "written, standard_error = os.pipe()\n"
        "os.dup2(standard_error, 2)\n"
        "def wait_for_stacks(device):\n"
        "    text = b''\n"
        "    while b'in wait_for_stacks' not in text:\n"
        "        text += os.read(written, 1000)\n"
        "    return sizes.Found({})\n"
        "parts.PARTS['hangs'] = parts.GpuPart('hangs', wait_for_stacks, 0.1)\n"
        f"command.measure('hangs', 'cuda', command.DayKind(), Path({str(tmp_path / 'found.json')!r}))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=deadline(60))
    assert json.loads((tmp_path / "found.json").read_text()) == {"numbers": {}, "problems": [], "rates": {}}


@pytest.mark.deep
def test_ctrl_c_ends_the_part_and_the_record_says_what_was_done(tmp_path):
    folder = tmp_path / "record"
    parts = ["machine", "layouts", "rates", "bridge"]
    with subprocess.Popen([*command(folder), "--parts", *parts], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line == "layouts ...\n":
                process.send_signal(signal.SIGINT)
        assert process.wait(deadline(60)) == 130
    record = json.loads((folder / "record.json").read_text())
    statuses = [(part["name"], part["status"]) for part in record["parts"]]
    assert statuses == list(zip(parts, ["passed", "stopped", "not run", "not run"], strict=True))
    text = (folder / "RECORD.md").read_text()
    assert "**1 of 4 parts have passed**" in text
    assert "| stopped | " in text and "Ctrl-C or SIGTERM ended it." in text


def test_a_record_is_never_mixed_with_another(tmp_path, capsys):
    (tmp_path / "RECORD.md").write_text("of yesterday\n")
    assert gpu_day.main(["--out", str(tmp_path), "--device", "cpu"]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert (tmp_path / "RECORD.md").read_text() == "of yesterday\n"


def test_without_a_gpu_cuda_is_refused_at_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_day.main(["--out", str(tmp_path / "day"), "--device", "cuda"]) == 2
    assert "give --device cpu" in capsys.readouterr().err and not (tmp_path / "day").exists()


def test_a_part_that_there_is_not_is_refused_with_the_parts_that_there_are(tmp_path, capsys):
    assert gpu_day.main(["--out", str(tmp_path / "day"), "--device", "cpu", "--parts", "rates", "layer"]) == 2
    assert "there is no part layer; the parts are: machine; layouts; " in capsys.readouterr().err
    assert not (tmp_path / "day").exists()


def test_all_deadlines_together_are_below_fifteen_minutes():
    assert sum(part.limit_s for part in PARTS.values()) < 900


def test_what_differs_too_much_is_a_problem_and_so_is_what_is_no_number():
    bounds = BOUNDS["float32"]
    fine = Difference("float32", 1.0, bounds.loss, 1.0, bounds.norm, bounds.gradient, "model.norm.weight")
    assert judged(fine, bounds) == []
    wrong = Difference("float32", 1.0, 2 * bounds.loss, 1.0, float("nan"), 1.0, "model.norm.weight")
    assert judged(wrong, bounds) == [
        "In float32 the loss differs from the CPU's in fp32 by 2.0e-05, and at most 1e-05 is rounding.",
        "In float32 the gradient norm differs from the CPU's in fp32 by nan, and at most 1e-05 is rounding.",
        "In float32 the gradient of model.norm.weight differs from the CPU's in fp32 by 1.0e+00, and at most 1e-04 is "
        "rounding.",
    ]


def test_a_node_needs_a_model(tmp_path, capsys):
    assert gpu_day.main(["--node", str(tmp_path), "--out", str(tmp_path / "record"), "--device", "cpu"]) == 2
    assert "is no folder of a model; give one with config.json" in capsys.readouterr().err
    assert not (tmp_path / "record").exists()


def test_a_training_run_of_a_node_is_judged_by_its_steps():
    steps = [
        {"loss": 0.5, "grad_norm": 2.0, "time/total_s": 3.0},
        {"loss": -0.5, "grad_norm": 4.0, "time/total_s": 1.0},
    ]
    assert problems_of(steps) == []
    found = numbers_of(steps)
    assert found["steps"] == 2 and found["grad_norm, last"] == 4 and found["time/total_s, mean"] == 2
    assert problems_of([*steps, {"loss": float("nan")}]) == ["loss is nan in step 2."]
    assert problems_of([]) == ["No step has trained anything."]
