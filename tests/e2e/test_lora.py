"""A run of adapters: it begins as the base model, keeps megabytes, survives deaths bit for bit, and its exports are
what `merge` makes; with adapters that engines serve, and with a mixture's that each push merges into the weights."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from recipe_runs import Recipe
from safetensors.torch import load_file
from test_resume import arguments, lines
from transformers import AutoModelForCausalLM

from megatron_rl.models.peft import CONFIG, TENSORS, read_adapters

pytestmark = pytest.mark.deep
LORA = "policy.lora={rank: 4, alpha: 8}"
WITH_OUTPUT = "[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head]"
PEFT_FILES = {CONFIG, TENSORS}


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory):
    """An undisturbed run, with checkpoints of the steps 2 and 4."""
    recipe = Recipe(tmp_path_factory.mktemp("lora"))
    done = recipe.run(*arguments(task, "lora"), LORA, "checkpoint.every=2")
    assert done.returncode == 0, done.stdout + done.stderr
    return recipe.folder / "runs" / "lora"


def test_the_base_model_is_the_reference_and_the_start(whole):
    first, second, *_ = lines(whole)
    assert first["kl"] == 0 and second["kl"] > 0
    assert first["on_policy/ratio_error"] == 0 and first["mismatch/max_abs"] < 1e-5
    assert all(record["mismatch/max_abs"] < 1e-5 for record in lines(whole)[:4])


@pytest.mark.deadline(900)
def test_a_resumed_run_whose_trainer_dies_has_the_same_numbers(task, recipe, whole):
    """The state of the trainer comes from a mirror, and the base model from its folder."""
    folder = recipe.folder / "runs" / "lora"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints" / "step_000004")
    (recipe.folder / "gate").touch()
    run = recipe.start(*arguments(task, "lora"), LORA, "checkpoint.every=2", "cluster.mirror=true", "--resume", "auto")
    recipe.wait_until(run, (recipe.folder / "waiting").exists)
    recipe.process(run, "ray::TrainerRank").kill()
    (recipe.folder / "gate").unlink()
    assert run.wait(recipe.deadline_s) == 0, (recipe.folder / "out.txt").read_text()
    assert lines(folder) == lines(whole)


def test_peft_loads_what_a_run_exports_and_saves_the_same_bits(task, recipe, whole):
    """`pip install peft accelerate` runs it."""
    peft = pytest.importorskip("peft")
    base, merged = (AutoModelForCausalLM.from_pretrained(folder) for folder in (task / "model", whole / "hf"))
    model = peft.PeftModel.from_pretrained(base, whole / "hf" / "adapters")
    ids = torch.arange(2, 18)[None]
    assert (model(ids).logits.log_softmax(-1) - merged(ids).logits.log_softmax(-1)).abs().max() < 1e-5
    model.save_pretrained(recipe.folder / "saved")
    given, again = (load_file(folder / TENSORS) for folder in (whole / "hf" / "adapters", recipe.folder / "saved"))
    assert given.keys() == again.keys() and all(torch.equal(given[key], again[key]) for key in given)
    mine, theirs = (read_adapters(folder) for folder in (whole / "hf" / "adapters", recipe.folder / "saved"))
    assert (mine.rank, mine.alpha, set(mine.targets)) == (theirs.rank, theirs.alpha, set(theirs.targets))


def test_checkpoints_and_exports_of_a_run(task, recipe, run_here, whole):
    model, hf = task / "model", whole / "hf"
    adapters = load_file(hf / "adapters" / TENSORS)
    files = json.loads((whole / "checkpoints/step_000004/manifest.json").read_text())["files"].values()
    held = [tensor for entry in files for tensor in entry.get("tensors", {}).values()]
    assert {tensor["tensor"].rpartition(".")[2] for tensor in held} == {"lora_A", "lora_B"}
    num_bytes = sum(tensor.nbytes for tensor in adapters.values())
    assert sum(tensor["bytes"] for tensor in held) == 3 * num_bytes, "weights and two moments, each once"
    assert read_adapters(hf / "adapters").scale == 2

    exported = run_here("export", str(whole), "exported")
    assert exported.returncode == 0, exported.stderr
    assert {path.name for path in (recipe.folder / "exported").iterdir()} == PEFT_FILES
    again = load_file(recipe.folder / "exported" / TENSORS)
    assert again.keys() == adapters.keys() and all(torch.equal(again[key], adapters[key]) for key in again)
    assert any(tensor.any() for key, tensor in adapters.items() if "lora_B" in key)

    merged = run_here("merge", str(model), "exported", "merged")
    assert merged.returncode == 0, merged.stderr
    ours, theirs = load_file(recipe.folder / "merged/model.safetensors"), load_file(hf / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)

    twice = run_here("merge", str(hf), "exported", "twice")
    assert twice.returncode == 1 and "is not the base model that exported were trained on" in twice.stderr
    assert not (recipe.folder / "twice").exists()
    assert json.loads((recipe.folder / "exported" / CONFIG).read_text())["base_model_name_or_path"] == str(model)
    other = recipe.run(
        *arguments(task, "lora"), LORA, f"model.path={hf}", f"run.folder={whole.parent}", "--resume", "auto"
    )
    assert "error: model.path: " in other.stdout and "is not the base model that the adapters of" in other.stdout

    pushed = run_here("push-weights", str(whole / "checkpoints/step_000004"), "http://127.0.0.1:1")
    assert pushed.returncode != 0


@pytest.mark.deadline(1200)
def test_a_push_that_merges_the_adapters_of_experts_is_repeated_and_a_run_resumes(task, mixture, recipe, run_here):
    """The engine dies while it waits for a push. Both runs have the same numbers, so the repeated push brings the same
    weights to the engine that takes its place."""
    lora = f"policy.lora={{rank: 4, alpha: 8, targets: {WITH_OUTPUT}}}"
    given = [*arguments(task, "merged"), lora, "rollout.lora=merged", "checkpoint.every=2", f"model.path={mixture}"]
    given += ["policy.parallel={tensor: 2, expert: 2, expert_tensor: 1, sequence: true}"]
    done, folder = recipe.run(*given), recipe.folder / "runs" / "merged"
    assert done.returncode == 0, done.stdout + done.stderr
    undisturbed = first, second, *_ = lines(folder)
    assert first["kl"] == 0 and second["kl"] > 0 and first["on_policy/ratio_error"] == 0
    assert all(record["mismatch/max_abs"] < 1e-5 for record in undisturbed[:4])
    weights = load_file(mixture / "model.safetensors")
    assert first["sync/bytes"] == sum(tensor.nbytes for tensor in weights.values()), "each weight once"

    shutil.rmtree(folder / "checkpoints" / "step_000004")
    (recipe.folder / "gate").touch()
    run = recipe.start(*given, "--resume", "auto")
    recipe.wait_until(run, (recipe.folder / "waiting").exists)
    recipe.process(run, "ray::EngineRank").kill()
    (recipe.folder / "gate").unlink()
    assert run.wait(recipe.deadline_s) == 0, (recipe.folder / "out.txt").read_text()
    assert lines(folder) == list(undisturbed)
    assert re.search(r"version \d: engine 0 .*died", (folder / "logs" / "bridge.log").read_text()), (
        "a push was repeated"
    )

    merged = run_here("merge", str(mixture), str(folder / "hf/adapters"), "by_hand")
    assert merged.returncode == 0, merged.stderr
    by_hand, exported = (load_file(one / "model.safetensors") for one in (recipe.folder / "by_hand", folder / "hf"))
    assert by_hand.keys() == exported.keys() and all(torch.equal(by_hand[key], exported[key]) for key in exported)
    changed = [key for key in weights if (exported[key] != weights[key]).any()]
    assert len(changed) == 2 * (4 + 8 * 3) + 1, "attention and 8 experts in each of two layers, and the output layer"
