"""Where the time goes: one record by hand for each sentence."""

from __future__ import annotations

import json

import pytest
from pytest import approx

from megatron_rl.commands import step_times as tool
from megatron_rl.observe.step_times import where
from megatron_rl.observe.trace import ProcessSpans, chrome_trace
from megatron_rl.observe.trace_path import work_of_phases
from megatron_rl.spans import PHASES, REQUESTS, TimeSpan

TURNS = {"time/sync_s": 1.0, "time/generate_s": 3.0, "time/update_s": 5.0, "time/other_s": 1.0, "time/total_s": 10.0}


def record(**changed: float) -> dict[str, float]:
    """A step in turns of 10 s. `sync=2` sets time/sync_s; other names are given with `__` for `/`."""
    phases = {f"time/{name}_s": value for name, value in changed.items() if "__" not in name}
    return TURNS | phases | {name.replace("__", "/"): value for name, value in changed.items() if "__" in name}


def test_the_first_step_is_left_out_and_phases_add_up():
    found = where([record(generate=100.0), record(), record(generate=5.0)])
    assert found.num_steps == 2 and found.seconds == approx(11.0)
    phases = {one.name: one for one in found.resources if one.name.startswith("phase ")}
    assert phases["phase generate"].value == approx(4.0) and phases["phase generate"].share == approx(4 / 11)
    assert sum(one.value for one in phases.values()) == approx(found.seconds)


def test_the_table_has_each_resource():
    found = where(
        [
            record(
                rollout__idle=0.25,
                sync__paused_s=0.5,
                sync__transfer_s=0.2,
                machine__waiting=0.4,
                reward__x__seconds=2.0,
            )
        ]
    )
    rows = {one.name: (one.value, one.unit, one.share) for one in found.resources}
    assert rows["engines idle"] == (0.25, "share", None)
    assert rows["weight sync: pause of the engines"] == (0.5, "s", approx(0.05))
    assert rows["weight sync: transfer"] == (0.2, "s", approx(0.02))
    assert rows["CPU cores idle"] == (0.4, "share", None)
    assert rows["reward x, all processes"] == (2.0, "s", None)


@pytest.mark.parametrize(
    ("step", "advice"),
    [
        (
            record(),
            "update is 50% of the step: more trainer ranks, or larger micro-batches "
            "(balance.max_tokens_per_microbatch)",
        ),
        (
            record(slowest_rank__ratio=2.0),
            "update is 50% of the step, and one rank takes 2.0 times as long as the median: repair or replace its "
            "machine",
        ),
        (
            record(balance__fill=0.2),
            "update is 50% of the step, and its micro-batches are filled to 20%: more answers in a step fill them, or "
            "fewer trainer ranks, if there are several",
        ),
        (
            record(generate=13.0),
            "generate is 65% of the step: more engines, or rollout.max_lag: 1, so that engines and trainer work at the "
            "same time",
        ),
        (
            record(generate=13.0, reward__slow__seconds=7.0, reward__quick__seconds=1.0),
            "generate is 65% of the step, and rewards take 8.00 s of processes' time, most of it slow: more verifiers "
            "(cluster.verifiers), or a faster reward",
        ),
        (
            record(generate=13.0, lag__mean=0.5),
            "generate is 65% of the step, although engines answer while the trainer works: more engines",
        ),
        (
            record(generate=0.5, lag__mean=0.5, rollout__idle=0.6),
            "engines are idle for 60% of their time: fewer engines, or more trainer ranks",
        ),
        (
            record(sync=11.0, sync__transfer_s=8.0),
            "sync is 55% of the step: the transfer takes 8.00 s of 11.00 s; a faster network, or chains of engines "
            "(bridge.chains)",
        ),
        (
            record(sync=11.0, sync__transfer_s=2.0),
            "sync is 55% of the step: most of it is no transfer: the engines are late to pause, or the trainer's "
            "memory must be brought back",
        ),
        (
            record(evaluate=10.0),
            "evaluate is 50% of the step: a larger eval.every, or fewer held-out prompts (eval.num_prompts)",
        ),
        (record(checkpoint=10.0), "checkpoint is 50% of the step: a larger checkpoint.every"),
        (
            record(other=11.0),
            "other is 55% of the step: the driver works outside all phases; a trace (observe: kind trace) shows when",
        ),
    ],
)
def test_what_would_help_first(step, advice):
    assert where([step]).advice == advice


