from __future__ import annotations

import io
import json
import re
import subprocess

import pytest
from rich.console import Console

from megatron_rl.commands.report import main
from megatron_rl.config.policy import ModelConfig
from megatron_rl.config.schema import BalanceConfig, RunConfig, SftConfig, SftRunConfig
from megatron_rl.observe import print_summary, write_provenance, write_report
from megatron_rl.observe.curves import draw_curves
from megatron_rl.observe.provenance import git_state
from megatron_rl.observe.records import read_metrics, read_warnings
from megatron_rl.observe.report import distinct_names, run_page

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


def data_of(page: str) -> dict:
    """What the page's scripts read."""
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_the_page_is_one_file_that_loads_nothing(tmp_path):
    write_run(tmp_path, *[record | {"reward/exact_answer/mean": 0.5} for record in GRPO])
    write_provenance(tmp_path, CONFIG)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    links = re.findall(r'<[^>]*\b(?:src|href)="([^"]*)', page)
    assert [link for link in links if not link.startswith("#")] == ["data:,"]
    assert "url(" not in page and "@import" not in page and "default-src 'none'" in page
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page)
    for text in ("0.375</b><span>first: 0.125", "models/tiny"):
        assert text in page
    assert "<h2>Rewards</h2>" not in page, "one reward that never abstains has no table"


def test_an_answer_cannot_end_the_element_that_holds_it(tmp_path):
    write_run(tmp_path, *GRPO)
    hostile = SAMPLE | {"answer": "</script><script>alert(1)</script>", "prompt": "<!--<script>", "uid": "\u2028"}
    (tmp_path / "samples.jsonl").write_text(json.dumps(hostile) + "\n")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "warnings.log").write_text("step 1: </script>\n")
    page = run_page(tmp_path)
    assert "alert(1)</script>" not in page and "<!--" not in page
    assert page.count("<script") == page.count("</script>") == 2, "the data and the program"
    assert data_of(page)["samples"] == [hostile] and data_of(page)["messages"] == [{"step": 1, "text": "</script>"}]


def test_what_json_has_no_word_for_is_read_by_the_page(tmp_path):
    write_run(tmp_path, GRPO[0] | {"loss": float("nan"), "grad_norm": float("inf")}, GRPO[1])
    (tmp_path / "samples.jsonl").write_text(json.dumps(SAMPLE | {"details": {"a": [float("nan")]}}) + "\n")
    data = data_of(run_page(tmp_path))
    assert data["samples"][0]["details"] == {"a": [None]}
    [norm] = [panel for panel in data["panels"] if panel["title"] == "Gradient norm"]
    assert (norm["lines"][0]["steps"], norm["lines"][0]["values"]) == ([1], [0.5])


def test_warnings_keep_their_steps(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "warnings.log").write_text("step 3: slow: step 4: x\nno step\nstep 12: y\n")
    told = [(message["step"], message["text"]) for message in read_warnings(tmp_path)]
    assert told == [(3, "slow: step 4: x"), (3, "no step"), (12, "y")]
    assert read_warnings(tmp_path / "logs") == []


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
    assert "2 steps in 8.0 s, 4.00 s per step without evaluations and checkpoints, rollout 1,000 tokens/s" in text
    assert "generate 75%" in text and "other 25%" in text
    assert "[bold]x</think><script>y" in text
    assert "abstained" not in text


@pytest.mark.parametrize("write", [write_report, lambda folder: print_summary(folder, Console())])
def test_nothing_logged(tmp_path, write):
    with pytest.raises(ValueError, match="nothing to"):
        write(tmp_path)


def test_the_configuration_reads_back_the_same(tmp_path):
    record = json.loads(write_provenance(tmp_path / "new", CONFIG).read_text())
    assert SftRunConfig.model_validate(record["config"]) == CONFIG
    assert record["versions"]["numpy"] and "git" in record


def test_resumes_are_marked_in_the_curves(tmp_path):
    write_run(tmp_path, *GRPO)
    for first_step in (0, 1, 4, 9, 6):  # with step 6 the steps after it are done again
        record = json.loads(write_provenance(tmp_path, CONFIG, first_step).read_text())
    assert record["resumed_at"] == [1, 4, 6]
    assert "resumed with step 1, 4, 6" in run_page(tmp_path)
    for axes in draw_curves(read_metrics(tmp_path), record["resumed_at"]).axes:
        assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"] == [0.5, 3.5, 5.5]
    assert json.loads(write_provenance(tmp_path, CONFIG).read_text())["resumed_at"] == []


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


