"""What a script gives as objects: arguments, a model's tokenizer, rewards, rows and callbacks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from tiny_chat import KEEPS, characters
from transformers import (
    EarlyStoppingCallback,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    ProgressCallback,
    TrainerCallback,
    TrainerState,
)

from megatron_rl import Run, api
from megatron_rl.trl import GRPOConfig, GRPOTrainer, adapters
from megatron_rl.trl.adapters import adapters_of
from megatron_rl.trl.callbacks import Callbacks
from megatron_rl.trl.configuration import as_arguments
from megatron_rl.trl.environments import GivenEnvironments
from megatron_rl.trl.metrics import named
from megatron_rl.trl.models import GivenModel
from megatron_rl.trl.progress import RunProgress
from megatron_rl.trl.prompts import longest_prompt
from megatron_rl.trl.rewards import GivenRewards
from megatron_rl.trl.rows import joined

ROWS = [{"prompt": f"{i}+1="} for i in range(8)]


def score(completions, **columns):
    return [0.0] * len(completions)


def tokenizer(template: str | None = KEEPS) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=characters(), eos_token="<end>")
    made.chat_template = template
    return made


@pytest.fixture
def model(tmp_path) -> str:
    folder = tmp_path / "model"
    tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, "vocab_size": 128}))
    (folder / "weights.safetensors").write_bytes(b"weights")
    return str(folder)


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """The configurations of runs that would have begun."""
    paths: list[Path] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "_run", lambda path, run, watch=None: paths.append(path) or run)
    return paths


@dataclass
class Scripts(GRPOConfig):
    system_prompt: str | None = None


def test_a_parser_of_command_lines_reads_the_arguments_and_a_script_extends_them():
    words = "--output_dir o --learning_rate 2e-6 --bf16 true --report_to wandb --reward_weights 1 .5 --warmup_ratio .1"
    kwargs = ["--model_init_kwargs", '{"dtype": "float32"}', "--system_prompt", "Think.", "--num_generations", "4"]
    [args] = HfArgumentParser(Scripts).parse_args_into_dataclasses([*words.split(), *kwargs])
    assert (args.output_dir, args.learning_rate, args.bf16, args.system_prompt) == ("o", 2e-6, True, "Think.")
    assert args.model_init_kwargs == {"dtype": "float32"} and args.reward_weights == [1.0, 0.5]
    assert args.warmup_steps == 0.1 and args.num_generations == 4 and args.gradient_checkpointing
    assert args.get_process_log_level() == 30 and args.world_size == 1 and str(args.device) == "cpu"
    assert args.get_warmup_steps(100) == 10 and args.to_dict()["hub_token"] == "<HUB_TOKEN>"
    assert json.loads(args.to_json_string())["seed"] == 42
    with pytest.raises(TypeError, match="'system_promt'.*'system_prompt'"):
        Scripts(system_promt="")
    with pytest.raises(AttributeError, match="no 'lr'"):
        args.lr  # noqa: B018


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"evaluation_strategy": "epoch"}, "eval_strategy", "epoch"),
        ({"warmup_ratio": 0.2}, "warmup_steps", 0.2),
        ({"logging_dir": "x", "overwrite_output_dir": True, "vllm_device": "auto"}, "logging_dir", "x"),
    ],
)
def test_arguments_of_earlier_releases_have_their_meaning(given, name, value):
    assert getattr(GRPOConfig(**given), name) == value


def test_arguments_of_another_class_are_taken_or_refused():
    @dataclass
    class Theirs:
        num_generations: int = 4
        gradient_accumulation_steps: int = 2
        steps_per_generation: int = 2
        generation_batch_size: int = 16
        per_device_train_batch_size: int = 8
        own: str = "of a script"

    args = as_arguments(Theirs())
    assert (args.num_generations, args.steps_per_generation, args.generation_batch_size) == (4, None, None)
    for wrong in ({}, SimpleNamespace(output_dir="x"), GRPOConfig):
        with pytest.raises(TypeError, match="GRPOTrainer: args .*GRPOConfig"):
            as_arguments(wrong)
    changed = GRPOConfig()
    changed.top_p = 0.5
    with pytest.raises(ValueError, match=r"top_p=0.5 is not supported"):
        as_arguments(changed)


@dataclass
class FutureLora:
    """PEFT's class in a release to come: an attribute that does something by default."""

    peft_type: str = "LORA"
    r: int = 8
    target_modules: list[str] | None = None
    qalora_group_size: int = 16
    of_tomorrow: dict[str, int] = field(default_factory=lambda: {"a": 1})


