"""Which rows are kept, and what a stopped filter finds when it goes on."""

from __future__ import annotations

import json
import os

import pytest

from megatron_rl.commands.engines_alone import PATIENCE, check_settings, from_first_score, settings_of
from megatron_rl.commands.filter_difficulty import (
    PASS_RATES,
    ROWS,
    PassRate,
    configured,
    main,
    pass_rate_of,
    read_pass_rates,
    warning_of,
    write_rows,
)
from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.types import Group, Prompt, Rollout, Verdict

RUN = {
    "run": {"name": "out", "steps": 1},
    "model": {"path": "model"},
    "data": {"train": "rows.jsonl"},
    "balance": {"max_tokens_per_microbatch": 64},
    "rollout": {"prompts_per_step": 1, "samples_per_prompt": 4, "max_prompt_tokens": 8, "max_response_tokens": 9},
    "rewards": [{"kind": "exact_answer"}, {"kind": "function", "path": "my_rewards:brevity"}],
}
OVERRIDES = [
    "run.name=x", "run.steps=1", "model.path=model", "data.train=rows.jsonl", "balance.max_tokens_per_microbatch=64",
    "rollout.prompts_per_step=1", "rollout.samples_per_prompt=2", "rollout.max_prompt_tokens=8",
    "rollout.max_response_tokens=9", "rewards=[{kind: exact_answer}]",
]  # fmt: skip


def config(**rollout) -> GrpoRunConfig:
    return validate(GrpoRunConfig, RUN | {"rollout": RUN["rollout"] | rollout})


def group(*parts: float | None) -> Group:
    """Samples with these scores of the first reward; the second one is no verifier of record."""
    samples = [
        Rollout(10 + i, 4, 6 + i, 0, "stop", oldest_version=0, verdict=Verdict(0.0, parts=(part, 0.7)))
        for i, part in enumerate(parts)
    ]
    return Group(Prompt("rows.jsonl:3", (1, 2, 3, 4), "q", {}), samples, None, 0)


def test_the_pass_rate_is_the_share_of_right_answers_among_those_with_a_score():
    rate = pass_rate_of(config(), group(1.0, 0.5, None, 1.0))
    assert (rate.uid, rate.pass_rate, rate.num_scored, rate.num_answers) == ("rows.jsonl:3", 2 / 3, 3, 4)
    assert rate.mean_tokens == (6 + 7 + 8 + 9) / 4
    assert pass_rate_of(config(), group(None, None)).pass_rate is None


def written(folder, *rates: tuple[str, float | None]):
    lines = [
        json.dumps({"uid": uid, "pass_rate": rate, "num_scored": 8, "num_answers": 8, "mean_tokens": 5.0}) + "\n"
        for uid, rate in rates
    ]
    (folder / PASS_RATES).write_text("".join(lines))
    return lines


def test_bounds_are_inclusive_and_every_row_is_counted(tmp_path):
    written(tmp_path, ("a", 0.0), ("b", 0.25), ("c", 0.625), ("d", 0.75), ("e", None))
    rows = [(uid, {"prompt": uid, "é": [1]}) for uid in "abcdef"]
    counts = write_rows(tmp_path, rows, 0.25, 0.625)
    assert counts == {"kept": 2, "too hard": 1, "too easy": 1, "without a score": 1, "not asked": 1}
    kept = [json.loads(line) for line in (tmp_path / ROWS).read_text().splitlines()]
    assert kept == [{"prompt": "b", "é": [1], "pass_rate": 0.25}, {"prompt": "c", "é": [1], "pass_rate": 0.625}]
    assert not list(tmp_path.glob("*.part"))


def test_a_line_that_a_kill_has_cut_is_asked_again(tmp_path):
    lines = written(tmp_path, ("a", 0.0), ("b", 0.25))
    assert read_pass_rates(tmp_path / "missing") == {}
    path = tmp_path / PASS_RATES
    for cut in range(len(lines[0]), len(lines[0] + lines[1])):
        path.write_text((lines[0] + lines[1])[:cut])
        assert list(read_pass_rates(path)) == ["a"]
        assert path.read_text() == lines[0]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model, rows and a reward in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    weights = tmp_path / "model" / "model.safetensors"
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    weights.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n')
    (tmp_path / "my_rewards.py").write_text("def brevity(completions): ...")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_other_settings_are_refused_and_other_engines_are_not(folder):
    path, results = folder / "settings.json", [folder / "pass_rates.jsonl"]
    check_settings(path, settings_of(config(max_response_tokens=8)), results)
    results[0].write_text("")
    check_settings(path, settings_of(config()), results)  # the start before left nothing
    results[0].write_text("{}\n")
    check_settings(path, settings_of(config(num_engines=2, max_sequences=7)), results)
    with pytest.raises(ValueError, match="rollout.max_response_tokens from 9 to 8"):
        check_settings(path, settings_of(config(max_response_tokens=8)), results)
    sampling = {"temperature": 0.5, "top_p": 0.5, "top_k": 1}
    others = config(samples_per_prompt=2, max_response_tokens=8, max_prompt_tokens=7, sampling=sampling)
    with pytest.raises(ValueError, match="rollout.sampling.temperature from 1.0 to 0.5 and 2"):
        check_settings(path, settings_of(others), results)


