"""A model that sees images in the real loop: its log-probs are transformers', a push leaves a frozen tower and brings a
trained one, and kills and shared GPUs change no number."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
import torch
import transformers
from image_models import IMAGE_TOKEN, VIDEO, drawing, write_model
from safetensors.torch import load_file
from test_resume import lines

from megatron_rl.data.pictures import Pictures
from megatron_rl.data.saved_rollouts import read_step

REWARD = """
def letters(completions, **columns):
    return [sum(map(str.islower, turns[-1]["content"])) / 6 for turns in completions]
"""


ADAPTED = re.compile(r"[qkvo]_proj\.weight|(gate|up|down)_proj")
ENVIRONMENT = """
import numpy as np
from PIL import Image

class Pages:
    def reset(self, row):
        self.number, self.turns = row["number"], 0

    def step(self, text):
        self.turns += 1
        page = Image.fromarray(np.full((8 * self.turns, 24, 3), 10 * self.number + self.turns, np.uint8))
        read = [{"type": "text", "text": f"<|image_pad|>{self.turns}"}, {"type": "image", "image": page}]
        return read if self.turns < 3 else "no more", sum(map(str.islower, text)) / 9, self.turns == 4
"""
"""The second page is larger than the first one. The text of an observation is no image."""
OVERLAPPING = ("rollout.max_lag=1", "rollout.max_sequences=3", "rollout.max_response_tokens=24")
"""Answers are under way when weights come, so that their images are seen again."""


@pytest.fixture
def asked(tmp_path):
    """The arguments of a run of a kind of model, and the model's folder. Some rows have two images or none."""
    return lambda kind: arguments(tmp_path, kind)


def arguments(tmp_path, kind):
    folder, source = tmp_path / "given" / "model", random.Random(0)
    write_model(folder, kind)
    rows = []
    for number in range(16):
        names = [f"{number}_{i}.png" for i in range(number % 3)]
        for name in names:
            drawing(source.randint(8, 40), source.randint(8, 40), number).save(tmp_path / "given" / name)
        text = "".join(f"{i}<image>" for i in range(len(names))) + f"{number}?"
        asked = [{"role": "user", "content": text}]
        rows.append({"messages": asked, "images": names, "ground_truth": "1", "number": number})
    (tmp_path / "given" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "given" / "reward.py").write_text(REWARD + ENVIRONMENT)
    settings = {
        "model.path": folder,
        "model.dtype": "float32",
        "data.train": tmp_path / "given" / "rows.jsonl",
        "cluster.device": "cpu",
        "policy.parallel.tensor": 2,
        "policy.optimizer.lr": 1e-2,
        "rollout": "{prompts_per_step: 8, samples_per_prompt: 4, max_prompt_tokens: 96, max_response_tokens: 6}",
        "rollout.delimiter": "",
        "rollout.num_engines": 2,
        "rollout.dump": "true",
        "rewards": f"[{{kind: function, path: '{tmp_path}/given/reward.py:letters'}}]",
        "algorithm.max_mismatch": 1e-4,
        "balance.max_tokens_per_microbatch": 256,
        "checkpoint": "{every: 1, keep: 9}",
        "bridge.verify": "true",
        "run.steps": 4,
    }
    return ["grpo", *(f"{key}={value}" for key, value in settings.items())], folder


@pytest.mark.deep
@pytest.mark.deadline(900)
@pytest.mark.parametrize("tower", ["frozen", "trained"])
def test_a_run_with_images_has_transformers_log_probs_and_goes_on_to_the_bit_after_kills(recipe, asked, tower):
    keys, model = asked("qwen3_vl")
    keys += [f"policy.vision_tower={tower}"]
    expected = check_run(recipe, keys, model, tower)
    run = recipe.start(*keys, "run.name=killed", "cluster.mirror=true")
    killed = recipe.folder / "runs" / "killed"
    recipe.wait_until(run, (killed / "checkpoints" / "step_000001").exists)
    recipe.process(run, "ray::TrainerRank").kill()
    recipe.wait_until(run, (killed / "checkpoints" / "step_000002").exists)
    run.kill()
    run.wait()
    resumed = recipe.run(*keys, "run.name=killed", "cluster.colocate=true", "--resume", "auto")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert lines(killed) == expected