def test_a_default_of_peft_changes_nothing_and_another_value_is_refused(monkeypatch):
    monkeypatch.setattr(adapters, "_table_of_peft", lambda: {"qwen3": ["q_proj", "v_proj"]})
    assert adapters_of(FutureLora(), "qwen3")["targets"] == ["q_proj", "v_proj"]
    with pytest.raises(ValueError, match="target_modules=None.*'other'.*qalora_group_size=8.*of_tomorrow"):
        adapters_of(FutureLora(qalora_group_size=8, of_tomorrow={"a": 2}), "other")


def test_layers_by_whole_names_are_all_of_a_kind_and_absent_ones_are_told():
    layers = {f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in ("q_proj", "o_proj")}
    whole = FutureLora(target_modules={name for name in layers if "q_proj" in name})
    assert adapters_of(whole, "qwen3", layers)["targets"] == ["q_proj"]
    with pytest.raises(ValueError, match="target_modules="):
        adapters_of(FutureLora(target_modules={"model.layers.0.self_attn.q_proj"}), "qwen3", layers)
    with pytest.warns(UserWarning, match="the model has no layer dense"):
        assert adapters_of(FutureLora(target_modules=["q_proj", "dense"]), "qwen3", layers)["targets"] == ["q_proj"]
    dropout = SimpleNamespace(peft_type="LORA", target_modules=["q_proj"], lora_dropout=0.05)
    with pytest.warns(UserWarning, match="lora_dropout=0.05"):
        adapters_of(dropout)


def test_a_tokenizer_of_the_script_is_in_the_folder_of_the_run(model, tmp_path):
    assert GivenModel(model, None).save(tmp_path / "a") == Path(model)
    assert GivenModel(model, tokenizer()).save(tmp_path / "b") == Path(model), "it is the same"
    for number, other in enumerate((tokenizer("{{ messages[0].content }}"), tokenizer(None))):
        saved = GivenModel(model, other).save(tmp_path / f"c{number}")
        assert saved != Path(model) and (saved / "weights.safetensors").read_bytes() == b"weights"
        template = saved / "chat_template.jinja"
        assert (template.read_text() if template.exists() else None) == other.chat_template
    assert (Path(model) / "chat_template.jinja").read_text() == KEEPS, "the user's folder is as it was"
    more = tokenizer()
    more.add_tokens([f"<{i}>" for i in range(60)])
    with pytest.raises(ValueError, match="processing_class has 161.*model 128.*resize_token"):
        GivenModel(model, more).save(tmp_path / "d")
    with pytest.raises(ValueError, match="processing_class is 'name'"):
        GivenModel(model, "name")


class Scorer:
    """A reward model's form: it can be called, like a module of torch, and it is no function."""

    def __init__(self, name: str, num_labels: int = 1) -> None:
        self.config = SimpleNamespace(_name_or_path=name, num_labels=num_labels)

    def __call__(self, *inputs):
        raise AssertionError("a model is no reward function")

    def save_pretrained(self, into: Path) -> None:
        Path(into).mkdir(parents=True)
        (Path(into) / "config.json").write_text("{}")


def test_reward_models_score_with_their_tokenizers_and_rewards_have_names_of_their_own(model, tmp_path):
    own = tokenizer("{{ messages }}")
    rewards = GivenRewards(
        [Scorer("org/scorer"), model, model, score, score], [1, 2, 3, 4, 5], [own, own, None, None, None]
    )
    entries = rewards.entries(tmp_path / "rewards")
    assert [entry.get("name", "score") for entry in entries] == ["scorer", "model", "model_2", "score", "score_2"]
    assert [entry["weight"] for entry in entries] == [1, 2, 3, 4, 5]
    assert {entry["path"] for entry in entries[:3]} == {"megatron_rl.trl.reward_model:ModelReward"}
    folders = [Path(entry["arguments"]["path"]) for entry in entries[:3]]
    assert folders[2] == Path(model) and (folders[0] / "config.json").exists()
    for folder in folders[:2]:
        assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert all(entry["max_silent_steps"] is None and "max_failed_steps" not in entry for entry in entries)


