"""Defaults that depend on the model's files and on the machine."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from megatron_rl.commands.defaults import read_config, with_defaults
from megatron_rl.config import machine
from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig, SftRunConfig


def grpo(folder, **changes):
    merged = {
        "run": {"name": "x", "steps": 3},
        "model": {"path": str(folder)},
        "data": {"train": "rows"},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_prompt_tokens": 8, "max_response_tokens": 8},
        "balance": {"max_tokens_per_microbatch": 16},
    }
    for section, keys in changes.items():
        merged[section] = merged.get(section, {}) | keys if isinstance(keys, dict) else keys
    return validate(GrpoRunConfig, merged)


def write_model(folder, vocabulary=(), template="{{ messages[0].content }}"):
    Tokenizer(models.WordLevel({token: i for i, token in enumerate(["<unk>", *vocabulary])}, unk_token="<unk>")).save(
        str(folder / "tokenizer.json")
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


@pytest.mark.parametrize(
    "model, changes, delimiter",
    [
        ({}, {}, ""),
        ({"vocabulary": ["</think>"]}, {}, "</think>"),
        ({"template": "{{ text.split('</think>')[-1] }}"}, {}, "</think>"),
        ({}, {"rollout": {"delimiter": "</think>"}}, "</think>"),
        ({}, {"rollout": {"delimiter": "So:"}}, "So:"),
        ({"vocabulary": ["</think>"]}, {"rollout": {"delimiter": ""}}, ""),
        ({}, {"rollout": {"thinking": {"thought_tokens": 4, "response_tokens": 2}}}, "</think>"),
        ({}, {"rewards": [{"kind": "format"}, {"kind": "exact_answer"}]}, "</think>"),
    ],
    ids=["neither", "vocabulary", "template", "given", "another", "given empty", "budget", "format"],
)
def test_a_model_without_thoughts_has_no_delimiter(tmp_path, model, changes, delimiter):
    write_model(tmp_path, **model)
    told = []
    assert with_defaults(grpo(tmp_path, **changes), told.append).rollout.delimiter == delimiter
    assert [note for note in told if "whole answers are judged" in note] == told[-1:] * (
        not delimiter and "delimiter" not in changes.get("rollout", {})
    )
    given = changes.get("rollout", {}).get("delimiter")
    assert [
        "an answer without it scores 0" in note for note in told if "is 'So:'" in note or "is '</think>'" in note
    ] == [True] * bool(given)


def test_a_folder_that_is_not_there_or_has_no_tokenizer_changes_nothing(tmp_path):
    """A dry run plans with models that are elsewhere; the preflight reports the tokenizer."""
    for folder in (tmp_path / "elsewhere", tmp_path):
        assert with_defaults(grpo(folder)).rollout.delimiter == "</think>"


@pytest.mark.parametrize(
    "flags, gpus, dtype, expected",
    [
        ("avx2 avx512f", 0, "auto", "float32"),
        ("avx512f avx512_bf16", 0, "auto", "bfloat16"),
        ("amx_bf16", 0, "auto", "bfloat16"),
        ("avx2", 1, "auto", "bfloat16"),
        ("avx2", 0, "bfloat16", "bfloat16"),
        ("amx_bf16", 0, "float32", "float32"),
    ],
)
def test_the_data_type_is_one_that_the_machine_computes_in(tmp_path, monkeypatch, flags, gpus, dtype, expected):
    monkeypatch.setattr(machine, "CPU", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    told = []
    config = grpo(
        tmp_path / "elsewhere",
        model={"dtype": dtype},
        cluster={"gpus_per_trainer": gpus},
        critic={"model": {"path": "critic"}},
        algorithm={"adv_estimator": {"kind": "gae"}},
    )
    settled = with_defaults(config, told.append)
    assert settled.model.dtype == expected
    assert settled.critic.model.dtype == ("bfloat16" if gpus or "bf16" in flags else "float32")
    assert told == ["model.dtype is float32, because trainers run on the CPU, which has no units for bfloat16"] * (
        dtype == "auto" and expected == "float32"
    )


@pytest.mark.parametrize(
    ("how", "here", "keys", "gpus"),
    [
        ({"in_job": True}, 0, ["slurm.gpus_per_node=8"], 1),
        ({"in_job": True}, 1, ["slurm.gpus_per_node=0"], 0),
        ({"in_job": True}, 0, [], 0),
        ({}, 0, ["slurm.gpus_per_node=8"], 0),
        ({"planning": True}, 0, ["cluster.ray_address=127.0.0.1:1"], 0),
        ({"planning": True}, 0, ["cluster.device=gpu"], 1),
    ],
)
def test_the_gpus_of_a_job_are_those_of_its_nodes_and_a_plan_asks_no_ray(tmp_path, monkeypatch, how, here, keys, gpus):
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if here:
        (tmp_path / "nvidia0").touch()
    given = ["run={name: x, steps: 3}", "model.path=nowhere", "sft={rows: rows, max_tokens: 8}"]
    found = read_config(SftRunConfig, [*given, "balance.max_tokens_per_microbatch=16", *keys], **how)
    assert found.cluster.gpus_per_trainer == gpus


def test_supervised_training_has_the_same_data_type(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CPU", tmp_path / "no such file")
    config = validate(
        SftRunConfig,
        {
            "run": {"name": "x", "steps": 3},
            "model": {"path": "nowhere"},
            "sft": {"rows": "rows", "rows_per_step": 2, "max_tokens": 8},
            "balance": {"max_tokens_per_microbatch": 16},
        },
    )
    assert with_defaults(config).model.dtype == "float32"


@pytest.mark.parametrize("given, expected", [({}, 128), ({"max_tokens": 4096}, 4096), ({"max_tokens": 64}, 64)])
def test_rows_of_supervised_training_are_no_longer_than_the_models_positions(tmp_path, given, expected):
    sizes = write_config(tmp_path, 128)
    merged = {"run": {"name": "x", "steps": 3}, "model": {"path": str(sizes)}, "sft": {"rows": "rows", **given}}
    told = []
    assert with_defaults(validate(SftRunConfig, merged), told.append).sft.max_tokens == expected
    assert any(note.startswith("sft.max_tokens is 128, the positions of") for note in told) == (not given)
    write_config(tmp_path, 8192)
    assert with_defaults(validate(SftRunConfig, merged)).sft.max_tokens == given.get("max_tokens", 4096)


@pytest.mark.parametrize(
    ("lag", "algorithm", "anchor", "said"),
    [
        (
            2,
            {},
            "interpolated",
            "is interpolated and algorithm.correction.weight.cap 5, because rollout.max_lag is 2: the clip",
        ),
        (4, {"updates_per_step": 2}, "interpolated", "is around a policy between the weights that sampled and the"),
        (1, {}, "old", ""),
        (4, {"loss": {"kind": "dual_clip", "clip_ratio_high": 0.28}}, "interpolated", "dual_clip is around a policy"),
        (5, {"loss": {"kind": "dual_clip", "clip_ratio_high": 0.28}}, "engine", "dual_clip is around the weights that"),
        (8, {"loss": {"kind": "gspo"}}, "engine", "the clip of gspo is around the weights that sampled"),
        (4, {"loss": {"kind": "gspo"}, "anchor": "old"}, "old", "gspo has no bound that acts"),
        (
            4,
            {"correction": {}},
            "old",
            "Consider one of these: algorithm.anchor=interpolated; algorithm.loss.kind=dppo_tv",
        ),
        (4, {"loss": {"kind": "reinforce"}}, "old", "Consider one of these: algorithm.loss.kind=dppo_tv without"),
        (4, {"loss": {"kind": "gspo"}, "anchor": "old", "updates_per_step": 4}, "old", "gspo has no bound that acts"),
        (8, {"correction": {"weight": {"cap": 2.0}}, "epochs": 2}, "old", "these: algorithm.anchor=engine without"),
        (4, {"epochs": 2}, "interpolated", "is around a policy between"),
        (4, {"epochs": 2, "stop_epochs": {"kl": 0.1}}, "old", "stays old, because algorithm.stop_epochs compares"),
        (4, {"loss": {"kind": "dppo_tv"}}, "old", ""),
        (4, {"anchor": "interpolated"}, "interpolated", ""),
        (4, {"correction": {"reject": [{"level": "token", "statistic": "k1", "low": 0.5, "high": 2.0}]}}, "old", ""),
    ],
)
def test_a_lag_has_a_clip_that_bounds_the_distance_from_the_weights_that_sampled(
    tmp_path, lag, algorithm, anchor, said
):
    told = []
    config = with_defaults(grpo(tmp_path / "elsewhere", rollout={"max_lag": lag}, algorithm=algorithm), told.append)
    assert config.algorithm.anchor == anchor and (config.algorithm.correction is None) >= (anchor == "engine")
    about = [note for note in told if "max_lag" in note]
    assert (said in about[0]) if said else not about


@pytest.mark.parametrize(
    ("algorithm", "is_told"),
    [
        ({"loss": {"kind": "dual_clip", "clip_ratio_high": 0.28}}, True),
        ({"loss": {"kind": "dual_clip", "clip_ratio_high": 0.28}, "epochs": 2}, False),
        ({"loss": {"kind": "dual_clip", "clip_ratio_high": 0.28}, "updates_per_step": 2}, False),
        ({"loss": {"kind": "dual_clip", "clip_ratio_high": 0.28}, "anchor": "engine", "correction": None}, False),
        ({"loss": {"kind": "cispo", "clip_ratio_high": 5.0}, "correction": {}}, True),
        ({}, False),
    ],
)
def test_a_clip_that_never_acts_is_told_if_somebody_has_set_it(tmp_path, algorithm, is_told):
    told = []
    with_defaults(grpo(tmp_path / "elsewhere", algorithm=algorithm), told.append)
    assert any("algorithm.loss.clip_ratio_high never acts" in note for note in told) == is_told


@pytest.mark.parametrize(("epochs", "steps"), [("1", 3), ("2", 5), ("0.8", 2), ("0.1", 1)])
def test_epochs_are_as_many_steps_as_train_all_their_rows(tmp_path, epochs, steps):
    """Ten rows, four in a step: two epochs are 20 rows, which fill five steps."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 10)
    told = []
    words = ["run.name=x", "model.path=nowhere", f"sft.rows={tmp_path}/rows.jsonl", "sft.rows_per_step=4"]
    config = read_config(SftRunConfig, [*words, f"run.epochs={epochs}"], told.append)
    assert config.run.steps == steps
    assert f"run.steps is {steps}: {epochs} epoch{'' if epochs == '1' else 's'} of 10 rows, 4 in a step" in told
    again = read_config(SftRunConfig, [*words, f"run.steps={config.run.steps}"])
    assert config == again, "the number of steps is all that the run knows of them"
    with pytest.raises(ValueError, match="run.epochs and run.steps"):
        read_config(SftRunConfig, [*words, "run.epochs=1", "run.steps=3"])
    with pytest.raises(ValueError, match="none.jsonl, and run.epochs"):
        read_config(SftRunConfig, [*words, "run.epochs=1", f"sft.rows={tmp_path}/none.jsonl"])
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    read_config(SftRunConfig, [*words, f"run.epochs={epochs}"], told.append)
    assert any(" of 1 row, 4 in a step" in note for note in told)


