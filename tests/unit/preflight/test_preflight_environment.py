"""Faults of `rollout.environment` that are found before anything starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.preflight.environment_source import faults_of_environment
from megatron_rl.preflight.row_sources import heldout_source, training_sources
from megatron_rl.preflight.rows import faults_of_rows
from megatron_rl.preflight.tokenizer_files import TokenizerFiles

TURNS = "{% for m in messages %}{{ m.role }}:{{ m.content }}<eos>{% endfor %}"
HERMES = '<tool_call>{"name": ..., "arguments": ...}</tool_call>'
TOOLS = "{% for t in tools or [] %}[{{ t.function.name }}]" + HERMES + "{% endfor %}"
TEMPLATE = TOOLS + TURNS + "{% if add_generation_prompt %}assistant:{% endif %}"
MODULE = """
import functools
from abc import ABC, abstractmethod

def add(a: int, b: int) -> int:
    \"\"\"Add.

    Args:
        a: one.
        b: the other.
    \"\"\"
    return a + b

def untyped(a):
    \"\"\"Nothing.\"\"\"

class Game:
    def reset(self, row): ...
    def step(self, text): ...

class Still:
    def reset(self, row): ...

class Wrapped(Still):
    from functools import partial as step

class Heir(Still):
    reward = 1.0

class Alone(Still):
    def step(self): ...

class Made(Game):
    def __init__(self, size): ...

def with_seed(method):
    @functools.wraps(method)
    def seeded(self, given):
        return method(self, given, 0)
    return seeded

class Full(Still):
    reset = with_seed(lambda self, row, seed: None)

    @staticmethod
    def step(text): ...

class Abstract(Game, ABC):
    @abstractmethod
    def board(self): ...

class Counter:
    def reset(self, start): ...

    def add(self, a: int, b: int):
        \"\"\"Add.

        Args:
            a: one.
            b: the other.
        \"\"\"

class Scored(Counter):
    def get_reward(self): ...

class NoTool:
    def reset(self): ...

