"""Each format of tool calls on the real engine, which is made to sample a good call, a malformed one and an answer."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_references import reference_logp
from tiny_trainers import write_model
from transformers import AutoModelForCausalLM

from megatron_rl.environments import FORMATS, Sessions
from megatron_rl.recipes.tiny.model import chat_tokenizer
from megatron_rl.rollout.programs.chat_template import chat_template
from megatron_rl.rollout.programs.episodes import Episodes
from megatron_rl.rollout.programs.turns import Turns
from megatron_rl.rollout.vocabulary import load_tokenizer, stop_ids
from megatron_rl.types import Mesh, Prompt

pytestmark = pytest.mark.deep

KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_call_end|><|tool_calls_section_end|>"
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
MINIMAX = '<minimax:tool_call>\n<invoke name="add">\n', "</invoke>\n", "</minimax:tool_call>"
GPT_OSS = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
TURNS = {  # a good call, a malformed one, and why it is none; a turn ends with <end> if it has no end of its own
    "hermes": (
        '<tool_call>\n{"name": "add", "arguments": {"a": 6}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": 6}\n</tool_call>',
        "malformed",
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=add>\n<parameter=a>\n6\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=add>\n<parameter=a>\n6\n</parameter>\n</function>\n",
        "unclosed",
    ),
    "glm": (
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>6</arg_value>\n</tool_call><|observation|>",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>6\n</tool_call><|observation|>",
        "malformed",
    ),
    "minimax_m2": (
        f'{MINIMAX[0]}<parameter name="a">6</parameter>\n{MINIMAX[1]}{MINIMAX[2]}',
        f'{MINIMAX[0]}<parameter name="a">6</parameter>\n{MINIMAX[2]}',
        "unclosed",
    ),
    "kimi_k2": (
        KIMI[0] + 'functions.add:0<|tool_call_argument_begin|>{"a": 6}' + KIMI[1],
        KIMI[0] + 'functions.add:0<|tool_call_argument_begin|>{"a": 6' + KIMI[1],
        "malformed",
    ),
    "deepseek": (DEEPSEEK[0] + '{"a": 6}' + DEEPSEEK[1], DEEPSEEK[0] + '{"a": 6' + DEEPSEEK[1], "malformed"),
    "gpt_oss": (GPT_OSS + '{"a": 6}<|call|>', GPT_OSS + '{"a": 6}<|return|>', "malformed"),
    "llama3": ('{"name": "add", "parameters": {"a": 6}}', '{"name": "add", "parameters": {"a": 6}', "malformed"),
    "mistral": ('[TOOL_CALLS]add[ARGS]{"a": 6}', '[TOOL_CALLS]add[ARGS]{"a": 6', "malformed"),
    "nemotron": (
        '<TOOLCALL>[{"name": "add", "arguments": {"a": 6}}]</TOOLCALL>',
        '<TOOLCALL>[{"name": "add", "arguments": {"a": 6}}',
        "unclosed",
    ),
}
ANSWER = "It is 12."
ANSWERS = {"gpt_oss": f"<|channel|>final<|message|>{ANSWER}<|return|>"}
ENDS = ("<end>", "<|call|>", "<|return|>", "<|observation|>")
MARKS = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|channel|>", "<|constrain|>", "<|message|>", "<minimax:tool_call>"),
    *("</minimax:tool_call>", "[TOOL_CALLS]", "[ARGS]", "<TOOLCALL>", "</TOOLCALL>", *ENDS[1:]),
)
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NUM_TOKENS = 256


def add(a: int, b: int = 6) -> int:
    """Add.

    Args:
        a: one.
        b: two.
    """
    return a + b


class ByFormat:
    """The answers of each format are carried out by its own turns."""

    def __init__(self, folder: Path, rollout, ask) -> None:
        self._of = {}
        for name in FORMATS:
            sessions = Sessions(rollout.environment, "", name)
            turns = Turns(folder, rollout, chat_template(folder, {}), sessions.new, name)
            self._of[name] = Episodes(turns, ask)

    async def answers(self, asked, begin):
        return await self._of[asked.prompt.columns["format"]].answers(asked, begin)


def sample_from(scripts: dict[int, list[list[int]]], tool: int, worker) -> None:
    """Let vLLM's sampler take the tokens of a script, and tell their log-probs by the model.

    Args:
        scripts: the tokens of each turn, by the second token of the prompt.
        tool: the token that begins an observation.
    """
    runner = worker.model_runner
    sampler = runner.sampler.topk_topp_sampler
    sample = sampler.forward

    def scripted(logits, *arguments):
        tokens, logp = sample(logits, *arguments)
        batch = runner.input_batch
        for row, name in enumerate(batch.req_ids):
            prompt = runner.requests[name].prompt_token_ids
            turn = scripts[prompt[1]][prompt.count(tool)]
            tokens[row] = turn[int(batch.num_tokens_no_spec[row]) - len(prompt)]
        return tokens, logp

    sampler.forward = scripted


@pytest.fixture(scope="module")
def world(make_stage, tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("formats"), 1, vocab_size=NUM_TOKENS, max_position_embeddings=512)
    letters = [*map(chr, range(32, 127)), "\n"]
    chat_tokenizer(["<user>", "<assistant>", "<tool>"], MARKS, letters, TEMPLATE).save_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    config = json.loads((folder / "generation_config.json").read_text())
    config["eos_token_id"] = [tokenizer.token_to_id(end) for end in ENDS]
    (folder / "generation_config.json").write_text(json.dumps(config))
    assert len(stop_ids(folder)) == len(ENDS)
    stage = make_stage(
        folder,
        Mesh(),
        answers=lambda rollout: partial(ByFormat, folder, rollout),
        environment={"kind": "tools", "paths": [f"{__name__}:add"], "max_turns": 4},
        delimiter="",
        max_prompt_tokens=16,
        max_response_tokens=400,
        sampling={"temperature": 1.5},
    )

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    prompts, scripts = [], {}
    for name, letter in zip(FORMATS, "abcdefghij", strict=True):
        question = ({"role": "user", "content": letter},)
        text = chat_template(folder, {})(question, [{"type": "function", "function": {"name": ""}}], True)
        prompt = ids(text.removeprefix("[]"))
        prompts.append(Prompt(name, tuple(prompt), question, {"format": name}))
        said = [
            turn if turn.endswith(ENDS[1:]) else f"{turn}<end>"
            for turn in (*TURNS[name][:2], ANSWERS.get(name, ANSWER))
        ]
        scripts[prompt[1]] = [ids(turn) for turn in said]
        assert tokenizer.token_to_id("<unk>") not in sum(scripts[prompt[1]], [])
    thread = stage.engine.sampler._thread
    force = partial(sample_from, scripts, tokenizer.token_to_id("<tool>"))
    stage.run(thread.call(lambda: thread.engine.collective_rpc(force)))
    stage.push(folder, 0)
    groups = stage.run(stage.generate(prompts, 1, 0, seed=1))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = {p.uid: (*group[0], scripts[p.token_ids[1]]) for p, group in zip(prompts, groups, strict=True)}
    return found, tokenizer, model


@pytest.mark.parametrize("name", FORMATS)
def test_a_good_call_acts_and_a_malformed_one_is_an_observation(world, name):
    found, tokenizer, model = world
    sample, tokens, script = found[name]
    assert (sample.finish, sample.episode.num_turns, sample.episode.num_tool_calls) == ("stop", 3, 2)
    assert sample.episode.tool_errors == (TURNS[name][2],)
    called, result, malformed, error, answer = tokens.conversation.turns
    [call] = called["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": {"a": 6}}
    assert (result["role"], result["content"]) == ("tool", "12")
    assert not malformed.get("tool_calls")
    assert error["content"].startswith("Error: ValueError: ") and answer["content"] == ANSWER
    # What is trained is what was sampled, and what stands between is what the template writes.
    assert tokens.ids[tokens.action_mask].tolist() == sum(script, []) and sample.num_actions == len(sum(script, []))
    text, *said = (tokenizer.decode(ids, skip_special_tokens=False) for ids in (tokens.ids.tolist(), *script))
    between = [f"<tool>{observed['content']}<end><assistant>" for observed in (result, error)]
    assert text.endswith(f"<assistant>{said[0]}{between[0]}{said[1]}{between[1]}{said[2]}")
    # Both sides compute two layers in fp32 and round logits at 1e-6 relative.
    expected = reference_logp(model, tokens.ids, 1.5, num_tokens=tokenizer.get_vocab_size())
    assert np.abs(expected - tokens.logp_rollout)[tokens.action_mask].max() < 1e-5