SEVERAL = [
    {
        "reward/mean": 1.5 * step - 2.0, "eval/accuracy": 0.25 * step, "eval/reward_mean": 3.0 * step - 2,
        "reward/exact_answer/mean": 0.5, "reward/exact_answer/abstained": 0.0, "reward/exact_answer/seconds": 0.5,
        "reward/judge:kind/mean": -1.0, "reward/judge:kind/abstained": 0.125 * step, "reward/judge:kind/seconds": 2.0,
        "time/other_s": 1.0, "time/total_s": 1.0,
    }
    for step in range(3)
]  # fmt: skip


def test_rewards_beyond_a_share_have_their_own_panel(tmp_path):
    write_run(tmp_path, *SEVERAL)
    reward, accuracy, alone, abstained, _ = draw_curves(read_metrics(tmp_path)).axes
    assert [axes.get_title(loc="left") for axes in (reward, accuracy, alone, abstained)] == [
        "Reward",
        "Held-out accuracy",
        "Each reward alone",
        "No reward, share of samples",
    ]
    shown = {line.get_label(): list(line.get_ydata()) for line in reward.lines}
    assert shown["reward"] == [-2.0, -0.5, 1.0] and shown["held-out reward"] == [-2.0, 1.0, 4.0]
    low, high = reward.get_ylim()
    assert low < -2 and high > 4, "nothing is cut"
    assert accuracy.get_ylim() == (0, 1.03) and list(accuracy.lines[0].get_ydata()) == [0, 0.25, 0.5]
    assert [line.get_label() for line in abstained.lines] == ["judge:kind"]
    assert {line.get_label() for line in alone.lines} >= {"exact_answer", "judge:kind"}


def test_a_slightly_negative_reward_is_not_cut(tmp_path):
    write_run(tmp_path, {"reward/mean": -0.05}, {"reward/mean": 0.5})
    [reward] = draw_curves(read_metrics(tmp_path)).axes
    assert reward.get_ylim()[0] < -0.05


def test_each_reward_and_its_abstentions_are_told(tmp_path):
    write_run(tmp_path, *SEVERAL)
    page = run_page(tmp_path)
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page)
    assert cells[:5] == ["exact_answer", "0.500", "0.500", "0.0%", "0.50 s"]
    assert cells[5:10] == ["judge:kind", "-1.000", "-1.000", "12.5%", "2.00 s"]
    screen = io.StringIO()
    print_summary(tmp_path, Console(file=screen, width=100, color_system=None))
    text = " ".join(screen.getvalue().split())
    assert "judge:kind -1.000 -1.000" in text and "judge:kind, no reward 0.0% 25.0%" in text


def test_a_last_step_without_a_score_has_none_in_the_summary(tmp_path):
    first, push = {"length/response_mean": 4.0, "reward/mean": 0.5, "eval/accuracy": 0.25}, {"rollout/preempted": 0.0}
    write_run(tmp_path, first, {"length/response_mean": 4.0}, push)
    screen = io.StringIO()
    print_summary(tmp_path, Console(file=screen, width=100, color_system=None))
    text = " ".join(screen.getvalue().split())
    assert "reward 0.500 no score" in text and "held-out accuracy 0.250 0.250" in text
    (tmp_path / "metrics.jsonl").unlink()
    write_run(tmp_path, first, push)
    screen = io.StringIO()
    print_summary(tmp_path, Console(file=screen, width=100, color_system=None))
    assert "reward 0.500 0.500" in " ".join(screen.getvalue().split()), "the last record has only the last weight sync"


def test_without_a_verifier_of_record_the_evaluation_is_a_reward(tmp_path):
    write_run(tmp_path, {"reward/mean": 2.0, "eval/reward_mean": -1.5})
    page = run_page(tmp_path)
    assert "Held-out reward</span><b>-1.500" in page and "accuracy" not in page


def test_a_spike_does_not_flatten_the_gradient_norm(tmp_path):
    write_run(tmp_path, *[{"grad_norm": 100.0 if step == 3 else 0.5} for step in range(9)])
    [norm] = draw_curves(read_metrics(tmp_path)).axes
    assert norm.get_yscale() == "log"