def nothing(): ...
"""


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_tools.py").write_text(MODULE)
    core = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("<eos>|."), "isolated")
    core.save("tokenizer.json")
    Path("tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    Path("config.json").write_text(json.dumps({"eos_token_id": 0}))
    Path("chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def config(environment: dict, rewards=({"kind": "exact_answer"},), data=None, **rollout) -> GrpoRunConfig:
    sizes = {"prompts_per_step": 4, "samples_per_prompt": 2, "max_prompt_tokens": 8, "max_response_tokens": 20}
    merged = {
        "run": {"name": "a", "steps": 3},
        "model": {"path": "."},
        "data": {"train": "train.jsonl", "eval": "eval.jsonl"} | (data or {}),
        "rollout": sizes | {"environment": environment, "delimiter": ""} | rollout,
        "balance": {"max_tokens_per_microbatch": 96},
        "rewards": list(rewards),
    }
    return validate(GrpoRunConfig, merged)


def tools(*names: str) -> dict:
    return {"kind": "tools", "paths": [f"my_tools.py:{name}" for name in names]}


def objects(*names: str) -> dict:
    """One class, or several by their names in small letters."""
    paths = {name.lower(): f"my_tools.py:{name}" for name in names}
    return {"kind": "tools", "objects": paths if len(paths) > 1 else paths[names[0].lower()]}


GAME = {"kind": "class", "path": "my_tools.py:Game"}


def faults(cfg: GrpoRunConfig) -> list[str]:
    told: list[str] = []
    found = faults_of_environment(cfg, TokenizerFiles(Path(".")), told.append)
    assert told == []
    return found


def test_what_is_right_has_no_fault(home):
    assert faults(config(tools("add"))) == faults(config(GAME)) == []
    for name, arguments in (("Wrapped", {}), ("Full", {}), ("Made", {"size": 3})):
        assert faults(config(GAME | {"path": f"my_tools.py:{name}", "arguments": arguments})) == []


def test_a_class_whose_module_needs_what_is_not_installed_here_is_told(home):
    Path("my_tools.py").write_text("import simulator_of_nobody\n" + MODULE)
    told: list[str] = []
    assert faults_of_environment(config(GAME), None, told.append) == []
    assert "the class is not checked, because" in told[0] and "No module named 'simulator_of_nobody'" in told[0]


def test_a_template_that_does_not_say_how_a_call_is_written_is_told(home):
    Path("chat_template.jinja").write_text(TEMPLATE.replace(HERMES, ""))
    told: list[str] = []
    assert faults_of_environment(config(tools("add")), TokenizerFiles(Path(".")), told.append) == []
    [sentence] = told
    assert "does not say how a call of a tool is written, so that calls in the format hermes count" in sentence


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (tools("absent"), "rollout.environment.paths: my_tools.py:absent: .*has no function 'absent'"),
        (tools("untyped"), "my_tools.py:untyped cannot be offered as a tool: Argument a is missing"),
        (objects("nothing"), "objects: my_tools.py:nothing must be a class, or .*; it returned None"),
        (objects("NoTool"), "objects: my_tools.py:NoTool has no method that could be a tool"),
        (objects("add"), "objects: my_tools.py:add asks for the argument 'a', but every object is made without"),
        (objects("Counter") | tools("add"), "rollout.environment: two tools are named 'add'; rename one"),
        (GAME | {"path": "my_tools.py:Still"}, "rollout.environment.path: my_tools.py:Still has no method step; write"),
        (
            GAME | {"path": "my_tools.py:Heir"},
            "rollout.environment.path: my_tools.py:Heir has no method step; write it",
        ),
        (GAME | {"path": "my_tools.py:Abstract"}, "my_tools.py:Abstract has no method board; write it"),
        (
            GAME | {"path": "my_tools.py:Alone"},
            r"Alone is called as step\(text\): too many positional arguments",
        ),
        (
            GAME | {"path": "my_tools.py:Made"},
            r"Made is called as Made\(\): missing a required argument: 'size'",
        ),
        (GAME | {"arguments": {"a": 1}}, r"Game is called as Game\(a=\.\.\.\): got an unexpected keyword argument 'a'"),
        (GAME | {"path": "my_tools.py:add"}, "my_tools.py:add is no class, and the key needs one; name the class"),
        (GAME | {"path": "other.py:Game"}, "rollout.environment.path: other.py:Game: there is no file other.py"),
    ],
)
def test_code_that_cannot_be_loaded_is_named(home, environment, message):
    [fault] = faults(config(environment))
    assert re.search(message, fault), fault


def test_a_reward_that_no_object_gives_is_refused(home):
    reward = [{"kind": "environment"}]
    assert faults(config(objects("Scored"), reward)) == faults(config(objects("Counter", "Scored"), reward)) == []
    assert faults(config(objects("Counter"))) == faults(config(GAME, reward)) == []
    assert faults(config(objects("Counter"), reward)) == [
        "rewards: environment is what get_reward returns, and no class of rollout.environment.objects has this method "
        "(Counter); write it, or choose another reward"
    ]


@pytest.mark.parametrize(
    ("environment", "row", "message"),
    [
        (
            objects("Counter"),
            {},
            "reset of rollout.environment.objects asks for 'start', but it gets the row's columns",
        ),
        (objects("Counter", "Scored"), {"start": 1}, "column `environment` is missing; it must name one of .*, scored"),
        (
            objects("Counter", "Scored"),
            {"start": 1, "environment": "count"},
            "column `environment` is 'count'; it must",
        ),
        (objects("Counter"), {"start": 1}, None),
        (objects("Counter", "Scored"), {"start": 1, "environment": "scored"}, None),
        (GAME, {}, None),
    ],
)
def test_rows_with_which_no_object_can_begin_are_refused(home, environment, row, message):
    whole = {"prompt": [{"role": "user", "content": "a"}], "ground_truth": "1"} | row
    for name in ("train.jsonl", "eval.jsonl"):
        Path(name).write_text(json.dumps(whole) + "\n")
    found = faults_of_rows(config(environment), None, [].append)
    assert len(found) == (2 if message else 0)
    for name, fault in zip(("train", "eval"), found, strict=False):
        assert fault.startswith(f"data.{name}: {name}.jsonl:1: ") and re.search(message, fault), fault


def test_what_makes_the_sandboxes_is_told(home, monkeypatch):
    def told() -> list[str]:
        sentences: list[str] = []
        path = "megatron_rl.environments.sandbox.workspace:Workspace"
        assert faults_of_environment(config({"kind": "tools", "objects": path}), None, sentences.append) == []
        return sentences

    [works] = told()
    assert works.endswith("workspace:Workspace: its sandboxes on this machine: bubblewrap")
    monkeypatch.setenv("PATH", "/nowhere")
    [absent] = told()
    assert "none, so each answer would fail: sandboxes need bubblewrap, which is not installed" in absent
    monkeypatch.setattr("megatron_rl.environments.sandbox.workspace.Workspace.image", "a:1")
    [absent] = told()
    assert "the image a:1 needs one of podman, docker, apptainer" in absent


@pytest.mark.parametrize(
    ("template", "environment", "message"),
    [
        (TEMPLATE.replace(TOOLS, ""), tools("add"), "cannot offer tools: 1 of 1 (add) do not appear"),
        (TEMPLATE.replace(HERMES, "<|python_tag|>"), tools("add"), "asks for calls of tools in another format than"),
        (
            TEMPLATE.replace("m.content", "m.content if loop.last else ''"),
            GAME | {"history": "refuse"},
            "from character 5 of the conversation",
        ),
        (TEMPLATE.replace("<eos>", "<end>"), GAME, "ends an answer with '<end>"),
    ],
)
def test_a_template_that_does_not_fit_is_refused(home, template, environment, message):
    Path("chat_template.jinja").write_text(template)
    [fault] = faults(config(environment))
    assert fault.startswith("rollout.environment: .: the chat template") and message in fault


def test_a_template_that_changes_the_history_is_told(home):
    Path("chat_template.jinja").write_text(TEMPLATE.replace("m.content", "m.content if loop.last else ''"))
    told: list[str] = []
    assert faults_of_environment(config(GAME), TokenizerFiles(Path(".")), told.append) == []
    [sentence] = told
    assert "from character 5 of the conversation" in sentence and "has several samples" in sentence


def test_no_template_is_a_fault_and_one_for_transformers_alone_is_told(home):
    Path("chat_template.jinja").write_text(TEMPLATE + "{{ unknown() }}")
    told: list[str] = []
    assert faults_of_environment(config(GAME), TokenizerFiles(home), told.append) == []
    assert told == [
        "the chat template is not checked for rollout.environment: it can be rendered by transformers alone"
    ]
    Path("chat_template.jinja").unlink()
    assert faults(config(GAME)) == [
        "rollout.environment: the tokenizer of . has no chat template; add chat_template.jinja"
    ]


def test_all_rows_are_rendered_with_the_tools(home):
    cfg = config(tools("add"), data={"chat_template": {"enable_thinking": False}})
    [train], heldout = (
        training_sources(cfg.data, cfg.rollout.environment),
        heldout_source(cfg.data, cfg.rollout.environment),
    )
    for source in (train, heldout):
        assert source.reading.in_turns and source.reading.chat_template["enable_thinking"] is False
        [schema] = source.reading.chat_template["tools"]
        assert schema["function"]["parameters"]["required"] == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": tools("add"), "rewards": [{"kind": "environment"}]}, "of kind tools, and functions give none"),
        ({"environment": None, "rewards": [{"kind": "environment"}]}, "which is null; remove one of the two"),
        (
            {
                "environment": GAME,
                "delimiter": "</think>",
                "thinking": {"thought_tokens": 4, "response_tokens": 4, "mode": "truncate"},
            },
            "would end the answer in the first turn",
        ),
        (
            {"environment": GAME, "data": {"train": [{"path": "a.jsonl", "weight": 1, "chat_template": {}}]}},
            "remove chat_template from the sources",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(home, changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)