@pytest.mark.parametrize(
    ("given", "weights", "tokenizers", "told"),
    [
        (None, None, None, "reward_funcs is empty"),
        ([score, score], [1.0], None, "reward_weights has 1 numbers for 2 reward_funcs"),
        ([score, score], None, tokenizer(), "reward_processing_classes has 1 entries for 2 reward_funcs"),
        (Scorer("two", 2), None, None, "the reward model two has 2 labels, not one"),
        ([3], None, None, "the reward 3 is neither a function nor a reward model"),
    ],
)
def test_rewards_that_are_none_are_refused(given, weights, tokenizers, told):
    with pytest.raises(ValueError, match=told):
        GivenRewards(given, weights, tokenizers)
    assert len(GivenRewards(score, np.array([2.0]), None)) == 1


def test_long_prompts_raise_the_bound_and_too_long_ones_are_told(model):
    short, long = {"prompt": "1+1="}, {"prompt": [{"role": "user", "content": "a" * 2000}]}
    given = GivenModel(model, None)

    def bound(*rows, heldout=None, **args):
        return longest_prompt(given, GRPOConfig(**args), rows, heldout, GivenEnvironments(None, None))

    assert bound(short) == 1024 and bound(short, max_completion_length=4000) == 96
    assert 2000 < bound(short, long) < 2050 and bound(short, heldout=[long]) == bound(long)
    assert bound(short, max_prompt_length=300) == 300
    with pytest.raises(ValueError, match="max_prompt_length=300.*row 1 of train_dataset"):
        bound(short, long, max_prompt_length=300)
    with pytest.raises(ValueError, match="row 0 of eval_dataset .*max_completion_length=3000 .* 4096 positions"):
        bound(short, heldout=[long], max_completion_length=3000)
    skips = {"data": {"on_bad_row": "skip"}}
    assert bound(long, max_prompt_length=300, sections=skips) == 300
    games = GivenEnvironments(Game, None)
    assert longest_prompt(given, GRPOConfig(), [short], None, games) == 2 * 1024, "room for what reset appends"
    assert longest_prompt(given, GRPOConfig(max_completion_length=3000), [short], None, games) == 1096


def test_several_evaluation_sets_are_one_with_their_names():
    sets = {"one": [{"prompt": "a"}], "two": iter([{"prompt": "b"}])}
    assert joined(sets) == [{"prompt": "a", "dataset": "one"}, {"prompt": "b", "dataset": "two"}]
    assert joined(ROWS) is ROWS and joined(None) is None
    with pytest.raises(ValueError, match="'one'.*`dataset`"):
        joined({"one": [{"prompt": "a", "dataset": "x"}]})


class Game:
    def reset(self, **row):
        return "Guess."

    def guess(self, word: str) -> str:
        """Guess.

        Args:
            word: a word.
        """
        return "no"

    def get_reward(self) -> float:
        return 0.0


class Plain(Game):
    get_reward = None


def test_an_environment_is_a_section_a_reward_and_rows(model, begun):
    sizes = {"per_device_train_batch_size": 16, "max_steps": 2, "max_completion_length": 64}
    args = GRPOConfig("out", **sizes, shuffle_dataset=False, reward_weights=[0.5])
    GRPOTrainer(model, score, args, environment_factory={"a": Game, "b": Game, "c": Plain}, train_dataset=NAMED).train()
    written = yaml.safe_load(begun[0].read_text())
    environment = written["rollout"]["environment"]
    assert list(environment["objects"]) == ["a", "b", "c"] and environment["paths"] == []
    assert (environment["max_turns"], environment["max_observation_tokens"]) == (64, 64)
    assert environment["ends_at_malformed_calls"] and written["data"]["shuffle"] is False
    assert [(one.get("name"), one["kind"], one.get("weight", 1)) for one in written["rewards"]] == [
        (None, "function", 0.5),
        ("Game", "environment", 1),
    ]
    rows = [json.loads(line) for line in Path(written["data"]["train"]).read_text().splitlines()]
    assert [row["environment"] for row in rows] == ["a", "b", "c", "a"], "the fifth row fills no batch of two prompts"
    assert rows[0]["prompt"] == [{"role": "user", "content": ""}]
    args = GRPOConfig("own", max_steps=2, max_tool_calling_iterations=3)
    GRPOTrainer(model, None, args, environment_factory=Game, tools=[guess]).train()
    written = yaml.safe_load(begun[1].read_text())
    assert written["rollout"]["environment"]["max_turns"] == 4 and [one["name"] for one in written["rewards"]] == [
        "Game"
    ]


