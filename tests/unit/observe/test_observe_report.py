from __future__ import annotations

import io
import json
import re
import subprocess

import pytest
from rich.console import Console

from megatron_rl.config.schema import BalanceConfig, ModelConfig, RunConfig, SftConfig, SftRunConfig
from megatron_rl.observe import print_summary, write_provenance, write_report
from megatron_rl.observe.provenance import git_state
from megatron_rl.observe.records import read_metrics
from megatron_rl.observe.report import draw_curves

CONFIG = SftRunConfig(
    run=RunConfig(name="demo", steps=2),
    model=ModelConfig(path="models/tiny"),
    balance=BalanceConfig(max_tokens_per_microbatch=4096),
    sft=SftConfig(rows="rows.jsonl"),
)


def write_run(folder, *records) -> None:
    lines = [json.dumps({"step": step} | record) + "\n" for step, record in enumerate(records)]
    (folder / "metrics.jsonl").write_text("".join(lines))


GRPO = [
    {
        "reward/mean": reward, "eval/accuracy": reward / 2,
        "length/response_mean": 30.0, "length/thought_mean": 20.0,
        "rollout/tokens_per_s": 1000.0, "mismatch/mean_abs": 1e-6, "grad_norm": 0.5, "loss": 0.01,
        "time/generate_s": 3.0, "time/other_s": 1.0, "time/total_s": 4.0,
    }
    for reward in (0.25, 0.75)
]  # fmt: skip

SAMPLE = {
    "step": 1, "uid": "r:1", "prompt": "1<b>2", "thought": "[bold]x</think>", "answer": "<script>y",
    "ground_truth": None, "reward": 1.0, "finish": "length", "num_tokens": 9,
}  # fmt: skip


def test_the_page_is_self_contained_and_escaped(tmp_path):
    write_run(tmp_path, *GRPO)
    samples = [json.dumps(SAMPLE | {"uid": f"r:{i}"}) + "\n" for i in range(5)]
    (tmp_path / "samples.jsonl").write_text("".join(samples))
    write_provenance(tmp_path, CONFIG)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [s[:22] for s in re.findall(r'(?:src|href)="([^"]*)', page)] == ["data:image/png;base64,"]
    assert "url(" not in page and "@import" not in page
    assert "1&lt;b&gt;2" in page and "&lt;script&gt;y" in page and "<script" not in page
    assert re.findall(r"<span>(r:\d)</span>", page) == ["r:2", "r:3", "r:4"]
    for text in ("0.375</b><span>from 0.125", "models/tiny", "cut by the length budget"):
        assert text in page


@pytest.mark.parametrize(
    ("records", "titles"),
    [
        (GRPO, ["Reward", "Length", "Time", "Rollout", "Mismatch", "Gradient"]),
        (
            [{"loss": 2.0, "grad_norm": 1.0, "time/other_s": 0.0, "time/total_s": 0.0}],
            ["Loss", "Time", "Gradient"],
        ),
        ([{"reward/mean": -3.0, "mismatch/mean_abs": 0.0}], ["Reward", "Mismatch"]),
    ],
)
def test_curves_show_what_was_logged(tmp_path, records, titles):
    write_run(tmp_path, *records)
    figure = draw_curves(read_metrics(tmp_path))
    figure.savefig(tmp_path / "curves.png")
    assert [axes.get_title(loc="left").split()[0].rstrip(",") for axes in figure.axes] == titles


def test_the_curves_are_the_logged_numbers(tmp_path):
    write_run(tmp_path, *GRPO)
    reward, _, times, *_ = draw_curves(read_metrics(tmp_path)).axes
    assert {line.get_label(): list(line.get_ydata()) for line in reward.lines} == {
        "reward": [0.25, 0.75],
        "held-out accuracy": [0.125, 0.375],
    }
    assert [(bar.get_y(), bar.get_height()) for bar in times.patches] == [(0, 3), (0, 3), (3, 1), (3, 1)]


def test_summary(tmp_path):
    write_run(tmp_path, *GRPO)
    (tmp_path / "samples.jsonl").write_text(json.dumps(SAMPLE) + "\n")
    screen = io.StringIO()
    print_summary(tmp_path, Console(file=screen, width=100, color_system=None))
    text = " ".join(screen.getvalue().split())
    assert "held-out accuracy 0.125 0.375" in text and "reward 0.250 0.750" in text
    assert "2 steps in 8.0 s, 4.00 s a step without evaluations and checkpoints, rollout 1,000 tokens/s" in text
    assert "generate 75%" in text and "other 25%" in text
    assert "[bold]x</think><script>y" in text


@pytest.mark.parametrize("write", [write_report, lambda folder: print_summary(folder, Console())])
def test_nothing_logged(tmp_path, write):
    with pytest.raises(ValueError, match="nothing to"):
        write(tmp_path)


def test_the_configuration_reads_back_the_same(tmp_path):
    record = json.loads(write_provenance(tmp_path / "new", CONFIG).read_text())
    assert SftRunConfig.model_validate(record["config"]) == CONFIG
    assert record["versions"]["numpy"] and "git" in record


def test_git_state(tmp_path):
    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", tmp_path, *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    package = tmp_path / "package"
    package.mkdir()
    (package / "x.py").write_text("1")
    assert git_state(package) is None
    git("init")
    assert git_state(package) is None, "no commit yet"
    git("add", ".")
    git("commit", "-m", "first")
    assert git_state(package) == {"commit": git("rev-parse", "HEAD").strip(), "changed": False}
    (package / "x.py").write_text("2")
    assert git_state(package)["changed"]
    (package / "inner").mkdir()
    assert git_state(package / "inner") is None, "installed below another repository"
