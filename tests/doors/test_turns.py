"""Runs of two steps whose model calls tools, and methods of an object, because it was taught the two conversations."""

from __future__ import annotations

import json
from typing import Any

import pytest
import real  # noqa: F401  # skips
import torch
from given import Scored, add, chats, totals
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.trl import GRPOConfig, GRPOTrainer

SMALL = {
    **{"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 96, "max_steps": 2},
    **{"learning_rate": 1e-6, "report_to": "none", "bf16": False, "temperature": 0.3},
}
NUM_STEPS = 150


def call(name: str, **arguments: int) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def conversations(tokenizer: Any) -> list[tuple[str, str]]:
    """The beginning, which is the prompt, and the rest, of what the model learns."""
    found = []
    for tools, questions, asked, result in (
        ([add], [row["prompt"][0]["content"] for row in chats()], call("add", a=3, b=4), "7"),
        ([Scored().increment], ["Count."] * 17, call("increment", step=2), "2"),
    ):
        for question in questions:
            prompt = [{"role": "user", "content": question}]
            said = [{"role": "assistant", "content": asked}, {"role": "tool", "name": "x", "content": result}]
            whole = [*prompt, *said, {"role": "assistant", "content": "Done"}]
            render = lambda turns, opens, tools=tools: tokenizer.apply_chat_template(  # noqa: E731
                turns, tools=tools, add_generation_prompt=opens, tokenize=False
            )
            begun = render(prompt, True)
            found.append((begun, render(whole, False).removeprefix(begun).rstrip("\n")))
    return found


@pytest.fixture(scope="module")
def taught(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("taught") / "model"
    tokenizer = AutoTokenizer.from_pretrained(models / "qwen3moe")
    model = AutoModelForCausalLM.from_pretrained(models / "qwen3", dtype="float32")
    rows = []
    for begun, rest in conversations(tokenizer):
        before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (begun, rest))
        rows.append((before + after, [-100] * len(before) + after))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(NUM_STEPS):
        chosen = [rows[(step * 5 + i * 7) % len(rows)] for i in range(4)]
        size = max(len(ids) for ids, _ in chosen)
        ids, labels = (
            torch.tensor([row[part] + [pad] * (size - len(row[part])) for row in chosen])
            for part, pad in ((0, 0), (1, -100))
        )
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.05, "it has not learnt the conversations"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def talks(completions: Any, prompts: Any, **columns: Any) -> list[float]:
    """1 for the whole conversation, 0 for any other."""
    asked = [{"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}]
    expected = [
        {"role": "assistant", "content": "", "tool_calls": asked},
        {"role": "tool", "name": "add", "content": "7"},
        {"role": "assistant", "content": "Done"},
    ]
    return [float(turns == expected) for turns in completions]


def counted(prompts: Any, environments: Any, **columns: Any) -> list[float]:
    """1 if the object has begun the conversation, and has counted."""
    return [
        float(turns == [{"role": "user", "content": "Count."}] and one.total == 2 and one.row == ["prompt"])
        for turns, one in zip(prompts, environments, strict=True)
    ]


@pytest.mark.deadline(600)
def test_functions_as_tools(taught, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = GRPOTrainer(str(taught), talks, GRPOConfig("out", **SMALL), chats(), tools=[add])
    trainer.train()
    for log in (log for log in trainer.state.log_history if "reward" in log):
        assert log["rewards/talks/mean"] > 0.7 and 0.7 < log["tools/call_frequency"] < 1.3
        assert log["tools/failure_frequency"] == 0


@pytest.mark.deadline(600)
def test_an_environment_that_owns_prompts_and_rewards(taught, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = GRPOConfig("out", reward_weights=[0.5, 0.1], **SMALL)
    trainer = GRPOTrainer(str(taught), [counted, totals], args, environment_factory=Scored)
    trainer.train()
    for log in (log for log in trainer.state.log_history if "reward" in log):
        assert log["rewards/counted/mean"] > 0.7 and log["rewards/Scored/mean"] == log["rewards/totals/mean"] > 1.4
        expected = 0.5 * log["rewards/counted/mean"] + 1.1 * log["rewards/Scored/mean"]
        assert log["reward"] == pytest.approx(expected, abs=1e-5)
    samples = [json.loads(line) for line in (trainer.run.folder / "samples.jsonl").read_text().splitlines()]
    assert samples and {sample["prompt"] for sample in samples} == {"user: Count."}