def command(capsys, *arguments) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_a_run_that_is_still_going_on_is_reported_without_its_last_line(tmp_path, capsys):
    """Cut inside a character: the writer's flush and a crash know nothing of them."""
    write_run(tmp_path, *GRPO)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write('{"step": 2, "name": "ä'.encode()[:-1])
    (tmp_path / "samples.jsonl").write_bytes((json.dumps(SAMPLE) + "\n").encode() + "ä".encode()[:1])
    record = json.loads(write_provenance(tmp_path, CONFIG).read_text())
    record["config"]["run"]["steps"] = 9
    (tmp_path / "config.json").write_text(json.dumps(record))
    status, out, _ = command(capsys, tmp_path)
    assert status == 0 and out.strip() == str(tmp_path / "report.html")
    assert "<span>Steps</span><b>2 of 9</b>" in (tmp_path / "report.html").read_text()


def test_a_spoilt_line_is_named(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step"\n{"step": 2}\n')
    status, _, err = command(capsys, tmp_path)
    assert status == 1 and "metrics.jsonl:2 is not JSON" in err
    (tmp_path / "metrics.jsonl").unlink()
    status, _, err = command(capsys, tmp_path)
    assert status == 1 and "nothing to report" in err
    status, _, err = command(capsys, tmp_path / "nowhere")
    assert status == 1 and "there is no folder" in err


def folders_of_seeds(tmp_path) -> list:
    """Two seeds of an experiment, another experiment, and a run without configuration that logged other metrics."""
    folders = [tmp_path / name / "grpo" for name in ("seed_0", "seed_1", "other")]
    for seed, (folder, scale) in enumerate(zip(folders, (1.0, 0.5, 2.0), strict=True)):
        folder.mkdir(parents=True)
        write_run(folder, *[record | {"reward/mean": record["reward/mean"] * scale} for record in GRPO])
        run = CONFIG.run.model_copy(update={"seed": seed, "name": f"run {seed}"})
        rows = "<b>.jsonl" if folder is folders[2] else "rows.jsonl"
        write_provenance(folder, CONFIG.model_copy(update={"run": run, "sft": SftConfig(rows=rows)}))
    (tmp_path / "c").mkdir()
    write_run(tmp_path / "c", {"loss": 2.0, "time/total_s": 1.0})
    return [folders[0], folders[2], folders[1], tmp_path / "c"]


def test_a_comparison_has_bands_of_seeds_and_the_differences_of_configurations(tmp_path, capsys):
    runs = folders_of_seeds(tmp_path)
    (runs[0] / "logs").mkdir()
    (runs[0] / "logs" / "warnings.log").write_text("step 1: slow\n")
    status, out, _ = command(capsys, *runs, "--out", tmp_path / "out")
    assert status == 0 and out.strip() == str(tmp_path / "out" / "comparison.html")
    page = (tmp_path / "out" / "comparison.html").read_text(encoding="utf-8")
    cells = re.findall(r"<td><code>([^<]*)</code></td>", page)
    rows = cells[cells.index("sft.rows") :][:5]
    assert rows == ["sft.rows", *["&#34;rows.jsonl&#34;"] * 2, "&#34;&lt;b&gt;.jsonl&#34;", "\N{EN DASH}"]
    assert cells[cells.index("run.seed") :][:5] == ["run.seed", "0", "1", "2", "\N{EN DASH}"]
    assert "seed_0/grpo, seed_1/grpo differ only in their seeds" in page
    assert "0.500 \N{RIGHTWARDS ARROW} 1.500" in page, "the other experiment's reward"
    data = data_of(page)
    assert data["messages"] == [{"step": 1, "text": "seed_0/grpo: slow"}]
    [reward] = [panel for panel in data["panels"] if panel["title"] == "Reward"]
    assert reward["bands"] == [{"colour": 0, "steps": [0, 1], "low": [0.125, 0.375], "high": [0.25, 0.75]}]
    assert [(line["label"], line["values"], line["is_thin"]) for line in reward["lines"]] == [
        ("seed_0/grpo", [0.25, 0.75], True),
        ("seed_1/grpo", [0.125, 0.375], True),
        ("seed_0/grpo and 1 more seed", [0.1875, 0.5625], False),
        ("other/grpo", [0.5, 1.5], False),
    ]
    assert (tmp_path / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_names_that_tell_runs_apart(tmp_path):
    paths = [tmp_path / "a" / "x" / "grpo", tmp_path / "b" / "x" / "grpo"]
    assert distinct_names(paths) == ["a/x/grpo", "b/x/grpo"]
    assert distinct_names([paths[0], tmp_path / "c"]) == ["grpo", "c"]
    with pytest.raises(ValueError, match="given twice"):
        distinct_names([paths[0], paths[0] / ".." / "grpo"])
