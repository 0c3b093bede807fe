"""`gpu-day --loop` on a CPU with a random model: real runs, real kills, a real engine and pushes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import deadline

from megatron_rl.recipes.tiny.gsm8k import write_model
from megatron_rl.tools.bench.gpu_day.loop import LOOP_PARTS, LOOP_SIZES

pytestmark = [pytest.mark.deep, pytest.mark.deadline(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What the command leaves."""
    folder = tmp_path_factory.mktemp("loop")
    write_model(folder)
    done = day(folder / "model", folder / "record")
    logs = {path.parent.name: path.read_text()[-3000:] for path in (folder / "record").glob("*/log.txt")}
    assert done.returncode == 0, (done.stdout, done.stderr, logs)
    return folder / "record"


def day(model: Path, out: Path, *more: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "megatron_rl.tools.bench.gpu_day.command", "--loop", str(model), "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "--device", "cpu", *more], capture_output=True, text=True, env=environment, timeout=deadline(850)
    )


def numbers_of(folder: Path) -> dict[str, dict]:
    """The numbers of each part."""
    record = json.loads((folder / "record.json").read_text())
    assert {part["name"]: part["status"] for part in record["parts"]} == dict.fromkeys(LOOP_PARTS, "passed")
    return {part["name"]: part["numbers"] for part in record["parts"]}


def test_every_part_passes_on_a_cpu(folder):
    numbers = numbers_of(folder)
    text = (folder / "RECORD.md").read_text()
    assert "**4 of 4 parts have passed** on a CPU, with tiny sizes." in text
    assert all(f"| {name} | {part.purpose} | passed | " in text for name, part in LOOP_PARTS.items())
    left = [path.relative_to(folder) for path in folder.rglob("*.safetensors")] + [*folder.rglob("checkpoints")]
    assert left == [], "no weights are left"

    run = numbers["real model"]
    assert run["steps"] == 3 and 0 < run["mismatch/mean_abs, mean"] < run["mismatch/max_abs, largest"] < 1e-4
    assert 0 <= run["held-out accuracy, before"] <= 1 and 0 <= run["held-out accuracy, after"] <= 1
    assert run["step, seconds, measured"] > run["generation, seconds, measured"] > 0
    assert run["memory training, bytes, predicted"] > 0 and run["perf/tokens_per_s, mean of later steps"] > 0

    resumed = numbers["real model, stopped and resumed"]
    assert resumed["status after SIGUSR1"] == 138
    assert resumed["steps with equal loss, gradient norm and reward, of 3"] == 3
    runs = folder / "real model, stopped and resumed" / "runs"
    assert [path.name for path in runs.iterdir()] == ["disturbed"], "the part before was the undisturbed run"
    log = (runs / "disturbed" / "logs" / "driver.log").read_text()
    assert log.count("grpo") == 3, "it was started three times"

    answers = numbers["same answers"]
    [longest] = [int(word.partition("=")[2]) for word in LOOP_SIZES["cpu"].sums if "max_response_tokens" in word]
    assert 0 < answers["eager: tokens"] == answers["graphs: tokens"] <= 2 * 8 * longest
    assert answers["eager: tokens that the push has changed"] > 8
    assert answers["tokens that differ with graphs, before the push"] == 0
    assert answers["tokens that differ with graphs, after the push"] == 0

    assert numbers["1.7B shape"]["steps"] == 2
    assert 0 < numbers["1.7B shape"]["mean answer, tokens, measured"] <= 24


def test_a_part_that_cannot_start_ends_with_one_sentence_and_the_next_one_begins(tmp_path):
    write_model(tmp_path)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"no weights")
    done = day(tmp_path / "model", tmp_path / "record", "--parts", *list(LOOP_PARTS)[:2])
    assert done.returncode == 1
    record = json.loads((tmp_path / "record" / "record.json").read_text())
    for part in record["parts"]:
        assert part["why"].startswith("The run ended with status 1: ") and "\n" not in part["why"]
        assert part["why"].endswith(
            "model.safetensors is truncated or not a safetensors file (10 bytes); copy it again"
        )