NAMED = [{"environment": name} for name in ("a", "b", "c", "a", "b")]


def guess(word: str) -> str:
    """Guess.

    Args:
        word: a word.
    """
    return word


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (dict(environment_factory=Plain), "reward_funcs is empty"),
        (dict(environment_factory=object), "environment_factory is a class without a method reset"),
        (dict(environment_factory={"a": Game}), "requires a train_dataset, whose column `environment`"),
        (dict(environment_factory={"a": Game}, train_dataset=NAMED), "row 1 has environment='b', which is not among"),
        (dict(environment_factory=Game), "the length of the training is max_steps"),
    ],
)
def test_an_environment_that_cannot_serve_is_refused(model, begun, given, told):
    with pytest.raises(ValueError, match=told):
        GRPOTrainer(model, args=GRPOConfig("out"), **given).train()
    assert not begun


def test_all_rows_of_the_evaluation_are_evaluated(model, begun):
    args = GRPOConfig("out", max_steps=2)
    trainer = GRPOTrainer(model, score, args, ROWS, {"all": [{"prompt": str(i)} for i in range(300)]})
    trainer.train()
    assert "num_prompts: 300" in begun[0].read_text()
    with pytest.raises(ValueError, match="train_dataset is a dict"):
        GRPOTrainer(model, score, args, {"train": ROWS})


def _callback(**methods):
    return type("Mine", (TrainerCallback,), methods)()


@pytest.mark.parametrize(
    ("callback", "told"),
    [
        (_callback(on_optimizer_step=lambda self, *told, **more: None), "Mine.on_optimizer_step would never be called"),
        (_callback(on_train_begin=lambda self, a, s, c, train_dataloader, **k: None), "needs train_dataloader, which"),
        (_callback(on_step_end=lambda self, a, s, c, model, **k: None), "Mine.on_step_end needs model"),
        (EarlyStoppingCallback(2), "EarlyStoppingCallback needs load_best_model_at_end"),
    ],
)
def test_a_callback_that_could_not_work_is_refused(model, callback, told):
    with pytest.raises(ValueError, match=f"GRPOTrainer: callbacks: .*{told}"):
        GRPOTrainer(model, score, GRPOConfig("out"), ROWS, callbacks=[callback])


