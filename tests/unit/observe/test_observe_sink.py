from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from megatron_rl.config.schema import RunConfig
from megatron_rl.observe import RunSink
from megatron_rl.observe import sink as sink_module
from megatron_rl.observe.live import figures, sparkline
from megatron_rl.observe.records import cut, read_lines, read_metrics, series, time_split, write_line
from megatron_rl.observe.report import write_report
from megatron_rl.types import Group, Prompt, Rollout, Tokens, Verdict
from megatron_rl.verifiers.failures import FailureLog


class Letters:
    """Token i is the i-th letter, 0 the end of sequence, 27 the delimiter."""

    def decode(self, ids, *, skip_special_tokens):
        special = {0: "<eos>", 27: "</think>"}
        kept = [i for i in ids if i not in special or not skip_special_tokens]
        return "".join(special.get(i, chr(96 + i)) for i in kept)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when told."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(sink_module.time, "perf_counter", lambda: Clock.now)
    return Clock


def sink_of(folder, steps: int = 10, terminal: bool = False, resume_at=None) -> tuple[RunSink, io.StringIO]:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=100, color_system=None)
    return RunSink(
        folder, RunConfig(name="x", steps=steps, stop_on=("jump",)), console, Letters(), "</think>", resume_at
    ), screen


def test_phases_and_other_sum_to_the_total(tmp_path, clock):
    sink, _ = sink_of(tmp_path)
    clock.now += 50  # before the first phase: of no step
    for step in range(2):
        for name, seconds in [("generate", 3.0), ("update", 2.0), ("generate", 1.0)]:
            with sink.phase(name):
                clock.now += seconds
        clock.now += 0.5
        sink.log(step, {"loss": 1.25})
    times = {"time/generate_s": 4.0, "time/update_s": 2.0, "time/other_s": 0.5, "time/total_s": 6.5}
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": s, "loss": 1.25} | times for s in range(2)]


def test_a_resumed_run_knows_its_last_records(tmp_path):
    sink, _ = sink_of(tmp_path)
    assert sink.recorded(50) == []
    for step in range(5):
        sink.log(step, {"loss": 1.0 / step if step else float("nan")})
    resumed, _ = sink_of(tmp_path, resume_at=4)
    assert [(one["step"], one.get("loss")) for one in resumed.recorded(50)] == [(0, None), (1, 1), (2, 0.5), (3, 1 / 3)]
    assert [one["step"] for one in resumed.recorded(2)] == [2, 3]


def test_phases_do_not_nest_and_survive_an_error(tmp_path, clock):
    sink, _ = sink_of(tmp_path)
    with pytest.raises(AssertionError, match="'push' inside phase 'update'"):
        with sink.phase("update"), sink.phase("push"):
            pass
    clock.now += 1
    with pytest.raises(KeyError), sink.phase("update"):
        clock.now += 2
        raise KeyError
    sink.log(0, {})
    assert read_lines(tmp_path / "metrics.jsonl")[0]["time/update_s"] == 2.0


def test_the_first_answers_of_a_step_are_recorded_and_only_their_tokens_are_fetched(tmp_path):
    sink, _ = sink_of(tmp_path)
    chat = ({"role": "system", "content": "s"}, {"role": "user", "content": "q"})
    prompts = [Prompt("r:1", (1, 2), "ab", {"ground_truth": "d", "dataset": "sums"}), Prompt("r:2", (3,), chat)] * 2
    groups, fetched = [], []
    for prompt, response in zip(prompts, [(3, 27, 4, 0), (5, 6)] * 2, strict=True):
        ids = np.array([*prompt.token_ids, *response], np.int32)
        verdict = Verdict(1.0, "found d", parts=(1.0, None))
        sample = Rollout(len(ids), len(prompt.token_ids), len(response), 1, "stop", verdict=verdict)
        tokens = Tokens(ids, ids != 27, np.full(len(ids), -0.126, np.float32), np.where(ids != 27, 5, -1))
        groups.append(Group(prompt, [sample, sample], [tokens, tokens], 0))

    def fetch(group):
        fetched.append(group)
        return group.payload

    sink.samples(7, groups, fetch, most=3)
    first, second, third = read_lines(tmp_path / "samples.jsonl")
    assert fetched == groups[:2]
    assert first == {
        "step": 7, "uid": "r:1", "index": 0, "prompt": "ab", "thought": "c</think>", "answer": "d<eos>",
        "ground_truth": "d", "reward": 1.0, "reason": "found d", "details": {}, "finish": "stop", "num_tokens": 4,
        "num_prompt_tokens": 2, "num_thought_tokens": 1, "datasets": ["sums"], "parts": [1.0, None],
        "tokens": {
            "lengths": [1, 8, 1, 5], "actions": [1, 1, 2], "versions": [[5, 1], [-1, 1], [5, 2]],
            "columns": {"logp_rollout": [-13, -13, -13, -13]},
        },
    }  # fmt: skip
    assert second == first | {"index": 1}
    assert (third["prompt"], third["thought"], third["answer"]) == ("system: s\nuser: q", "", "ef")
    assert (third["uid"], third["index"]) == ("r:2", 0) and "datasets" not in third