@pytest.mark.deep
@pytest.mark.deadline(900)
@pytest.mark.parametrize(
    ("kind", "tower", "settings"),
    [
        ("qwen2_5_vl", "frozen", ("policy.parallel.pipeline=2", "run.steps=2")),
        ("qwen2_5_vl", "trained", ("rollout.parallel.tensor=2", "rollout.num_engines=1", *OVERLAPPING)),
        ("qwen3_vl_moe", "frozen", ("policy.parallel.data=2", "policy.parallel.expert=2", "run.steps=2")),
    ],
)
def test_other_models_in_the_same_loop(recipe, asked, kind, tower, settings):
    keys, model = asked(kind)
    keys += ["policy.parallel.tensor=1", f"policy.vision_tower={tower}", *settings]
    check_run(recipe, keys, model, tower)


@pytest.mark.deep
@pytest.mark.deadline(900)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen2_5_vl", ("rollout.parallel.tensor=2", "rollout.num_engines=1", *OVERLAPPING)),
        ("qwen3_vl", ("policy.parallel.tensor=2", "run.steps=2")),
        ("qwen3_vl_moe", ("rollout.lora=merged", "policy.parallel.data=2", "policy.parallel.expert=2", "run.steps=2")),
    ],
)
def test_adapters_of_the_text_model(recipe, asked, run_here, kind, settings):
    """The export is what `merge` makes of the model and the adapters."""
    keys, model = asked(kind)
    keys += ["policy.parallel.tensor=1", "policy.lora={rank: 4, alpha: 8}", *settings]
    check_run(recipe, keys, model, "adapted")
    exported = recipe.folder / "runs" / "whole" / "hf"
    merged = run_here("merge", str(model), str(exported / "adapters"), "merged")
    assert merged.returncode == 0, merged.stderr
    ours, theirs = files(recipe.folder / "merged"), files(exported)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.deep
@pytest.mark.deadline(900)
def test_an_environment_shows_pictures(recipe, asked, run_here):
    """The row has the images of all turns, in order. A replay computes the same, and so does a run that is killed and
    resumed."""
    keys, model = asked("qwen3_vl")
    keys += [f"rollout.environment={{kind: class, path: '{model.parent}/reward.py:Pages'}}"]
    keys += ["rollout.max_response_tokens=300", "balance.max_tokens_per_microbatch=512", "run.steps=2"]
    metrics = check_run(recipe, keys, model, "frozen")
    run, read = recipe.folder / "runs" / "whole", 0
    for group in read_step(run / "rollouts", 0).groups:
        assert len(group.prompt.pictures) == group.prompt.columns["number"] % 3
        for tokens in group.payload:
            turns, own = tokens.conversation.turns, tokens.pictures[len(group.prompt.pictures) :]
            shown = [turn["content"] for turn in turns if not isinstance(turn["content"], str)]
            assert [parts[0]["text"] for parts in shown] == [f"< |image_pad|>{i + 1}" for i in range(len(shown))]
            assert [(one.num_rows, one.num_columns) for one in own] == [(2, 6), (4, 6)][: len(shown)]
            read += len(shown)
    assert read > 16
    again = recipe.run(*keys, "run.name=again", "rollout.dump=false", f"rollout.replay={run}/rollouts")
    assert again.returncode == 0, again.stdout + again.stderr
    replayed = lines(recipe.folder / "runs" / "again")
    assert [one["loss"] for one in replayed[:2]] == [one["loss"] for one in metrics[:2]]
    killed = recipe.start(*keys, "run.name=killed")
    recipe.wait_until(killed, (recipe.folder / "runs" / "killed" / "checkpoints" / "step_000001").exists)
    killed.kill()
    killed.wait()
    resumed = recipe.run(*keys, "run.name=killed", "--resume", "auto")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert lines(recipe.folder / "runs" / "killed") == metrics
    assert run_here("report", str(run)).returncode == 0
    assert '[2,"data:image/png' in (run / "report.html").read_text()


