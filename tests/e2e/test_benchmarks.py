"""Benchmarks whose commands stand on a page run in their smallest sizes, and compute what they say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pages import PAGES, ROOT
from patience import deadline

from megatron_rl.layout import Links
from megatron_rl.models import FAMILIES
from megatron_rl.tools.bench import against_trl, rollout, sync
from megatron_rl.tools.bench.run_process import IS_STEP

ELSEWHERE = {
    "gpu_day": "tests/unit/tools/test_tools_gpu_day.py",
    "logprobs": "tests/unit/algorithms/test_algorithms_logprobs.py",
    "own_trainer": "tests/ranks/test_own_trainer.py",
    "simulate_balance": "tests/unit/balance/test_balance_simulation.py",
    "step": "tests/unit/tools/test_tools_bench_step.py",
}
"""The other files that run a benchmark of a page."""


@pytest.fixture
def rows(task, tmp_path) -> Path:
    """A few rows of the demo."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join((task / "train.jsonl").read_text().splitlines()[:64]))
    return path


@pytest.fixture
def few(rows) -> list[str]:
    """Options for runs of one rank, one engine and few rows: starting and reading cost more than a test's steps."""
    return ["--settings", "policy.parallel.tensor=1", "rollout.num_engines=1", f"data.train={rows}"]


