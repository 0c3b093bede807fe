"""The programs that a model learns to repair: what the demonstrations say is what a sandbox does."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from megatron_rl.config.load import load_config
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.environments import schemas_of
from megatron_rl.environments.sandbox import Box, BoxError, workspace
from megatron_rl.environments.sandbox.spares import Spares
from megatron_rl.environments.sandbox.workspace import Workspace
from megatron_rl.recipes.repair import task
from megatron_rl.recipes.repair.task import DONE, EDIT, OPERATORS, READ, RUN, TOOLS, demonstration, programs, write_task

ROOT = Path(__file__).parents[3]


def test_an_example_tells_the_operators_apart():
    for one in islice(programs(random.Random(0)), 300):
        assert one.operator != one.wanted
        wanted = OPERATORS[one.wanted](one.a, one.b)
        assert [sign for sign, compute in OPERATORS.items() if compute(one.a, one.b) == wanted] == [one.wanted]


def test_the_demonstrations_offer_the_tools_of_the_environment():
    cfg = load_config(GrpoRunConfig, [str(ROOT / "configs/run/repair_tiny_cpu.yaml")])
    names = [tool["function"]["name"] for tool in schemas_of(cfg.rollout.environment)]
    assert names == [tool["function"]["name"] for tool in TOOLS]


def test_the_tasks_are_disjoint_and_their_texts_are_tokens(tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.setattr(task, "NUM_TRAIN", 200)
    monkeypatch.setattr(task, "NUM_DEMONSTRATIONS", 300)
    monkeypatch.setattr(task, "write_random_qwen3", lambda *_, **__: None)
    write_task(tmp_path)
    train, held_out, shown = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "eval", "demonstrations")
    )
    assert (len(train), len(held_out)) == (200, 100)
    assert not {row["files"]["f.py"] + row["files"]["test.py"] for row in train} & {
        row["files"]["f.py"] + row["files"]["test.py"] for row in held_out
    }
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    texts = [tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False) for row in shown]
    lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    assert tokenizer.unk_token not in tokenizer.convert_ids_to_tokens(
        sorted({i for ids in tokenizer(texts)["input_ids"] for i in ids})
    )
    assert 200 < max(lengths) <= 384
    assert all(tokenizer.decode(tokenizer(text).input_ids) == text for text in texts[:50])


@pytest.mark.deep
def test_demonstrations_say_what_a_sandbox_does(monkeypatch):
    """Each call of a demonstration, carried out: the tool's text is the one that the demonstration has."""
    try:
        Box().close()
    except BoxError as error:
        pytest.skip(f"this machine permits no sandbox: {error}")
    monkeypatch.setattr(workspace, "SPARES", Spares(most=0))
    rng, seen = random.Random(3), set()
    for one in islice(programs(rng), 12):
        turns = demonstration(one, rng)
        with Workspace() as own:
            own.reset({"f.py": one.text, "test.py": one.test}, "python3 -S check.py", {"check.py": one.hidden_test})
            for asked, told in zip(turns[:-1:2], turns[1::2], strict=True):
                given = asked["content"]
                seen.add(told["content"].split()[0])
                if given == READ:
                    assert own.read_file("f.py") == told["content"]
                elif given == RUN:
                    assert own.run("python3 -S test.py") == told["content"]
                else:
                    old, new = given.removeprefix(EDIT[0]).removesuffix(EDIT[2]).split(EDIT[1])
                    try:
                        said = own.edit_file("f.py", old, new)
                    except ValueError as error:
                        said = f"Error: {error}"
                    assert said == told["content"]
            repaired = replace(one, operator=one.wanted).text
            assert own.get_reward() == (own._box.read("f.py").decode() == repaired)
        assert turns[-1]["content"] == DONE
    assert {"1", "replaced"} < seen
