"""Good and bad configurations are merged and validated."""

from __future__ import annotations

import re

import pytest

from megatron_rl.config.cluster import ClusterConfig
from megatron_rl.config.function import ImportPath, load_function
from megatron_rl.config.key_hints import KEYS
from megatron_rl.config.load import _locate, load_config, merge, merge_arguments, parse_value, validate
from megatron_rl.config.package_files import PACKAGE
from megatron_rl.config.schema import GrpoRunConfig, SftRunConfig
from megatron_rl.config.section import import_paths

GOOD = {
    "run": {"name": "x", "steps": 2},
    "model": {"path": "somewhere"},
    "data": {"train": "rows.jsonl"},
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_prompt_tokens": 8, "max_response_tokens": 24},
    "balance": {"max_tokens_per_microbatch": 32},
}


def refused(change: dict) -> str:
    merged = {}
    merge(merged, GOOD)
    merged = {key: dict(value) for key, value in merged.items()}
    merge(merged, change)
    with pytest.raises(ValueError) as caught:
        validate(GrpoRunConfig, merged)
    return str(caught.value)


def test_files_merge_left_to_right_and_overrides_win(tmp_path):
    (tmp_path / "a.yaml").write_text("run: {name: a, steps: 1}\nmodel: {path: here}\n")
    (tmp_path / "b.yaml").write_text(
        "run: {steps: 2}\nsft: {rows: r.jsonl, max_tokens: 64}\nbalance: {max_tokens_per_microbatch: 128}\n"
    )
    config = load_config(
        SftRunConfig, [str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml"), "run.seed=7", "policy.optimizer.lr=3e-4"]
    )
    assert (config.run.name, config.run.steps, config.run.seed, config.policy.optimizer.lr) == ("a", 2, 7, 3e-4)


def test_an_empty_mapping_takes_away_what_was_there():
    merged = {"data": {"columns": {"messages": "problem"}, "train": "a"}, "rewards": {"kind": "text", "weight": 2}}
    merge(merged, {"data": {"columns": {}}, "rewards": {"weight": 3}})
    assert merged == {"data": {"columns": {}, "train": "a"}, "rewards": {"kind": "text", "weight": 3}}


def test_another_kind_replaces_the_section():
    merged = {"x": {"kind": "a", "only_a": 1}}
    merge(merged, {"x": {"kind": "b"}})
    assert merged == {"x": {"kind": "b"}}


@pytest.mark.parametrize(
    ("text", "value"), [("1e-6", 1e-6), ("3", 3), ("null", None), ("[1, 2]", [1, 2]), ("1.5E3", 1500.0), ("a", "a")]
)
def test_override_values(text, value):
    assert parse_value(text) == value and type(parse_value(text)) is type(value)


def thinks(tokens, **others) -> dict:
    return {"rollout": {"thinking": {"thought_tokens": tokens, "response_tokens": 4, **others}}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout": {"num_engine": 2}}, "rollout.num_engine: unknown key; did you mean rollout.num_engines?"),
        (
            {"policy": {"optimizer": {"learning_rate": 1}}},
            "policy.optimizer.learning_rate: unknown key; the learning rate is policy.optimizer.lr",
        ),
        ({"model": {"lora_rank": 8}}, "model.lora_rank: unknown key; the rank of adapters is policy.lora.rank"),
        ({"policy": {"lora": {"target_modules": ["q_proj"]}}}, "policy.lora.target_modules: unknown key; layers with "),
        ({"rollout": {"num_generations": 4}}, "rollout.num_generations: unknown key; answers to a prompt are rollout."),
        (
            {"rollout": {"tensor_parallel_size": 2}},
            "rollout.tensor_parallel_size: unknown key; it is rollout.parallel.te",
        ),
        ({"rollout": {"expert_parallel": True}}, "it is rollout.parallel.expert now"),
        ({"policy": {"tp": 2}}, "policy.tp: unknown key; it is policy.parallel.tensor"),
        ({"algorithm": {"ppo_epochs": 2}}, "passes over a step's answers are algorithm.epochs"),
        ({"policy": {"nonsense": 1}}, "policy.nonsense: unknown key; known here: parallel,"),
        ({"rewards": [{"kind": "mathematic"}]}, "rewards.0.kind: there is no kind 'mathematic'; did you mean math"),
        ({"rewards": [{"kind": "q"}]}, "rewards.0.kind: there is no kind 'q'; known here: exact_answer, text,"),
        ({"rewards": [{"weight": 1}]}, "rewards.0: it needs a `kind`"),
        ({"run": {"seed": -1}}, "run.seed: must be greater than or equal to 0 (got -1)"),
        ({"algorithm": {"loss": {"clip_ratio_hi": 1}}}, "did you mean algorithm.loss.clip_ratio_high?"),
        (
            {"rewards": [{"kind": "function", "paht": "a:b"}]},
            "rewards.0.paht: unknown key; did you mean rewards.0.path?",
        ),
        ({"algorithm": {"loss": {"clip_ratio_c": 1.0}}}, "algorithm.loss.clip_ratio_c: must be greater than 1"),
        ({"balance": {"max_tokens_per_microbatch": 31}}, "max_response_tokens = 32"),
        ({"cluster": {"world_size": 3}}, "cluster.world_size is 3, but policy.parallel needs 1 x 1 x 1 x 1 = 1"),
        ({"rollout": {"max_lag": 1, "prefix_cache": "salted"}}, "set prefix_cache to cleared"),
        (
            {"cluster": {"colocate": True}, "rollout": {"num_engines": 3}},
            "1 trainer ranks (policy.parallel) and 3 x 1 = 3",
        ),
        (
            {"cluster": {"colocate": True}, "rollout": {"parallel": {"pipeline": 2}}},
            "1 trainer ranks (policy.parallel) and 1 x 1 x 2 = 2 ranks of engines; change rollout.num_engines, "
            "rollout.parallel.tensor or rollout.parallel.pipeline so that their product is 1",
        ),
        (
            {"policy": {"routing_replay": True}, "rollout": {"parallel": {"pipeline": 2}}},
            "vLLM gives none with pipeline stages (rollout.parallel.pipeline is 2); set rollout.parallel.pipeline to 1",
        ),
        (
            {"rollout": {"parallel": {"pipeline": 4}, "max_sequences": 3}},
            "rollout.max_sequences (3) is below rollout.parallel.pipeline (4), so that some stages would always wait",
        ),
        ({"cluster": {"colocate": True}, "rollout": {"max_lag": 1}}, "so that rollout.max_lag, with which they answer"),
        ({"cluster": {"colocate": True}, "rollout": {"replay": "saved"}}, "and cluster.colocate needs engines"),
        ({"rollout": {"replay": "saved", "dump": True}}, "and rollout.dump needs engines"),
        ({"cluster": {"colocate": True, "mirror": True}}, "set cluster.mirror to false"),
        ({"cluster": {"colocate": True, "gpus_per_trainer": 1}}, "must both be 1, or both 0 on CPUs; they are 1 and 0"),
        ({"cluster": {"colocate": True, "pools": {"engine": "a"}}}, "must give both the same pool"),
        ({"rollout": {"late": "requeue"}}, "rollout.late: requeue has no effect"),
        (
            {"rollout": {"thinking": {"thought_tokens": 20, "response_tokens": 4}}},
            "tokens (24) is below 25",
        ),
        ({"rollout": {"thinking": {"thought_tokens": -1, "response_tokens": 4}}}, "or equal to 0 (got -1)"),
        (thinks({"kind": "uniform", "low": 5, "high": 4}), "thought_tokens: low is 5, above high, which is 4"),
        (thinks({"kind": "uniform", "low": -1, "high": 4}), "thought_tokens.low: must be greater than or"),
        (thinks({"kind": "schedule", "tokens": {9: 4}}), "tokens has no budget for step 0, only for [9]; add one"),
        (thinks({"kind": "quantile", "quantile": 0.5, "low": 2, "high": 4, "start": 5}), "start is 5, which is not"),
        (thinks(0, mode="truncate"), "such an answer would have no token"),
        (thinks(21, mode="truncate"), "tokens (24) is below 25, which is the largest of thinking.thought_tokens (21)"),
        (thinks(4, closing="</think>. "), "closing '</think>. ' must end with rollout.delimiter '</think>'"),
        (thinks(4) | {"rollout": thinks(4)["rollout"] | {"delimiter": ""}}, "needs rollout.delimiter"),
        (
            thinks({"kind": "quantile", "quantile": 0.5, "low": 2, "high": 4, "start": 4})
            | {"rewards": [{"kind": "function", "path": "mine:f"}]},
            "follows the reasoning of right answers, but no reward says",
        ),
        ({"rollout": {"samples_per_prompt": 1}}, "every grpo advantage would be 0"),
        (thinks(4, mode="truncate", closing="</think>"), "with mode truncate the sample ends there; remove it"),
        (
            {"rollout": {"num_engines": True}},
            "rollout: num_engines must not be true, which YAML also reads for on, off, yes",
        ),
        ({"policy": {"parallel": {"expert": 3}}}, "refused:\n  policy.parallel: Mesh(tensor=1, pipeline=1, data=1,"),
        (
            {"algorithm": {"shaping": [{"kind": "soft_overlong", "max_tokens": 20480, "cache_tokens": 4096}]}},
            "penalises answers from 16385 tokens on, and rollout.max_response_tokens is",
        ),
        ({"checkpoint": {"keep_best": "eval/accuracy"}}, "evaluates nothing; give held-out rows in data.eval"),
        ({"policy": {"optimizer": {"lr": float("inf")}}}, "policy.optimizer.lr: must be a finite number"),
        ({"policy": {"optimizer": {"betas": [0.9, 1.0]}}}, "policy.optimizer.betas.1: must be less than 1"),
        (
            {"rewards": [{"kind": "text", "weight": float("nan")}]},
            "refused:\n  rewards.0.weight: must be a finite number (got nan)",
        ),
        ({"run": {"stop_on": "jump"}}, "run.stop_on: must be a list (got 'jump')"),
        ({"policy": {"lora": True}}, "refused:\n  policy.lora: must be a section of keys (got True)"),
        (
            {"policy": {"lora": {"targets": []}}},
            "refused:\n  policy.lora.targets: must be 'all-linear', or must be a list of at least 1 (got [])",
        ),
        ({"slurm": {"time_limit_h": 0.05}}, "is 180 s, and the run would be asked to stop notice_s = 300 s before"),
        ({"rollout": {"dump": "last"}}, "rollout.dump: must be true or false, or must be a section of keys (got 'last"),
        ({"rollout": {"dump": {"last": 0}}}, "refused:\n  rollout.dump.last: must be greater than 0 (got 0)"),
        ({"rollout": {"dump": {"last": 2, "lats": 1}}}, "rollout.dump.lats: unknown key; did you mean rollout.dump.la"),
    ],
)
def test_faults_name_their_path_and_the_remedy(change, message):
    assert message in refused(change)


