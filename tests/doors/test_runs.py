"""Real runs of two steps through the door, with what a script asks for after `train`."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import real  # noqa: F401  # skips
import torch
from datasets import Dataset
from given import chats, few, length, lora, pictures, scorer, texts, tokenizer, words
from image_models import drawing
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from transformers import TrainerCallback
from trl.data_utils import prepare_multimodal_messages

from megatron_rl.trl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer
from megatron_rl.trl.rows import placed

TURNS = "{% for m in messages %}({{ m.role }}) {{ m.content }}\n{% endfor %}"
OWN = TURNS + "{% if add_generation_prompt %}(assistant) {% endif %}"
SMALL = {
    **{"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 8, "max_steps": 2},
    **{"learning_rate": 1e-2, "report_to": "none", "bf16": False, "lr_scheduler_type": "constant"},
}


class Seen(TrainerCallback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.events.append(f"begin {state.global_step}")

    def on_step_end(self, args, state, control, processing_class=None, **kwargs):
        self.events.append(f"end {state.global_step}")


@pytest.mark.deadline(600)
def test_adapters_a_reward_model_and_a_template_of_the_script(models, tmp_path, monkeypatch):
    """The reward model scores, the prompts have the script's template, two layers of PEFT's table are trained, and
    each of two evaluation sets has its metrics."""
    monkeypatch.chdir(models)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    seen, given = Seen(), tokenizer("base", OWN)()
    several = {"one": chats().select(range(2)), "two": chats().select(range(2, 4))}
    trainer = GRPOTrainer(
        model="base",
        processing_class=given,
        reward_funcs=[scorer("scorer_llama")(), words],
        reward_processing_classes=[tokenizer("scorer_llama")(), None],
        args=GRPOConfig(str(tmp_path / "out"), reward_weights=[1.0, 0.1], beta=0.1, entropy_coef=0.01, **SMALL),
        train_dataset=chats(),
        eval_dataset=several,
        peft_config=lora(r=4)(),
        callbacks=[seen],
    )
    done = trainer.train()
    first = trainer.state.log_history[0]
    assert first["rewards/scorer_llama/mean"] != 0 and first["rewards/words/std"] >= 0
    steps = [log for log in trainer.state.log_history if "reward" in log]
    assert [log["step"] for log in steps] == [1, 2]
    for log in steps:
        assert log["reward"] == pytest.approx(
            log["rewards/scorer_llama/mean"] + 0.1 * log["rewards/words/mean"], abs=1e-5
        )
    found = trainer.evaluate()
    assert found["eval_one_reward"] + found["eval_two_reward"] == pytest.approx(2 * found["eval_reward"], abs=1e-5)
    assert seen.events == ["begin 0", "end 1", "begin 1", "end 2"]
    assert trainer.state.log_history[-1]["train_loss"] == done.training_loss and done.metrics["train_runtime"] > 0
    assert (trainer.run.folder / "model" / "chat_template.jinja").read_text() == OWN
    _after(trainer, given)


def _after(trainer: GRPOTrainer, given) -> None:
    trainer.log_metrics("train", {"train_loss": 0.5})
    trainer.save_metrics("train", {"train_loss": 0.5})
    trainer.save_state()
    folder = trainer.run.folder
    assert json.loads((folder / "train_results.json").read_text()) == {"train_loss": 0.5}
    trainer.accelerator.wait_for_everyone()
    if trainer.accelerator.is_main_process:
        trainer.create_model_card(dataset_name="rows", tags=["mine"])
    assert "mine" in (folder / "README.md").read_text()
    before, after = load_file("base/model.safetensors"), trainer.model.state_dict()
    changed = {name.split(".")[-2] for name, old in before.items() if not old.equal(after[name])}
    assert changed == {"q_proj", "v_proj"}, "PEFT's table for qwen2"
    assert trainer.processing_class.chat_template == given.chat_template
    assert (trainer.run.model / "chat_template.jinja").read_text() == OWN
    for token in (None, "hf_none"):  # nobody is logged in, and there is no network or no such token
        with pytest.raises(ValueError, match="nothing was uploaded to out: .* `hf auth login`"):
            trainer.push_to_hub(token=token)


@pytest.mark.deadline(600)
def test_an_evaluation_of_other_rows_before_train(models, tmp_path, monkeypatch):
    monkeypatch.chdir(models)
    args = GRPOConfig(str(tmp_path / "out"), **SMALL)
    trainer = GRPOTrainer("qwen2", length, args, texts())
    found = trainer.evaluate({"one": few(), "two": texts().to_iterable_dataset()})
    assert found["eval_reward"] > 0 and found["eval_one_reward"] > 0 and found["eval_two_reward"] > 0
    assert trainer.run is None and trainer.state.global_step == 0 and not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.deadline(600)
def test_a_reward_that_raises_stops_a_run_and_one_that_abstains_does_not(models, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(models)

    def broken(completions, **columns):
        return [column.no_such_thing for column in completions]

    def silent(completions, **columns):
        return [None] * len(completions)

    rows = Dataset.from_dict({"prompt": [f"{i} and" for i in range(8)]})
    args = GRPOConfig(str(tmp_path / "out"), **SMALL | {"max_steps": 5})
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="the run ended with status 1"):
        warnings.simplefilter("ignore")
        GRPOTrainer("qwen2", [length, silent, broken], args, rows, few()).train()
    told = capfd.readouterr()
    assert "reward broken scored none of" in told.out + told.err and "max_failed_steps" in told.out + told.err
    metrics = [json.loads(line) for line in (Path(tmp_path) / "out" / "metrics.jsonl").read_text().splitlines()]
    assert max(record["step"] for record in metrics) in (1, 2)


@pytest.mark.deadline(600)
def test_a_reward_model_begins_with_a_classifiers_head_and_ends_as_one(models, tmp_path, monkeypatch):
    """The first loss is the one of transformers' classifier; a row has its prompt in both texts."""
    monkeypatch.chdir(models)
    made, start = tokenizer()(), scorer("scorer")()
    rows = [{"chosen": f"What is {i}? It is {i}.", "rejected": f"What is {i}? No idea."} for i in range(4)]
    args = RewardConfig(
        str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=4, bf16=False, report_to="none", max_length=99
    )
    trainer = RewardTrainer(start, args, train_dataset=rows, eval_dataset=rows, processing_class=made)
    trainer.train()

    def loss(network) -> float:
        ids = [made(row[name] + made.eos_token, return_tensors="pt") for row in rows for name in ("chosen", "rejected")]
        chosen, rejected = torch.stack([network(**one).logits[0, 0] for one in ids]).view(-1, 2).unbind(1)
        return -logsigmoid(chosen - rejected).mean().item()

    steps = [log for log in trainer.state.log_history if "loss" in log]
    assert steps[0]["loss"] == pytest.approx(loss(start), abs=1e-5)
    assert type(trainer.model) is type(start) and loss(trainer.model) < steps[1]["loss"] < steps[0]["loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss(trainer.model), abs=1e-5)


def test_images_have_the_places_that_trl_gives_them():
    says = [{"role": "system", "content": "Look."}, {"role": "user", "content": "What is it?"}]
    asks = [*says, {"role": "assistant", "content": "A disc."}, {"role": "user", "content": "And now?"}]
    own = [{"role": "user", "content": [{"type": "text", "text": "Is "}, {"type": "image"}, {"type": "image"}]}]
    for turns, number in ((says, 1), (says, 0), (asks, 2), (own, 2)):
        images = [drawing(8, 8, i) for i in range(number)]
        ours, theirs = placed({"prompt": turns, "images": images})["prompt"], prepare_multimodal_messages(turns, images)
        places = [[[part["type"] for part in parts(turn)] for turn in prompt] for prompt in (ours, theirs)]
        assert places[0] == places[1]


def parts(turn) -> list:
    content = turn["content"]
    return content if isinstance(content, list) else [{"type": "text"}]


@pytest.mark.deep
@pytest.mark.deadline(600)
def test_images_of_pillow_and_a_trained_tower(models, tmp_path, monkeypatch):
    """Two steps on rows with an image each; their prompts have all of its tokens."""
    monkeypatch.chdir(models)
    args = GRPOConfig(str(tmp_path / "out"), **SMALL)
    trainer = GRPOTrainer("qwen3vl", words, args, pictures())
    trainer.train()
    before, after = (
        {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}
        for folder in (Path("qwen3vl"), trainer.run.model)
    )
    changed = {name for name, one in before.items() if not torch.equal(one, after[name])}
    assert {name for name in before if "visual" in name} < changed
    assert list((trainer.run.folder / "images").glob("*.png"))