def test_epochs_count_the_rows_that_are_kept(tmp_path):
    """Four rows are good, one is empty and three are longer than six tokens."""
    core = Tokenizer(WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>").save_pretrained(tmp_path)
    long = " ".join("b" * 9)
    rows = ['{"prompt": "a", "completion": " b"}\n'] * 4 + [f'{{"prompt": "a", "completion": "{long}"}}\n'] * 3
    (tmp_path / "rows.jsonl").write_text("".join(rows) + '{"prompt": "a", "completion": ""}\n')
    words = ["run.name=x", f"model.path={tmp_path}", f"sft.rows={tmp_path}/rows.jsonl", "sft.rows_per_step=2"]
    words += ["run.epochs=2", "sft.max_tokens=6", "cluster.device=cpu"]
    assert read_config(SftRunConfig, [*words, "sft.on_bad_row=skip"]).run.steps == 4
    assert read_config(SftRunConfig, words).run.steps == 8, "a bad row will end the run"


def test_the_epochs_of_a_run_with_engines(tmp_path):
    """Five rows: one is unreadable, one has no ground truth, and one repeats another."""
    write_model(tmp_path, ["a", "b", "c"])
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>")), eos_token="</s>"
    ).save_pretrained(tmp_path)
    rows = ['{"prompt": "a", "ground_truth": "1"}', '{"prompt": "b", "ground_truth": "2"}', "{", '{"prompt": "c"}']
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows, rows[0]]) + "\n")
    words = ["run.name=x", f"model.path={tmp_path}", f"data.train={tmp_path}/rows.jsonl", "rollout.prompts_per_step=2"]
    words += ["run.epochs=3", "rewards=[{kind: text}]", "cluster.device=cpu"]
    told = []

    def steps(*more: str) -> int:
        return read_config(GrpoRunConfig, [*words, *more], told.append).run.steps

    assert steps() == 8, "a bad row will end the run"
    assert steps("data.on_bad_row=skip") == 5, "3 epochs of 3 good rows, and the last step begins a fourth"
    assert "run.steps is 5: 3 epochs of 3 rows, 2 in a step" in told
    assert steps("data.on_bad_row=skip", "data.deduplicate=true") == 3
    with pytest.raises(ValueError, match="rollout.active_sampling .* give run.steps"):
        steps("rollout.active_sampling=true")
    with pytest.raises(ValueError, match="data.train is a mixture"):
        steps(f"data.train=[{{path: {tmp_path}/rows.jsonl, weight: 1}}]")