@pytest.mark.parametrize("name", ["eval/acuracy", "accuracy", "loss", "eval/pass@8", "eval/maj@2", "eval/pass@3"])
def test_a_checkpoint_is_best_by_a_metric_that_the_run_reports(name):
    evaluated = {"data": {"train": "t.jsonl", "eval": "e.jsonl"}, "eval": {"samples_per_prompt": 4}}
    assert "choose one of eval/reward_mean, eval/accuracy, eval/pass@2, eval/pass@4, eval/maj@4" in refused(
        evaluated | {"checkpoint": {"keep_best": name}}
    )
    unjudged = {"data": evaluated["data"], "rewards": [{"kind": "function", "path": "mine:f"}]}
    told = refused(unjudged | {"checkpoint": {"keep_best": name}})
    assert told.endswith("choose one of eval/reward_mean")


def test_supervised_training_is_best_by_its_loss():
    row = {"run": {"name": "x", "steps": 1}, "model": {"path": "m"}}
    for rows, name, message in (
        ({"eval": "e.jsonl"}, "eval/accuracy", "choose one of eval/loss"),
        ({}, "eval/loss", "evaluates nothing; give held-out rows in sft.eval"),
    ):
        with pytest.raises(ValueError, match=message):
            validate(SftRunConfig, row | {"sft": {"rows": "r.jsonl"} | rows, "checkpoint": {"keep_best": name}})