def test_a_file_that_is_removed_in_a_run_is_told_and_begins_again(tmp_path):
    sink, _ = sink_of(tmp_path)
    (tmp_path / "logs").mkdir()
    for step in range(3):
        sink.log(step, {"loss": 1.0})
        if step == 1:
            (tmp_path / "metrics.jsonl").unlink()
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [2]
    [told] = (tmp_path / "logs" / "warnings.log").read_text().splitlines()
    assert told.startswith("step 2: ") and "metrics.jsonl was removed while the run writes it" in told


def test_a_folder_that_is_moved_in_a_run_is_an_error_that_says_so(tmp_path):
    folder = tmp_path / "run"
    sink, _ = sink_of(folder)
    (folder / "logs").mkdir()
    sink.log(0, {"loss": 1.0})
    folder.rename(tmp_path / "moved")
    (folder / "checkpoints").mkdir(parents=True)  # as a trainer rank makes it again
    with pytest.raises(FileNotFoundError, match="was moved or removed while the run goes on; put it back"):
        sink.log(1, {"loss": 1.0})


def test_no_answer_is_recorded_and_nothing_fetched_if_none_is_asked_for(tmp_path):
    sink, _ = sink_of(tmp_path)
    group = Group(Prompt("r:1", (1,), "q"), [Rollout(2, 1, 1, 0, "stop")], None, 0)
    sink.samples(0, [group], lambda group: pytest.fail("fetched"), most=0)
    assert not (tmp_path / "samples.jsonl").exists()


def test_half_a_character_anywhere_is_written_and_read_and_ends_nothing(tmp_path):
    """A row, a reward or a model may give half of a surrogate pair, which UTF-8 does not have."""
    half = json.loads('"\\ud800"')
    sink, _ = sink_of(tmp_path)
    prompt = Prompt(f"r:{half}", (1,), f"q{half}", {"ground_truth": half})
    verdict = Verdict(None, f"reason {half}", failed=True, details={f"said/{half}": [half]})
    ids = np.array([1, 3, 0], np.int32)
    group = Group(prompt, [Rollout(3, 1, 2, 0, "stop", verdict=verdict)], None, 0)
    sink.samples(0, [group], lambda _: [Tokens(ids, ids > 0, ids * 0.0, ids)], most=1)
    sink.log(0, {f"reward/said/{half}": 1.0, "reward/mean": 1.0})
    sink.warn(f"warning {half}")
    FailureLog(tmp_path / "rewards.log").write(0, "said", [prompt], [verdict])
    sink.rewind(1)  # writes what it has read
    [sample], [metrics] = read_lines(tmp_path / "samples.jsonl"), read_metrics(tmp_path)
    assert (sample["uid"], sample["reason"], sample["details"]) == (prompt.uid, verdict.reason, verdict.details)
    assert metrics[f"reward/said/{half}"] == 1.0
    assert (tmp_path / "logs/warnings.log").read_text(encoding="utf-8") == "step 1: warning \\ud800\n"
    assert read_lines(tmp_path / "rewards.log")[0]["error"] == verdict.reason
    assert "reason \\ud800" in write_report(tmp_path).read_text(encoding="utf-8")