@pytest.mark.parametrize(
    ("given", "prompt", "response"),
    [
        ({}, 64, 64),
        ({"max_prompt_tokens": 100}, 100, 28),
        ({"max_prompt_tokens": 128}, 128, 4096),  # no answer has room: the preflight refuses it
        ({"max_response_tokens": 500}, 1024, 500),  # as given: the preflight refuses it
        ({"thinking": {"thought_tokens": 8, "response_tokens": 8}}, 1024, 4096),
    ],
)
def test_prompts_and_answers_fit_into_the_models_positions_unless_they_are_given(tmp_path, given, prompt, response):
    told = []
    merged = {"run": {"name": "x", "steps": 3}, "model": {"path": str(write_config(tmp_path, 128))}}
    merged |= {"data": {"train": "rows"}, "rollout": given}
    rollout = with_defaults(validate(GrpoRunConfig, merged), told.append).rollout
    assert (rollout.max_prompt_tokens, rollout.max_response_tokens) == (prompt, response)
    assert any("has 128 positions" in note for note in told) == (prompt + response == 128)


def write_config(folder, positions):
    """The configuration of a small Qwen3; returns its folder."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"head_dim": 16, "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": positions}
    named = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "rope_theta": 1e4}
    (folder / "config.json").write_text(
        json.dumps(sizes | named | {"rms_norm_eps": 1e-6, "tie_word_embeddings": False})
    )
    return folder