def numbers(name: str, *options: str, **constants: int) -> dict:
    """
    Args:
        constants: smaller values of the benchmark's own constants, which only its driver knows.
    """
    command = [sys.executable, str(ROOT / "tools" / "bench" / f"{name}.py"), "--json", *options]
    if constants:
        changed = f"vars(module).update({constants})"
        program = f"from megatron_rl.tools.bench import {name} as module; {changed}; raise SystemExit(module.main())"
        command = [sys.executable, "-c", program, "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline(180), cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_benchmark_of_a_page_runs_in_some_test():
    pages = [*PAGES, *ROOT.glob("recipes/*/RECORD.md"), *ROOT.glob("megatron_rl/*/README.md")]
    named = {name for page in pages for name in re.findall(r"tools/bench/(\w+)\.py", page.read_text())}
    here = set(re.findall(r'(?:numbers\("|bench/|    assert )(\w+)(?:"|\.py"|\.main\()', Path(__file__).read_text()))
    assert named >= {"against_trl", "chaos", "step"}, "the pages are read"
    assert named <= here | ELSEWHERE.keys()
    for name, file in ELSEWHERE.items():
        assert name in (ROOT / file).read_text(), file


@pytest.mark.deep
def test_rollouts_of_static_and_continuous_batches():
    """Both answer the same in each step, so their rates are as their seconds; a static batch wastes slots."""
    options = ["--steps", "1", "--modes", "static", "continuous", "--trainer-seconds", "0.1"]
    found = numbers("rollout", *options, WARM_UP=0, PROMPTS=8)
    static, continuous = (found["modes"][name] for name in ("static", "continuous"))
    num_tokens = rollout.LENGTHS[: 8 * rollout.SAMPLES].sum()
    for one in (static, continuous):
        assert one["tokens_per_s"] * one["seconds_per_step"] == pytest.approx(num_tokens, rel=1e-9)
    assert 0 < static["occupancy"] < continuous["occupancy"] <= 1


@pytest.mark.deep
def test_agents_of_another_process_have_one_conversation_each():
    found = numbers("agents", "--agents", "50", "--calls", "3", "--answer-seconds", "0.1")
    assert (found["calls"], found["conversations"]) == (150, 50)
    assert found["tokens"] > 150 * 200 and found["cpu_ms_per_call"] > 0


@pytest.mark.deep
def test_a_stream_of_stubs_carries_a_step_of_32_gpus():
    """8 answers a GPU, whose tokens each data-parallel replica fetches once."""
    options = ["--modes", "rate", "step", "--rate", "100", "--seconds", "1", "--gpus", "32"]
    found = numbers("stream", *options, NUM_ENGINES=2, NUM_RANK_PROCESSES=2)
    assert 0 < found["rate"]["answers"] <= 108, "a hundred a second for a second, in groups of eight"
    step = found["step"]
    assert step["answers"] == 256 and step["fetched_gb_of_all_replicas"] >= step["stored_gb"] > 0


@pytest.mark.deep
@pytest.mark.deadline(300)
def test_drafts_change_no_token():
    found = numbers("speculation", "--answers", "2", "--tokens", "96", "--turns", "1")
    assert [(row["kind"], row["answers"]) for row in found] == [("repetitive", 2), ("new", 2)]
    assert all(row["same_tokens"] and row["logp_difference"] < 1e-5 for row in found)
    repetitive, new = found
    assert 0 < repetitive["accepted"] <= repetitive["drafted"] and new["drafted"] < 0.1
    for row in found:
        without, with_drafts = row["tokens_per_s"]
        assert row["times"] == pytest.approx(with_drafts / without), "one turn is its median"


@pytest.mark.deep
def test_a_push_moves_the_bytes_of_the_model():
    found = numbers("sync", "--layouts", "pipeline-small", "--gigabytes", "0.01", "--repeats", "1")
    row = found["layouts"]["pipeline-small"]
    size = sync.Size(sync.HERE.hidden, 0.01, sync.HERE.bucket_bytes)
    shape = sync.make_setup(sync.LAYOUTS["pipeline-small"], size, Links()).shape
    held = 2 * FAMILIES[shape.family].num_parameters(shape)  # in bf16; both engine ranks have the few numbers of norms
    assert held < sum(row["held_bytes"]) < held * 1.001
    assert row["received_bytes"] == row["held_bytes"]
    for way, seconds in row["seconds"].items():
        assert row["gigabytes_per_s"][way] * seconds * 1e9 == pytest.approx(sum(row["received_bytes"])), way


@pytest.mark.deep
@pytest.mark.deadline(600)
def test_killed_processes_change_no_number(few):
    # This seed kills a trainer rank first.
    found = numbers("chaos", "--steps", "3", "--every", "1", "--most", "1", "--seed", "18", *few)
    assert len(found["checks"]) == 6 and all(found["checks"].values())
    [first] = found["disturbances"]
    assert (first["kind"], first["signal"]) == ("trainer rank", "SIGKILL") and first["recovered_s"] > 0
    assert 1 <= first["at_step"] < found["steps"] == 3


@pytest.mark.deep
@pytest.mark.deadline(600)
@pytest.mark.skipif(not (against_trl.TRL / "trl").is_dir(), reason="TRL is not here: make test-trl installs it")
def test_a_step_against_trl(monkeypatch, capfd, rows):
    """Without --jobs there are two, which differ in model and reward; one is run, with fewer and shorter answers."""
    prepare, ours, seconds = against_trl.prepare, against_trl.ours, []

    def small(folder, names):
        jobs = prepare(folder, names)
        assert list(jobs) == ["demo", "long"] and (jobs["demo"].model / "model.safetensors").exists()
        assert getattr(against_trl, jobs["demo"].reward)(["1+1="] * 2, ["2</think>2", "2"], ["2", "3"]) == [1.0, 0.0]
        return {"long": replace(jobs["long"], train=rows, num_prompts=2, max_tokens=16)}

    def seen(job, steps, folder, options):
        found = ours(job, steps, folder, options)
        records = [json.loads(line) for line in (folder / "ours/metrics.jsonl").read_text().splitlines()]
        assert [one[IS_STEP] for one in records[:steps]] == [2 * against_trl.SAMPLES] * steps
        seconds.append(records[steps - 1]["time/total_s"])
        return found

    monkeypatch.setattr(against_trl, "prepare", small)
    monkeypatch.setattr(against_trl, "ours", seen)
    monkeypatch.setattr(against_trl, "WARM_UP", 1)
    monkeypatch.setattr(against_trl, "MODES", {"max_lag 1": [*against_trl.MODES["max_lag 1"], "rollout.num_engines=1"]})
    assert against_trl.main(["--rounds", "1", "--steps", str(against_trl.WARM_UP + 1), "--json"]) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert found == {"long": {"TRL": found["long"]["TRL"], "max_lag 1": seconds}} and found["long"]["TRL"][0] > 0