def test_a_resumed_file_reads_as_if_it_had_never_stopped(tmp_path):
    sink, _ = sink_of(tmp_path)
    for step in range(5):
        sink.log(step, {"reward/mean": step / 10})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')  # killed here
    with pytest.raises(ValueError, match="--resume auto"):
        sink_of(tmp_path)
    resumed, _ = sink_of(tmp_path, resume_at=3)
    for step in (3, 4):
        resumed.log(step, {"reward/mean": step * 10.0})
    assert series(read_metrics(tmp_path), "reward/mean") == ([0, 1, 2, 3, 4], [0.0, 0.1, 0.2, 30.0, 40.0])


def test_records_hold_what_json_has_no_word_for(tmp_path):
    path = tmp_path / "x.jsonl"
    with path.open("w", encoding="utf-8") as file:
        write_line(file, {"step": 0, "a": float("nan"), "b": float("inf"), "text": "one\u2028two\nthree"})
        assert json.loads(path.read_text(encoding="utf-8").strip("\n"))["a"] is None, "not flushed"
    assert read_lines(path) == [{"step": 0, "a": None, "b": None, "text": "one\u2028two\nthree"}]
    cut(path, 0)
    assert path.read_text() == "" and read_lines(tmp_path / "none") == []


@pytest.mark.parametrize("line", ['{"loss": 1}', '{"step": "3"}', '{"step": null}', '{"step": true}', "[1]", "3", "{"])
def test_a_line_without_a_step_is_an_error_with_its_place(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n' + line + "\n")
    with pytest.raises(ValueError, match="metrics.jsonl:2"):
        read_lines(path)
    with pytest.raises(ValueError, match=r"metrics.jsonl:2 "):
        cut(path, 3)


def test_lines_of_one_step_become_one(tmp_path):
    with (tmp_path / "metrics.jsonl").open("w") as file:
        write_line(file, {"step": 0, "eval/accuracy": 0.5, "time/eval_s": 2.0, "time/total_s": 2.5})
        write_line(file, {"step": 0, "loss": float("nan"), "time/other_s": 1.0, "time/total_s": 4.0})
    [record] = read_metrics(tmp_path)
    times = {"time/eval_s": 2.0, "time/other_s": 1.0, "time/total_s": 6.5}
    assert record == {"step": 0, "eval/accuracy": 0.5} | times


def test_time_split_has_other_last():
    records = [{"time/a_s": 1.0, "time/other_s": 9.0, "time/total_s": 10.0}, {"time/b_s": 2.0}]
    assert list(time_split(records).items()) == [("b", 2.0), ("a", 1.0), ("other", 9.0)]


def test_figures():
    record = {
        "step": 3, "reward/mean": 0.5, "length/response_mean": 30.0, "length/thought_mean": 24.5,
        "length/answer_mean": 5.5, "grad_norm": 0.25, "rollout/tokens_per_s": 12345.6, "mismatch/mean_abs": 2e-6,
    }  # fmt: skip
    assert figures(record) == {
        "reward": "0.500", "reasoning": "24.5 tokens", "answer": "5.5 tokens", "speed": "12,346 tokens/s",
        "grad norm": "0.25", "mismatch": "2.0e-06",
    }  # fmt: skip


def test_figures_of_several_rewards():
    record = {
        "reward/mean": -1.5, "eval/reward_mean": 2.5,
        "reward/exact_answer/mean": 0.5, "reward/exact_answer/abstained": 0.0, "reward/exact_answer/seconds": 1.0,
        "reward/judge/mean": -2.0, "reward/judge/abstained": 0.125, "reward/away/abstained": 1.0,
    }  # fmt: skip
    assert figures(record) == {
        "reward": "-1.500", "held-out reward": "2.500", "exact_answer": "0.500", "judge": "-2.000, 12.5% no reward",
        "away": "no score, 100.0% no reward",
    }  # fmt: skip
    idle = {"lag/mean": 0.0, "rollout/idle": 0.03, "stream/running": 0.0, "stream/ready": 0.0}
    assert list(figures(idle)) == ["engines idle"], "active sampling without a lag"
    asynchronous = figures({"lag/mean": 1.25, "rollout/idle": 0.03, "stream/running": 40.0, "stream/ready": 24.0})
    assert asynchronous == {"engines idle": "3%", "lag": "1.25 steps", "groups under way": "40", "ready": "24"}
    assert figures({"loss": 0.0, "critic/loss": 0.1234}) == {"loss": "0.0000", "critic loss": "0.1234"}
    assert figures({"eval/loss": 0.5}) == {"held-out loss": "0.5000"}
    assert "exact_answer" not in figures({"reward/exact_answer/mean": 0.5, "reward/exact_answer/abstained": 0.0})
    assert figures({"reward/judge/mean": 0.5, "reward/judge/abstained": 0.25}) == {"judge": "0.500, 25.0% no reward"}


def test_sparkline():
    assert (sparkline([0.0, 0.5, 1.0]), sparkline([2.0, 2.0]), sparkline([])) == ("▁▅█", "▁▁", "")


def test_without_a_terminal_one_plain_line_a_step(tmp_path, clock):
    sink, screen = sink_of(tmp_path, steps=2)
    with sink:
        for step in range(2):
            with sink.phase("update"):
                clock.now += 3
            clock.now += 1
            sink.log(step, {"reward/mean": 0.25} if step else {"eval/accuracy": 0.5})
        sink.log(2, {"time/export_s": 1.0})  # what comes after the last step is in the files
    assert screen.getvalue().splitlines() == [
        "step 0 (1/2 done)  held-out accuracy 0.500  4.00 s: update 75%, other 25%",
        "step 1 (2/2 done)  reward 0.250  4.00 s: update 75%, other 25%",
    ]


def test_a_terminal_gets_a_live_table_that_keeps_the_last_held_out_accuracy(tmp_path):
    sink, screen = sink_of(tmp_path, steps=3, terminal=True)
    with sink, sink.phase("generate"):
        sink.log(0, {"eval/accuracy": 0.125, "reward/mean": 0.5})
        sink.log(1, {"reward/mean": 0.75})
        sink.log(1, {"reward/mean": float("nan")})  # every verdict abstained: no point in the history
    last = screen.getvalue()[screen.getvalue().rindex("2/3 steps") :]
    assert "0.125" in last and "nan" in last and "▁█" in last


def test_a_rule_that_the_configuration_names_ends_the_run(tmp_path):
    sink, screen = sink_of(tmp_path)
    with sink:
        sink.warn("the disk is nearly full", "disk")
        with pytest.raises(ValueError, match="jumps.*run.stop_on"):
            sink.warn("it jumps", "jump")
    assert "the disk is nearly full" in screen.getvalue()
    assert "it jumps" not in screen.getvalue(), "the error that ends the run shows it"
    assert "it jumps" in (tmp_path / "logs" / "warnings.log").read_text()


def test_a_warning_is_told_once_in_a_row_and_kept_with_its_step(tmp_path):
    sink, screen = sink_of(tmp_path, resume_at=4)
    with sink:
        sink.warn("the clock is [bold]slow[/]")
        sink.log(4, {})
        sink.warn("the clock is [bold]slow[/]")
        sink.warn("two\nlines")
        sink.warn("the clock is [bold]slow[/]")
    told = [line for line in screen.getvalue().splitlines() if "warning" in line]
    assert told == ["warning: the clock is [bold]slow[/]", "warning: two", "warning: the clock is [bold]slow[/]"]
    assert (tmp_path / "logs" / "warnings.log").read_text().splitlines() == [
        "step 4: the clock is [bold]slow[/]",
        "step 5: two lines",
        "step 5: the clock is [bold]slow[/]",
    ]


def test_a_warning_stands_above_the_live_table_in_yellow(tmp_path):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system="standard")
    sink = RunSink(tmp_path, RunConfig(name="x", steps=3), console, Letters(), "</think>")
    with sink, sink.phase("generate"):
        sink.warn("the clock is slow")
    text = screen.getvalue()
    assert "\x1b[33mwarning: the clock is slow\x1b[0m" in text
    assert text.index("warning") < text.rindex("0/3 steps"), "the table is drawn below it"