@pytest.mark.deep
@pytest.mark.deadline(900)
@pytest.mark.parametrize(("kind", "tower"), [("qwen3_5", "trained"), ("qwen3_5_moe", "frozen")])
def test_linear_attention_and_images_in_bf16(recipe, asked, kind, tower):
    """vLLM computes linear attention in bf16 alone on CPUs. Transformers' own rounding is the measure, in the rows with
    images; without the pixels it would be off by several times as much."""
    keys, model = asked(kind)
    config = json.loads((model / "config.json").read_text())
    if kind == "qwen3_5_moe":  # all experts are active, so that no choice of experts differs
        config["text_config"]["num_experts_per_tok"] = config["text_config"]["num_experts"]
    (model / "config.json").write_text(json.dumps(config))
    keys += ["model.dtype=bfloat16", f"policy.vision_tower={tower}", "run.steps=2", "algorithm.max_mismatch=1"]
    folder, rounded = recipe.folder / "runs" / "whole", open_whole(model, "bfloat16")
    metrics = check_run(recipe, keys, model, tower, within=np.inf)
    pictures, first = Pictures(model, folder / "images"), open_whole(model)
    said, exact, close, blind = [], [], [], []
    for group in read_step(folder / "rollouts", 0).groups:
        for tokens in group.payload if group.prompt.pictures else ():
            acted = tokens.action_mask
            said.append(tokens.logp_rollout[acted])
            exact.append(log_probs(first, tokens, pictures)[acted[1:]])
            close.append(log_probs(rounded, tokens, pictures)[acted[1:]])
            blind.append(log_probs(first, tokens, pictures, 0)[acted[1:]])
    said, exact, close, blind = map(np.concatenate, (said, exact, close, blind))
    off, rounding, unseen = (np.abs(one - exact).mean() for one in (said, close, blind))
    mismatch = max(record["mismatch/mean_abs"] for record in metrics[:-1])
    assert off < 1.5 * rounding and mismatch < 2 * rounding < unseen / 3


def check_run(recipe, keys, model, tower, within=1e-5):
    """Log-probs are transformers', the run ends with a whole model, and what is frozen is as it was.

    Returns:
        The metrics of the steps.
    """
    done = recipe.run(*keys, "run.name=whole")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = recipe.folder / "runs" / "whole"
    metrics = lines(folder)
    assert all(record["grad_norm"] > 0 and record.get("mismatch/mean_abs", 0) < within for record in metrics[:-1])

    first, last = open_whole(model), open_whole(folder / "hf")
    pictures, seen = Pictures(model, folder / "images"), set()
    for group in read_step(folder / "rollouts", 0).groups:
        for tokens in group.payload:
            seen.add(len(tokens.pictures))
            assert IMAGE_TOKEN not in tokens.ids[tokens.action_mask]
            logp = log_probs(first, tokens, pictures)[tokens.action_mask[1:]]
            assert tokens.logp_rollout[tokens.action_mask] == pytest.approx(logp, abs=within)
    assert len(seen) > 2
    parts = [dict(one.named_parameters()) for one in (first, last)]
    unchanged = {name for name, tensor in parts[0].items() if torch.equal(tensor, parts[1][name])}
    of_tower = {name for name in parts[0] if ".visual." in name}
    text = set() if tower != "adapted" else {name for name in parts[0] if not ADAPTED.search(name)} - of_tower
    assert unchanged == (set() if tower == "trained" else of_tower | text)
    extents = [{name: tensor.shape for name, tensor in files(one).items()} for one in (model, folder / "hf")]
    assert extents[0] == extents[1]
    return metrics


def files(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def open_whole(folder, dtype="float32"):
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def log_probs(model, tokens, pictures, bright=1) -> list[float]:
    """Of each token but the first, by transformers. Tokens of images and videos, and rows without a token, are never
    sampled.

    Args:
        bright: what pixels are multiplied by.
    """
    ids, images = torch.from_numpy(tokens.ids.astype(np.int64))[None], {}
    if tokens.pictures:
        patches = np.concatenate([pictures.patches(picture) for picture in tokens.pictures])
        grids = torch.tensor([[1, picture.num_rows, picture.num_columns] for picture in tokens.pictures])
        images = dict(pixel_values=bright * torch.from_numpy(patches).to(model.dtype), image_grid_thw=grids)
        images["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
    logits = model(input_ids=ids, **images).logits[0, :-1].float()
    logits[:, [IMAGE_TOKEN, VIDEO]] = -torch.inf
    logits[:, model.config.text_config.vocab_size - 3 :] = -torch.inf
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