def test_supervised_training_has_no_choices_of_an_engine():
    row = {"run": {"name": "x", "steps": 1}, "model": {"path": "m"}, "sft": {"rows": "r.jsonl"}}
    config = row | {"balance": {"max_tokens_per_microbatch": 4096}, "policy": {"routing_replay": True}}
    with pytest.raises(ValueError, match="policy.routing_replay"):
        validate(SftRunConfig, config)


def test_all_faults_are_told_at_once():
    text = refused({"run": {"stepz": 1}, "model": {"dtyp": "x"}})
    assert "run.stepz" in text and "model.dtyp" in text


def test_missing_key_file_and_broken_yaml(tmp_path):
    with pytest.raises(ValueError, match="run.steps: .*required") as told:
        validate(SftRunConfig, {"run": {"name": "x"}})
    keys = [line.split(":")[0].strip() for line in str(told.value).splitlines()[1:]]
    assert keys == ["run.steps", "model.path", "sft.rows"], "and no section"
    assert "sets it; run.epochs may take its place\n" in str(told.value)
    with pytest.raises(ValueError, match="run.steps: .*required") as told:
        validate(GrpoRunConfig, {"run": {"name": "x"}})
    assert "sft" not in str(told.value), "prompts have no epochs"
    with pytest.raises(ValueError, match="no such file"):
        merge_arguments([str(tmp_path / "none.yaml")])
    with pytest.raises(ValueError, match="it is a folder; give a YAML file, or an override"):
        merge_arguments([str(tmp_path)])
    (tmp_path / "bad.yaml").write_text("run: {name: x\n")
    with pytest.raises(ValueError, match=r"(?s)bad.yaml is not valid YAML.*line 2"):
        merge_arguments([str(tmp_path / "bad.yaml")])
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match="top level must be a mapping"):
        merge_arguments([str(tmp_path / "list.yaml")])
    with pytest.raises(ValueError, match="has an empty key"):
        merge_arguments(["run..steps=1"])


