"""TRL's DPOConfig and SFTConfig against what TRL computes from them, and the rows and models that scripts give."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from tiny_chat import KEEPS, characters
from transformers import HfArgumentParser, PreTrainedTokenizerFast

from megatron_rl import api
from megatron_rl.trl import (
    CPOConfig,
    CPOTrainer,
    DPOConfig,
    DPOTrainer,
    GKDConfig,
    GKDTrainer,
    GRPOConfig,
    KTOConfig,
    KTOTrainer,
    ORPOConfig,
    ORPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from megatron_rl.trl.models import same_weights

PAIRS = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "7"} for i in range(10)]
CHATS = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "12"}]}] * 10
TEXTS = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(10)]


@pytest.fixture
def model(tmp_path) -> str:
    made = PreTrainedTokenizerFast(tokenizer_object=characters(), eos_token="<end>", chat_template=KEEPS)
    made.save_pretrained(tmp_path / "model")
    config = {"max_position_embeddings": 2048, "vocab_size": 128, "model_type": "qwen3"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return str(tmp_path / "model")


@pytest.fixture
def run_of(monkeypatch, tmp_path):
    """The configuration of the run that a trainer would begin."""
    monkeypatch.chdir(tmp_path)
    found: list[Path] = []
    monkeypatch.setattr(api, "_run", lambda path, run, watch=None: found.append(path) or run)

    def run_of(trainer) -> tuple[str, dict]:
        trainer.train()
        return found[-1].stem, yaml.safe_load(found[-1].read_text())

    return run_of


def test_the_defaults_of_offline_runs_are_those_of_trl(model, run_of):
    kind, run = run_of(DPOTrainer(model, None, DPOConfig("d"), train_dataset=PAIRS, eval_dataset=PAIRS[:2]))
    assert kind == "dpo" and run["run"]["steps"] == 4, "3 epochs of 10 rows, 8 a step"
    assert run["dpo"]["loss"] == {"kind": "dpo", "beta": 0.1} and run["dpo"]["rows_per_step"] == 8
    assert (run["dpo"]["max_tokens"], run["dpo"]["on_bad_row"], run["dpo"]["eval_every"]) == (1024, "cut", 0)
    assert Path(run["dpo"]["eval"]).name == "eval.jsonl" and run["policy"]["optimizer"]["lr"] == 1e-6
    labelled = [{"prompt": row["prompt"], "completion": "1", "label": True} for row in PAIRS]
    for name, rows, steps in (("k", PAIRS, 8), ("l", labelled, 4)):
        kind, run = run_of(KTOTrainer(model, None, KTOConfig(name, beta=0.2, desirable_weight=1.5), None, rows))
        loss = {"kind": "kto", "beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 1.0}
        assert (kind, run["dpo"]["loss"], run["run"]["steps"]) == ("dpo", loss, steps), "a pair is two rows"
    args = RewardConfig("r", center_rewards_coefficient=0.01)
    kind, run = run_of(RewardTrainer(model, args, train_dataset=[{"chosen": "1+1=2", "rejected": "1+1=7"}] * 10))
    assert kind == "reward_model" and run["policy"]["optimizer"]["lr"] == 1e-4
    expected = {"loss": {"center": 0.01}, "on_bad_row": "skip", "max_tokens": 1024, "rows_per_step": 8}
    assert expected.items() <= run["reward_model"].items()
    kind, run = run_of(SFTTrainer(model, SFTConfig("s"), None, CHATS))
    assert kind == "sft" and run["sft"]["turns"] == "whole" and run["policy"]["optimizer"]["lr"] == 2e-5
    optimizer = run["policy"]["optimizer"]
    assert (optimizer["schedule"], optimizer["min_lr_ratio"], optimizer["weight_decay"]) == ("linear", 0.0, 0.0)


@pytest.mark.parametrize(
    ("trainer", "args", "loss"),
    [
        (ORPOTrainer, ORPOConfig("o", beta=0.2), {"kind": "orpo", "beta": 0.2}),
        (CPOTrainer, CPOConfig("o"), {"kind": "cpo", "beta": 0.1, "alpha": 1.0, "label_smoothing": 0.0}),
        (
            CPOTrainer,
            CPOConfig("o", loss_type="simpo", beta=2.0, cpo_alpha=0.0),
            {"kind": "simpo", "beta": 2.0, "alpha": 0.0, "gamma": 0.5},
        ),
    ],
)
def test_preferences_without_a_reference(trainer, args, loss, model, run_of):
    kind, run = run_of(trainer(model, args, train_dataset=PAIRS))
    expected = {"loss": loss, "rows_per_step": 8, "max_tokens": 1024, "on_bad_row": "cut"}
    assert kind == "dpo" and expected.items() <= run["dpo"].items() and run["policy"]["optimizer"]["lr"] == 1e-6


GKD = {"lmbda": 1.0, "temperature": 1.0}


def test_a_student_answers_the_prompts_of_chats_and_has_a_teacher_on_its_ranks(model, run_of):
    args = GKDConfig("g", **GKD, gradient_accumulation_steps=2, per_device_train_batch_size=3, max_new_tokens=64)
    kind, run = run_of(GKDTrainer(model, model, args, train_dataset=CHATS))
    assert kind == "grpo" and run["teachers"] == [{"path": model}] and run["run"]["steps"] == 5
    assert run["algorithm"]["distillation"] == {"form": "jensen_shannon", "by": "trainer"}
    sizes = {"prompts_per_step": 6, "samples_per_prompt": 1, "max_prompt_tokens": 1024, "max_response_tokens": 64}
    assert sizes.items() <= run["rollout"].items() and run["policy"]["optimizer"]["lr"] == 2e-5
    [row, *_] = [json.loads(line) for line in Path(run["data"]["train"]).read_text().splitlines()]
    assert row == {"prompt": [{"role": "user", "content": "hi"}]}
    other = GKDConfig("h", **GKD, beta=1, max_steps=2, max_length=None, teacher_model_name_or_path=model)
    _, run = run_of(GKDTrainer(model, args=other, train_dataset=iter(TEXTS)))
    assert run["algorithm"]["distillation"]["form"] == "reverse" and run["rollout"]["max_prompt_tokens"] == 2048 - 128
    rows = [json.loads(line) for line in Path(run["data"]["train"]).read_text().splitlines()]
    assert rows == [{"prompt": row["prompt"]} for row in TEXTS]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"teacher_model": None}, "teacher_model is missing"),
        ({"eval_dataset": CHATS, "formatting_func": len}, "formatting_func is not .*eval_dataset is not supported"),
        ({"train_dataset": [{"messages": CHATS[0]["messages"][:1]}]}, "must end with the assistant's answer"),
        ({"train_dataset": [{"text": "once"}]}, "row 0 of train_dataset has neither messages nor prompt"),
        ({"train_dataset": iter(CHATS)}, "give max_steps"),
    ],
)
def test_what_a_student_cannot_use_is_refused(given, told, model):
    with pytest.raises(ValueError, match=told):
        GKDTrainer(model, **{"teacher_model": model, "args": GKDConfig("o", **GKD), "train_dataset": CHATS, **given})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"loss_type": "ipo", "beta": 0.3}, {"loss": {"kind": "ipo", "beta": 0.3}}),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}, {"rows_per_step": 6}),
        (
            {"gradient_accumulation_steps": 2, "sections": {"policy": {"parallel": {"data": 4}}}},
            {"rows_per_step": 64},
        ),
        ({"max_length": None}, {"max_tokens": 2048}),
        ({"max_length": 4096}, {"max_tokens": 2048, "on_bad_row": "cut"}),
        ({"eval_strategy": "epoch"}, {"eval_every": 2}),
        ({"eval_strategy": "steps", "eval_steps": 3}, {"eval_every": 3}),
        ({"sections": {"dpo": {"on_bad_row": "skip"}}}, {"on_bad_row": "skip"}),
    ],
    ids=str,
)
def test_arguments_of_dpo_are_mapped(given, expected, model, run_of):
    _, run = run_of(DPOTrainer(model, args=DPOConfig("o", **given), train_dataset=PAIRS, eval_dataset=PAIRS))
    assert expected.items() <= run["dpo"].items() and ("on_bad_row" in run["dpo"]) == (
        given.get("max_length", 0) is not None
    )


@pytest.mark.parametrize(
    ("rows", "given", "turns"),
    [
        (TEXTS, {}, "all"),
        (TEXTS, {"completion_only_loss": False}, "whole"),
        (CHATS, {}, "whole"),
        (CHATS, {"assistant_only_loss": True}, "all"),
        ([{"text": "once"}], {}, "whole"),
    ],
)
def test_what_is_trained_of_a_row_is_decided_as_by_trl(rows, given, turns, model, run_of):
    _, run = run_of(SFTTrainer(model, SFTConfig("o", **given), train_dataset=rows))
    assert run["sft"]["turns"] == turns


def test_rows_have_the_column_that_the_script_names_or_makes(model, run_of):
    def rows_of(trainer) -> list[dict]:
        _, run = run_of(trainer)
        return [json.loads(line) for line in Path(run["sft"]["rows"]).read_text().splitlines()]

    story = [{"story": "once", "number": 1}]
    args = SFTConfig("a", dataset_text_field="story")
    assert rows_of(SFTTrainer(model, args, train_dataset=story)) == [{"number": 1, "text": "once"}]
    made = SFTTrainer(model, SFTConfig("b"), train_dataset=story, formatting_func=lambda row: row["story"] * 2)
    assert rows_of(made) == [{"text": "onceonce"}]
    assert rows_of(SFTTrainer(model, SFTConfig("c"), train_dataset=TEXTS)) == TEXTS
    read = SFTTrainer(model, SFTConfig("d", max_steps=1, per_device_train_batch_size=3), train_dataset=iter(TEXTS))
    assert rows_of(read) == TEXTS[:3], "rows that are read one by one"


def test_a_packed_step_has_as_many_rows_as_its_blocks_would_hold(model, run_of):
    rows = [{"text": "a" * 24}] * 40
    with pytest.warns(UserWarning, match="about 4 in a block of 100"):
        args = SFTConfig("o", packing=True, max_length=100, per_device_train_batch_size=2)
        _, run = run_of(SFTTrainer(model, args, train_dataset=rows))
    assert run["sft"]["rows_per_step"] == 8 and run["run"]["steps"] == 15


def test_the_end_and_the_template_of_the_arguments_are_in_the_folder_of_the_run(model, run_of, tmp_path):
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}<u>")
    args = SFTConfig("o", eos_token="=", chat_template_path=str(tmp_path / "own.jinja"))
    _, run = run_of(SFTTrainer(model, args, train_dataset=TEXTS))
    folder = Path(run["model"]["path"])
    assert folder != Path(model) and (folder / "chat_template.jinja").read_text() == "{{ messages[0].content }}<u>"
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "="


@pytest.mark.parametrize(
    ("config", "given", "told"),
    [
        (DPOConfig, {"loss_type": ["sigmoid", "sft"]}, "loss_type=.'sigmoid', 'sft'. is not supported"),
        (DPOConfig, {"loss_type": "robust"}, "megatron-rl dpo"),
        (DPOConfig, {"loss_weights": [1.0]}, "loss_weights=.1.0. is not supported: the loss is one"),
        (DPOConfig, {"beta": 0.0}, "beta=0.0 must be positive"),
        (DPOConfig, {"f_divergence_type": "js_divergence", "use_weighting": True}, "f_divergence_type.*use_weighting"),
        (DPOConfig, {"truncation_mode": "keep_end"}, "rows are cut at their end"),
        (DPOConfig, {"optim": "sgd", "sync_ref_model": True}, "sync_ref_model.*optim='sgd'"),
        (KTOConfig, {"loss_type": "apo_zero_unpaired", "beta": -1}, "the loss is kto.*beta=-1 must be positive"),
        (CPOConfig, {"loss_type": "hinge"}, "loss_type='hinge' .*known are sigmoid, and simpo"),
        (CPOConfig, {"loss_type": "simpo", "label_smoothing": 0.1}, "label_smoothing=0.1 is not supported"),
        (CPOConfig, {"alpha": 0.5}, "alpha=0.5 is not supported"),
        (ORPOConfig, {"generate_during_eval": True, "beta": 0}, "generate_during_eval=True .*beta=0 must be positive"),
        (GKDConfig, {}, "lmbda=0.5 is not supported.*write 1.0.*temperature=0.9 is not supported.*write 1.0"),
        (GKDConfig, GKD | {"beta": 0.3}, "beta=0.3 is not supported: write 0"),
        (GKDConfig, GKD | {"max_new_tokens": 0, "eval_strategy": "steps"}, "eval_strategy='steps'.*at least 1"),
        (RewardConfig, {"center_rewards_coefficient": -1.0}, "must not be negative"),
        (SFTConfig, {"loss_type": "dft"}, "loss_type='dft' is not supported"),
        (SFTConfig, {"packing": True, "packing_strategy": "wrapped"}, "packing_strategy='wrapped'"),
        (SFTConfig, {"packing": True, "max_length": None}, "packing=True needs max_length"),
        (SFTConfig, {"dataset_kwargs": {"skip_prepare_dataset": True}}, "rows are always tokenized here"),
        (SFTConfig, {"max_length": 1}, "max_length=1 leaves nothing"),
    ],
)
def test_arguments_that_cannot_be_expressed_are_refused_by_name(config, given, told):
    with pytest.raises(ValueError, match=f"^{config.NAME}: .*{told}"):
        config("o", **given)


@pytest.mark.parametrize(
    ("trainer", "given", "told"),
    [
        (DPOTrainer, {"data_collator": len, "compute_metrics": len}, "data_collator is .*compute_metrics is not"),
        (DPOTrainer, {"train_dataset": None}, "train_dataset is missing"),
        (RewardTrainer, {"compute_metrics": len}, "compute_metrics is not supported"),
        (DPOTrainer, {"train_dataset": {"a": PAIRS}}, "a dict of a; give one"),
        (DPOTrainer, {"train_dataset": [{"image": 1, **PAIRS[0]}]}, "a column 'image'"),
        (SFTTrainer, {"optimizer_cls_and_kwargs": (1, {})}, "optimizer_cls_and_kwargs is not supported"),
        (SFTTrainer, {"args": SFTConfig(eos_token="<none>")}, "eos_token='<none>' is not in the vocabulary"),
        (SFTTrainer, {"args": SFTConfig(chat_template_path="org/model")}, "is no file; give a .jinja file"),
        (SFTTrainer, {"args": SFTConfig("o", assistant_only_loss=True)}, "needs chats"),
        (SFTTrainer, {"args": SFTConfig("o", completion_only_loss=True), "train_dataset": CHATS}, "needs rows with"),
        (SFTTrainer, {"train_dataset": iter(TEXTS)}, "give max_steps"),
    ],
)
def test_what_a_trainer_would_ignore_is_refused(trainer, given, told, model, run_of):
    with pytest.raises(ValueError, match=told):
        run_of(trainer(model, **{"train_dataset": TEXTS, **given}))


def test_arguments_of_another_trainer_are_refused(model):
    with pytest.raises(TypeError, match="SFTTrainer: args is a GRPOConfig; give a SFTConfig"):
        SFTTrainer(model, GRPOConfig("o"), train_dataset=TEXTS)
    with pytest.raises(TypeError, match="RewardTrainer: there is no argument 'formatting_func'"):
        RewardTrainer(model, train_dataset=PAIRS, formatting_func=len)
    with pytest.raises(TypeError, match="DPOConfig has no argument 'bta': did you mean 'beta'"):
        DPOConfig(bta=1)


@dataclass
class Scripts(SFTConfig):
    system: str | None = None


def test_a_parser_reads_the_arguments_and_earlier_names_have_their_meaning():
    words = "--output_dir o --packing true --max_seq_length 512 --eval_packing false --system x --loss_type chunked_nll"
    [args] = HfArgumentParser(Scripts).parse_args_into_dataclasses(words.split())
    assert (args.packing, args.max_length, args.eval_packing, args.system) == (True, 512, False, "x")
    [args] = HfArgumentParser(DPOConfig).parse_args_into_dataclasses("--loss_type ipo --max_length 64".split())
    assert args.loss_type == ["ipo"] and args.max_length == 64


def test_a_reference_must_have_the_weights_of_the_model(model, run_of):
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    copy = torch.nn.Linear(2, 2)
    copy.load_state_dict(one.state_dict())
    assert same_weights(one, copy) and same_weights(one, copy.bfloat16()) and not same_weights(one, other)
    assert run_of(DPOTrainer(model, model, DPOConfig("o"), train_dataset=PAIRS))[0] == "dpo"
    with pytest.raises(ValueError, match="ref_model has other weights than model.*leave ref_model out"):
        DPOTrainer(model, other, DPOConfig("p"), train_dataset=PAIRS)
