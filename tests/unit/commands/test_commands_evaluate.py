"""What an evaluation writes of each answer, and what it makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.commands.engines_alone import config_without_trainers
from megatron_rl.commands.evaluate import ANSWERS, main, name_of, record_of, result_of, show
from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.types import Group, Picture, Prompt, Rollout, Tokens, Verdict

CONFIG = validate(
    GrpoRunConfig,
    {
        "run": {"name": "out", "steps": 1},
        "model": {"path": "model"},
        "data": {"train": "rows.jsonl"},
        "rollout": {"samples_per_prompt": 2},
        "rewards": [{"kind": "exact_answer"}, {"kind": "function", "path": "my_rewards:brevity"}],
    },
)


class Numbers:
    """A tokenizer whose tokens are written as numbers."""

    def decode(self, ids, *, skip_special_tokens):
        return " ".join(map(str, ids))


def tokens(*ids: int) -> Tokens:
    size = len(ids)
    return Tokens(np.array(ids, np.int32), np.ones(size, bool), np.zeros(size, np.float32), np.zeros(size, np.int32))


def test_a_record_has_the_response_and_the_verdict_of_each_answer():
    right = Verdict(1.5, parts=(1.0, 0.5), details={"exact_answer/final_answer": "7"})
    rollouts = [
        Rollout(5, 3, 2, 0, "stop", oldest_version=0, verdict=right),
        Rollout(4, 3, 1, 0, "length", oldest_version=0, verdict=Verdict(None, parts=(None, None))),
    ]
    group = Group(Prompt("rows.jsonl:3", (1, 2, 3), "q", {}), rollouts, [tokens(1, 2, 3, 8, 9), tokens(1, 2, 3, 6)], 0)
    record = record_of(CONFIG, group, Numbers())
    assert (record["uid"], record["prompt"], "images" in record) == ("rows.jsonl:3", "q", False)
    shown = replace(group, prompt=replace(group.prompt, pictures=(Picture("5f3a", 2, 2),)))
    assert record_of(CONFIG, shown, Numbers())["images"] == [str(CONFIG.pictures_folder / "5f3a.png")]
    first, second = record["answers"]
    assert first == {
        "is_right": True,
        "final_answer": "7",
        "score": 1.5,
        "rewards": {"exact_answer": 1.0, "brevity": 0.5},
        "num_tokens": 2,
        "is_cut": False,
        "text": "8 9",
    }
    assert (second["is_right"], second["score"], second["is_cut"], second["text"]) == (None, None, True, "6")


def answer(is_right: bool | None, final: str | None = None, num_tokens: int = 10, is_cut: bool = False):
    score = None if is_right is None else float(is_right)
    return {"is_right": is_right, "final_answer": final, "score": score, "num_tokens": num_tokens, "is_cut": is_cut}


RECORDS = [
    {"uid": "a", "answers": [answer(True, "1"), answer(True, "1"), answer(False, "2"), answer(False, None, 30, True)]},
    {"uid": "b", "answers": [answer(False, "5"), answer(False, "5"), answer(None), answer(True, "6")]},
]


def test_pass_at_k_is_the_mean_over_all_subsets_and_leaves_out_answers_without_a_score():
    """Prompt a: of 6 pairs one has no right answer; of 4 triples none. Prompt b: three scored answers, of whose 3
    pairs one has no right one, and whose only triple has one."""
    result = result_of(RECORDS, [1, 2, 3, 4])
    assert result["eval/accuracy"] == pytest.approx(3 / 7)
    assert result["eval/pass@2"] == pytest.approx((5 / 6 + 2 / 3) / 2)
    assert result["eval/pass@3"] == 1 and result["eval/pass@4"] == 1
    assert result["eval/maj@4"] == 0.5, "a: the final answer 1 is right; b: 5 is wrong"
    assert (result["eval/reward_mean"], result["eval/num_samples"]) == (pytest.approx(3 / 7), 8)
    assert (result["eval/abstained"], result["eval/response_mean"], result["eval/response_cut"]) == (1, 12.5, 0.125)
    assert "eval/pass@1" not in result, "it is eval/accuracy"


def test_what_makes_a_result_doubtful_is_told(capsys):
    show(result_of(RECORDS, [1, 3]), 2, 4, [1, 3], Path("out"))
    said = " ".join(capsys.readouterr().out.split())
    assert "pass@1 (accuracy) 0.429" in said and "pass@3 1.000" in said and "maj@4 0.500" in said
    assert "12.5% of the answers have no score" in said and "12.5% of the answers reach rollout.max_response" in said
    show(result_of([{"uid": "a", "answers": [answer(False)]}], [1]), 1, 1, [1], Path("out"))
    assert f"no answer is right: look at some in out/{ANSWERS}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "0"], "--k 0: pass@k is about k answers"),
        (["--k", "1", "2", "rollout.tensors=2"], "rollout.tensors: unknown key"),
        (["--k", "rollout.parallel.tensor=2"], "--k needs a number"),
        (["rewards=[{kind: function, path: 'my_rewards:brevity'}]"], "name the one that does with eval.verifier"),
        (["configs/run/recommendation.yaml"], "rollout.beams gives rankings"),
        ([], "/a model has no config.json, so it is no folder of a Hugging Face model"),
    ],
)
def test_what_cannot_be_evaluated_is_told_before_anything_starts(tmp_path, capsys, arguments, message):
    assert main(["a model", "a: row.jsonl", "--out", str(tmp_path / "out"), *arguments]) == 1
    assert message in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "out").exists()


def test_a_run_and_rows_that_are_not_there_are_told(tmp_path, capsys):
    (tmp_path / "hf").mkdir()
    assert main([str(tmp_path), "rows.jsonl", "--out", str(tmp_path / "out")]) == 1
    assert f"it is a run, whose model is {tmp_path}/hf" in "".join(capsys.readouterr().out.splitlines())
    (tmp_path / "hf" / "config.json").write_text("{}")
    assert main([f"{tmp_path}/hf", f"{tmp_path}/rows.jsonl", "--out", str(tmp_path / "out")]) == 1
    assert f"data.train: there is no {tmp_path}/rows.jsonl" in capsys.readouterr().out


def test_the_length_of_a_training_run_is_not_asked(tmp_path):
    words = ["run.epochs=2", f"model.path={tmp_path}/none", "data.train=rows.jsonl", "rewards=[{kind: text}]"]
    config = config_without_trainers([*words, "cluster.device=cpu"], tmp_path)
    assert (config.run.steps, config.run.epochs) == (1, None)


def test_the_folder_of_a_result_names_model_and_rows():
    assert name_of(Path("runs/sums/hf"), "task/eval.jsonl") == "sums-hf-eval"
    assert name_of(Path("/models/qwen"), "hf://openai/gsm8k/main:test") == "models-qwen-main-test"