def test_secrets_are_refused_in_the_environment_because_the_configuration_is_written_down():
    assert (
        ClusterConfig(environment={"NCCL_IB_TIMEOUT": 22, "NCCL_IB_PKEY": "1"}).environment["NCCL_IB_TIMEOUT"] == "22"
    )
    for name in ("WANDB_API_KEY", "HF_TOKEN", "PGPASSWORD", "aws_secret_access_key"):
        with pytest.raises(ValueError, match=f"{name} is one of a secret.*export"):
            ClusterConfig(environment={name: "x"})


def test_all_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(GrpoRunConfig, ["configs/run/tiny_grpo.yaml", "data.eval=null"]).absolute()
    assert config.model.path == tmp_path / "runs/tiny/warm_start/hf"
    assert config.data.train == tmp_path / "runs/tiny/task/train.jsonl" and config.data.eval is None
    assert config.run_folder == tmp_path / "runs/tiny/grpo"
    assert config == config.absolute()


def test_functions_in_files_become_absolute_and_those_that_ship_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = [
        "rewards=[{kind: function, path: 'mine/reward.py:score'}, {kind: function, path: 'a.b:judge'}]",
        "rollout.environment={kind: tools, paths: ['recipes/tiny/rewards.py:digits_in_answer']}",
        "algorithm.loss={kind: function, path: 'recipes/tiny/losses.py:penalised'}",
        "algorithm.adv_estimator={kind: function, path: 'mine/estimate.py:advantages'}",
        "rollout.thinking=null",
    ]
    config = load_config(GrpoRunConfig, ["configs/run/tiny_grpo.yaml", *keys]).absolute()
    shipped = PACKAGE / "recipes" / "tiny"
    assert import_paths(config) == [
        f"{shipped}/rewards.py:digits_in_answer",
        f"{tmp_path}/mine/estimate.py:advantages",
        f"{shipped}/losses.py:penalised",
        f"{tmp_path}/mine/reward.py:score",
        "a.b:judge",
    ]
    assert load_function(config.algorithm.loss.path).__name__ == "penalised"
    (tmp_path / "recipes" / "tiny").mkdir(parents=True)
    (tmp_path / "recipes" / "tiny" / "losses.py").write_text("def penalised(terms): ...\n")
    assert ImportPath("recipes/tiny/losses.py:penalised").file.resolve().parent == tmp_path / "recipes" / "tiny"


def test_the_keys_that_the_remedies_for_foreign_names_point_to_exist():
    named = {name for hint in KEYS.values() for name in re.findall(r"\b[a-z]+(?:\.[a-z_]+)+", hint)}
    assert len(named) > 15
    for name in named:
        _, section, _ = _locate(GrpoRunConfig, name.split(".")[:-1])
        assert name.split(".")[-1] in section.model_fields, name


def test_a_key_that_is_there_twice_is_an_error_with_its_line(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("run: {name: a}\nmodel: {path: m}\nrun: {steps: 3}\n")
    with pytest.raises(ValueError, match=r"twice.yaml is not valid YAML: the key 'run' is there twice(.|\n)*line 3"):
        load_config(GrpoRunConfig, [str(path)])
    with pytest.raises(ValueError, match="the key 'kind' is there twice"):
        load_config(GrpoRunConfig, ["rewards=[{kind: text, kind: code}]"])
