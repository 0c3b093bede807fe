"""PEFT itself is the reference of adapters, where it is installed (`pip install peft accelerate`): the gradients of a
folder that it has written, and the bits of the folder that a run exports after reading it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from image_models import write_model
from random_adapters import write_adapters
from safetensors.torch import load_file
from scenarios import Layout
from sizes import VOCAB_SIZE
from test_actor_gradients import relative
from transformers_models import open_model

from megatron_rl.config.policy import LoraConfig, ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.models import read_shape
from megatron_rl.models.peft import PREFIX, TENSORS, read_adapters, require_fitting
from megatron_rl.tools.bench.compare_layouts import deal_rows, random_rows
from megatron_rl.types import Mesh

pytestmark = pytest.mark.deep
CASES = {
    "qwen3": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"),
    "qwen2": ("v_proj", "up_proj"),
    "qwen3_moe": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    "gpt_oss": ("q_proj", "o_proj"),
    "qwen3_next": ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"),
    "qwen3_5": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "down_proj"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_pefts(name, trainers, folders, model_folder, tmp_path):
    peft = pytest.importorskip("peft")
    folder, targets = model_folder if name == "qwen3" else folders[name], CASES[name]
    rows = random_rows(VOCAB_SIZE, num_rows=4, longest=24, seed=3)
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=3, lora_alpha=7, target_modules=list(targets), use_rslora=name == "qwen2", init_lora_weights=False
    )
    written = peft.get_peft_model(open_model(folder, torch.float32), config)
    written.save_pretrained(tmp_path / "start", save_embedding_layers=False)
    adapters = read_adapters(tmp_path / "start")
    assert set(adapters.targets) == set(targets)

    scaled = adapters.rank_stabilised
    lora = LoraConfig(rank=3, alpha=7, targets=targets, rank_stabilised=scaled, start=tmp_path / "start")
    given = dict(folder=folder, model=ModelConfig(path=folder, dtype="float32"), exact=False)
    shares = deal_rows(folder, ParallelConfig(), rows, 1)
    ((_, _, found),) = trainers.run("one_update", 1, shares=shares, policy=PolicyConfig(lora=lora), **given)

    base = open_model(folder, torch.float64, experts_implementation="eager")
    given = dict(is_trainable=True, autocast_adapter_dtype=False)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "start", **given).double()
    loss, num_tokens = 0.0, sum(int(row.action_mask.sum()) for row in rows)
    for row in rows:
        ids = torch.from_numpy(row.ids.astype(np.int64))
        logp = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])
        loss = loss - logp[torch.from_numpy(row.action_mask[1:])].sum() / num_tokens
    loss.backward()
    expected = {
        name.replace(".default", "").removeprefix(PREFIX): parameter.grad.numpy()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    stored = load_file(tmp_path / "start" / TENSORS)
    assert found.keys() == expected.keys() == {key.removeprefix(PREFIX) for key in stored}
    assert all(relative(found[key], expected[key]) < 1e-5 for key in found)

    given = dict(folder=folder, layout=Layout(Mesh(tensor=2)), lora=lora, export=tmp_path)
    trainers.run("merge_and_export", 2, **given)
    base = open_model(folder, torch.float32)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    again.save_pretrained(tmp_path / "again", save_embedding_layers=False)
    saved = load_file(tmp_path / "again" / TENSORS)
    assert saved.keys() == stored.keys() and all(torch.equal(saved[key], stored[key]) for key in stored)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_peft_reads_adapters_beside_a_tower_and_gives_it_none(kind, tmp_path):
    """The tower of Qwen2.5-VL has layers with the names of targets."""
    peft = pytest.importorskip("peft")
    write_model(tmp_path / "model", kind)
    start = write_adapters(tmp_path / "start", tmp_path / "model", LoraConfig(rank=3, alpha=7))
    base = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    model = peft.PeftModel.from_pretrained(base, start)
    model.save_pretrained(tmp_path / "again")
    given, saved = (load_file(folder / TENSORS) for folder in (start, tmp_path / "again"))
    assert given.keys() == saved.keys() and all(torch.equal(given[key], saved[key]) for key in given)
    read = read_adapters(tmp_path / "again")
    require_fitting(tmp_path / "again", replace(read_shape(tmp_path / "model"), adapters=read), tmp_path)