def test_a_function_whose_file_is_not_there_is_told(folder):
    rewards = [{"kind": "exact_answer"}, {"kind": "function", "path": "none.py:f"}]
    with pytest.raises(ValueError, match="none.py"):
        settings_of(validate(GrpoRunConfig, RUN | {"rewards": rewards}))


@pytest.mark.parametrize("changed", ["rows.jsonl", "my_rewards.py", "model/config.json", "model/model.safetensors"])
def test_the_same_paths_with_other_contents_are_other_settings(folder, changed):
    path, results = folder / "settings.json", [folder / "pass_rates.jsonl"]
    check_settings(path, settings_of(config()), results)
    results[0].write_text("{}\n")
    for file in folder.rglob("*"):
        os.utime(file, (1, 1))  # a copy of the same files
    check_settings(path, settings_of(config()), results)
    data = (folder / changed).read_bytes()
    (folder / changed).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    named = "model" if "/" in changed else changed
    with pytest.raises(ValueError, match=f"other settings: the contents of [^ ]*{named} changed"):
        check_settings(path, settings_of(config()), results)


def scored(*scores: float | None, failed: bool = True) -> Group:
    verdicts = [Verdict(score, "" if score else "it raised", failed=failed and score is None) for score in scores]
    rollouts = [Rollout(2, 1, 1, 0, "stop", oldest_version=0, verdict=verdict) for verdict in verdicts]
    return Group(Prompt("rows.jsonl:3", (1,), "q", {}), rollouts, None, 0)


def test_answers_are_kept_once_one_of_them_has_a_score():
    groups = [scored(None, None), scored(None, 1.0), scored(None, None)]
    assert list(from_first_score(iter(groups))) == groups
    asked = []

    def failing():
        for group in [scored(*[None] * (PATIENCE // 2))] * 3:
            asked.append(group)
            yield group

    with pytest.raises(ValueError, match=f"scored none of {PATIENCE} answers; .* is: it raised. Correct the reward"):
        list(from_first_score(failing()))
    assert len(asked) == 2, "it does not wait for the end"
    with pytest.raises(ValueError, match=f"scored none of {2 * PATIENCE} answers; .*: it raised. Correct the reward$"):
        list(from_first_score(iter([scored(*[None] * PATIENCE, failed=False)] * 2)))
    assert list(from_first_score(iter([]))) == []


def test_the_configuration_is_that_of_a_run(tmp_path):
    given = configured([*OVERRIDES, "cluster.colocate=true"], tmp_path / "out", 8)
    assert given.run_folder == tmp_path / "out"
    assert given.rollout.samples_per_prompt == 8 and not given.cluster.colocate
    with pytest.raises(ValueError, match="`megatron-rl convert to-hf`.*model.path"):
        configured([*OVERRIDES, "model.weights=checkpoint"], tmp_path / "out", 8)
    with pytest.raises(ValueError, match="eval.verifier.*'brevity'"):
        configured([*OVERRIDES, "rewards=[{kind: function, path: 'my_rewards:brevity'}]"], tmp_path / "out", 8)
    with pytest.raises(ValueError, match="give its sources one by one"):
        configured([*OVERRIDES, "data.train=[{path: a.jsonl, weight: 1}]"], tmp_path / "out", 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--min", "0.7"], "--min 0.7 and --max 0.625 must be in order, from 0 to 1"),
        (["--max", "62.5"], "--min 0 and --max 62.5 must be in order"),
        (["rollout.tensors=2"], "rollout.tensors"),
    ],
)
def test_wrong_arguments_are_told_before_anything_starts(tmp_path, capsys, arguments, message):
    assert main([*OVERRIDES, "--out", str(tmp_path / "out"), *arguments]) == 1
    assert message in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "rates, low, said",
    [
        ((0.0, 0.0, None), 0.0, "no answer to any of 2 prompts was right, and --min 0 keeps them all"),
        ((0.0, 0.0), 0.1, "no answer to any of 2 prompts was right. Look"),
        ((1.0, 1.0), 0.0, "every answer to each of 2 prompts was right"),
        ((0.0, 0.5), 0.0, None),
        ((None,), 0.0, None),
    ],
)
def test_a_model_that_solves_nothing_or_everything_is_told(rates, low, said):
    warning = warning_of([PassRate(f"row {i}", rate, 4, 4, 9.0) for i, rate in enumerate(rates)], low)
    assert warning is None if said is None else warning.startswith(said)
