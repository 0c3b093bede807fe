"""Pairs from kept answers: the best and the worst to each prompt, or two models' answers."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.commands import pairs
from megatron_rl.data.saved_rollouts import write_step
from megatron_rl.types import Group, Prompt, Rollout, Rollouts, Tokens, Verdict

STOP = 99


@pytest.fixture(autouse=True)
def letters(monkeypatch):
    """A tokenizer that writes token i as the letter with this number."""
    decode = lambda ids, skip_special_tokens: "".join(chr(96 + i) if i != STOP else "<end>" for i in ids)  # noqa: E731
    monkeypatch.setattr(pairs, "_tokenizer", lambda folder, given: SimpleNamespace(decode=decode))


def write(folder, *prompts, step=0):
    """
    Args:
        prompts: (name, messages, [(tokens of an answer, its reward, how it ended)])
    """
    groups, payloads = [], []
    for uid, messages, answers in prompts:
        rollouts, tokens = [], []
        for response, reward, finish in answers:
            ids = np.array([7, 8, *response, *([STOP] if finish == "stop" else [])], np.int32)
            mask = np.arange(len(ids)) >= 2
            version = np.where(mask, 0, -1).astype(np.int32)
            tokens.append(Tokens(ids, mask, np.zeros(len(ids), np.float32), version))
            rollouts.append(Rollout(len(ids), 2, int(mask.sum()), 0, finish, verdict=Verdict(reward)))
        groups.append(Group(Prompt(uid, (7, 8), messages, {"dataset": "sums", "ground_truth": "x"}), rollouts, None, 0))
        payloads.append(tokens)
    write_step(folder, step, Rollouts(groups, None, {}), payloads, {})


def run(tmp_path, *arguments: str):
    status = pairs.main([*arguments, "--out", str(tmp_path / "pairs.jsonl")])
    return status, [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]


CHAT = ({"role": "user", "content": "é"},)


def test_the_best_and_the_worst_answer_make_a_pair(tmp_path, capsys):
    run_folder = tmp_path / "run"
    write(
        run_folder / "rollouts",
        ("a", "1+1=", [([1], 0.5, "stop"), ([2, 2], 1.0, "stop"), ([3], 0.0, "stop"), ([4], 9.0, "length")]),
        ("b", "2+2=", [([1], 1.0, "stop"), ([2], 1.0, "stop")]),
        ("c", "3+3=", [([1], 1.0, "stop"), ([2], None, "stop")]),
    )
    write(run_folder / "rollouts", ("d", CHAT, [([5], -1.0, "stop"), ([6], 2.0, "stop")]), step=3)
    status, found = run(tmp_path, str(run_folder))
    scores = {"score_chosen": 1.0, "score_rejected": 0.0, "dataset": "sums"}
    assert status == 0 and found == [
        {"prompt": "1+1=", "chosen": "bb", "rejected": "c", **scores},
        {
            "prompt": [*CHAT],
            "chosen": "f",
            "rejected": "e",
            "score_chosen": 2.0,
            "score_rejected": -1.0,
            "dataset": "sums",
        },
    ]
    told = capsys.readouterr().out
    assert "2 pairs" in told and "prompts whose answers all have the same reward: 2" in told
    assert "answers that a limit has cut: 1" in told


def test_two_models_answers_make_pairs_by_the_prompts_name(tmp_path, capsys):
    write(
        tmp_path / "large",
        ("a", "1", [([1], 0.0, "stop"), ([2], 1.0, "stop")]),
        ("b", "2", [([3], None, "stop")]),
        ("c", "3", [([4], None, "stop")]),
    )
    write(tmp_path / "small", ("c", "3", [([5], 1.0, "stop")]), ("b", "2", [([3], None, "stop")]))
    status, found = run(tmp_path, str(tmp_path / "large"), "--rejected", str(tmp_path / "small"))
    assert status == 0 and [(one["prompt"], one["chosen"], one["rejected"]) for one in found] == [("3", "d", "e")]
    told = capsys.readouterr().out
    assert "prompts that only one of the folders has answered: 1" in told
    assert "prompts with the same answer twice: 1" in told


def test_a_folder_without_answers_is_told(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "pairs.jsonl").write_text("of before")
    assert pairs.main([str(tmp_path / "run"), "--out", str(tmp_path / "pairs.jsonl")]) == 1
    assert "rollout.dump=true" in capsys.readouterr().out
    assert (tmp_path / "pairs.jsonl").read_text() == "of before"