def test_callbacks_see_the_beginning(model, begun):
    seen: list[str] = []
    events = ("on_init_end", "on_train_begin", "on_epoch_begin", "on_step_begin", "on_log", "on_train_end")
    methods = {event: lambda self, *told, name=event, **more: seen.append(name) for event in events}
    trainer = GRPOTrainer(model, score, GRPOConfig("out", max_steps=2), ROWS, callbacks=[_callback(**methods)])
    trainer.add_callback(ProgressCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.train()
    assert seen == list(events), "on_log has the closing record"


def test_the_state_counts_optimizer_steps_and_epochs(tmp_path):
    """Two optimizer steps a batch, and two batches an epoch."""
    seen: list[str] = []
    state, args = TrainerState(), GRPOConfig("out")
    events = ("on_epoch_begin", "on_step_begin", "on_step_end", "on_epoch_end", "on_evaluate")
    methods = {e: lambda self, a, s, c, name=e, **k: seen.append(f"{name[3:]} {s.global_step}") for e in events}
    progress = RunProgress(Callbacks([_callback(**methods)], args, state), state)
    progress.begin(3, SimpleNamespace(updates=2, updates_per_epoch=4), None)
    metrics = tmp_path / "metrics.jsonl"
    records = [{"step": i, "loss": 0.5 * i, "rollout/num_samples": 4, "reward/mean": 1.0} for i in range(3)]
    records.append({"step": 3, "eval/reward_mean": 2.0})
    for number in range(1, 5):
        metrics.write_text("".join(json.dumps(record) + "\n" for record in records[:number]))
        progress.watch(Run(tmp_path))
    assert seen == [
        *("epoch_begin 0", "step_begin 0", "step_end 2", "step_begin 2", "step_end 4", "epoch_end 4"),
        *("epoch_begin 4", "step_begin 4", "step_end 6", "evaluate 6"),
    ]
    assert state.max_steps == 6 and state.num_train_epochs == 2 and state.epoch == 1.5
    closing = progress.close(Run(tmp_path), 2.0)
    assert closing["train_loss"] == 0.5 and closing["train_steps_per_second"] == 3.0
    assert closing["train_samples_per_second"] == 6.0 and state.log_history[-1]["step"] == 6


def test_metrics_have_the_names_of_trl():
    record = {"reward/mean": 1.0, "reward/f/mean": 2.0, "reward/f/std": 3.0, "reward/f/own": 4.0, "loss": 5.0}
    record |= {"eval/dataset/one/reward_mean": 6.0, "eval/reward_mean": 7.0}
    assert named(record) == {
        **{"reward": 1.0, "rewards/f/mean": 2.0, "rewards/f/std": 3.0, "own": 4.0, "loss": 5.0},
        **{"eval_one_reward": 6.0, "eval_reward": 7.0},
    }


@pytest.mark.parametrize("asked", ["out/checkpoint-500", "/no/such/folder", "auto", Path("runs/x")])
def test_a_checkpoint_that_is_not_there_is_no_new_run(model, begun, asked):
    trainer = GRPOTrainer(model, score, GRPOConfig("out", max_steps=2), ROWS)
    with pytest.raises(
        ValueError, match=f"resume_from_checkpoint='{asked}': there is no such folder; .* no checkpoint"
    ):
        trainer.train(resume_from_checkpoint=asked)
    Path("elsewhere").mkdir()
    with pytest.raises(ValueError, match="is not the newest checkpoint of the run in .*, which has none"):
        trainer.train(resume_from_checkpoint="elsewhere")
    assert not begun
    trainer.train(resume_from_checkpoint=True)
    assert begun


def test_a_trainer_has_what_scripts_ask_for_after_training_and_says_what_is_elsewhere(model, begun, capsys):
    trainer = GRPOTrainer(model, score, GRPOConfig("out", max_steps=2), ROWS)
    done = trainer.train()
    assert trainer.state.log_history[-1].keys() >= {"train_loss", "train_runtime"}
    assert done.training_loss == done.metrics["train_loss"] == 0.0
    trainer.save_metrics("train", {"train_loss": 0.5})
    trainer.save_state()
    trainer.log_metrics("train", done.metrics)
    trainer.accelerator.print("said")
    trainer.create_model_card(dataset_name="rows")
    assert "said" in capsys.readouterr().out and trainer.is_world_process_zero()
    out = trainer.run.folder
    assert json.loads((out / "all_results.json").read_text()) == {"train_loss": 0.5}
    assert (out / "trainer_state.json").exists() and "datasets:\n- rows" in (out / "README.md").read_text()
    assert trainer.train_dataset is ROWS and trainer.processing_class.chat_template == KEEPS
    with pytest.raises(ValueError, match="there is no trained model yet"):
        trainer.push_to_hub()
    with pytest.raises(AttributeError, match="'get_train_dataloader'"):
        trainer.get_train_dataloader()
    with pytest.raises(AttributeError, match="'unknown'"):
        trainer.unknown  # noqa: B018
    with pytest.raises(AttributeError, match="trainer.accelerator has no 'backward' here"):
        trainer.accelerator.backward(1)


def test_a_folder_that_has_a_run_keeps_its_model(model, begun):
    first = GRPOTrainer(model, score, GRPOConfig("out", max_steps=2), ROWS, processing_class=tokenizer("{{ 1 }}"))
    first.train()
    (first.run.folder / "metrics.jsonl").write_text('{"step": 0, "loss": 1}\n')
    with pytest.raises(ValueError, match="train.resume_from_checkpoint=True"):
        GRPOTrainer(model, score, GRPOConfig("out", max_steps=2), ROWS, processing_class=tokenizer("{{ 2 }}")).train()
    assert (first.run.folder / "model" / "chat_template.jinja").read_text() == "{{ 1 }}"


@pytest.mark.parametrize("name", ["ModelConfig", "TrlParser"])
def test_another_name_of_trl_says_what_is_in_its_place(name):
    import megatron_rl.trl

    with pytest.raises(ImportError, match=f"megatron_rl.trl has no {name}: "):
        getattr(megatron_rl.trl, name)