@pytest.mark.parametrize(
    ("step", "path"),
    [
        (
            record(),
            "in turns: sync -> generate -> update, each waits for the one before; the longest is update with 5.00 of "
            "10.00 s",
        ),
        (
            record(lag__mean=1.0, rollout__idle=0.1),
            "the trainer waits for answers for 30% of the step; engines are idle for 10%",
        ),
        (
            record(generate=1.0, lag__mean=1.0, rollout__idle=0.5),
            "engines wait for the trainer: they are idle for 50% of their time; the trainer waits for answers for 12% "
            "of the step",
        ),
        (
            record(generate=0.0, lag__mean=1.0, rollout__idle=0.02),
            "engines and trainer keep each other busy: idle 2%, waiting 0% of the step",
        ),
    ],
)
def test_who_waits_for_whom(step, path):
    assert where([step]).path == path


def test_active_sampling_without_a_lag_is_in_turns():
    assert where([record(lag__mean=0.0, rollout__idle=0.6)]).path.startswith("in turns: ")


def test_a_run_without_a_step_is_refused():
    with pytest.raises(ValueError, match="no step of the run has trained yet"):
        where([{"step": 0, "time/evaluate_s": 1.0}])


def spans(*given: tuple[str, float, float], track: str = "MainThread") -> list[TimeSpan]:
    """Spans from their names and their times in seconds."""
    return [TimeSpan(name, round(a * 1e9), round(b * 1e9), track, "") for name, a, b in given]


TRACED = chrome_trace(
    [
        ProcessSpans(
            "driver (1 on a)",
            spans(("step 7", 0, 10), ("generate", 0, 6), ("plan", 6, 6.5), ("update", 7, 10), track=PHASES),
        ),
        ProcessSpans("trainer rank 0 (2 on a)", spans(("update 0", 7, 9), ("wait for all ranks", 9, 10))),
        ProcessSpans("trainer rank 1 (3 on b)", spans(("update 0", 7, 9.8))),
        ProcessSpans("engine 0 (4 on b)", spans(("request", 0, 4), ("request", 1, 5), track=REQUESTS)),
        ProcessSpans("verifier (5 on a)", spans(("score", 5, 5.5))),
    ]
)


def test_each_long_phase_of_a_trace_has_the_process_that_works_longest():
    """Requests that overlap count once, a wait is no work, and a short phase holds nobody up."""
    told = [(one.phase, one.seconds, one.process, one.busy_s, one.nobody_s) for one in work_of_phases(TRACED)]
    assert told == [
        ("generate", approx(6), "engine 0", approx(5), approx(0.5)),
        ("update", approx(3), "trainer rank 1", approx(2.8), approx(0.2)),
    ]
    assert work_of_phases({"traceEvents": []}) == []


def test_the_command(tmp_path, capsys):
    assert tool.main([str(tmp_path)]) == 1 and "has no metrics.jsonl" in capsys.readouterr().err
    lines = [json.dumps({"step": step} | record()) for step in range(3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "step_000001.json").write_text(json.dumps(TRACED))
    assert tool.main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "2 steps of 10.00 s each" in text and "phase update" in text and "more trainer ranks" in text
    assert "update 3.00 s: trainer rank 1 works longest, 2.80 s; for 0.20 s no other process than the driver" in text
    assert tool.main([str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["process"] for one in found["newest_trace"]] == ["engine 0", "trainer rank 1"]
    assert found["seconds"] == 10.0 and found["traces"] == [str(tmp_path / "traces" / "step_000001.json")]
