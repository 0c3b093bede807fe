"""An engine of vLLM that drafts with the multi-token head, which every push brings."""

from __future__ import annotations

from pathlib import Path

import leaks
import numpy as np
import pytest
import torch
from pushes import flat, sampled, with_push
from safetensors.torch import load_file, save_file
from test_rollout_speculation import columns
from tiny_references import reference_logp
from tiny_trainers import NUM_LAYERS, OF_HEAD, write_with_head
from transformers import AutoModelForCausalLM
from vllm_workers import called_in_workers

from megatron_rl.rollout.drafts import MOST_RUNNING
from megatron_rl.types import Mesh, Prompt

FORBIDDEN = 4
PROMPTS = [Prompt(f"row {i}", (5 + i, 6, 7 + i, 5 + i, 6, 16), "") for i in range(4)]


def with_other_head(folder: Path, source: Path) -> Path:
    """The same policy with a head that drafts at random."""
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors, generator = load_file(source / "model.safetensors"), torch.Generator().manual_seed(3)
    projection = tensors[OF_HEAD + "eh_proj.weight"]
    tensors[OF_HEAD + "eh_proj.weight"] = 0.2 * torch.randn(projection.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def stage(make_stage, tmp_path_factory):
    """It can get a model, another one, and the first one with another head."""
    root = tmp_path_factory.mktemp("models")
    folders = {name: write_with_head(root / name, seed) for seed, name in enumerate("ab")}
    folders["stale"] = with_other_head(root / "stale", folders["a"])
    with leaks.lasting():  # a port outlives an engine that has a head; nobody knows why
        stage = make_stage(
            folders["a"],
            Mesh(),
            max_prompt_tokens=80,
            max_response_tokens=60,
            shares_gpus=True,
            sampling={"temperature": 0.5, "forbid": ["<unk>"]},
            speculative={"kind": "multi_token", "tokens": 3},
        )
    stage.folders = folders
    return stage


def held(worker) -> dict[str, torch.Tensor]:
    """Called in vLLM's worker: what the head computes with."""
    return {name: one.detach().clone() for name, one in worker.model_runner.drafter.model.named_parameters()}


def lookup(stage) -> list[int]:
    """How many drafts vLLM asks for, by the number of answers in a step."""
    return stage.engine.sampler._thread.engine.engine_core.engine_core.scheduler.dynamic_sd_lookup


@pytest.fixture
def plain(stage):
    """Inside the block the head drafts nothing."""
    numbers = [*lookup(stage)]

    def without(ask):
        lookup(stage)[:] = [0] * len(numbers)
        answers = stage.run(ask())
        lookup(stage)[:] = numbers
        assert not stage.engine.sampler.drafts.take_counts()
        return answers

    return without


@pytest.mark.deep
def test_an_engine_samples_the_same_with_and_without_its_head(stage, plain):
    """With forbidden tokens; and steps with too many answers have no drafts."""
    version, drafts = stage.load(stage.folders["a"]), stage.engine.sampler.drafts

    def ask():
        return stage.generate(PROMPTS, 4, version, seed=3)

    drafted = stage.run(ask())
    counts = drafts.take_counts()
    assert counts["accepted"] > 100 and counts["accepted/depth_3"] > 0 and counts["accepted"] < counts["drafted"]
    others = plain(ask)
    assert columns(drafted) == columns(others)
    model = AutoModelForCausalLM.from_pretrained(stage.folders["a"], dtype=torch.float32)
    for (_, tokens), (_, other) in zip(flat(drafted), flat(others), strict=True):
        assert np.allclose(tokens.logp_rollout, other.logp_rollout, atol=1e-5)
        expected = reference_logp(model, tokens.ids, 0.5, [FORBIDDEN])
        assert abs(expected - tokens.logp_rollout)[tokens.action_mask].max() < 1e-4
        assert FORBIDDEN not in tokens.ids[tokens.action_mask]

    stage.run(stage.generate(PROMPTS, 2 * MOST_RUNNING // len(PROMPTS), version, seed=4))
    sizes = {int(name.rpartition("_")[2]) for name in drafts.take_counts() if name.startswith("drafted/running")}
    assert sizes and max(sizes) <= MOST_RUNNING


@pytest.mark.deep
def test_a_push_brings_the_head_also_to_an_engine_that_slept(stage):
    drafts = stage.engine.sampler.drafts

    def share(name: str) -> float:
        """The accepted share of the drafts, after a push of this folder."""
        version = stage.load(stage.folders[name])
        stage.run(stage.generate(PROMPTS, 4, version, seed=3))
        counts = drafts.take_counts()
        return counts["accepted"] / counts["drafted"]

    good, other = share("a"), share("stale")
    assert good > 3 * other
    stage.run(stage.engine.weights.enter("training"))
    stage.run(stage.engine.weights.enter("weight sync"))
    stage.load(stage.folders["b"])
    stage.run(stage.engine.weights.enter("generating"))
    [found] = stage.run(called_in_workers(stage.engine, held))
    tensors = load_file(stage.folders["b"] / "model.safetensors")
    for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "mtp_block.self_attn.o_proj"):
        expected = tensors[OF_HEAD + name.removeprefix("mtp_block.") + ".weight"]
        assert torch.equal(found[f"model.layers.{NUM_LAYERS}.{name}.weight"], expected)
    assert torch.equal(found["model.embed_tokens.weight"][:40], tensors["model.embed_tokens.weight"])
    assert share("a") == good


@pytest.mark.deep
def test_a_push_in_the_middle_of_answers_brings_both(stage):
    version = stage.load(stage.folders["a"])
    stage.trainers.begin_push(stage.folders["b"], version + 1)
    groups, running, received = with_push(stage, PROMPTS, 4, version, sampled(8), version + 1)
    assert running > 8 and received["preempted"] >= 0
    stage.trainers.end_push()
    assert stage.engine.sampler.drafts.take_counts()["accepted"] > 0
    models = [AutoModelForCausalLM.from_pretrained(stage.folders[name], dtype=torch.float32) for name in "ab"]
    for _, tokens in flat(groups):
        assert {*tokens.version[tokens.action_mask].tolist()} <= {version, version + 1}
        for offset, model in enumerate(models):
            own = tokens.version == version + offset
            expected = reference_logp(model, tokens.ids, 0.5, [FORBIDDEN])
            assert abs(expected - tokens.logp_rollout)[own].max(initial=0) < 1e-4
    assert any(len({*tokens.version[tokens.action_mask].tolist()}) == 2 for _, tokens in flat(groups))


@pytest.mark.deep
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_two_ranks_of_an_engine_take_the_same_drafts(make_own_stage, tmp_path, dtype, tolerance):
    """In bfloat16 a step of another size may round a probability to another value, so that tokens could differ."""
    folder, drafts = write_with_head(tmp_path / "model", 0), {"kind": "multi_token", "tokens": 3}
    limits = {"max_prompt_tokens": 80, "max_response_tokens": 60, "sampling": {"temperature": 0.5}}
    stage = make_own_stage(folder, Mesh(), dtype=dtype, parallel={"tensor": 2}, speculative=drafts, **limits)
    version = stage.load(folder)
    drafted = stage.run(stage.generate(PROMPTS, 4, version, seed=3))
    assert stage.engine.sampler.drafts.take_counts()["accepted"] > 50
    lookup(stage)[:] = [0] * len(lookup(stage))
    others = stage.run(stage.generate(PROMPTS, 4, version, seed=3))
    assert not stage.engine.sampler.drafts.take_counts()
    assert dtype == "bfloat16" or columns(drafted) == columns(others)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for _, tokens in [*flat(drafted), *flat(others)]:
        expected = reference_logp(model, tokens.ids, 0.5, [])
        assert abs(expected - tokens.logp_rollout)[tokens.action_mask].max() < tolerance
